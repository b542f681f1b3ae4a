"""Samples through a backbone, batch by batch: decoding on threads, the network on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apfl.data.backbones import Backbone
from apfl.data.samples import Samples
from apfl.errors import InputError
from apfl.maths.machine import n_cores

__all__ = ["Passed", "through"]

# Batches that are decoded while one is in the network. On a CPU the network uses every core already, and decoding at
# the same time makes its threads wait for each other: on two busy cores it ran at 0.78 of its bare speed, not at 0.95.
AHEAD = {"cpu": 0, "cuda": 2, "mps": 2}


class Passed(NamedTuple):
    """One batch that went through."""

    rows: range
    bad: dict[int, str]  # rows that could not be read: why
    features: np.ndarray  # (rows - bad, l), float32


class _Batch(NamedTuple):
    rows: range
    bad: dict[int, str]
    inputs: Tensor | None  # none if nothing in it could be read
    memory: Tensor | None  # that the inputs lie in, to be given back


class _Memory:
    """Room for some batches, used in turn: made (for a GPU, pinned) once; every item is copied once, by its thread."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        self.free: list[Tensor] = []
        self.lock = Lock()

    def take(self, item: Tensor) -> Tensor:
        """Room for a batch of such items; (size, ...)."""
        with self.lock:
            self.free = [room for room in self.free if (room.shape[1:], room.dtype) == (item.shape, item.dtype)]
            if self.free:
                return self.free.pop()
        return torch.empty((self.size, *item.shape), dtype=item.dtype, pin_memory=self.pinned)

    def give(self, room: Tensor | None) -> None:
        if room is not None:
            with self.lock:
                self.free.append(room)


class _Filling:
    """A batch that threads put their items into, each its own."""

    def __init__(self, memory: _Memory) -> None:
        self.memory, self.lock = memory, Lock()
        self.room: Tensor | None = None

    def put(self, place: int, item: Tensor) -> None:
        with self.lock:
            if self.room is None:
                self.room = self.memory.take(item)
        if item.shape != self.room.shape[1:]:
            raise _OtherSizeError
        # numpy copies on this thread alone; torch would wake threads that fight with the network's.
        self.room.numpy()[place] = item.numpy()


class _OtherSizeError(Exception):
    pass


def through(
    samples: Samples, backbone: Backbone, device: torch.device, *, start: int, size: int, mixed_precision: bool
) -> Iterator[Passed]:
    """The rows from ``start`` on, in their order.

    A batch always begins at a multiple of ``size``, also after a resumption: the same rows share a batch, so that the
    same numbers come out to the last bit. A GPU is given the next batch before the features of the last are waited for.
    """
    backbone.module.to(device)
    memory = _Memory(size, pinned=device.type == "cuda")
    launched: deque[tuple[_Batch, Tensor | None]] = deque()
    for batch in _batches(samples, backbone, device, start, memory):
        launched.append((batch, _launch(backbone, batch, device, mixed_precision)))
        if len(launched) > 1:
            yield _land(samples, backbone, *launched.popleft(), memory)
    while launched:
        yield _land(samples, backbone, *launched.popleft(), memory)


def _batches(
    samples: Samples, backbone: Backbone, device: torch.device, start: int, memory: _Memory
) -> Iterator[_Batch]:
    """Decoded on threads, a fixed number of batches ahead: memory does not grow with the samples."""

    def prepare(stored: Any, filling: _Filling, place: int) -> Exception | None:
        try:
            if isinstance(stored, Exception):
                return stored
            filling.put(place, backbone.prepare(samples.decode(stored)))
            return None
        except Exception as error:  # Pillow's readers raise whatever they like on damaged files
            return error

    def fetch(row: int) -> Any:
        try:
            return samples.fetch(row)
        except Exception as error:  # of a damaged archive or a vanished file
            return error

    def collect(rows: range, filling: _Filling, futures: list[Future[Exception | None]]) -> _Batch:
        problems = [future.result() for future in futures]
        if any(isinstance(problem, _OtherSizeError) for problem in problems):
            raise InputError(
                f"{backbone.name} prepares images of {samples.name} to different sizes; resize them before"
            )
        bad = {row: str(problem) for row, problem in zip(rows, problems, strict=True) if problem is not None}
        if filling.room is None:
            return _Batch(rows, bad, None, None)
        inputs = filling.room[: len(rows)]
        good = [place for place, problem in enumerate(problems) if problem is None]
        return _Batch(rows, bad, inputs[good] if bad else inputs, filling.room)

    waiting: deque[Future[_Batch]] = deque()
    with ThreadPoolExecutor(n_cores()) as decoders, ThreadPoolExecutor(1) as collector:
        try:
            for first in range(start, len(samples), memory.size):
                rows, filling = range(first, min(first + memory.size, len(samples))), _Filling(memory)
                decoding = [decoders.submit(prepare, fetch(row), filling, place) for place, row in enumerate(rows)]
                waiting.append(collector.submit(collect, rows, filling, decoding))
                if len(waiting) > AHEAD[device.type]:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            collector.shutdown(wait=False, cancel_futures=True)
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


def _land(samples: Samples, backbone: Backbone, batch: _Batch, features: Tensor | None, memory: _Memory) -> Passed:
    """Wait for the features, check them, and give back the memory of the inputs, which nobody reads any more."""
    if features is None:
        return Passed(batch.rows, batch.bad, np.empty((0, 0), np.float32))
    landed = features.cpu().numpy().copy()  # a network may hand out what it was given
    memory.give(batch.memory)
    if not np.isfinite(landed).all():
        raise InputError(f"{backbone.name} gives NaN or infinity in the batch from {samples.where(batch.rows[0])} on")
    return Passed(batch.rows, batch.bad, landed)
