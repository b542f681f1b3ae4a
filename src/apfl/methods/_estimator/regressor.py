"""The scikit-learn face for numbers: one regression for each client."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from apfl.errors import InputError, unknown
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN, LandmarkMap, draw_points, landmark_map, spread
from apfl.maths.leaveout import leaving
from apfl.maths.normalise import Normaliser, check_features, moments, normaliser
from apfl.maths.personalise import width_for
from apfl.maths.regression import (
    Block,
    Choice,
    Primary,
    choose,
    clearly_less,
    fit_client,
    number_statistics,
    shares,
    solve,
    squared,
)
from apfl.maths.ridge import total
from apfl.methods._estimator.client_rows import group_code, one_each, rows_by_name, seed_of, tensor
from apfl.methods._estimator.reading import mind, read

__all__ = ["APFLRegressor"]

MAPS = ("linear", "landmarks", "both")  # simple ones first
LEAST_SHARE = 1e-3  # of a model in the average
MOST = 2048  # landmarks: leverages are exact here, which costs the cube of the width


class APFLRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """One regression for each client: a ridge shared by all, plus a private ridge on what it gets wrong locally.

    Predicts ``weight * Phi G + balance * Phi P_k``, with G fitted to the rows of all clients and P_k to what
    ``weight * Phi G`` leaves of the client's own. What is left open gives up to nine models: G alone, refined, and each
    client's own ridge, on each map. Their predictions are averaged, with shares by the likelihood of left-out rows.
    Targets are standardised; one column or several.

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

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None) -> Self:
        """Fit from scratch. ``clients`` and ``groups`` as of `APFLClassifier.fit`."""
        kinds = self._maps()
        X, y, names = read(self, X, clients, y, reset=True, numbers=True)
        targets = tensor(np.asarray(y, dtype=np.float64)).reshape(len(X), -1)
        mean, scale = targets.mean(0), targets.std(0, correction=0)
        scale = torch.where(scale == 0, 1, scale)
        data = _Data.of(X, (targets - mean) / scale, names, groups)
        fixed = (self._number("weight"), self._number("beta"), self._number("balance"))
        seed = seed_of(self.random_state)
        each = [_fitted(data, kind, self._width(), self._number("gamma"), fixed, seed) for kind in kinds]
        self._fitted = _blend(each, data.names, seed, _Scale(mean, scale, y.ndim == 1))
        return self

    def predict(self, X: Any, clients: Any = None) -> np.ndarray:
        """Numbers (n,), or (n, t) if there were several targets."""
        check_is_fitted(self)
        X, _, names = read(self, X, clients)
        state, rows_of = self._fitted, rows_by_name(names)
        mind(self, [name for name in rows_of if name not in state.clients])
        found = torch.zeros(len(X), len(state.scale.mean), dtype=torch.float64)
        for part in state.parts:
            phi = part.phi(tensor(X))
            for name, rows in rows_of.items():
                found[rows] += phi[rows] @ part.weights.get(name, part.shared)
        return state.scale.undo(found)

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """R2, averaged over targets."""
        return float(r2_score(y, self.predict(X, clients), sample_weight=sample_weight))

    @property
    def clients_(self) -> list[Any]:
        return list(self._fitted.clients)

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
class _Data:
    """The rows by client."""

    names: list[Hashable]
    features: list[Tensor]
    targets: list[Tensor]
    groups: list[Tensor | None]

    @staticmethod
    def of(X: np.ndarray, targets: Tensor, names: list[Hashable], groups: Any) -> _Data:
        rows_of, codes = rows_by_name(names), None
        if groups is not None:
            codes = torch.tensor([group_code(group) for group in one_each("groups", groups, len(X))])
        places = list(rows_of.values())
        return _Data(
            list(rows_of), [tensor(X[rows]) for rows in places], [targets[rows] for rows in places],
            [None if codes is None else codes[rows] for rows in places],
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Map:
    """Phi: the features as they are, landmarks, or both."""

    kind: str
    columns: Normaliser
    landmarks: tuple[Normaliser, LandmarkMap] | None

    def __call__(self, features: Tensor) -> Tensor:
        """The rows on the map, (n, d), with a constant column: the client's own level."""
        parts = [torch.ones(len(features), 1, dtype=torch.float64)]
        if self.kind != "landmarks":
            parts.append(self.columns(features) / math.sqrt(features.shape[1]))
        if self.landmarks is not None:
            scaling, drawn = self.landmarks
            parts.append(drawn(scaling(features)))
        return torch.cat(parts, 1)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A map with its primary and its models."""

    phi: _Map
    blocks: list[Block]
    primary: Primary
    choice: Choice

    def weights(self, client: int, shares: Tensor) -> Tensor:
        """The models' w G + balance P_k, averaged."""
        parts = zip(shares.tolist(), self.choice.settings, strict=True)
        fits = [share * fit_client(self.blocks[client], self.primary, own) for share, own in parts if share]
        return sum(fits, torch.zeros_like(self.primary.weights))

    def accounts(self, shares: Tensor) -> list[dict[str, Any]]:
        of_map = {"map": self.phi.kind, "width": len(self.primary.weights), "gamma": self.primary.gamma}
        return [
            {**of_map, "weight": weight, "beta": beta, "balance": balance, "share": share}
            for (weight, beta, balance), share in zip(self.choice.settings, shares.tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class _Scale:
    """Of the targets."""

    mean: Tensor
    scale: Tensor
    flat: bool  # whether targets were one column without a second dimension

    def undo(self, numbers: Tensor) -> np.ndarray:
        found = np.asarray((numbers * self.scale + self.mean).numpy())
        return found[:, 0] if self.flat else found


@dataclass(frozen=True, eq=False)
class _Part:
    """What one map adds to the prediction."""

    phi: _Map
    weights: dict[Hashable, Tensor]  # of each client, (d, t)
    shared: Tensor  # for anybody else


@dataclass(frozen=True, eq=False)
class _Fitted:
    clients: list[Hashable]
    parts: list[_Part]
    scale: _Scale
    account: dict[str, Any]


def _blend(each: Sequence[_Candidate], names: list[Hashable], seed: int, scale: _Scale) -> _Fitted:
    """The average of all models, with shares from left-out rows."""
    left = [torch.cat([one.choice.residuals[k] for one in each]) for k in range(len(names))]  # (models, n, t)
    everyone = _clean(shares([squared(own) for own in left], seed))
    alone = torch.tensor([weight == 0 for one in each for weight, *_ in one.choice.settings])
    own = [_own_shares(residuals, everyone, alone) for residuals in left]
    mixed = torch.cat([torch.einsum("m,mnt->nt", *pair) for pair in zip(own, left, strict=True)])
    targets = torch.cat([block.targets for block in each[0].blocks])
    models = [model for one, found in zip(each, _by_map(each, everyone), strict=True) for model in one.accounts(found)]
    account = {
        **max(models, key=lambda model: float(model["share"])),
        "alone": [name for name, found in zip(names, own, strict=True) if found is not everyone],
        "left_out_r2": _r2(mixed, targets),
        "models": models,
    }
    return _Fitted(names, _parts(each, names, own, seed), scale, account)


def _parts(each: Sequence[_Candidate], names: list[Hashable], own: Sequence[Tensor], seed: int) -> list[_Part]:
    """What each map adds, for clients with shares of their own and for anybody else."""
    by_map = [_by_map(each, found) for found in own]
    primaries = [torch.stack([squared(one.choice.primary[k]) for one in each]) for k in range(len(names))]
    anybody = _clean(shares(primaries, seed)).tolist()
    return [
        _Part(
            one.phi,
            {name: one.weights(k, by_map[k][i]) for k, name in enumerate(names)},
            anybody[i] * one.primary.weights,
        )
        for i, one in enumerate(each)
        if anybody[i] or any(bool(found[i].any()) for found in by_map)
    ]


def _by_map(each: Sequence[_Candidate], found: Tensor) -> Sequence[Tensor]:
    return torch.split(found, [len(one.choice.settings) for one in each])


def _clean(found: Tensor) -> Tensor:
    """Without shares that cost time and change nothing."""
    kept = torch.where(found < LEAST_SHARE, 0.0, found)
    return kept / kept.sum()


def _own_shares(left: Tensor, everyone: Tensor, alone: Tensor) -> Tensor:
    """Of one client: everyone's, or going alone if its own rows are clearly better off."""
    if not alone.any() or alone.all():
        return everyone
    errors, mixed = squared(left), squared(torch.einsum("m,mnt->nt", everyone, left))
    sums = torch.where(alone, errors.nansum(1), math.inf)
    best = int(sums.argmin())
    if not clearly_less(errors[best], mixed, 2.0):
        return everyone
    return torch.nn.functional.one_hot(torch.tensor(best), len(everyone)).to(everyone)


def _r2(left: Tensor, targets: Tensor) -> float:
    judged = ~left.isnan().any(1)
    energy = float(targets[judged].square().sum())
    return 1 - float(left[judged].square().sum()) / energy if energy else math.nan


def _fitted(
    data: _Data, kind: str, width: int | None, gamma: float | None, fixed: tuple[float | None, ...], seed: int
) -> _Candidate:
    """A map, the primary on the sums of all clients, and the settings."""
    phi = _mapped(data, kind, width, seed)
    blocks = []
    for features, targets, groups in zip(data.features, data.targets, data.groups, strict=True):
        alike = torch.from_numpy(np.unique(targets.numpy(), axis=0, return_inverse=True)[1].reshape(-1))
        blocks.append(Block(phi(features), targets, *leaving(features, alike, groups)))
    summed = total(number_statistics(b.phi, b.targets, _n_copies(b)) for b in blocks)
    used = 1.0 if gamma is None and summed.n_samples < 2 else gamma
    primary = solve(summed, used)
    choice = choose(blocks, primary, (fixed[0], fixed[1], fixed[2]))
    return _Candidate(phi, blocks, primary, choice)


def _n_copies(block: Block) -> int:
    return 0 if block.copies is None else int(block.copies.sum())


def _mapped(data: _Data, kind: str, width: int | None, seed: int) -> _Map:
    check_features("standardise", data.features)
    shared = reduce(add, (moments(features) for features in data.features))
    columns = normaliser("standardise", shared)
    if kind == "linear":
        return _Map(kind, columns, None)
    scaling = normaliser("columns", shared)
    n, n_in = shared.n_samples, scaling.width(data.features[0].shape[1])
    full = n >= ROWS_FOR_EACH_COLUMN * n_in
    products = reduce(add, (spread(scaling(features), full=full) for features in data.features))
    d = min(MOST, width_for(n, data.features[0].shape[1]), max(n, 2)) if width is None else width
    return _Map(kind, columns, (scaling, landmark_map(draw_points(d, seed, products))))
