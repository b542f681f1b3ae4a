"""What happened, one JSON object a line: for people who follow a run, and for programs."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from apfl.errors import printable
from apfl.files import cannot_write

__all__ = ["WORDS", "Events", "in_words"]

WORDS = "APFL_EVENTS_IN_WORDS"  # set: print events for people; the file has them as JSON in any case


class Events:
    """``events.jsonl`` in the server's folder; each line reaches the file whole, also when the process is killed."""

    def __init__(self, folder: Path, run: str) -> None:
        self.path, self.run = folder / "events.jsonl", run

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "run": self.run, "event": event, **_printable(fields)})
        with suppress(OSError):  # Flower's log, which may lie on a full disk, says less than the file
            print(in_words(json.loads(line)) if os.environ.get(WORDS) else line, flush=True)
        try:
            _append(self.path, f"{line}\n".encode())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @staticmethod
    def read(path: Path, begin: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """The events from a position on, each with the position after it; a line that is not whole yet is left."""
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                begin += len(line)
                with suppress(ValueError):  # a line that a power cut or an earlier version left incomplete
                    yield begin, json.loads(line)


def _append(path: Path, line: bytes) -> None:
    """Add a line, or nothing: a full disk may take a part of it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(handle).st_size
        if os.write(handle, line) < len(line):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(handle)


def _printable(value: Any, longest: int = 500) -> Any:
    """The value with every text in it bounded and escaped: sites have a say in some of them."""
    if isinstance(value, dict):
        return {printable(key, longest): _printable(each, longest) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(each, longest) for each in value]
    return printable(value, longest) if isinstance(value, str) else value


def in_words(event: dict[str, Any]) -> str:
    """An event as a line for people."""
    event = _printable(event, 1000)  # those that were written before they were bounded
    fields = {key: value for key, value in event.items() if key not in ("at", "run", "event", "client")}
    details = ", ".join(f"{key} {value}" for key, value in fields.items() if value not in ("", None, [], {}))
    return f"{event['event']:<10} {event.get('client') or '':<16} {details}".rstrip()
