"""Which of a client's rows the federation can use, which of them leave as sums, and that in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate.terms import Terms
from apfl.maths.leaveout import ECHO
from apfl.maths.normalise import check_features, needs_moments
from apfl.maths.wire import form_for, statistics_shapes

__all__ = ["Usable", "WhatLeaves", "select", "what_leaves"]


@dataclass(frozen=True, eq=False)
class Usable:
    """Rows of classes that the federation has, and which of them it may have."""

    rows: Shard  # with labels in the federation's order
    shared: Tensor  # (n,), bool: rows behind the statistics; the others' classes are withheld

    def only_shared(self) -> Usable:
        """The rows behind the statistics."""
        return Usable(self.rows.where(self.shared), self.shared[self.shared])


def select(train: Shard, class_names: Sequence[str], terms: Terms) -> Usable:
    """A client's rows under these terms, or under a draft of them."""
    if terms.n_features is not None and train.features.shape[1] != terms.n_features:
        raise InputError(
            f"features of width {train.features.shape[1]} given; the federation agreed on {terms.n_features}: "
            "use the same backbone"
        )
    check_features(terms.method.normalise, [train.features])
    names = names_under(class_names, terms)
    index = torch.tensor([names.index(name) if name in names else -1 for name in class_names])
    labels = index[train.labels]
    known = labels >= 0
    if not bool(known.any()):
        raise InputError(f"no row is of a class that the federation has ({', '.join(names[:8])}); compare the names")
    rows = Shard(train.features, labels, train.groups).where(known)
    enough = torch.bincount(rows.labels, minlength=len(names)) >= terms.min_per_class
    return Usable(rows, enough[rows.labels])


def names_under(class_names: Sequence[str], terms: Terms) -> tuple[str, ...]:
    """What labels index: the agreed classes, or the client's own while none are agreed."""
    return tuple(class_names) if terms.class_names is None else terms.class_names


@dataclass(frozen=True)
class WhatLeaves:
    """What a client sends, in numbers; `lines` says it in words."""

    n_samples: int  # rows behind the statistics
    counts: dict[str, int]  # rows of each class behind them
    withheld: dict[str, int]  # classes whose rows stay out of them, because they are too few
    unknown: dict[str, int]  # classes that the federation does not have
    n_features: int
    width: int | None  # of the map; None while the terms are not settled
    numbers: int | None  # in the statistics
    n_bytes: int | None
    table: int  # integers in the table of left-out hits
    moments: bool
    keeps: bool  # whether the server keeps single contributions

    def lines(self) -> list[str]:
        """In words, one statement a line."""
        size = "" if self.numbers is None else f": {self.numbers:,} numbers, {(self.n_bytes or 0) / 1e6:.1f} MB"
        told = [
            f"first: the number of rows ({self.n_samples:,}), the feature width ({self.n_features}), and the names of "
            f"{len(self.counts)} classes: {', '.join(self.counts)}",
            f"then, once: sums of products of the activated features of these rows, and their sums by class{size}",
            f"with it, how many rows each class has: {', '.join(f'{k} {v}' for k, v in self.counts.items())}",
            "with it, to find rows that several sites hold: how many rows fall into each of "
            f"{ECHO:,} buckets by a hash, and how many repeat another row of this site",
        ]
        if self.moments:
            told.insert(1, f"also first: sum and sum of squares of each of the {self.n_features} features")
        if self.table:
            told.append(f"later: {self.table:,} counts of left-out rows predicted right, one for each setting tried")
        told.append(
            "the server keeps this contribution by itself" if self.keeps else "the server keeps only everyone's sum"
        )
        told += [
            f"withheld: class {name} with {_rows(n)}, which could be read off the sums"
            for name, n in self.withheld.items()
        ]
        told += [
            f"not used: class {name} with {_rows(n)}; the federation does not have it"
            for name, n in self.unknown.items()
        ]
        return [*told, "never: rows, images, labels of single rows, the personal model; metrics only if you say so"]


def what_leaves(train: Shard, class_names: Sequence[str], terms: Terms) -> WhatLeaves:
    """What a client with these rows would send."""
    names = names_under(class_names, terms)
    usable = select(train, class_names, terms).rows.labels
    counts = dict(zip(names, torch.bincount(usable, minlength=len(names)).tolist(), strict=True))
    own = dict(zip(class_names, torch.bincount(train.labels, minlength=len(class_names)).tolist(), strict=True))
    shared = {name: n for name, n in counts.items() if n >= terms.min_per_class}
    n, numbers = sum(shared.values()), None
    if terms.settled:
        shapes = statistics_shapes(form_for(n, terms.width), n, terms.width, terms.n_classes)
        numbers = sum(map(math.prod, shapes.values()))
    return WhatLeaves(
        n_samples=n,
        counts=shared,
        withheld={name: n for name, n in counts.items() if 0 < n < terms.min_per_class},
        unknown={name: n for name, n in own.items() if n and name not in names},
        n_features=train.features.shape[1],
        width=terms.width if terms.settled else None,
        numbers=numbers,
        n_bytes=None if numbers is None else numbers * terms.dtype.itemsize,
        table=int(np.prod(terms.grid(1.0).shape)) if terms.wants_tables else 0,
        moments=needs_moments(terms.method.normalise),
        keeps=terms.keep_contributions,
    )


def _rows(n: int) -> str:
    return "1 row" if n == 1 else f"{n} rows"
