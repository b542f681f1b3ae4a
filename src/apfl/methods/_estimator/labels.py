"""`APFLClassifier` with several labels a row: an indicator matrix of 0 and 1 in place of classes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sklearn.utils.multiclass import type_of_target

from apfl.errors import InputError
from apfl.methods._estimator.client_rows import rows_by_name, seed_of, tensor
from apfl.methods._estimator.reading import mind, numbers_by_client, read
from apfl.methods._numbers import Asked, fit_numbers
from apfl.models.additive import AdditiveModel

__all__ = ["FittedLabels", "are_labels", "fit_labels", "label_scores"]


@dataclass(frozen=True, eq=False)
class FittedLabels:
    """The models of several labels."""

    models: dict[Hashable, AdditiveModel]
    shared: AdditiveModel
    account: dict[str, Any]

    @property
    def n_labels(self) -> int:
        return len(self.shared.intercept)

    def model(self, client: Hashable | None, names: dict[str, Any]) -> AdditiveModel:
        """One client's model, to save or deploy."""
        found = self.models.get(client, self.shared) if client is not None else self.shared
        called = [str(i) for i in range(self.n_labels)]
        return replace(found, class_names=called, about={**found.about, "target": "multilabel", **names})


def are_labels(y: Any) -> bool:
    """Whether they are an indicator matrix; anything else is for `fit` of classes to judge."""
    if not hasattr(y, "__len__") or isinstance(y, str) or np.ndim(y) != 2 or np.shape(y)[1] < 2:
        return False
    return bool(type_of_target(y) == "multilabel-indicator")


def fit_labels(
    estimator: Any, asked: Asked, X: Any, y: Any, clients: Any, groups: Any, sample_weight: Any
) -> FittedLabels:
    """Fit all clients' models."""
    X, y, names = read(estimator, X, clients, np.asarray(y), reset=True, numbers=True)
    if not np.isin(y, (0, 1)).all():
        raise InputError("y has several columns with other entries than 0 and 1; give an indicator matrix")
    clients_rows = numbers_by_client(X, y, names, groups, sample_weight)
    blend = fit_numbers(list(clients_rows.values()), asked, seed_of(estimator.random_state))
    models = {
        name: blend.model(own, shares) for (name, own), shares in zip(clients_rows.items(), blend.own, strict=True)
    }
    account = blend.account | {"alone": [list(models)[k] for k in blend.account["alone"]]}
    return FittedLabels(models, blend.shared, account)


def label_scores(estimator: Any, fitted: FittedLabels, X: Any, clients: Any) -> np.ndarray:
    """Scores (n, c): above 0.5 for a label that the row is given."""
    X, _, names = read(estimator, X, clients)
    rows_of = rows_by_name(names)
    mind(estimator, [name for name in rows_of if name not in fitted.models])
    scores = np.empty((len(X), fitted.n_labels))
    for name, rows in rows_of.items():
        scores[rows] = fitted.models.get(name, fitted.shared).scores(tensor(X[rows]))
    return scores
