"""What the analytic methods do alike: normalise, map, add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.machine import check_width, n_workers, over_clients
from apfl.maths.maps import FeatureMap, random_map
from apfl.maths.normalise import Normaliser, check_features, moments, needs_moments, normaliser
from apfl.maths.ridge import Statistics, accumulate, one_hot, solve, total
from apfl.maths.wire import description_bytes, scaling_bytes, statistics_bytes
from apfl.methods import Round
from apfl.models.file import Model

WIDE = 2048  # above this width one product keeps all cores busy, and a sum for each worker is too much memory


def shared_normaliser(how: str, clients: Sequence[Shard]) -> Normaliser:
    """The normaliser all clients use; their moments are summed first if it needs them."""
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = [shard.features for shard in clients]
    check_features(how, features)
    if not needs_moments(how):
        return normaliser(how)
    shared = normaliser(how, reduce(add, map(moments, features)))
    check_features(shared.how, features)  # what `auto` stands for
    return shared


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


def shared_ridge(
    clients: Sequence[Shard],
    n_classes: int,
    how: str,
    d: int,
    activation: str,
    seed: int,
    gamma: float,
    *,
    intercept: bool = False,
) -> SharedRidge:
    """The primary stream of fixed settings: normalise, map, add up, solve."""
    normalise, features = shared_normaliser(how, clients), clients[0].features
    n_in = normalise.width(features.shape[1])
    feature_map = random_map(n_in, d, activation, 2 * seed, intercept=intercept).like(features)
    phis, summed = mapped_and_summed(clients, n_classes, normalise, feature_map)
    return SharedRidge(normalise, feature_map, phis, summed, solve(summed, gamma))


def mapped_and_summed(
    clients: Sequence[Shard], n_classes: int, normalise: Normaliser, feature_map: FeatureMap
) -> tuple[list[Tensor], Statistics]:
    """Every client's Phi_k, and the sum of all clients' statistics.

    Each worker adds its share of the clients into one sum: the same total as adding client by client, without ever
    holding more than a sum for each worker. A wide map has one worker, which adds several clients' rows at a time.
    """
    device = clients[0].features.device
    workers = 1 if feature_map.width > WIDE else n_workers(len(clients), device)
    check_width(feature_map.width, sum(map(len, clients)), workers, device)
    rows_at_a_time = feature_map.width // 2 if workers == 1 else 1
    phis: dict[int, Tensor] = {}

    def add_share(share: Sequence[int]) -> Statistics:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for some in _bundles(clients, share, rows_at_a_time):
                phi = feature_map(normalise(torch.cat([clients[k].features for k in some])))
                labels = torch.cat([clients[k].labels for k in some])
                parts = torch.split(phi, [len(clients[k]) for k in some])
                phis.update(zip(some, parts, strict=True))
                yield phi, one_hot(labels, n_classes)

        return accumulate(batches())

    shares = [range(w, len(clients), workers) for w in range(workers)]
    parts = over_clients(add_share, shares, device)
    summed = parts[0] if workers == 1 else total(parts)  # total() would copy the only one
    return [phis[k] for k in range(len(clients))], summed


def _bundles(clients: Sequence[Shard], share: Sequence[int], n_rows: int) -> Iterator[list[int]]:
    """Clients together until they have ``n_rows``: a product of few rows spends its time moving the d x d sum."""
    some: list[int] = []
    for k in share:
        some.append(k)
        if sum(len(clients[i]) for i in some) >= n_rows:
            yield some
            some = []
    if some:
        yield some
