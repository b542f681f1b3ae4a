"""What the analytic methods do alike: normalise, map, add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Annotated, Any, ClassVar, overload

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.targets import TARGETS, Target
from apfl.errors import InputError
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.leaveout import Hashes, echo, leaving, row_hashes
from apfl.maths.machine import check_width, n_workers, over_clients
from apfl.maths.maps import Activation, FeatureMap, random_map, raw_map
from apfl.maths.normalise import Normalise, Normaliser, check_features, described, needs_moments, normaliser
from apfl.maths.regression import NumberStatistics
from apfl.maths.ridge import Statistics, accumulate, one_hot, solve, total
from apfl.maths.wire import description_bytes, scaling_bytes, statistics_bytes
from apfl.methods import Method, Round
from apfl.models.file import Model

Width = Annotated[int, Field(gt=0, le=2**20)]  # of a random map
ROWS_ON_A_GPU = 2**14  # that are mapped at once
ANY_TARGET: tuple[Target, ...] = TARGETS  # of a method that fits any columns of Y
WIDE = 2048  # above this width one product keeps all cores busy, and a sum for each worker is too much memory


def shared_normaliser(how: str, clients: Sequence[Shard]) -> Normaliser:
    """The normaliser all clients use; their moments are summed first if it needs them."""
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = [shard.features for shard in clients]
    check_features(how, features)
    if not needs_moments(how):
        return normaliser(how)
    shared = normaliser(how, reduce(add, (described(how, rows) for rows in in_one(features))))
    check_features(shared.how, features)  # what `auto` stands for
    return shared


def in_one(features: Sequence[Tensor]) -> Sequence[Tensor]:
    """On a GPU all clients' rows together, since their sums are the same and one kernel is less than a hundred."""
    return features if features[0].device.type == "cpu" else [torch.cat([*features])]


def stream_maps(
    features: Tensor,
    normalise: Normaliser,
    widths: tuple[int, int],
    activations: tuple[str, str],
    seed: int,
    intercept: bool,
) -> tuple[FeatureMap, FeatureMap]:
    """The primary and the refinement map of normalised features, from two seeds of their own."""
    n_in = normalise.width(features.shape[1])
    primary, refinement = (
        random_map(n_in, d, activation, 2 * seed + stream, intercept=intercept).like(features)
        for stream, d, activation in zip((0, 1), widths, activations, strict=True)
    )
    return primary, refinement


def moments_bytes(how: str, n_features: int, shared: Normaliser) -> tuple[int, int]:
    """What the exchange that sums the moments weighs for each client, up and down; nothing if ``how`` needs none."""
    if not needs_moments(how):
        return 0, 0
    return description_bytes(n_features, moments=True), scaling_bytes(shared)


def upload_bytes(clients: Sequence[Shard], summed: Statistics) -> list[int]:
    """What each client's statistics weigh."""
    return [statistics_bytes(len(shard), summed.width, len(summed.class_counts)) for shard in clients]


def one_exchange(
    models: Sequence[Model], shared: Normaliser, n_features: int, *, up: Sequence[int], down: int, **more: Any
) -> Round:
    """The round of a method that needs one exchange: ``up`` bytes of each client, ``down`` to every client.

    Before it the clients add up their moments, if the normalisation needs them.
    """
    moments_up, moments_down = moments_bytes(shared.how, n_features, shared)
    total_up, total_down = sum(up) + len(models) * moments_up, len(models) * (down + moments_down)
    return Round(models, index=2 if moments_up else 1, bytes_up=total_up, bytes_down=total_down, **more)


@dataclass(frozen=True, eq=False)
class SharedRidge:
    """A ridge regression on a random map of everyone's rows, and what it was made from."""

    normalise: Normaliser
    feature_map: FeatureMap
    phis: Sequence[Tensor]  # Phi_k of each client
    stats: Statistics
    weights: Tensor  # G (d, c)


@dataclass(frozen=True)
class OneMap(Method):
    """A ridge regression on one random map: its settings, and the primary stream that they give."""

    d: Width = 1024
    gamma: Annotated[float, Field(ge=0)] = 1.0
    activation: Activation = "relu"
    normalise: Normalise = "row"

    predicts: ClassVar[Sequence[Target]] = ANY_TARGET

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, 0

    def shared(self, clients: Sequence[Shard], n_classes: int, seed: int, *, intercept: bool = False) -> SharedRidge:
        """The primary stream of everyone's rows: normalise, map, add up, solve."""
        normalise, features = shared_normaliser(self.normalise, clients), clients[0].features
        n_in = normalise.width(features.shape[1])
        feature_map = random_map(n_in, self.d, self.activation, 2 * seed, intercept=intercept).like(features)
        phis, summed = mapped_and_summed(clients, n_classes, normalise, feature_map)
        return SharedRidge(normalise, feature_map, phis, summed, solve(summed, self.gamma))


def summed_features(
    clients: Sequence[Shard], n_classes: int, how: str, *, intercept: bool = False
) -> tuple[Normaliser, FeatureMap, Statistics]:
    """The sum of all clients' statistics of the backbone's own features, and what they went through before it."""
    normalise = shared_normaliser(how, clients)
    feature_map = raw_map(normalise.width(clients[0].features.shape[1]), intercept=intercept)
    return normalise, feature_map, mapped_and_summed(clients, n_classes, normalise, feature_map)[1]


def mapped_and_summed(
    clients: Sequence[Shard], n_classes: int, normalise: Normaliser, feature_map: FeatureMap | LandmarkMap
) -> tuple[list[Tensor], Statistics]:
    """Every client's Phi_k, and the sum of all clients' statistics.

    Each worker adds its share of the clients into one sum: the same total as adding client by client, without ever
    holding more than a sum for each worker. Several clients' rows are added at a time; a wide map has one worker.
    """
    device = clients[0].features.device
    workers = 1 if feature_map.width > WIDE else n_workers(len(clients), device)
    check_width(feature_map.width, sum(map(len, clients)), workers, device)
    rows_at_a_time = feature_map.width // 2 if workers == 1 else 2 * feature_map.width
    if device.type != "cpu":
        rows_at_a_time = ROWS_ON_A_GPU
    phis: dict[int, Tensor] = {}

    def add_share(share: Sequence[int]) -> Statistics:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for bundle in _bundles(clients, share, rows_at_a_time):
                phi = feature_map(normalise(torch.cat([clients[k].features for k in bundle])))
                responses = _responses([clients[k] for k in bundle], n_classes)
                parts = torch.split(phi, [len(clients[k]) for k in bundle])
                phis.update(zip(bundle, parts, strict=True))
                yield phi, responses

        return accumulate(batches(), None if clients[0].targets is None else NumberStatistics)

    shares = [range(w, len(clients), workers) for w in range(workers)]
    parts = over_clients(add_share, shares, device)
    summed = parts[0] if workers == 1 else total(parts)  # total() would copy the only one
    return [phis[k] for k in range(len(clients))], summed


def _responses(clients: Sequence[Shard], n_columns: int) -> Tensor:
    """Y (n, c) of several clients' rows: one call for all their labels."""
    if clients[0].targets is None:
        return one_hot(torch.cat([shard.labels for shard in clients]), n_columns)
    return torch.cat([shard.responses(n_columns) for shard in clients])


def mapped(
    clients: Sequence[Shard], normalise: Normaliser, feature_map: Callable[[Tensor], Tensor]
) -> Callable[[int], Tensor]:
    """A client's mapped rows by its place: on a CPU when asked for; on a GPU many clients' in one product, and kept."""
    if clients[0].features.device.type == "cpu":
        return lambda k: feature_map(normalise(clients[k].features))
    made: list[Tensor] = []
    for some in _bundles(clients, range(len(clients)), ROWS_ON_A_GPU):
        phi = feature_map(normalise(torch.cat([clients[k].features for k in some])))
        made += torch.split(phi, [len(clients[k]) for k in some])
    return made.__getitem__


@dataclass(frozen=True, eq=False)
class Repeated:
    """What is known of a client's repeated rows."""

    groups: Tensor | None  # as in `Leaving`
    copies: Tensor
    n_copies: int
    hashes: Hashes

    @property
    def echo(self) -> Tensor:
        """(ECHO,), made when asked for: of a client of few rows it is much larger than the rows."""
        return echo(self.copies, self.hashes)


class Echoes(Sequence[tuple[int, Tensor]]):
    """What integers tell of each client's repeated rows, one client at a time."""

    def __init__(self, together: Sequence[Repeated]) -> None:
        self._together = together

    def __len__(self) -> int:
        return len(self._together)

    @overload
    def __getitem__(self, k: int) -> tuple[int, Tensor]: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[tuple[int, Tensor]]: ...
    def __getitem__(self, k: int | slice) -> tuple[int, Tensor] | Sequence[tuple[int, Tensor]]:
        if isinstance(k, slice):
            return Echoes(self._together[k])
        own = self._together[k]
        return own.n_copies, own.echo


def repeated_rows(clients: Sequence[Shard]) -> list[Repeated]:
    """Of each client: rows are hashed once for all there is to know, on a GPU those of all clients in one go."""
    features = [shard.features for shard in clients]
    parts = [*map(row_hashes, in_one(features))] if features else []
    if len(parts) < len(features):
        parts = np.split(parts[0], np.cumsum([*map(len, clients)])[:-1])
    labels = torch.split(torch.cat([shard.labels for shard in clients]).cpu(), [*map(len, clients)]) if clients else []
    found = [
        leaving(shard.features, codes, shard.groups, own)
        for shard, codes, own in zip(clients, labels, parts, strict=True)
    ]
    counts = torch.stack([own.copies.sum() for own in found]).tolist() if found else []
    return [Repeated(*own, n_copies, hashes) for own, n_copies, hashes in zip(found, counts, parts, strict=True)]


def _bundles(clients: Sequence[Shard], share: Sequence[int], n_rows: int) -> Iterator[list[int]]:
    """Clients together until they have ``n_rows``: a product of few rows spends its time moving the d x d sum."""
    bundle, held = list[int](), 0
    for k in share:
        bundle.append(k)
        held += len(clients[k])
        if held >= n_rows:
            yield bundle
            bundle, held = [], 0
    if bundle:
        yield bundle
