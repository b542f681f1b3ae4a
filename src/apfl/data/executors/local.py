"""Processes of this machine, each with an item. One that dies takes its own item with it and is replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from apfl.data.executors import GRACE, Event, Executor, Work, attempt

__all__ = ["Local", "blas_threads", "limit_threads"]

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Local(Executor):
    """``n_workers`` processes with so many threads each."""

    n_workers: int
    threads: int = 1

    def team(self, work: Work, n_items: int) -> _Processes:
        """The processes, started now."""
        return _Processes(work, min(self.n_workers, n_items), self.threads)


class _Processes:
    def __init__(self, work: Work, size: int, threads: int) -> None:
        self.work, self.threads, self.context = work, threads, multiprocessing.get_context("spawn")
        self.members: dict[Connection, tuple[BaseProcess, Any]] = {}  # with its item, or None
        for _ in range(size):
            self._hire()

    @property
    def busy(self) -> list[Any]:
        return [item for _, item in self.members.values() if item is not None]

    @property
    def n_idle(self) -> int:
        return sum(item is None for _, item in self.members.values())

    def give(self, item: Any) -> None:
        connection = next(each for each, (_, own) in self.members.items() if own is None)
        self.members[connection] = self.members[connection][0], item
        with suppress(OSError):  # one that is dead is noticed when listening
            connection.send(item)

    def listen(self) -> list[Event[Any]]:
        events = []
        for connection in wait([each for each, (_, item) in self.members.items() if item is not None]):
            assert isinstance(connection, Connection)
            process, item = self.members[connection]
            try:
                kind, info = connection.recv()
            except (EOFError, OSError):
                process.join()
                del self.members[connection]
                self._hire()
                events.append(Event("failed", item, _how_it_ended(process.exitcode)))
                continue
            if kind in ("done", "failed"):
                self.members[connection] = process, None
            events.append(Event(kind, item, info))
        return events

    def stop(self) -> None:
        for connection, (process, item) in self.members.items():
            if item is None:
                with suppress(OSError):
                    connection.send(None)
            else:
                process.terminate()
        for process, _ in self.members.values():
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()

    def _hire(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.threads, self.work), daemon=True)
        with blas_threads(self.threads):
            process.start()
        theirs.close()
        self.members[ours] = process, None


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """The environment of a process that is started now: BLAS libraries look there when they are loaded."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(n)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def limit_threads(n: int) -> None:
    """In a process that works on items: so many threads for torch and BLAS, from now on."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(n)
    threadpool_limits(n)


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
    return f"its process ended with code {code}"


# ------------------------------------------------------------------------------------------------- in the process


def _serve(connection: Connection, threads: int, work: Work) -> None:
    """Take items until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent says who stops
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    limit_threads(threads)
    while (item := connection.recv()) is not None:
        connection.send(attempt(work, item, _Teller(connection)))


class _Teller:
    """Says how far an item has got, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.last = connection, time.monotonic()

    def __call__(self, reached: float) -> None:
        if time.monotonic() - self.last > 0.2:
            self.connection.send(("reached", reached))
            self.last = time.monotonic()


def _leave(*_: Any) -> None:
    raise SystemExit(143)  # whoever has a checkpoint then writes it


def _leave_with_parent() -> None:
    """A parent that was killed leaves nobody behind who would work in the same folder as its successor."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
