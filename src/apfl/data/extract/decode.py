"""Rows to the network's inputs, in chunks and in order: by worker processes for a GPU, otherwise by threads.

A GPU waits for images, and threads of one process cannot decode enough of them. On a CPU the network uses every core
already, and decoding at the same time makes its threads wait for each other: on two busy cores it ran at 0.78 of its
bare speed, not at 0.95. There, and for vectors and texts, threads of this process prepare a batch, and then the network
runs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from apfl.data.backbones import Backbone
from apfl.data.extract.chunk import Chunk, Reader
from apfl.data.samples import Samples
from apfl.errors import InputError
from apfl.maths.machine import n_cores

__all__ = ["chunks"]

AHEAD = 2  # chunks that each worker prepares before they are asked for
WAITING = 512 << 20  # bytes of prepared chunks that may wait for the network, all workers together
MOST = 32  # rows of a worker's chunk: more would only make the first one late
SHARED = Path("/dev/shm")  # the memory that processes share; 64 MB in a container, unless it asks for more


def chunks(
    samples: Samples, backbone: Backbone, device: torch.device, *, start: int, size: int, workers: int | None = None
) -> Iterator[Chunk]:
    """The rows from ``start`` on; no chunk reaches over a multiple of ``size``.

    ``workers`` processes decode (default: for images on a GPU one for each core but one, otherwise none).
    """
    reader = Reader(samples, backbone)
    rows, workers = _division(reader, device, start, size, workers)
    ranges = _ranges(start, len(samples), size, rows)
    if not workers:
        return _by_threads(reader, ranges, device)
    from apfl.data.extract.workers import chunks_of_workers  # which Windows could not import

    return chunks_of_workers(reader, ranges, workers, device, ahead=AHEAD)


def _by_threads(reader: Reader, ranges: list[range], device: torch.device) -> Iterator[Chunk]:
    threads = ThreadPoolExecutor(n_cores())
    try:
        for rows in ranges:
            chunk = reader.chunk(rows, threads.map)
            yield chunk.pin_memory() if device.type == "cuda" else chunk
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _ranges(start: int, stop: int, size: int, rows: int) -> list[range]:
    """``start`` to ``stop`` in pieces of at most ``rows``, none over a multiple of ``size``.

    >>> _ranges(4, 11, 4, 3)
    [range(4, 7), range(7, 8), range(8, 11)]
    """
    batches = (range(first, min(first + size, stop)) for first in range(start, stop, size))
    return [batch[first : first + rows] for batch in batches for first in range(0, len(batch), rows)]


def _division(reader: Reader, device: torch.device, start: int, size: int, workers: int | None) -> tuple[int, int]:
    """Rows of a chunk, and workers. Without workers, a chunk is a batch."""
    left = len(reader.samples) - start
    workers = _by_default(reader.samples, device) if workers is None else _checked(workers, reader.samples)
    room = _room(reader, start) if workers and left else 0  # rows that may wait
    workers = min(workers, room, left)
    if not workers:
        return size, 0
    return min(size, MOST, room // workers, -(-left // workers)), workers


def _by_default(samples: Samples, device: torch.device) -> int:
    return n_cores() - 1 if samples.kind == "images" and device.type != "cpu" and _can_fork() else 0


def _checked(workers: int, samples: Samples) -> int:
    if workers < 0:
        raise InputError(f"--workers {workers} given; it must be at least 0")
    if workers and samples.kind != "images":
        raise InputError(
            f"--workers {workers} given, but {samples.name} holds {samples.kind}, not images: leave it out"
        )
    if workers and not _can_fork():
        raise InputError(
            f"--workers {workers} given, but decoding processes need Linux, and a process that may have children; "
            "leave it out"
        )
    return workers


def _can_fork() -> bool:
    return sys.platform == "linux" and not multiprocessing.current_process().daemon


def _room(reader: Reader, start: int) -> int:
    """How many rows fit into half of the free shared memory and into `WAITING`, by the size of one."""
    one = reader.chunk(range(start, start + 1)).inputs
    bytes_of_one = 1 << 20 if one is None else max(1, one.nbytes)  # if it cannot be read, a guess
    state = os.statvfs(SHARED)
    return min(WAITING, state.f_bavail * state.f_frsize // 2) // (AHEAD * bytes_of_one)
