"""The nouns: who holds which rows, what a method yields, what a trained model can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from apfl.data.missing import refuse_missing
from apfl.errors import InputError, unknown
from apfl.models.dual_stream import DualStream
from apfl.models.file import Container, read
from apfl.models.linear_head import LinearHead

__all__ = ["Dataset", "Federation", "Method", "Model", "Round", "Shard", "load_model"]


def values_of(column: str, file: str) -> str:
    """What a message calls the values of a column, whose rows it counts: the header of a CSV is none of them."""
    counted = " (row 0 follows the header)" if file.lower().endswith(".csv") else ""
    return f"values in column '{column}' of {file}{counted}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Features and labels in one place, before they are spread over clients."""

    name: str
    features: Tensor  # (n, l), float32
    labels: Tensor  # (n,), int64, 0 to c - 1
    class_names: tuple[str, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # other columns of n entries: client, test, ...
    sha256: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)  # data, splits and backbone that features came from

    def column(self, name: str) -> np.ndarray:
        """A column by name, to be used: one that is not there, or that has missing values, is an error."""
        if name not in self.columns:
            raise unknown(f"column in {self.name}", name, self.columns)
        refuse_missing(values_of(name, self.name), self.columns[name])
        return self.columns[name]


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one client."""

    features: Tensor  # (n, l)
    labels: Tensor  # (n,)
    groups: Tensor | None = None  # (n,): rows of one group (a patient, say) stay together

    def __post_init__(self) -> None:
        if self.features.ndim != 2 or self.labels.shape != self.features.shape[:1]:
            raise InputError(
                f"features {tuple(self.features.shape)} and labels {tuple(self.labels.shape)} given; "
                "expected (n, l) and (n,)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, rows: Tensor) -> Shard:
        """The rows of this mask, or of these indices."""
        return Shard(self.features[rows], self.labels[rows], None if self.groups is None else self.groups[rows])

    def __add__(self, other: Shard) -> Shard:
        """These rows, then the other's."""
        if (self.groups is None) != (other.groups is None):
            raise InputError("groups given for some rows of a client and not for others; give them for all or none")
        groups = None
        if self.groups is not None and other.groups is not None:
            groups = torch.cat([self.groups, other.groups])
        return Shard(torch.cat([self.features, other.features]), torch.cat([self.labels, other.labels]), groups)

    def to(self, device: torch.device | str) -> Shard:
        """The shard on another device."""
        return Shard(self.features.to(device), self.labels.to(device), self.groups)


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients with their training and test rows. A method is given ``train`` alone, so test rows cannot leak."""

    train: Sequence[Shard]
    test: Sequence[Shard]
    class_names: tuple[str, ...]
    names: Sequence[str] = ()

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

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    def to(self, device: torch.device | str) -> Federation:
        """The federation on another device."""
        train, test = [s.to(device) for s in self.train], [s.to(device) for s in self.test]
        return Federation(train, test, self.class_names, self.names)


@runtime_checkable
class Model(Protocol):
    """What one client ends up with."""

    kind: str

    @property
    def class_names(self) -> Sequence[str] | None:
        """What the columns of the scores are called, where that is known."""
        ...

    def scores(self, features: Tensor) -> Tensor:
        """(n, c), higher is likelier."""
        ...

    def container(self) -> Container:
        """The model as data, to be written to disk."""
        ...


@dataclass(frozen=True, eq=False)
class Round:
    """Where a method stands after some exchanges between server and clients."""

    models: Sequence[Model]  # one for each client, in their order
    index: int  # server -> client -> server exchanges so far; 0 if there were none
    bytes_up: int = 0  # so far, over all clients
    bytes_down: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)  # what the method settled by itself
    state: Mapping[str, Tensor] | None = None  # enough to go on from here, where a method can
    # Models of clients that come after training, from their own training rows. Without it a later client can only be
    # given the shared model, where there is one.
    admit: Callable[[Sequence[Shard]], Sequence[Model]] | None = None


class Method(Protocol):
    """A federated method: a frozen dataclass of settings that can be run."""

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        """Train; yield after every round. The last one yielded is the result."""
        ...


KINDS: dict[str, type[DualStream] | type[LinearHead]] = {each.kind: each for each in (DualStream, LinearHead)}


def load_model(path: str | Path) -> Model:
    """Read any model file."""
    container = read(path)
    if container.kind not in KINDS:
        raise unknown("kind of model", container.kind, KINDS)
    return KINDS[container.kind].from_container(container)
