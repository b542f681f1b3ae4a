"""What a process that Flower started has to say to the person who started apfl: a marked line in Flower's log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from apfl.errors import printable

__all__ = ["Telling", "tame_logs", "tell", "tell_warnings"]

MARK = "apfl tells: "
LONGEST = 2000  # characters of one line that a person is shown
N_LINES = 200  # of a traceback


def tell(text: str) -> None:
    """Say something, in one line."""
    print(f"{MARK}{' '.join(text.split())}", flush=True)


def tell_warnings(logger: logging.Logger) -> None:
    """Say what this logger warns of."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: tell(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)


def tame_logs() -> None:
    """Escape and bound what this process logs, Flower's own words too: sites have a say in them.

    Flower logs hashes and numbers of a request as they came. One with a line break could speak for apfl.
    """
    make, whole = logging.getLogRecordFactory(), logging.Formatter.formatException

    def made(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        record.msg = _tame(record.msg)
        record.args = tuple(map(_tame, record.args)) if isinstance(record.args, tuple) else record.args
        return record

    def indented(self: logging.Formatter, ei: Any) -> str:
        return "\n".join(f"  {_tame(line)}" for line in whole(self, ei).split("\n")[-N_LINES:])

    logging.setLogRecordFactory(made)
    logging.Formatter.formatException = indented  # type: ignore[method-assign]


def _tame(value: object) -> object:
    """A value that stands on one line of a log; numbers as they are, for formats that want them."""
    text = value if isinstance(value, int | float) else str(value)
    return text if not isinstance(text, str) or _is_tame(text) else printable(text, LONGEST)


def _is_tame(text: str) -> bool:
    return len(text) <= LONGEST and text.isprintable()


class Telling:
    """A log from its present end on: what was told in it since the last look."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._position = log.stat().st_size if log.exists() else 0

    def lines(self) -> list[str]:
        """What was told, without marks; a line that is not whole yet is left for the next look."""
        if not self.log.exists():
            return []
        marked = []
        with self.log.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                text = line.decode(errors="replace")
                if text.startswith(MARK):  # elsewhere in a line it is quoted: sites have a say in some lines
                    marked.append(printable(text.removeprefix(MARK), LONGEST))
        return marked
