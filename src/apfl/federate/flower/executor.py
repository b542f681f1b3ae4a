"""Flower's executor, kept alive.

The SuperLink and every SuperNode start one executor (``flower-superexec``), which starts a process for each run or
message. Flower does not look after it: without it the SuperLink and the SuperNode go on as if nothing had happened,
and nothing is done. Here it is started again when it dies, and none outlives the process that started it (`guard`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from apfl.federate.flower import guard

__all__ = ["Executor", "keep_executor"]

PAUSES = (0.0, 1.0, 5.0, 30.0)  # seconds before it is started again, if it keeps dying
STEADY = 60.0  # seconds of life after which a death counts as the first


class Executor:
    """Takes the place of the ``Popen`` that Flower makes of its executor."""

    def __init__(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        self.command, self.say = list(command), say
        self._ending = threading.Event()
        self._process = self._start()
        threading.Thread(target=self._watch, daemon=True).start()

    def terminate(self) -> None:
        """End it, and start no other."""
        self._ending.set()
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        return self._process.wait(timeout)

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(os.getpid())]
        return subprocess.Popen([*words, *self.command], start_new_session=True)

    def _watch(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if self._ending.is_set():
                return
            deaths = 0 if time.monotonic() - began > STEADY else deaths
            pause = PAUSES[min(deaths, len(PAUSES) - 1)]
            deaths += 1
            when = f" in {pause:.0f} s" if pause else ""
            self.say(f"Flower's executor ended (code {code}); starting it again{when}")
            if self._ending.wait(pause):
                return
            self._process = self._start()
            if self._ending.is_set():  # in this very moment
                self._process.terminate()


def keep_executor(module: ModuleType, say: Callable[[str], None]) -> None:
    """Have a module of Flower, which calls ``subprocess.Popen`` for its executor and nothing else, start it here."""

    def start(command: Sequence[str], **options: Any) -> Executor:
        return Executor(command, say)

    module.subprocess = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[attr-defined]
