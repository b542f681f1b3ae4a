"""The stopwatch of the benchmarks."""

from __future__ import annotations

import statistics as stats_of
import time
from collections.abc import Callable


def interleaved(repeats: int, **peers: Callable[[], object]) -> dict[str, float]:
    """Median seconds of each peer; they take turns, so that a busy moment hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        for name, call in peers.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - start)
    return {name: stats_of.median(seconds) for name, seconds in times.items()}
