"""The round of `apfl` with numbers or several labels as targets: `apfl.methods._numbers`, and what it exchanges.

Exchanges: moments of features and targets; products for the landmarks, if there are any; statistics on the widest map,
of which those of the others are parts; likelihoods of beta and errors of the plain ridges; errors of left-out rows.
Leverages are exact, so the factor of the summed system goes down to every client.
"""

from __future__ import annotations

from collections.abc import Sequence

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN
from apfl.maths.regression import DECADES, DRAWS
from apfl.maths.ridge_cv import RIDGES
from apfl.maths.wire import Traffic, description_bytes, landmarks_bytes, spread_bytes, statistics_bytes
from apfl.methods import Round
from apfl.methods._numbers import THRESHOLDS, Asked, Blend, NumberRows, fit_numbers
from apfl.models.additive import AdditiveModel

__all__ = ["number_round"]


def number_round(clients: Sequence[Shard], asked: Asked, seed: int) -> Round:
    """One model for each client."""
    rows = [_rows(shard) for shard in clients]
    blend = fit_numbers(rows, asked, seed)
    models = [blend.model(own, shares) for own, shares in zip(rows, blend.own, strict=True)]
    traffic = _traffic(blend, clients, asked)

    def admit(late: Sequence[Shard]) -> list[AdditiveModel]:
        return [blend.model(_rows(shard), blend.shares) for shard in late]

    return Round(
        models,
        index=traffic.rounds,
        bytes_up=traffic.total_up,
        bytes_down=traffic.total_down(len(clients)),
        chosen={**blend.account, "bytes": traffic.account},
        admit=admit,
    )


def _rows(shard: Shard) -> NumberRows:
    if shard.targets is None:
        raise InputError("a client without targets among clients with targets given; give all of them targets")
    return NumberRows(shard.features, shard.targets, shard.groups)


def _traffic(blend: Blend, clients: Sequence[Shard], asked: Asked) -> Traffic:
    n_clients, n_features = len(clients), clients[0].features.shape[1]
    t, widths = len(blend.scale.mean), [len(one.primary.weights) for one in blend.maps]
    widest = max(widths)
    n_models = len(blend.shares)
    tables = 2 * len(DECADES) * 2 * len(widths) + (len(RIDGES) if asked.plain else 0)
    up = {
        "description": [description_bytes(n_features, moments=True) + 16 * t] * n_clients,
        "statistics": [statistics_bytes(len(shard), widest, t) for shard in clients],
        "table": [8 * tables] * n_clients,
        "left-out errors": [8 * (DRAWS * n_models + (2 * len(THRESHOLDS) * t if asked.labels else 0))] * n_clients,
    }
    down = {"publication": 8 * sum(d * t + d * (d + 1) // 2 for d in widths), "scaling": 16 * (n_features + t)}
    drawn = blend.maps[-1].phi.landmarks
    if drawn is not None:
        _, landmarks = drawn
        full = sum(map(len, clients)) >= ROWS_FOR_EACH_COLUMN * landmarks.n_in
        up["moments"] = [spread_bytes(landmarks.n_in, full=full)] * n_clients
        down["landmarks"] = landmarks_bytes(landmarks.width, landmarks.n_in, mean_squares=False)
    return Traffic(up, down, 4 + (drawn is not None))
