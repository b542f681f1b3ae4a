"""A few consecutive rows, fetched, decoded and prepared for the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from apfl.data.backbones import Backbone
from apfl.data.samples import Samples

__all__ = ["Chunk", "Reader"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive rows, ready for the network."""

    rows: range
    bad: dict[int, str]  # rows that could not be read: why
    inputs: Tensor | None  # (rows - bad, ...); none if no row could be read
    n_cut: int = 0  # rows that were too long for the network
    refusal: str = ""  # why these rows cannot go through the network together

    def pin_memory(self) -> Chunk:
        """The same in memory that a GPU copies from by itself; torch's `DataLoader` calls this too."""
        return self if self.inputs is None else replace(self, inputs=self.inputs.pin_memory())


@dataclass(frozen=True)
class Reader:
    """From rows to chunks. An unreadable row is returned with its reason, never raised."""

    samples: Samples
    backbone: Backbone

    def chunk(self, rows: range, over: Callable[..., Any] = map) -> Chunk:
        """The rows; ``over`` is `map`, or that of a pool of threads."""
        stored = [self._fetch(row) for row in rows]  # in order: a compressed file is a stream
        prepared = list(over(self._prepare, stored))
        good = [item for item in prepared if not isinstance(item, Exception)]
        bad = {row: str(item) for row, item in zip(rows, prepared, strict=True) if isinstance(item, Exception)}
        if not good:
            return Chunk(rows, bad, None)
        try:
            return Chunk(rows, bad, self.backbone.combine(good), sum(map(self.backbone.is_cut, good)))
        except (RuntimeError, ValueError) as error:
            return Chunk(rows, bad, None, refusal=self._refusal(good) or f"{self.backbone.name}: {error}")

    def _fetch(self, row: int) -> Any:
        try:
            return self.samples.fetch(row)
        except Exception as error:  # of a damaged archive or a vanished file
            return error

    def _prepare(self, stored: Any) -> Any:
        if isinstance(stored, Exception):
            return stored
        try:
            return self.backbone.prepare(self.samples.decode(stored))
        except Exception as error:  # Pillow's readers raise whatever they like on damaged files
            return error

    def _refusal(self, items: list[Any]) -> str:
        same = len({tuple(getattr(item, "shape", ())) for item in items}) == 1
        name = f"{self.backbone.name} prepares images of {self.samples.name}"
        return "" if same else f"{name} to different sizes; resize them before"
