"""The round of `apfl` with numbers or several labels as targets: `apfl.methods._numbers`, and what it exchanges.

Exchanges: moments of features and targets; products for the landmarks, if there are any; statistics on the widest map,
of which those of the others are parts; likelihoods of beta and errors of the plain ridges; errors of left-out rows; for
labels, counts of left-out rows above thresholds. Leverages are exact, so everyone's sum goes down to every client.
`apfl.federate.numbers` sends just this.
"""

from __future__ import annotations

from collections.abc import Sequence

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN
from apfl.maths.regression import DECADES, DRAWS, open_weights
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
    widest, n_models, n_shared = max(widths), len(blend.shares), len(blend.anybody)
    n_open = len(widths) * len(open_weights(asked.fixed))
    up = {
        "description": [description_bytes(n_features, moments=True) + 16 * t] * n_clients,
        "statistics": [statistics_bytes(len(shard), widest, t) for shard in clients],
        "table": [8 * (n_open * (3 * len(DECADES) + 1) + 2 * len(RIDGES) * asked.plain)] * n_clients,
        "left-out errors": [8 * (DRAWS * (n_models + n_shared + 2) + 2)] * n_clients,
        **({"labels": [8 * t * (2 * len(THRESHOLDS) + 1)] * n_clients} if asked.labels else {}),
    }
    down = {
        "publication": 8 * (widest * t + widest * (widest + 1) // 2 + t + 1),
        "scaling": 8 * (3 * n_features + 2 * t),
    }
    drawn = blend.maps[-1].phi.landmarks
    if drawn is not None:
        _, landmarks = drawn
        full = sum(map(len, clients)) >= ROWS_FOR_EACH_COLUMN * landmarks.n_in
        up["moments"] = [spread_bytes(landmarks.n_in, full=full)] * n_clients
        down["landmarks"] = landmarks_bytes(landmarks.width, landmarks.n_in, mean_squares=False)
    exchanges = 3 + (n_open > 0 or asked.plain) + asked.labels
    return Traffic(up, down, exchanges + (drawn is not None))
