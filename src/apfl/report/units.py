"""Sizes in words."""

from __future__ import annotations

from typing import SupportsFloat

__all__ = ["human_bytes"]


def human_bytes(size: SupportsFloat) -> str:
    """A number of bytes in decimal units.

    >>> human_bytes(4_200_000)
    '4.2 MB'
    """
    n = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"
