"""The stopwatch of the benchmarks."""

from __future__ import annotations

import statistics as stats_of
import time
from collections.abc import Callable


def interleaved(
    repeats: int, *, clock: Callable[[], float] = time.perf_counter, **peers: Callable[[], object]
) -> dict[str, float]:
    """Median seconds of each peer; they take turns, so that a busy moment hits all of them.

    ``clock=time.process_time`` counts processor seconds of this process, which others on the machine hardly change.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        for name, call in peers.items():
            start = clock()
            call()
            if turn:  # the first turn warms up
                times[name].append(clock() - start)
    return {name: stats_of.median(seconds) for name, seconds in times.items()}
