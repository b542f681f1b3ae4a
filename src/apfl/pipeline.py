"""Samples through a backbone, batch by batch: decoding on threads, the network on one device."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apfl.backbones import Backbone
from apfl.data.samples import Samples
from apfl.errors import InputError

__all__ = ["Passed", "extraction_device", "through"]

# Batches that are decoded while one is in the network. On a CPU the network uses every core already, and decoding at
# the same time makes its threads wait for each other: on two busy cores it ran at 0.78 of its bare speed, not at 0.95.
AHEAD = {"cpu": 0, "cuda": 2, "mps": 2}
Prepared = Tensor | Exception


class Passed(NamedTuple):
    """One batch that went through."""

    rows: range
    bad: dict[int, str]  # rows that could not be read: why
    features: np.ndarray  # (rows - bad, l), float32


class _Batch(NamedTuple):
    rows: range
    bad: dict[int, str]
    inputs: Tensor | None  # none if nothing in it could be read


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


def through(
    samples: Samples, backbone: Backbone, device: torch.device, *, start: int, size: int, mixed_precision: bool
) -> Iterator[Passed]:
    """The rows from ``start`` on, in their order.

    A batch always begins at a multiple of ``size``, also after a resumption: the same rows share a batch, so that the
    same numbers come out to the last bit. A GPU is given the next batch before the features of the last are waited for.
    """
    backbone.module.to(device)
    launched: tuple[_Batch, Tensor | None] | None = None
    for batch in _batches(samples, backbone, device, start, size):
        latest = batch, _launch(backbone, batch, device, mixed_precision)
        if launched is not None:
            yield _land(samples, backbone, *launched)
        launched = latest
    if launched is not None:
        yield _land(samples, backbone, *launched)


def _batches(samples: Samples, backbone: Backbone, device: torch.device, start: int, size: int) -> Iterator[_Batch]:
    """Decoded and stacked on threads, a fixed number of batches ahead: memory does not grow with the samples."""

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

    def stack(rows: range, futures: list[Future[Prepared]]) -> _Batch:
        prepared = [future.result() for future in futures]
        bad = {row: str(item) for row, item in zip(rows, prepared, strict=True) if isinstance(item, Exception)}
        good = [item.numpy() for item in prepared if isinstance(item, Tensor)]
        if len({item.shape for item in good}) > 1:
            raise InputError(
                f"{backbone.name} prepares images of {samples.name} to different sizes; resize them before"
            )
        # numpy copies on this thread alone; torch.stack would wake threads that fight with the network's.
        inputs = torch.from_numpy(np.stack(good)) if good else None
        return _Batch(rows, bad, inputs.pin_memory() if inputs is not None and device.type == "cuda" else inputs)

    waiting: deque[Future[_Batch]] = deque()
    with ThreadPoolExecutor(_n_threads()) as decoders, ThreadPoolExecutor(1) as stacker:
        try:
            for first in range(start, len(samples), size):
                rows = range(first, min(first + size, len(samples)))
                waiting.append(stacker.submit(stack, rows, [decoders.submit(prepare, fetch(row)) for row in rows]))
                if len(waiting) > AHEAD[device.type]:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            stacker.shutdown(wait=False, cancel_futures=True)
            decoders.shutdown(wait=False, cancel_futures=True)


def _launch(backbone: Backbone, batch: _Batch, device: torch.device, mixed: bool) -> Tensor | None:
    """(m, l) on the device; on a GPU it is still being computed."""
    if batch.inputs is None:
        return None
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=mixed)
    half = torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed)
    try:
        with torch.inference_mode(), half, exact:
            return backbone.forward(batch.inputs.to(device, non_blocking=True)).float()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a batch of {len(batch.inputs)} does not fit into the memory of {device}; lower --batch-size"
        ) from error


def _land(samples: Samples, backbone: Backbone, batch: _Batch, features: Tensor | None) -> Passed:
    """Wait for the features and check them."""
    if features is None:
        return Passed(batch.rows, batch.bad, np.empty((0, 0), np.float32))
    landed = features.cpu().numpy()
    if not np.isfinite(landed).all():
        raise InputError(f"{backbone.name} gives NaN or infinity in the batch from {samples.where(batch.rows[0])} on")
    return Passed(batch.rows, batch.bad, landed)


def _n_threads() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, available or 1)
