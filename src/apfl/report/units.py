"""Sizes and times in words."""

from __future__ import annotations

from typing import SupportsFloat

__all__ = ["human_bytes", "human_seconds"]


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


def human_seconds(seconds: float) -> str:
    """A time in the unit that keeps it short.

    >>> human_seconds(0.04), human_seconds(90), human_seconds(3 * 3600), human_seconds(36 * 86400)
    ('0.04 s', '90.0 s', '3.0 h', '36.0 days')
    """
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    for unit, n, most in (("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * n:
            return f"{seconds / n:.1f} {unit}"
    return f"{seconds / 86400:,.1f} days"
