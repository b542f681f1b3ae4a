"""What happened, one JSON object a line: for people who follow a run, and for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["WORDS", "Events", "in_words"]

WORDS = "APFL_EVENTS_IN_WORDS"  # set: print events for people; the file has them as JSON in any case


class Events:
    """``events.jsonl`` in the server's folder; each line reaches the file whole, also when the process is killed."""

    def __init__(self, folder: Path, run: str) -> None:
        self.path, self.run = folder / "events.jsonl", run

    def __call__(self, event: str, **fields: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "run": self.run, "event": event, **fields})
        print(in_words(json.loads(line)) if os.environ.get(WORDS) else line, flush=True)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, f"{line}\n".encode())
        finally:
            os.close(handle)

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
                yield begin, json.loads(line)


def in_words(event: dict[str, Any]) -> str:
    """An event as a line for people."""
    told = {key: value for key, value in event.items() if key not in ("at", "run", "event", "client")}
    details = ", ".join(f"{key} {value}" for key, value in told.items() if value not in ("", None, [], {}))
    return f"{event['event']:<10} {event.get('client') or '':<16} {details}".rstrip()
