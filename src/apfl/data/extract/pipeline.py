"""Samples through a backbone, batch by batch: the network on one device, while the next batches are prepared."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apfl.data.backbones import Backbone
from apfl.data.extract.chunk import Chunk
from apfl.data.extract.decode import chunks
from apfl.data.samples import Samples
from apfl.errors import InputError

__all__ = ["HALF", "Batching", "Passed", "through"]

# The short format of mixed precision. bfloat16 has too few digits for a convolutional network (EfficientNet-Lite0:
# correlation 0.9955 with float32, float16 0.99997), but a CPU computes float16 five times slower than float32.
HALF = {"cpu": torch.bfloat16, "cuda": torch.float16, "mps": torch.float16}
LAUNCHED = {"cpu": 0, "cuda": 2, "mps": 2}  # batches a GPU has before the features of an earlier one are waited for


@dataclass(frozen=True)
class Batching:
    """Where a network takes rows, from which one on, and how many at a time."""

    device: torch.device
    start: int
    size: int
    mixed_precision: bool
    workers: int | None = None  # processes that decode


class Passed(NamedTuple):
    """One batch that went through."""

    rows: range
    bad: dict[int, str]  # rows that could not be read: why
    features: np.ndarray  # (rows - bad, l), float32
    n_cut: int = 0  # rows that were too long for the network


class _Launched(NamedTuple):
    chunks: list[Chunk]
    inputs: Tensor | None  # on the device; none if nothing could be read
    features: Tensor | None  # (m, l) on the device, perhaps still being computed


def through(samples: Samples, backbone: Backbone, batching: Batching) -> Generator[Passed, None, None]:
    """The rows from ``batching.start`` on, in their order.

    A batch always begins at a multiple of its size, also after a resumption: the same rows share a batch, so that the
    same numbers come out to the last bit. A GPU is given the next batches before the features of one are waited for.
    """
    device, size = batching.device, batching.size
    backbone.module.to(device)
    half = HALF[device.type] if batching.mixed_precision else None
    launched: deque[_Launched] = deque()
    prepared = chunks(samples, backbone, device, start=batching.start, size=size, workers=batching.workers)
    for batch in _batches(prepared, size):
        launched.append(_launch(backbone, batch, device, half))
        if len(launched) > LAUNCHED[device.type]:
            yield _land(samples, backbone, launched.popleft(), half)
    while launched:
        yield _land(samples, backbone, launched.popleft(), half)


def _batches(prepared: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    for chunk in prepared:
        batch.append(chunk)
        if chunk.rows.stop % size == 0:
            yield batch
            batch = []
    if batch:
        yield batch


def _launch(backbone: Backbone, batch: list[Chunk], device: torch.device, half: torch.dtype | None) -> _Launched:
    """Start the network on a batch; a GPU computes on while this returns."""
    refusal = next((chunk.refusal for chunk in batch if chunk.refusal), "")
    if refusal:
        raise InputError(refusal)
    parts = [chunk.inputs for chunk in batch if chunk.inputs is not None]
    if not parts:
        return _Launched(batch, None, None)
    if len({part.shape[1:] for part in parts}) > 1:
        raise InputError(f"{backbone.name} prepares images to different sizes; resize them before")
    try:
        moved = [part.to(device, non_blocking=True) for part in parts]
        inputs = moved[0] if len(moved) == 1 else torch.cat(moved)
        if half is not None and device.type == "cuda" and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)  # as tensor cores convolve
        return _Launched(batch, inputs, _forward(backbone, inputs, half))
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"a batch of {sum(map(len, parts))} does not fit into the memory of {device}; lower --batch-size"
        ) from error


def _forward(backbone: Backbone, inputs: Tensor, half: torch.dtype | None) -> Tensor:
    """(m, l), float32."""
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=half is not None)
    mixed = torch.autocast(inputs.device.type, dtype=half, enabled=half is not None)
    with torch.inference_mode(), exact, mixed:
        return backbone.forward(inputs).float()


def _land(samples: Samples, backbone: Backbone, launched: _Launched, half: torch.dtype | None) -> Passed:
    """Wait for the features and check them; what overflows float16 is computed again in float32."""
    first, last = launched.chunks[0], launched.chunks[-1]
    rows = range(first.rows.start, last.rows.stop)
    bad = {row: why for chunk in launched.chunks for row, why in chunk.bad.items()}
    if launched.inputs is None or launched.features is None:
        return Passed(rows, bad, np.empty((0, 0), np.float32))
    landed = launched.features.cpu().numpy().copy()  # a network may hand out what it was given
    if half is not None and not np.isfinite(landed).all():
        landed = _forward(backbone, launched.inputs, None).cpu().numpy().copy()
    if not np.isfinite(landed).all():
        raise InputError(f"{backbone.name} gives NaN or infinity in the batch from {samples.where(rows[0])} on")
    return Passed(rows, bad, landed, sum(chunk.n_cut for chunk in launched.chunks))
