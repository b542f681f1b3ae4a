"""Many small clients on a few cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from threadpoolctl import threadpool_limits

__all__ = ["n_cores", "n_workers", "over_clients"]

T = TypeVar("T")
R = TypeVar("R")


def n_cores() -> int:
    """The cores this process may use, which a container or a scheduler can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_workers(n_clients: int, device: torch.device) -> int:
    """How many clients are worked on at a time: as many as torch may use threads, one at a time on a GPU."""
    return 1 if device.type != "cpu" else max(1, min(torch.get_num_threads(), n_clients))


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
