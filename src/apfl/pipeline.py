"""Samples through a backbone, batch by batch: decoding on threads, the network on one device."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.backbones import Backbone
from apfl.data.samples import Samples
from apfl.errors import InputError

__all__ = ["batches", "extraction_device", "forward"]

AHEAD = 2  # batches that are decoded while one is in the network
Prepared = Tensor | Exception


def extraction_device(name: str) -> torch.device:
    """``auto`` is a GPU, NVIDIA's or Apple's, if there is one."""
    have = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if have[kind])
    kind, _, index = name.partition(":")
    if kind not in have or not (index == "" or index.isdigit()):
        raise InputError(f"--device {name} given; allowed are auto, cpu, cuda, cuda:N and mps")
    if int(index or 0) >= have[kind]:
        raise InputError(f"--device {name} given, but torch sees {have[kind]} of that kind here; use --device cpu")
    return torch.device(name)


def batches(samples: Samples, backbone: Backbone, start: int, size: int) -> Iterator[tuple[range, list[Prepared]]]:
    """Rows and their prepared samples, decoded on threads a fixed number of batches ahead: memory stays constant.

    A batch always begins at a multiple of ``size``, also after a resumption: the same rows share a batch, so that the
    same numbers come out to the last bit.
    """

    def prepare(stored: Any) -> Prepared:
        try:
            return stored if isinstance(stored, Exception) else backbone.prepare(samples.decode(stored))
        except Exception as error:  # Pillow's readers raise whatever they like on damaged files
            return error

    def fetch(row: int) -> Any:
        try:
            return samples.fetch(row)
        except Exception as error:  # of a damaged archive or a vanished file
            return error

    waiting: deque[tuple[range, list[Future[Prepared]]]] = deque()
    with ThreadPoolExecutor(_n_threads()) as pool:
        try:
            for first in range(start, len(samples), size):
                rows = range(first, min(first + size, len(samples)))
                waiting.append((rows, [pool.submit(prepare, fetch(row)) for row in rows]))
                if len(waiting) > AHEAD:
                    ready, futures = waiting.popleft()
                    yield ready, [future.result() for future in futures]
            for ready, futures in waiting:
                yield ready, [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def forward(
    backbone: Backbone, batch: list[Tensor], device: torch.device, mixed: bool, samples: Samples, rows: range
) -> np.ndarray:
    """(m, l) float32."""
    if not batch:
        return np.empty((0, 0), np.float32)
    if len({item.shape for item in batch}) > 1:
        raise InputError(f"{backbone.name} prepares images of {samples.name} to different sizes; resize them before")
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=mixed)
    half = torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed)
    try:
        with torch.inference_mode(), half, exact:
            features = backbone.forward(torch.stack(batch).to(device)).float().cpu().numpy()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a batch of {len(batch)} does not fit into the memory of {device}; lower --batch-size"
        ) from error
    finite = np.isfinite(features).all(1)
    if not finite.all():
        raise InputError(f"{backbone.name} gives NaN or infinity in the batch from {samples.where(rows[0])} on")
    return np.asarray(features)


def _n_threads() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, available or 1)
