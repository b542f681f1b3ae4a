"""The machine: many small clients on a few cores, and whether a run fits, known before it starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

from apfl.errors import InputError
from apfl.maths.memory import of_run

__all__ = [
    "alike", "available", "check_width", "multiplies_halves", "n_cores", "n_workers", "over_clients", "threads",
    "too_much", "widest",
]  # fmt: skip

T = TypeVar("T")
R = TypeVar("R")


def n_cores() -> int:
    """The cores this process may use, which a container or a scheduler can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def multiplies_halves(device: torch.device) -> bool:
    """Whether there are instructions for products in bfloat16; without them they are slower than in float32."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # torch has no public name for it
    return bool(known and known())


def n_workers(n_clients: int, device: torch.device) -> int:
    """How many clients are worked on at a time: as many as torch may use threads, one at a time on a GPU."""
    return 1 if device.type != "cpu" else max(1, min(torch.get_num_threads(), n_clients))


ALIKE = 1.25  # clients whose sizes differ by no more than this factor are worked on at once


def alike(sizes: Sequence[int], most_rows: int, most_clients: int, factor: float = ALIKE) -> list[list[int]]:
    """Clients to be worked on at once: of sizes within a factor, filled up to so many rows, and so many clients.

    The largest come first, so that no core ends up waiting for one of them.

    >>> alike([10, 100, 9, 90, 30], 200, 2)
    [[1, 3], [4], [0, 2]]
    """
    found: list[list[int]] = []
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        largest = sizes[found[-1][0]] if found else 0
        fits = found and len(found[-1]) < most_clients and (len(found[-1]) + 1) * largest <= most_rows
        if fits and sizes[k] * factor >= largest:
            found[-1].append(k)
        else:
            found.append([k])
    return found


def over_clients(work: Callable[[T], R], clients: Sequence[T], device: torch.device) -> list[R]:
    """``[work(client) for client in clients]``, on a thread for each core with one BLAS thread each.

    torch, numpy and scipy each bring a thread pool of their own. Alternating between two-threaded calls of them on a
    small client costs twice the work itself, because the idle pool spins; one thread each never waits.
    """
    workers, threads = n_workers(len(clients), device), torch.get_num_threads()
    if workers == 1:
        return [work(client) for client in clients]
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(workers)
    try:
        with threadpool_limits(1):
            return list(pool.map(work, clients))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@contextmanager
def threads(n: int | None) -> Iterator[None]:
    """torch and BLAS with this many threads, for a while; None leaves them as they are.

    On a busy machine one thread can be many times as fast as two: the second waits, and the first for it.
    """
    if n is None:
        yield
        return
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError(f"threads={n!r} given; allowed: a whole number of at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        with threadpool_limits(n):
            yield
    finally:
        torch.set_num_threads(before)


log = logging.getLogger(__name__)


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on ``device``; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def too_much(n_bytes: int, device: torch.device) -> bool:
    """Whether so many bytes are more than half of what is free."""
    have = available(device)
    return have is not None and n_bytes > have // 2


def widest(n_rows: int, workers: int, device: torch.device) -> int | None:
    """The widest power of two that fits; None if none does or if the system does not say how much is free."""
    have = available(device)
    widths = (2**power for power in range(20, 3, -1))
    return None if have is None else next((each for each in widths if of_run(each, n_rows, workers) <= have), None)


def check_width(width: int, n_rows: int, workers: int, device: torch.device) -> None:
    """Say what a run of this width takes; refuse it, with the widest that fits, if there is not that much."""
    take, have = of_run(width, n_rows, workers), available(device)
    if take > 1e9:  # below that nobody has to plan for it
        log.info("width %d for %d rows takes about %.1f GB of memory", width, n_rows, take / 1e9)
    if have is None or take <= have:
        return
    fits = widest(n_rows, workers, device)
    remedy = f"the widest power of two that fits is d_primary={fits}" if fits else "use fewer rows or another machine"
    want = f"d_primary={width} with {n_rows} rows needs about {take / 1e9:.1f} GB"
    raise InputError(f"{want} and {have / 1e9:.1f} GB are free: {remedy}")
