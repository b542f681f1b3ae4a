"""How the rows of a dataset become a federation: who gets which, which are for testing, who comes late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset, Federation, Shard
from apfl.data.partition import COLUMNS, load_partition, options_of, split
from apfl.data.targets import Scale
from apfl.errors import InputError

__all__ = [
    "Protocol",
    "apart",
    "deal",
    "encoded",
    "feature_names",
    "federate",
    "halving",
    "named_columns",
    "protocol_of",
    "sharding",
]

OPTIONS = ("alpha", "minimum", "classes_per_client")  # what a partition may ask the protocol for
Halves = tuple[np.ndarray, np.ndarray]  # one client's rows: training, test
FLAGS = {"0": False, "1": True, "false": False, "true": True, "train": False, "test": True}  # of a test column
UNSEEN, RESHUFFLE = 7, 8  # what a stream of random numbers is for, so that it moves no other one


@dataclass(frozen=True)
class Protocol:
    """How rows become a federation: who gets which, and which of them are for testing."""

    partition: str = "dirichlet"
    n_clients: int | None = 10
    alpha: float = 0.1
    minimum: int | None = None
    classes_per_client: int = 2
    test_fraction: float = 0.25
    client_column: str | None = None  # clients (partition given) or domains (partition domains)
    test_column: str | None = None  # true where a row is for testing
    group_column: str | None = None  # rows that must stay together
    unseen_clients: int = 0  # so many clients, drawn at random, come after training, and they alone are measured
    reshuffle: int | None = None  # the first client alone is measured; if not 0, all other training rows change hands


def protocol_of(
    clients: int | None,
    alpha: float,
    partition: str | None,
    client_column: str | None,
    test_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = Protocol.test_fraction,
    minimum: int | None = None,
    classes_per_client: int = Protocol.classes_per_client,
) -> Protocol:
    """The protocol of --clients, --alpha, --partition and the columns, with the defaults that depend on each other."""
    if partition is None:
        partition = Protocol.partition if client_column is None else "given"
    if clients is None and partition != "given":
        clients = Protocol.n_clients
    return Protocol(
        partition, clients, alpha, minimum, classes_per_client, test_fraction, client_column, test_column, group_column
    )


def federate(dataset: Dataset, protocol: Protocol, seed: int) -> Federation:
    """Deal the rows of ``dataset`` out to clients and split each client's rows; all randomness from ``seed``."""
    halves = deal(dataset, protocol, seed)
    shard = sharding(encoded(dataset, protocol, halves), protocol)
    train, test = ([shard(half[side]) for half in halves] for side in (0, 1))
    scale = None
    if dataset.target == "regression":
        scale = Scale.of(torch.cat([own.targets for own in train if own.targets is not None]))
        train, test = ([_scaled(own, scale) for own in side] for side in (train, test))
    return Federation(train, test, dataset.class_names, _client_names(dataset, protocol, len(halves)), scale)


def _scaled(shard: Shard, scale: Scale) -> Shard:
    return shard if shard.targets is None else replace(shard, targets=scale.apply(shard.targets))


def encoded(dataset: Dataset, protocol: Protocol, halves: Sequence[Halves]) -> Dataset:
    """The dataset with features, if its columns are still to be encoded: from the sums of these training rows alone."""
    if dataset.raw is None:
        return dataset
    names = feature_names(dataset, protocol)
    settled = dataset.raw.settled(names, [train for train, _ in halves])
    features = torch.from_numpy(settled.transform(dataset.raw.columns)).float()
    made = tuple(settled.feature_names)
    return replace(dataset, features=features, feature_names=made, raw=None, encoding=settled)


def deal(dataset: Dataset, protocol: Protocol, seed: int) -> list[Halves]:
    """The rows of every client, training and test, as indices."""
    if protocol.minimum is not None and protocol.minimum < 1:
        raise InputError(f"a minimum of {protocol.minimum} rows for each client given; it must be 1 or more")
    rng = np.random.default_rng(seed)
    recipe, options = load_partition(protocol.partition), _partition_options(dataset, protocol)
    parts = recipe(dataset.labels.numpy(), protocol.n_clients, rng, **options)
    _check_unseen(protocol, len(parts))
    halve = halving(dataset, protocol)
    halves = [halve(rows, rng) for rows in parts]
    if protocol.reshuffle is None:
        return halves
    return _reshuffled(dataset, protocol, halves, seed)


def halving(dataset: Dataset, protocol: Protocol) -> Callable[[np.ndarray, np.random.Generator], Halves]:
    """How one client's rows become training and test rows: by the test column, or by share with whole groups."""
    groups = _codes(dataset, protocol.group_column)
    in_test = None if protocol.test_column is None else _test_flags(dataset, protocol.test_column)

    def halve(rows: np.ndarray, rng: np.random.Generator) -> Halves:
        if in_test is not None:
            return rows[~in_test[rows]], rows[in_test[rows]]
        own_groups = None if groups is None else groups[rows]
        return split(rows, rng, test_fraction=protocol.test_fraction, groups=own_groups)

    return halve


def sharding(dataset: Dataset, protocol: Protocol) -> Callable[[np.ndarray], Shard]:
    """How rows become a shard, with the codes of their groups if the protocol has a group column."""
    if dataset.raw is not None:
        raise InputError(
            f"--encode auto given for {dataset.name}: one site cannot settle an encoding for all. Every site describes "
            "its columns (`apfl encoding describe`), `apfl encoding settle` adds them up, and each site gives "
            "the file with --encode"
        )
    _check_encoding(dataset, protocol)
    groups, features = _codes(dataset, protocol.group_column), _features(dataset, protocol)

    def shard(rows: np.ndarray) -> Shard:
        own = torch.from_numpy(rows)
        codes = None if groups is None else torch.from_numpy(groups[rows])
        targets = None if dataset.targets is None else dataset.targets[own]
        return Shard(features[own], dataset.labels[own], codes, targets=targets, target=dataset.target)

    return shard


def feature_names(dataset: Dataset, protocol: Protocol) -> list[str]:
    """The columns of a table that models are fitted to: none that names clients, groups or test rows."""
    return [name for name in dataset.feature_names if name not in named_columns(protocol)]


def named_columns(protocol: Protocol) -> set[str]:
    """The columns that the protocol uses."""
    return {name for name in (protocol.client_column, protocol.test_column, protocol.group_column) if name is not None}


def _check_encoding(dataset: Dataset, protocol: Protocol) -> None:
    """Refuse an encoding that makes features of columns that name clients, groups or test rows."""
    used = set() if dataset.encoding is None else named_columns(protocol) & {*dataset.encoding.names}
    if used:
        raise InputError(
            f"the encoding reads {', '.join(sorted(used))}, which names clients, groups or test rows: make another one "
            f"(`apfl encoding describe --drop {','.join(sorted(used))}`, then `settle`)"
        )


def _features(dataset: Dataset, protocol: Protocol) -> torch.Tensor:
    names = feature_names(dataset, protocol)
    if len(names) == len(dataset.feature_names):
        return dataset.features
    if not names:
        raise InputError(
            f"{dataset.name} has no features but the columns that name clients, groups or test rows "
            f"({', '.join(dataset.feature_names)}); name other columns with --features"
        )
    return dataset.features[:, [dataset.feature_names.index(name) for name in names]]


def apart(federation: Federation, protocol: Protocol, seed: int) -> tuple[Federation, Federation | None]:
    """Those who train, and those who come after training, where the protocol has any."""
    if not protocol.unseen_clients:
        return federation, None
    drawn = np.random.default_rng((seed, UNSEEN)).permutation(len(federation.train))[: protocol.unseen_clients]
    late = sorted(drawn.tolist())
    return _some(federation, [k for k in range(len(federation.train)) if k not in late]), _some(federation, late)


def _some(federation: Federation, which: Sequence[int]) -> Federation:
    train, test, names = ([each[k] for k in which] for each in (federation.train, federation.test, federation.names))
    return Federation(train, test, federation.class_names, names, federation.scale)  # type: ignore[arg-type]


def _check_unseen(protocol: Protocol, n_clients: int) -> None:
    if not 0 <= protocol.unseen_clients < n_clients:
        raise InputError(f"{protocol.unseen_clients} unseen clients of {n_clients} asked for; at least one must train")
    if protocol.reshuffle is not None and (protocol.reshuffle < 0 or protocol.unseen_clients or n_clients < 3):
        raise InputError(
            f"reshuffle {protocol.reshuffle} given with {n_clients} clients and {protocol.unseen_clients} unseen; "
            "it must be 0 or more, with at least three clients and none unseen"
        )


def _reshuffled(dataset: Dataset, protocol: Protocol, halves: Sequence[Halves], seed: int) -> list[Halves]:
    """The first client as it is; the training rows of the others dealt out again, by the same recipe.

    The union of the training rows stays the same. The others have no test rows: the first client is what is looked at.
    """
    nothing = np.empty(0, dtype=int)
    if not protocol.reshuffle:
        return [halves[0], *((train, nothing) for train, _ in halves[1:])]
    if not options_of(protocol.partition).keys().isdisjoint(COLUMNS):
        raise InputError(f"partition '{protocol.partition}' cannot be dealt out again: leave reshuffle out")
    rest = np.sort(np.concatenate([train for train, _ in halves[1:]]))
    rng = np.random.default_rng((seed, protocol.reshuffle, RESHUFFLE))
    recipe, options = load_partition(protocol.partition), _partition_options(dataset, protocol)
    parts = recipe(dataset.labels.numpy()[rest], len(halves) - 1, rng, **options)
    return [halves[0], *((rest[part], nothing) for part in parts)]


def _partition_options(dataset: Dataset, protocol: Protocol) -> Mapping[str, Any]:
    """What the recipe's signature asks for."""
    options: dict[str, Any] = {}
    for name, required in options_of(protocol.partition).items():
        if name in OPTIONS:
            options[name] = asdict(protocol)[name]
        elif name in COLUMNS and protocol.client_column is not None:
            options[name] = dataset.column(protocol.client_column)
        elif name in COLUMNS and required:
            raise InputError(f"partition '{protocol.partition}' needs a column: name it with --client-column")
        elif required:
            raise InputError(
                f"partition '{protocol.partition}' asks for '{name}'; give that a default, or ask for "
                f"{', '.join([*OPTIONS, *COLUMNS])}"
            )
    return options


def _client_names(dataset: Dataset, protocol: Protocol, n_clients: int) -> list[str]:
    if protocol.partition == "given" and protocol.client_column is not None:
        return [str(name) for name in np.unique(dataset.column(protocol.client_column))]
    return [str(k) for k in range(n_clients)]


def _test_flags(dataset: Dataset, name: str) -> np.ndarray:
    """True for test rows. A value that is neither training nor test is refused: a guess would leak or lose rows."""
    column = dataset.column(name)
    words = [_word(value) for value in column.tolist()]
    for row, word in enumerate(words):
        if word not in FLAGS:
            raise InputError(
                f"column '{name}' of {dataset.name} has {column[row]} in row {row}; it must be true or false, 1 or 0, "
                "or 'test' or 'train', in every row to say which are for testing"
            )
    return np.array([FLAGS[word] for word in words], dtype=bool)


def _word(value: bool | float | str) -> str:
    return str(int(value)) if isinstance(value, bool | float) and value in (0, 1) else str(value).lower()


def _codes(dataset: Dataset, name: str | None) -> np.ndarray | None:
    return None if name is None else np.unique(dataset.column(name), return_inverse=True)[1]
