"""A pass over a site's files of rows, some rows at a time. It can be killed, and goes on when it is called again.

Beside OUT stands OUT.partial while the pass runs: the part of the shards that are done, and which files these were. A
shard that was not done is begun again. Since parts add exactly, the result has the same bytes as without a kill.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.streams import Batch, RowFile, open_rows
from apfl.errors import InputError
from apfl.federate.stats.parts import BLOCK, Aside, Part, opened, sealed, write_part, write_private
from apfl.federate.stats.stages import Stage
from apfl.federate.terms import Terms
from apfl.files import hold
from apfl.maths.leaveout import echo, hashed_copies, row_hashes
from apfl.maths.machine import n_cores, threads
from apfl.maths.memory import INTERPRETER
from apfl.maths.normalise import check_features

__all__ = ["Pass", "file_state", "pass_bytes"]

ENTRIES = 2**24  # float64 numbers of the rows that are mapped at a time
FEWEST, MOST = 256, 8192  # rows at a time
EVERY = 60.0  # seconds between two states on disk
Progress = Callable[[int, int], None]  # rows done, of so many


@dataclass
class Pass:
    """The sums of some files under a stage's terms, written to ``out``.

    ``options`` are those of `apfl.data.streams.open_rows`. ``share`` is the share of the rows that is used, drawn by
    the terms' seed and a row's place in its file.
    """

    stage: Stage
    files: Sequence[Path]
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    show: Progress = lambda done, total: None
    every: float = EVERY
    n_threads: int | None = None  # they decide the last digits; default: one for each core
    done: dict[str, list[Any]] = field(default_factory=dict, init=False)  # path -> size, time, of a finished file

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"a share of {self.share} of the rows given; it must be above 0 and at most 1")
        if not self.files:
            raise InputError("no files of rows given")
        names = [_name(path) for path in self.files]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{twice[0]} given twice; name every file once")

    def run(self) -> Part:
        """Sum up what is not yet in the partial file, and write the part; on all cores, unless it is told how many.

        The number of threads decides the last digits of a sum, and a killed pass must go on to the same bytes.
        """
        with (
            threads(self.n_threads or n_cores()),
            hold(self.out.with_name(f".{self.out.name}.lock"), what=self.out, private=True) as lock,
        ):
            part = self._begun()
            waiting = [path for path in self.files if _name(path) not in self.done]
            shards = [_Shard(self.stage.terms, open_rows(path, **self.options), self.share) for path in waiting]
            for path, shard in zip(waiting, shards, strict=True):
                shard.state = file_state(path)
            part = self._all(part, shards)
            write_part(part, self.out)
            self.unfinished.unlink(missing_ok=True)
            os.unlink(lock.name)
        return part

    def _all(self, part: Part | None, shards: Sequence[_Shard]) -> Part:
        """The part with these shards; what is done is on disk once a minute, and after Ctrl-C."""
        total, read, saved = sum(shard.n_rows for shard in shards), 0, time.monotonic()
        for shard in shards:
            try:
                own = self._summed(shard, partial(self._tell, read, total))
            except KeyboardInterrupt:
                if part is not None:
                    self._save(part)
                raise
            part, read = _together(shard.file.path, part, own), read + shard.n_rows
            self.done[_name(shard.file.path)] = shard.state
            if time.monotonic() - saved >= self.every:
                self._save(part)
                saved = time.monotonic()
        assert part is not None
        return part

    def _tell(self, before: int, total: int, n: int) -> None:
        self.show(before + n, total)

    @property
    def unfinished(self) -> Path:
        """What a killed pass leaves."""
        return self.out.with_name(f"{self.out.name}.partial")

    @property
    def kept(self) -> dict[str, Any]:
        """What decides which rows are summed, beside the terms; parts that differ in it do not add."""
        return {**{key: value for key, value in self.options.items() if value is not None}, "share": self.share}

    def _save(self, part: Part) -> None:
        write_private(sealed(part, {"done": self.done}), self.unfinished)

    def _begun(self) -> Part | None:
        """What an earlier call has done, if it was the same pass."""
        if not self.unfinished.is_file():
            return None
        part, header = opened(self.unfinished.read_bytes(), self.stage, str(self.unfinished))
        self.done = dict(header["done"])
        present = {_name(path): file_state(path) for path in self.files}
        for name, state in self.done.items():
            if present.get(name) != state:
                how = "has changed since" if name in present else "is not given now"
                raise InputError(
                    f"{self.unfinished} has the sums of {name}, which {how}: give the same files, or remove "
                    f"{self.unfinished} to begin anew"
                )
        if part.options != self.kept:
            raise InputError(
                f"{self.unfinished} was made with other options ({part.options}; given {self.kept}): give the same, or "
                "remove it to begin anew"
            )
        return part

    def _summed(self, shard: _Shard, tell: Callable[[int], None]) -> Part:
        """The part of one file."""
        n_features = shard.n_features
        part = Part.empty(self.stage, n_features, self.kept)
        if part.open_names:
            part.recode(shard.names)
        part.counts, part.unknown = shard.counts, shard.unknown
        size = batch_rows(self.stage.width or n_features, n_features)
        batches = shard.file.batches(size)
        for first in batches:
            block = itertools.chain([first], itertools.islice(batches, BLOCK // size - 1))
            _Block(self.stage, shard, block, tell).add_to(part)
        part.shards = frozenset([shard.digest.hexdigest()])
        return part


def batch_rows(width: int, n_features: int) -> int:
    """Rows that are mapped at a time: a power of two that depends on the widths alone, so that sums do not vary.

    >>> batch_rows(6144, 1280), batch_rows(64, 20)
    (512, 8192)
    """
    wanted = ENTRIES // (n_features + 3 * width)
    return max(FEWEST, min(MOST, 1 << (max(wanted, 1).bit_length() - 1)))


def pass_bytes(terms: Terms, n_features: int, *, parquet: bool = False) -> int:
    """Peak bytes of a pass, whatever the number of rows.

    A Parquet file takes pages and a dictionary of each column, about four megabytes.

    Under settled terms: the part and that of the current shard (two words for each sum), their copy as they are
    written, the sums of a block, the map's factor, and the rows at a time.
    """
    width = terms.width if terms.settled else n_features
    rows = batch_rows(width, n_features) * (2 * n_features + 4 * width)
    if terms.settled:
        words = 2 * (width * (width + 1) // 2 + width * terms.n_classes)
        sums = 3 * words + 3 * width**2 + width * n_features
    else:
        sums = 4 * n_features**2 if terms.outlined and terms.spread == "full" else 300 * n_features
    return INTERPRETER + 8 * (sums + rows) + 24 * BLOCK + (4 * 2**20 * n_features if parquet else 0)


def _together(path: Path, part: Part | None, own: Part) -> Part:
    if part is None:
        own.settle()
        return own
    try:
        part.take(own)
    except InputError as error:
        raise InputError(f"{path} cannot be added to the other files: {error}") from error
    return part


def _name(path: Path) -> str:
    return str(path.absolute())


def file_state(path: Path) -> list[int]:
    """What tells a file from a later one of the same name."""
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"there is no file {path}") from error
    return [found.st_size, found.st_mtime_ns]


class _Shard:
    """One file: which of its rows are used, and which of those are of classes that are too small in it."""

    def __init__(self, terms: Terms, file: RowFile, share: float) -> None:
        self.terms, self.file, self.share = terms, file, share
        found: dict[str, int] = {}
        self.n_rows, keep = 0, self._keeper()
        for codes, names in file.labels():
            for name, n in zip(names, np.bincount(codes[keep(len(codes))], minlength=len(names)).tolist(), strict=True):
                found[name] = found.get(name, 0) + n
            self.n_rows += len(codes)
        if not self.n_rows:
            raise InputError(f"{file.path} has no rows")
        self.names = terms.class_names or tuple(sorted(found))
        self.unknown = {name: n for name, n in sorted(found.items()) if n and name not in self.names}
        self.counts = np.array([found.get(name, 0) for name in self.names], np.int64)
        self.rare = torch.from_numpy(self.counts < terms.min_per_class)
        self.place = {name: k for k, name in enumerate(self.names)}
        self.digest = hashlib.sha256(b"rows in float32")
        self.keep, self.n_read = self._keeper(), 0
        self.state: list[int] = []  # of the file when it was looked at first

    @property
    def n_features(self) -> int:
        """l, by a look at the first row."""
        return next(self.file.batches(1)).features.shape[1]

    def _keeper(self) -> Callable[[int], np.ndarray]:
        """Which of the next rows are used: the same whenever the file is read, however many rows at a time."""
        rng = np.random.default_rng([self.terms.seed, 1])
        return lambda n: np.ones(n, bool) if self.share == 1 else rng.random(n) < self.share

    def labels(self, batch: Batch) -> Tensor:
        """In the order of the part's classes; -1 for those that the federation does not have."""
        place = torch.tensor([self.place.get(name, -1) for name in batch.names])
        return place[torch.from_numpy(batch.codes)]

    def note(self, batch: Batch, hashes: np.ndarray) -> None:
        """Let the rows and the names of their classes count towards the shard's identity."""
        own = [
            int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True) for name in batch.names
        ]
        self.digest.update((hashes ^ np.array(own, np.int64)[batch.codes]).tobytes())


class _Block:
    """Some rows of a shard, mapped and summed in double precision; copies are found among them."""

    def __init__(self, stage: Stage, shard: _Shard, batches: Iterator[Batch], tell: Callable[[int], None]) -> None:
        self.stage, self.shard, self.batches, self.tell = stage, shard, batches, tell
        self.hashes: list[np.ndarray] = []  # of the rows that are summed
        self.labels: list[np.ndarray] = []
        self.aside: list[Aside] = []

    def add_to(self, part: Part) -> None:
        """Sum the rows, and note what is known of copies."""
        rows = self._rows()
        first = next(rows, None)
        if first is not None:
            part.sums.add(itertools.chain([first], rows))
        hashes, labels = (
            np.concatenate(each) if each else np.zeros(0, np.int64) for each in (self.hashes, self.labels)
        )
        part.n_copies += int(hashed_copies(hashes, labels).sum())
        part.echo = part.echo + echo(torch.zeros(0), hashes).numpy()
        for own in self.aside:
            part.aside = part.aside + own

    def _rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows that are summed, as the stage sees them."""
        for batch in self.batches:
            hashes = row_hashes(batch.features)
            self.shard.note(batch, hashes)
            labels = self.shard.labels(batch)
            used = (labels >= 0) & torch.from_numpy(self.shard.keep(len(labels)))
            self.shard.n_read += len(labels)
            if bool(used.any()):
                check_features(self.stage.terms.method.normalise, [batch.features[used]])
                rows = self.stage.mapped(batch.features[used].double())
                yield from self._sorted(rows, labels[used], hashes[used.numpy()])
            self.tell(self.shard.n_read)

    def _sorted(self, rows: Tensor, labels: Tensor, hashes: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        rare = self.shard.rare[labels]
        if bool(rare.any()):
            own = torch.from_numpy(hashes)[rare]
            copies = torch.from_numpy(hashed_copies(own.numpy(), labels[rare].numpy())).to(torch.uint8)
            self.aside.append(Aside(rows[rare].clone(), labels[rare], own, copies))
        if not bool(rare.all()):
            self.hashes.append(hashes[~rare.numpy()])
            self.labels.append(labels[~rare].numpy())
            yield (rows[~rare], labels[~rare]) if bool(rare.any()) else (rows, labels)
