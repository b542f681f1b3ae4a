"""The scikit-learn face for numbers: one regression for each client."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted

from apfl.errors import InputError, unknown
from apfl.methods._estimator.client_rows import rows_by_name, seed_of, tensor
from apfl.methods._estimator.reading import mind, numbers_by_client, read
from apfl.methods._numbers import MAPS, Asked, fit_numbers
from apfl.models.additive import AdditiveModel

__all__ = ["APFLRegressor"]


class APFLRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """One regression for each client: a ridge shared by all, plus a private ridge on what it gets wrong locally.

    Predicts ``weight * Phi G + balance * Phi P_k``, with G fitted to the rows of all clients and P_k to what
    ``weight * Phi G`` leaves of the client's own. What is left open gives up to eleven models: G alone, refined, and
    each client's own ridge, on each map; and, if all is open, the ridge with an intercept that `RidgeCV` would choose,
    over everyone's rows and over the client's own. Their predictions are averaged, with shares by the likelihood of
    left-out rows. Targets are standardised; one column or several.

    Parameters
    ----------
    map : {"auto", "linear", "landmarks", "both"}
        Phi: the standardised features and a constant, a kernel on landmarks that are drawn from the features' moments,
        or both side by side. ``auto`` averages over the three.
    width : int or "auto"
        The number of landmarks. ``auto`` follows the number of rows.
    gamma : float or "auto"
        Ridge of the primary; ``auto``: that of the highest marginal likelihood.
    beta : float or "auto"
        Ridge of the refinement; ``auto``: likewise, added over clients.
    balance, weight : float or "auto"
        Weights of the refinement and of the primary; ``auto`` averages over (0, 1), (1, 1) and (1, 0).
    client_column, unknown
        As of `APFLClassifier`.
    random_state : int, RandomState or None
        Seed of the landmarks and of the shares.

    Attributes
    ----------
    clients_ : list of the clients that have a model
    chosen_ : dict, the model with the largest share, every model with its share, who goes alone, R2 of left-out rows

    Examples
    --------
    >>> from sklearn.datasets import make_friedman1
    >>> X, y = make_friedman1(600, random_state=0)
    >>> site = np.arange(600) % 3
    >>> y = y + 5 * site  # every site has a level of its own
    >>> model = APFLRegressor().fit(X[:450], y[:450], clients=site[:450])
    >>> model.score(X[450:], y[450:], clients=site[450:]) > 0.9
    True
    """

    _fitted: _Fitted

    def __init__(
        self,
        map: str = "auto",
        width: int | str = "auto",
        gamma: float | str = "auto",
        beta: float | str = "auto",
        balance: float | str = "auto",
        weight: float | str = "auto",
        client_column: int | str | None = None,
        unknown: str = "warn",
        random_state: Any = 0,
    ) -> None:
        self.map = map
        self.width = width
        self.gamma = gamma
        self.beta = beta
        self.balance = balance
        self.weight = weight
        self.client_column = client_column
        self.unknown = unknown
        self.random_state = random_state

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None, weights: Any = None) -> Self:
        """Fit from scratch. ``clients`` and ``groups`` as of `APFLClassifier.fit`.

        ``weights`` (n,) weigh the rows in ridges, likelihoods, moments and left-out errors: with a given map and
        settings, 2 is a row given twice, and 0 is always a row that is absent. If nothing is fixed, only ratios of
        weights matter. Beside a given ``gamma`` or ``beta``, weights that are twice as large are a ridge half as large.
        Copies of a client's row are left out together, and judged once, with their mean weight; of an argument called
        ``sample_weight`` scikit-learn asks that copies count like a weight in choices, too.
        """
        kinds = self._maps()
        X, y, names = read(self, X, clients, y, reset=True, numbers=True)
        rows = numbers_by_client(X, y, names, groups, weights)
        gamma, weight, beta, balance = (self._number(name) for name in ("gamma", "weight", "beta", "balance"))
        asked = Asked(kinds, self._width(), gamma, weight, beta, balance)
        blend = fit_numbers(list(rows.values()), asked, seed_of(self.random_state))
        models = {name: blend.model(own, found) for (name, own), found in zip(rows.items(), blend.own, strict=True)}
        account = blend.account | {"alone": [list(rows)[k] for k in blend.account["alone"]]}
        self._fitted = _Fitted(models, blend.shared, y.ndim == 1, account)
        return self

    def predict(self, X: Any, clients: Any = None) -> np.ndarray:
        """Numbers (n,), or (n, t) if there were several targets."""
        check_is_fitted(self)
        X, _, names = read(self, X, clients)
        state, rows_of = self._fitted, rows_by_name(names)
        mind(self, [name for name in rows_of if name not in state.models])
        found = torch.zeros(len(X), len(state.shared.intercept), dtype=torch.float64)
        for name, rows in rows_of.items():
            found[rows] = state.models.get(name, state.shared).scores(tensor(X[rows]))
        return np.asarray(found[:, 0] if state.flat else found)

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """R2, averaged over targets."""
        return float(r2_score(y, self.predict(X, clients), sample_weight=sample_weight))

    @property
    def clients_(self) -> list[Any]:
        return list(self._fitted.models)

    @property
    def chosen_(self) -> dict[str, Any]:
        return self._fitted.account

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_fitted")

    def _maps(self) -> tuple[str, ...]:
        if self.map == "auto":
            return MAPS
        if self.map not in MAPS:
            raise unknown("map", str(self.map), (*MAPS, "auto"))
        return (self.map,)

    def _width(self) -> int | None:
        if self.width == "auto":
            return None
        if isinstance(self.width, bool) or not isinstance(self.width, (int, np.integer)) or self.width < 1:
            raise InputError(f"width={self.width!r} given; allowed: 'auto', or a whole number of landmarks from 1 on")
        return int(self.width)

    def _number(self, name: str) -> float | None:
        """A setting, or None if it is to be chosen."""
        given, least = getattr(self, name), 0.0 if name in ("balance", "weight") else math.ulp(0.0)
        if given == "auto":
            return None
        if isinstance(given, (str, bool)) or not least <= float(given) < math.inf:
            allowed = "above 0" if least else "from 0 on"
            raise InputError(f"{name}={given!r} given; allowed: 'auto', or a number {allowed}")
        return float(given)


@dataclass(frozen=True, eq=False)
class _Fitted:
    models: dict[Hashable, AdditiveModel]
    shared: AdditiveModel  # for anybody else
    flat: bool  # whether targets were one column without a second dimension
    account: dict[str, Any]
