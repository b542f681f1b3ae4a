"""An extraction by many machines: shards of consecutive rows, each a file of its own, then put together in their order.

A shard begins at a multiple of the batch size, so that the same rows share a batch and the same numbers come out as on
one machine. What is finished stays beside the target until all is, so that the same command goes on after a stop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data.backbones import Backbone, load_backbone
from apfl.data.executors import Executor, Tell
from apfl.data.extract.pipeline import Batching, Passed
from apfl.data.federation import Dataset
from apfl.data.samples import Samples, vectors
from apfl.data.source import Source
from apfl.data.sources.features import read_arrays, read_provenance
from apfl.errors import InputError

__all__ = ["InShards"]

BATCHES = 64  # of a shard

Rows = tuple[int, int]


@dataclass(frozen=True)
class InShards:
    """In the place of `apfl.data.extract.pipeline.through`: an executor's processes open the source themselves."""

    executor: Executor
    source: Source
    target: Path
    batches: int = BATCHES
    show: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, samples: Samples, backbone: Backbone, batching: Batching) -> Generator[Passed, None, None]:
        """The rows from ``batching.start`` on, in their order, once all shards are done."""
        start, size = batching.start, batching.size
        folder = self.target.with_name(f".{self.target.name}.shards")
        step, n = self.batches * size, len(samples)
        shards = [(first, min(first + step, n)) for first in range(start - start % step, n, step)]
        work = _Extracting(
            self.source, folder, samples.revision, size, batching.device.type, batching.mixed_precision,
            batching.workers, backbone.weights,
        )  # fmt: skip
        self._all_done(work, shards, n)
        for first, last in shards:
            yield from _read(folder, max(first, start), first, last, size)
        shutil.rmtree(folder, ignore_errors=True)

    def _all_done(self, work: _Extracting, shards: list[Rows], n: int) -> None:
        done, why = 0, ""
        for event in self.executor.map(work, shards):
            if event.kind == "done":
                done += event.item[1] - event.item[0]
                self.show(done, n)
            elif event.kind == "failed":
                why = why or f"rows {event.item[0]} to {event.item[1]}: {str(event.info).strip().splitlines()[-1]}"
        if why:
            raise InputError(f"{why}; shards that are done are kept, and the same command goes on")


@dataclass
class _Extracting:
    """What is done with a shard."""

    source: Source
    folder: Path
    revision: str
    size: int
    device: str
    mixed_precision: bool
    workers: int | None
    weights: str | None
    kept: list[Any] = field(default_factory=list, compare=False)  # samples and network, from one shard to the next

    def __call__(self, rows: Rows, tell: Tell) -> int:
        from apfl.data.extract.features import extract

        samples, network = self._opened()
        path = _place(self.folder, *rows)
        made = extract(
            _some(samples, *rows), network, path, batch_size=self.size, device=self.device,
            mixed_precision=self.mixed_precision, workers=self.workers, on_corrupt=self.source.on_corrupt,
            on_progress=lambda done, total: tell(done),
        )  # fmt: skip
        return made.n_rows

    def _opened(self) -> tuple[Samples, Backbone]:
        if not self.kept:
            opened = self.source.open()
            samples = vectors(opened) if isinstance(opened, Dataset) else opened
            if samples.revision != self.revision:
                raise InputError(f"{samples.name} differs between machines; give all machines the same data")
            source = self.source
            network = load_backbone(str(source.backbone), pooling=source.pooling, revision=source.backbone_revision)
            if network.weights != self.weights:
                raise InputError(f"{network.name} has other weights on another machine; give all machines the same")
            self.kept[:] = [samples, network]
        return self.kept[0], self.kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": []}


def _some(samples: Samples, first: int, last: int) -> Samples:
    """Consecutive rows; what columns say of them is for the whole file."""
    return replace(
        samples,
        labels=samples.labels[first:last],
        fetch=lambda row: samples.fetch(first + row),
        where=lambda row: samples.where(first + row),
        columns={},
        settings={**samples.settings, "rows": [first, last]},
    )


def _place(folder: Path, first: int, last: int) -> Path:
    return folder / f"{first:012d}-{last:012d}.npz"


def _read(folder: Path, start: int, first: int, last: int, size: int) -> Generator[Passed, None, None]:
    """The batches of a shard, from row ``start`` on."""
    path = _place(folder, first, last)
    arrays = read_arrays(path)
    told = read_provenance(path, arrays)
    skipped = dict(zip(told.get("skipped_rows", ()), told["skipped"].values(), strict=True))
    kept = np.setdiff1d(np.arange(last - first), list(skipped))
    cut = told.get("n_cut", 0)
    for at in range(start, last, size):
        rows = range(at, min(at + size, last))
        mine = (kept >= rows.start - first) & (kept < rows.stop - first)
        bad = {first + row: why for row, why in skipped.items() if first + row in rows}
        yield Passed(rows, bad, arrays["features"][mine], cut)
        cut = 0
