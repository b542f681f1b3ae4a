"""How good models of numbers and of several labels are: RMSE, R2 and MAE; mean average precision and F1.

As with accuracies, a name carries its weighting. ``_client_mean`` is the unweighted mean over clients of the measure on
each client's own test rows, ``_worst_decile`` that of the ceil(K/10) worst of them, and ``_sample_mean`` the measure of
all clients' test rows together. RMSE and MAE of one target are in its units; of several they are in standard deviations
of each target over the training rows, over all of them. R2 compares with the mean of the same test rows, target by
target; a client whose test rows are all alike has none. A label counts in mean average precision if the rows have it,
in macro F1 if they have it or a model gives it to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from apfl.data.federation import Shard
from apfl.data.targets import Scale, Target
from apfl.errors import InputError
from apfl.experiments.headline import HEADLINES
from apfl.models.file import Model
from apfl.models.predict import HALF

__all__ = ["client_scores", "measures"]

Measure = Callable[[np.ndarray, np.ndarray], float | None]  # of scores and targets, (n, c) each


def _rmse(scores: np.ndarray, targets: np.ndarray) -> float:
    return math.sqrt(float(np.square(scores - targets).mean()))


def _mae(scores: np.ndarray, targets: np.ndarray) -> float:
    return float(np.abs(scores - targets).mean())


def _r2(scores: np.ndarray, targets: np.ndarray) -> float | None:
    around = np.square(targets - targets.mean(0)).sum(0)
    moving = around > 1e-12 * np.maximum(np.square(targets).sum(0), 1e-300)
    if not moving.any():
        return None
    left = np.square(scores - targets).sum(0)
    return float((1 - left[moving] / around[moving]).mean())


def _map(scores: np.ndarray, targets: np.ndarray) -> float | None:
    """Mean over the labels that some row has of the precision at each such row, rows in the order of their scores."""
    from sklearn.metrics import average_precision_score  # here, because it takes a second to import

    held = targets.any(0)
    if not held.any():
        return None
    return float(average_precision_score(targets[:, held].astype(int), scores[:, held], average="macro"))


def _f1(both: np.ndarray, given: np.ndarray, held: np.ndarray) -> np.ndarray:
    """2 both / (given + held); NaN if nobody gives or has it."""
    with np.errstate(invalid="ignore"):
        found: np.ndarray = 2 * both / (given + held)
    return found


def _micro_f1(scores: np.ndarray, targets: np.ndarray) -> float | None:
    given, held = scores > HALF, targets > HALF
    found = float(_f1((given & held).sum(), given.sum(), held.sum()))
    return None if math.isnan(found) else found


def _macro_f1(scores: np.ndarray, targets: np.ndarray) -> float | None:
    given, held = scores > HALF, targets > HALF
    each = _f1((given & held).sum(0), given.sum(0), held.sum(0))
    return None if np.isnan(each).all() else float(np.nanmean(each))


MEASURES: Mapping[Target, Mapping[str, Measure]] = {
    "regression": {"rmse": _rmse, "r2": _r2, "mae": _mae},
    "multilabel": {"map": _map, "micro_f1": _micro_f1, "macro_f1": _macro_f1},
}
LOWER = ("rmse", "mae")  # is better


def client_scores(models: Sequence[Model], tests: Sequence[Shard], scale: Scale | None = None) -> list[float | None]:
    """The headline of each client's model on its own test rows, as `HEADLINES` names it; None without any."""
    target = tests[0].target
    of = MEASURES[target][HEADLINES[target].key]
    return [None if pair is None else of(*pair) for pair in _pairs(models, tests, scale)]


def measures(models: Sequence[Model], tests: Sequence[Shard], scale: Scale | None = None) -> dict[str, Any]:
    """All measures of one set of models, one for each client, as a record has them."""
    pairs = _pairs(models, tests, scale)
    known = [pair for pair in pairs if pair is not None]
    if not known:
        raise InputError("no client has test rows, so there is nothing to measure; keep some back for testing")
    together = tuple(np.concatenate(side) for side in zip(*known, strict=True))
    found: dict[str, float | None] = {}
    by_client: dict[str, list[float | None]] = {}
    for name, of in MEASURES[tests[0].target].items():
        by_client[name] = [None if pair is None else of(*pair) for pair in pairs]
        found |= _summary(name, [value for value in by_client[name] if value is not None])
        found[f"{name}_sample_mean"] = of(together[0], together[1])
    return {"measures": found, "client_measures": by_client, "n_clients_without_test": len(pairs) - len(known)}


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Over the clients that have the measure."""
    if not values:
        return {f"{name}_client_mean": None, f"{name}_client_std": None, f"{name}_worst_decile": None}
    worst = sorted(values, reverse=name in LOWER)[: math.ceil(len(values) / 10)]
    return {
        f"{name}_client_mean": float(np.mean(values)),
        f"{name}_client_std": float(np.std(values)),
        f"{name}_worst_decile": float(np.mean(worst)),
    }


def _pairs(
    models: Sequence[Model], tests: Sequence[Shard], scale: Scale | None
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Scores and targets of each client's test rows, in units if there is one target; None without rows."""
    if len(models) != len(tests):
        raise InputError(f"{len(models)} models for {len(tests)} clients; there must be one for each")
    pairs: list[tuple[np.ndarray, np.ndarray] | None] = []
    for model, test in zip(models, tests, strict=True):
        if not len(test) or test.targets is None:
            pairs.append(None)
            continue
        scores, targets = model.scores(test.features).double(), test.targets
        if scale is not None and targets.shape[1] == 1:
            scores, targets = scale.undo(scores), scale.undo(targets)
        pairs.append((scores.cpu().numpy(), targets.cpu().numpy()))
    return pairs
