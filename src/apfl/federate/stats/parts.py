"""The sums of some of a site's shards, as a file. Parts add: in any order and grouping to the same bytes.

A shard is known by the hash of its rows and labels in their order, so that none counts twice. Rows of a class that has
fewer rows than the terms let a site contribute (`min_per_class`) wait aside, each by itself, until other shards bring
enough of them; those that still wait when the site joins are withheld.

Repeated rows: within a block of a shard (`BLOCK` rows) they are counted as copies, as a site in memory counts all of
its own. A row that stands in two shards counts twice in the echo, as one that stands at two sites does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.stats.stages import Contributed, Described, Spreads, Stage, Sums, stage_of
from apfl.federate.terms import Terms
from apfl.federate.wire import Expected, count, seal, text, unseal
from apfl.files import make_private, replacing
from apfl.maths.landmarks import Spread
from apfl.maths.leaveout import ECHO
from apfl.maths.ridge import Statistics

__all__ = ["BLOCK", "Aside", "Part", "add_parts", "read_part", "stage_in", "write_part"]

KIND = "part"
BLOCK = 2**20  # rows that are summed in double precision, and among which copies are found


@dataclass(frozen=True, eq=False)
class Aside:
    """Rows of classes that are too small so far, as the stage sees them."""

    rows: Tensor  # (m, width), float64
    labels: Tensor  # (m,), int64
    hashes: Tensor  # (m,), int64, of the features
    copies: Tensor  # (m,), uint8: whether the row repeats another of its block

    @staticmethod
    def none(width: int) -> Aside:
        """No rows."""
        zeros = torch.zeros(0, dtype=torch.int64)
        return Aside(torch.zeros(0, width, dtype=torch.float64), zeros, zeros, zeros.to(torch.uint8))

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, rows: Tensor) -> Aside:
        """Some of the rows, by mask or place."""
        return Aside(self.rows[rows], self.labels[rows], self.hashes[rows], self.copies[rows])

    def __add__(self, other: Aside) -> Aside:
        """All rows, in an order that does not depend on which came first."""
        mine, others = vars(self), vars(other)
        together = Aside(*(torch.cat([mine[name], others[name]]) for name in mine))
        own = np.array([hashlib.sha256(row.numpy().tobytes()).digest() for row in together.rows], dtype="S32")
        keys = [own, together.copies.numpy(), together.hashes.numpy(), together.labels.numpy()]
        return together.where(torch.from_numpy(np.lexsort(keys)))


@dataclass(eq=False)
class Part:
    """The sums of some shards. ``names`` are the classes that labels stand for."""

    stage: Stage
    n_features: int
    names: tuple[str, ...]
    counts: np.ndarray  # (c,), int64: of all rows, those aside too
    sums: Sums  # of the rows that are not aside
    aside: Aside
    shards: frozenset[str]  # SHA-256 of each
    echo: np.ndarray  # (ECHO,), int64
    n_copies: int = 0
    unknown: Mapping[str, int] = field(default_factory=dict)  # rows of classes that the federation does not have
    options: Mapping[str, Any] = field(default_factory=dict)  # which columns, which share of the rows

    @staticmethod
    def empty(stage: Stage, n_features: int, options: Mapping[str, Any]) -> Part:
        """The sums of no shard."""
        terms = stage.terms
        if terms.n_features not in (None, n_features):
            raise InputError(
                f"features of width {n_features} given; the federation agreed on {terms.n_features}: use the same "
                "backbone"
            )
        width = stage.width or n_features
        names = terms.class_names or ()
        return Part(
            stage, n_features, names, np.zeros(len(names), np.int64), stage.empty(width), Aside.none(width),
            frozenset(), np.zeros(ECHO, np.int64), options=options,
        )  # fmt: skip

    @property
    def open_names(self) -> bool:
        """Whether the terms leave the classes open, so that labels stand for the site's own."""
        return self.stage.terms.class_names is None

    @property
    def n_samples(self) -> int:
        """Rows in the sums."""
        return int(self.counts.sum()) - len(self.aside)

    @property
    def contributed(self) -> dict[str, int]:
        """Rows of each class in the sums."""
        waiting = np.bincount(self.aside.labels.numpy(), minlength=len(self.names))
        return {name: n for name, n in zip(self.names, (self.counts - waiting).tolist(), strict=True) if n}

    @property
    def withheld(self) -> dict[str, int]:
        """Rows of each class that are aside."""
        waiting = np.bincount(self.aside.labels.numpy(), minlength=len(self.names)).tolist()
        return {name: n for name, n in zip(self.names, waiting, strict=True) if n}

    def take(self, other: Part) -> None:
        """Add the sums of other shards; afterwards the other may not be used."""
        twice = self.shards & other.shards
        if twice:
            raise InputError(f"{len(twice)} of the shards are in both, for example {sorted(twice)[0][:12]}")
        if self.n_features != other.n_features:
            raise InputError(f"features of width {self.n_features} and of width {other.n_features}; all must agree")
        if self.open_names:
            names = tuple(sorted({*self.names, *other.names}))
            self.recode(names)
            other.recode(names)
        self.shards |= other.shards
        self.counts = self.counts + other.counts
        self.echo = self.echo + other.echo
        self.n_copies += other.n_copies
        self.unknown = _added(self.unknown, other.unknown)
        self.sums.merge(other.sums)
        self.aside = self.aside + other.aside
        self.settle()

    def recode(self, names: Sequence[str]) -> None:
        """Let labels stand for these classes, which include the present ones."""
        if tuple(names) == self.names:
            return
        place = torch.tensor([names.index(name) for name in self.names], dtype=torch.int64)
        counts = np.zeros(len(names), np.int64)
        counts[place.numpy()] = self.counts
        self.names, self.counts = tuple(names), counts
        if len(self.aside):
            self.aside = replace(self.aside, labels=place[self.aside.labels])

    def settle(self) -> None:
        """Add those of the rows aside whose class has enough rows by now, each by itself."""
        enough = torch.from_numpy(self.counts >= self.stage.terms.min_per_class)[self.aside.labels]
        ready, self.aside = self.aside.where(enough), self.aside.where(~enough)
        for row, label in zip(ready.rows, ready.labels, strict=True):
            self.sums.add([(row[None], label[None])])
        own = ready.hashes[ready.copies == 0].numpy()
        self.echo = self.echo + np.bincount(own % ECHO, minlength=ECHO)
        self.n_copies += int(ready.copies.sum())

    # ----------------------------------------------------------------------------------- what a site makes of it

    def statistics(self) -> Statistics:
        """Of a part of statistics, in float64, with what is known of repeated rows."""
        assert isinstance(self.sums, Contributed)
        return replace(self.sums.statistics(), n_copies=self.n_copies, echo=torch.from_numpy(self.echo))

    def spread(self) -> Spread:
        """Of a part of moments."""
        assert isinstance(self.sums, Spreads)
        return self.sums.spread()

    @property
    def described(self) -> Described:
        """Of a part of a description."""
        assert isinstance(self.sums, Described)
        return self.sums


def _added(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}


def add_parts(parts: Iterable[tuple[str, Part]]) -> Part:
    """The sum of named parts, which must be of one stage and have no shard in common; two are held at a time."""
    others = iter(parts)
    first, summed = next(others)
    for name, part in others:
        if part.options != summed.options:
            raise InputError(
                f"{first} and {name} were made with other options ({json.dumps(summed.options)} and "
                f"{json.dumps(part.options)}); make them alike"
            )
        try:
            summed.take(part)
        except InputError as error:
            raise InputError(f"{name} cannot be added: {error}") from error
    return summed


# -------------------------------------------------------------------------------------------------------- files


def sealed(part: Part, more: Mapping[str, Any] | None = None) -> bytes:
    """The part as bytes: the same for the same shards."""
    terms, aside = part.stage.terms, part.aside
    header = {
        "terms": terms.to_json(), "stage": part.stage.kind, "names": list(part.names),
        "n_features": part.n_features, "n_shards": len(part.shards), "n_aside": len(aside),
        "unknown": dict(part.unknown), "options": dict(part.options), **(more or {}),
    }  # fmt: skip
    ids = bytearray(b"".join(bytes.fromhex(each) for each in sorted(part.shards)))
    tensors = {
        "part_shards": torch.frombuffer(ids, dtype=torch.uint8).view(-1, 32),
        "part_counts": torch.from_numpy(part.counts), "part_echo": torch.from_numpy(part.echo),
        "part_copies": torch.tensor(part.n_copies), "aside_rows": aside.rows, "aside_labels": aside.labels,
        "aside_hashes": aside.hashes, "aside_copies": aside.copies, **part.sums.tensors(),
    }  # fmt: skip
    return seal(KIND, header, tensors)


def opened(data: bytes, stage: Stage, where: str) -> tuple[Part, dict[str, Any]]:
    """The part back, and its header; one of another stage or of other terms is refused."""

    def expected(header: dict[str, Any]) -> Expected:
        _check_header(header, stage, where)
        width = stage.width or count(header, "n_features")
        m, c = count(header, "n_aside"), len(_names(header))
        return {
            "part_shards": (("U8",), (count(header, "n_shards"), 32)), "part_counts": (("I64",), (c,)),
            "part_echo": (("I64",), (ECHO,)), "part_copies": (("I64",), ()), "aside_rows": (("F64",), (m, width)),
            "aside_labels": (("I64",), (m,)), "aside_hashes": (("I64",), (m,)), "aside_copies": (("U8",), (m,)),
            **stage.shapes(width),
        }  # fmt: skip

    header, tensors = unseal(KIND, data, expected)
    part = Part.empty(stage, count(header, "n_features"), header["options"])
    part.names, part.counts = _names(header), tensors["part_counts"].numpy()
    part.shards = frozenset(row.tobytes().hex() for row in tensors["part_shards"].numpy())
    part.echo, part.n_copies = tensors["part_echo"].numpy(), int(tensors["part_copies"])
    part.unknown = header["unknown"]
    part.aside = Aside(*(tensors[f"aside_{name}"] for name in ("rows", "labels", "hashes", "copies")))
    part.sums.load(tensors)
    return part, header


def stage_in(path: Path) -> Stage:
    """The stage of the part in a file, by its header; it can add parts, and map no rows."""

    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})["apfl"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} is no part that `apfl stats` has made ({error})") from error
    if header.get("kind") != KIND:
        raise InputError(f"{path} is no part that `apfl stats` has made; it is of kind {header.get('kind')!r}")
    return stage_of(Terms.from_json(str(header.get("terms"))))


def read_part(path: Path, stage: Stage) -> Part:
    """The part in a file, which must be of this stage."""
    return opened(_bytes(path), stage, str(path))[0]


def write_part(part: Part, path: Path) -> None:
    """Write a part; whoever reads it knows much of the rows, so nobody else may."""
    write_private(sealed(part), path)


def write_private(data: bytes, path: Path) -> None:
    """Write a file that only its owner can read, all of it or nothing."""
    with replacing(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_bytes(data)
        make_private(temporary)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error


def _check_header(header: Mapping[str, Any], stage: Stage, where: str) -> None:
    terms, kind = stage.terms, text(header, "stage")
    if kind != stage.kind:
        raise InputError(f"{where} is a part of the {kind}; the {stage.kind} is needed")
    own = Terms.from_json(str(header.get("terms")))
    if own.digest != terms.digest:
        raise InputError(
            f"{where} was made under other terms ({own.federation}, digest {own.digest[:12]}; given "
            f"{terms.federation}, digest {terms.digest[:12]}); make it again"
        )
    if not isinstance(header.get("unknown"), dict) or not isinstance(header.get("options"), dict):
        raise InputError(f"{where} has a damaged header; make it again")


def _names(header: Mapping[str, Any]) -> tuple[str, ...]:
    names = header.get("names")
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InputError("a part must list class names; make it again")
    return tuple(names)
