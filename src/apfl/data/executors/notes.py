"""How far items have got, told by files: a cluster's processes share a file system and little else."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Note"]

EVERY = 1.0  # seconds between two notes of one item


@dataclass
class Note:
    """The note of one item; calling it writes, a second apart at least."""

    path: Path
    last: float = field(default=0.0, compare=False)

    def __call__(self, reached: float) -> None:
        """Write how far the item has got; a note that cannot be written is no reason to stop."""
        if time.monotonic() - self.last < EVERY:
            return
        self.last = time.monotonic()
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            temporary.write_text(repr(float(reached)))
            os.replace(temporary, self.path)

    def read(self) -> float | None:
        """How far the item has got, if it says."""
        try:
            return float(self.path.read_text())
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """The item is over."""
        self.path.unlink(missing_ok=True)
