"""A fingerprint of many rows that changes with each of them in constant time, whatever their order."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["Tally"]

SIZE = 2**256


class Tally:
    """The sum of the rows' hashes: rows that come and go again leave no trace.

    It notices what happens to a disk by chance. It is no proof against someone who makes up rows.

    >>> one, other = Tally(), Tally()
    >>> one.count(1, "t", "a", 1); one.count(1, "t", "b", None); one.count(-1, "t", "a", 1)
    >>> other.count(1, "t", "b", None)
    >>> one.total == other.total
    True
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def count(self, sign: int, *row: Any) -> None:
        """A row is there (1) or is not any more (-1)."""
        digest = hashlib.sha256(repr(row).encode(errors="backslashreplace")).digest()
        self.total = (self.total + sign * int.from_bytes(digest, "little")) % SIZE
