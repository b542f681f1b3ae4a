"""The nouns of data: a dataset, and who holds which of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.missing import refuse_missing
from apfl.data.raw import Raw
from apfl.data.targets import Scale, Target, alike
from apfl.errors import InputError, unknown
from apfl.maths.encoding import Encoding
from apfl.maths.ridge import one_hot

__all__ = ["Dataset", "Federation", "Shard", "counted", "values_of"]

NOUNS: Mapping[Target, str] = {"classification": "class", "regression": "target", "multilabel": "label"}


def values_of(column: str, file: str) -> str:
    """What a message calls the values of a column, whose rows it counts: the header of a CSV is none of them."""
    counted = " (row 0 follows the header)" if file.lower().removesuffix(".gz").endswith((".csv", ".tsv")) else ""
    return f"values in column '{column}' of {file}{counted}"


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(2, "class")
    ('1 row', '2 classes')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('s') else 's'}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Features and labels in one place, before they are spread over clients.

    >>> Dataset("pets", torch.zeros(3, 2), torch.tensor([0, 1, 0]), ("cat", "dog"), {"site": np.array(["n", "n", "s"])})
    Dataset('pets', 3 rows, 2 features, 2 classes, columns site)
    """

    name: str
    features: Tensor  # (n, l), float32
    labels: Tensor  # (n,), int64, 0 to c - 1
    class_names: tuple[str, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # other columns of n entries: client, test, ...
    sha256: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)  # data, splits and backbone that features came from
    feature_names: tuple[str, ...] = ()  # (l), of a table; some may be in ``columns`` too, and name clients or groups
    raw: Raw | None = (
        None  # columns that are still to be encoded, once training rows are known: then features are zeros
    )
    encoding: Encoding | None = None  # that made the features of a table's columns
    targets: Tensor | None = None  # (n, c), float64: numbers or 0/1, named by ``class_names``; labels are codes of them
    target: Target = "classification"

    def __repr__(self) -> str:
        others = f", columns {', '.join(self.columns)}" if self.columns else ""
        size = f"{counted(len(self.labels), 'row')}, {counted(self.features.shape[1], 'feature')}"
        return f"Dataset({self.name!r}, {size}, {counted(len(self.class_names), NOUNS[self.target])}{others})"

    def column(self, name: str) -> np.ndarray:
        """A column by name, to be used: one that is not there, or that has missing values, is an error."""
        if name not in self.columns:
            raise unknown(f"column in {self.name}", name, self.columns)
        refuse_missing(values_of(name, self.name), self.columns[name])
        return self.columns[name]


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one client.

    >>> Shard(torch.zeros(3, 2), torch.tensor([0, 1, 0])) + Shard(torch.ones(1, 2), torch.tensor([1]))
    Shard(4 rows, 2 features)
    """

    features: Tensor  # (n, l)
    labels: Tensor  # (n,)
    groups: Tensor | None = None  # (n,): rows of one group (a patient, say) stay together
    shared: Tensor | None = None  # (n,), bool: rows that a federation may have the sums of; without it, all
    weights: Tensor | None = None  # (n,), float64, above 0: what rows weigh in sums (of estimators); without it, one
    targets: Tensor | None = None  # (n, c), float64: standardised numbers, or 0 and 1; without it, classes
    target: Target = "classification"

    def __post_init__(self) -> None:
        if (self.targets is None) != (self.target == "classification"):
            raise InputError(
                f"target={self.target!r} {'with' if self.targets is not None else 'without'} targets given"
            )
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1]:
            raise InputError(
                f"features {tuple(self.features.shape)} and labels {tuple(self.labels.shape)} given; "
                "expected (n, l) and (n,)"
            )

    def __len__(self) -> int:
        return self.labels.shape[0]  # len() of a tensor takes ten times as long

    def __repr__(self) -> str:
        return f"Shard({counted(len(self), 'row')}, {counted(self.features.shape[1], 'feature')})"

    def where(self, rows: Tensor) -> Shard:
        """The rows of this mask, or of these indices."""
        groups, shared, weights = (
            None if each is None else each[rows] for each in (self.groups, self.shared, self.weights)
        )
        targets = None if self.targets is None else self.targets[rows]
        return Shard(self.features[rows], self.labels[rows], groups, shared, weights, targets, self.target)

    def responses(self, n_columns: int) -> Tensor:
        """Y (n, c), float64: the targets, or the classes as indicators."""
        return one_hot(self.labels, n_columns) if self.targets is None else self.targets

    @property
    def alike(self) -> Tensor:
        """Equal codes for rows with equal Y, (n,)."""
        return self.labels if self.targets is None else alike(self.targets)

    def only_shared(self) -> Shard:
        """The rows that a federation may have the sums of."""
        return self if self.shared is None else self.where(self.shared)

    def __add__(self, other: Shard) -> Shard:
        """These rows, then the other's."""
        if (self.groups is None) != (other.groups is None):
            raise InputError("groups given for some rows of a client and not for others; give them for all or none")
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = torch.cat([self.groups, other.groups])
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = torch.cat([self.weighing, other.weighing])
        features, labels = torch.cat([self.features, other.features]), torch.cat([self.labels, other.labels])
        if self.target != other.target:
            raise InputError(f"rows for {self.target} and for {other.target} given; a client has rows of one kind")
        targets = None
        if self.targets is not None and other.targets is not None:
            targets = torch.cat([self.targets, other.targets])
        return Shard(features, labels, groups, weights=weights, targets=targets, target=self.target)

    @property
    def weighing(self) -> Tensor:
        """The weight of each row, (n,), float64."""
        return torch.ones(len(self), dtype=torch.float64) if self.weights is None else self.weights

    def to(self, device: torch.device | str) -> Shard:
        """The shard on another device."""
        weights, targets = (None if each is None else each.to(device) for each in (self.weights, self.targets))
        features, labels = self.features.to(device), self.labels.to(device)
        return Shard(features, labels, self.groups, self.shared, weights, targets, self.target)


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with their training and test rows. A method is given ``train`` alone, so test rows cannot leak.

    >>> rows = Shard(torch.zeros(3, 2), torch.tensor([0, 1, 0]))
    >>> Federation([rows, rows], [rows, rows], ("cat", "dog"), ["north", "south"])
    Federation(2 clients: north, south; 6 training and 6 test rows, 2 features, 2 classes)
    """

    train: Sequence[Shard]
    test: Sequence[Shard]
    class_names: tuple[str, ...]
    names: Sequence[str] = ()
    scale: Scale | None = None  # of numbers: shards have them standardised by it

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", [str(k) for k in range(len(self.train))])
        if not len(self.train) == len(self.test) == len(self.names) > 0:
            raise InputError(
                f"{len(self.train)} training shards, {len(self.test)} test shards and {len(self.names)} names "
                "given; a federation needs the same number of each, at least one"
            )
        refuse_missing("client names", list(self.names))
        if len(set(self.names)) < len(self.names):
            twice = sorted({name for name in self.names if list(self.names).count(name) > 1})
            raise InputError(f"client names must differ; given more than once: {', '.join(twice)}")
        for name, shard in zip(self.names, self.train, strict=True):
            if not len(shard):
                raise InputError(f"client {name} has no training rows; leave it out or give it some")

    def __repr__(self) -> str:
        shown = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        rows = [sum(map(len, shards)) for shards in (self.train, self.test)]
        return (
            f"Federation({counted(len(self.names), 'client')}: {shown}; {rows[0]} training and {rows[1]} test rows, "
            f"{counted(self.train[0].features.shape[1], 'feature')}, {counted(self.n_classes, NOUNS[self.target])})"
        )

    @property
    def n_classes(self) -> int:
        """c, the number of columns of Y."""
        return len(self.class_names)

    @property
    def target(self) -> Target:
        """What its models predict."""
        return self.train[0].target

    def to(self, device: torch.device | str) -> Federation:
        """The federation on another device."""
        train, test = [s.to(device) for s in self.train], [s.to(device) for s in self.test]
        return Federation(train, test, self.class_names, self.names, self.scale)
