"""Bytes that a run, a site and a server hold at their peak: what the width check and `apfl cost` go by.

A matrix of width x width in double precision is a square here, one of rows x width is mapped rows.
"""

from __future__ import annotations

__all__ = ["INTERPRETER", "of_pilot", "of_run", "of_server", "of_site"]

INTERPRETER = 500_000_000  # Python with torch
# From measured settings (docs/benchmarks.md). The server holds the sum, the system, its factor, its band form and room
# to work; before that, moments and points, of which it draws those that tell mean squares after the landmarks.
SITE_SQUARES, SITE_MAPPED, SITE_POINTS = 5, 4.5, 6
SERVER_SQUARES, SERVER_MOMENTS, SERVER_POINTS = 8, 6, 8
PILOT_SQUARES, PILOT_MAPPED, PILOT_POINTS, PILOT_SUMS = 36, 3.5, 5.5, 18
LEAST_POINTS = 1024  # `landmarks.SYNTHETIC`, which stands above this in the order of imports
FIRST_USE, MOST_FIRST = 24_000, 16_000_000  # bytes a column that libraries take when first used, to that many


def of_run(width: int, n_rows: int, workers: int) -> int:
    """All clients in one process: a sum for each worker, the system, its factor, and all activated rows.

    Sums, system and factor are float64 and width x width; rows are float32. One eighth is added for all else.
    """
    return int(1.125 * (8 * width**2 * (workers + 2) + 4 * width * n_rows))


def of_site(width: int, n_rows: int, n_features: int, n_classes: int) -> int:
    """One site between machines, without the interpreter: squares, its mapped rows, points, and what it sends, twice.

    Points are the landmarks that are agreed on and the site's own, (width, n_features).
    """
    held = 8 * width * (SITE_SQUARES * width + SITE_MAPPED * n_rows + SITE_POINTS * n_features)
    return int(held) + 2 * _sent(width, n_classes) + _first_use(width, MOST_FIRST // 2)


def of_pilot(width: int, n_rows: int, n_features: int) -> tuple[int, int]:
    """One site and the server in the pilot, without the interpreter: the maps of all candidates, rows, points, sums.

    ``n_rows`` are those of the site that take part.
    """
    points = PILOT_POINTS * (width + LEAST_POINTS) * n_features
    held = 8 * (PILOT_SQUARES * width**2 + PILOT_MAPPED * n_rows * width + points)
    used = _first_use(width, MOST_FIRST // 2)
    return int(held) + used, 8 * PILOT_SUMS * width**2 + used


def of_server(width: int, n_features: int, n_classes: int, *, moments: bool) -> int:
    """The server, without the interpreter; it does not grow with the number of sites.

    ``n_features`` are those of landmarks, 0 without them; ``moments`` whether their products are what it draws from.
    """
    points = SERVER_POINTS * max(width, LEAST_POINTS) * n_features
    drawing = 8 * (points + SERVER_MOMENTS * n_features**2 * moments)
    publishing = 2 * _sent(width, n_classes) + 8 * SERVER_SQUARES * width**2
    return max(drawing, publishing) + _first_use(width, MOST_FIRST)


def _first_use(width: int, most: int) -> int:
    return min(FIRST_USE * width, most)


def _sent(width: int, n_classes: int) -> int:
    """A triangle and Phi'Y in double precision."""
    return 8 * (width * (width + 1) // 2 + width * n_classes)
