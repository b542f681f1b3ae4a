"""Models of numbers and of several labels: fits on three maps and two plain ridges, averaged by left-out rows.

Up to eleven models: on the standardised features, on landmarks and on both, the shared ridge alone, refined, and each
client's own ridge (`apfl.maths.regression`); and the ridge that tables are usually given, over everyone's rows and over
the client's own (`apfl.maths.ridge_cv`). A client's average is one `AdditiveModel`. Labels are fitted as numbers; each
is given to a row if its score is above the threshold with the highest F1 over left-out rows, which the intercept then
moves to 0.5.

Rows may have weights. Rows of Phi and Y are then multiplied by their roots, which gives weighted ridges, likelihoods
and squared errors of left-out rows at once; moments and thresholds are weighted too. If nothing is fixed, only ratios
of weights matter. Copies of a row are in all sums, but leave together, and only one of them is judged, with their mean
weight: a row given many times has one voice in every choice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.targets import Scale, alike
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN, LandmarkMap, draw_points, landmark_map, spread
from apfl.maths.leaveout import Leaving, first_equal, leaving
from apfl.maths.normalise import Normaliser, check_features, moments, normaliser
from apfl.maths.personalise import width_for
from apfl.maths.regression import (
    Block,
    Choice,
    Fixed,
    Primary,
    Setting,
    choose,
    clearly_less,
    fit_client,
    number_statistics,
    shares,
    solve,
    squared,
)
from apfl.maths.ridge import total
from apfl.maths.ridge_cv import PlainRidge, plain_ridge
from apfl.models.additive import AdditiveModel

__all__ = [
    "MAPS",
    "THRESHOLDS",
    "Asked",
    "Blend",
    "Labelled",
    "NumberMap",
    "NumberRows",
    "OnMap",
    "Plain",
    "account_of",
    "clean",
    "evened",
    "fit_numbers",
    "labelled",
    "landmark_number",
    "models_alone",
    "own_ridge",
    "own_shares",
    "prior_of",
    "thresholds_of",
]

MAPS = ("linear", "landmarks", "both")  # simple ones first
LEAST_SHARE = 1e-3  # of a model in the average
MOST = 2048  # landmarks: leverages are exact here, which costs the cube of the width
FEW = 3  # rows from which a client has a plain ridge of its own
CLEARLY = 3.0  # standard errors by which going alone must be better for a client to leave the average
SIMPLE = 5.0  # prior weight of shared models that are linear in the features; 1 of every other
POOLED = 50.0  # of the plain ridge of everyone's rows: what anybody would take that no row has told otherwise
THRESHOLDS = [step / 50 for step in range(1, 50)]  # that a label's score is compared with


@dataclass(frozen=True, eq=False)
class NumberRows:
    """One client's rows."""

    features: Tensor  # (n, l)
    targets: Tensor  # (n, t), float64
    groups: Tensor | None = None
    weights: Tensor | None = None  # (n,), float64, above 0

    def weighed(self, of_rows: Tensor) -> Tensor:
        """(n, any) times the root of each row's weight."""
        return of_rows if self.weights is None else self.weights.sqrt()[:, None] * of_rows

    @cached_property
    def leaving(self) -> Leaving:
        """Which rows are left out together."""
        return leaving(self.features, alike(self.targets), self.groups)

    @cached_property
    def key(self) -> int:
        """Of what is drawn for these rows in `shares`: whoever has the rows can draw it again, in any order."""
        rows = self.features.detach().double().cpu().contiguous().numpy()
        return int.from_bytes(hashlib.sha256(rows.tobytes()).digest()[:16], "little")


def evened(rows: NumberRows) -> NumberRows:
    """The rows with the mean weight of each row's copies, so that it does not matter which of them is judged."""
    if rows.weights is None or not bool(rows.leaving.copies.any()):
        return rows
    own = torch.arange(len(rows.weights))
    places = torch.where(rows.leaving.copies, torch.from_numpy(first_equal(rows.features)), own)
    sums = torch.zeros_like(rows.weights).index_add_(0, places, rows.weights)
    return replace(rows, weights=(sums / torch.bincount(places, minlength=len(own)).clamp_min(1))[places])


@dataclass(frozen=True)
class Asked:
    """What is to be fitted; None: to be chosen."""

    kinds: Sequence[str] = MAPS
    width: int | None = None
    gamma: float | None = None
    weight: float | None = None
    beta: float | None = None
    balance: float | None = None
    labels: bool = False  # targets are 0 and 1

    @property
    def fixed(self) -> Fixed:
        """Weight, beta and balance that are given."""
        return self.weight, self.beta, self.balance

    @property
    def plain(self) -> bool:
        """Whether plain ridges are among the models: not if a setting is given that they do not have."""
        return "linear" in self.kinds and (self.gamma, self.weight, self.beta, self.balance) == (None,) * 4


@dataclass(frozen=True, eq=False)
class NumberMap:
    """Phi: a constant, the features as they are, landmarks, or both."""

    kind: str
    columns: Normaliser
    landmarks: tuple[Normaliser, LandmarkMap] | None

    def __call__(self, features: Tensor) -> Tensor:
        """The rows on the map, (n, d), with a constant column: the client's own level."""
        parts = [torch.ones(len(features), 1, dtype=torch.float64, device=features.device)]
        if self.kind != "landmarks":
            parts.append(self.columns(features.double()) / math.sqrt(features.shape[1]))
        if self.landmarks is not None:
            scaling, drawn = self.landmarks
            parts.append(drawn(scaling(features.double())))
        return torch.cat(parts, 1)

    def spread_out(self, weights: Tensor, n_features: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights (d, t) of this map as those of the constant, the standardised features and the landmarks."""
        level, rest = weights[0], weights[1:]
        linear = weights.new_zeros(n_features, weights.shape[1])
        if self.kind != "landmarks":
            linear, rest = rest[:n_features] / math.sqrt(n_features), rest[n_features:]
        return level, linear, rest if self.landmarks is not None else None


@dataclass(frozen=True, eq=False)
class OnMap:
    """A map with its primary and its models."""

    phi: NumberMap
    blocks: list[Block]
    primary: Primary
    choice: Choice

    def accounts(self, found: Tensor) -> list[dict[str, Any]]:
        of_map = {"map": self.phi.kind, "width": len(self.primary.weights), "gamma": self.primary.gamma}
        return [
            {**of_map, "weight": weight, "beta": beta, "balance": balance, "share": share}
            for (weight, beta, balance), share in zip(self.choice.settings, found.tolist(), strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Plain:
    """The plain ridge of everyone's rows, and what each client's own leaves of its rows."""

    pooled: PlainRidge
    left_out: list[Tensor]  # of each client, (2, n, t): pooled, own


@dataclass(frozen=True, eq=False)
class Blend:
    """The average of all models."""

    maps: list[OnMap]
    plain: Plain | None
    scale: Scale  # of the targets
    shares: Tensor  # (models,), everyone's
    own: list[Tensor]  # of each client: everyone's, or one that goes alone
    shift: Tensor  # (t,), added to the scores
    account: dict[str, Any]
    anybody: Tensor  # shares of the maps' primaries, and of the pooled plain ridge

    def model(self, rows: NumberRows, own: Tensor) -> AdditiveModel:
        """The average of one client, with these shares of the models."""
        parts, place = [], 0
        for one in self.maps:
            found = own[place : place + len(one.choice.settings)].tolist()
            place += len(found)
            if any(found):
                block = _block(one.phi, self._scaled(rows))
                fits = zip(found, one.choice.settings, strict=True)
                summed = sum(share * fit_client(block, one.primary, setting) for share, setting in fits if share)
                parts.append((one.phi, torch.as_tensor(summed)))
        plain = []
        if self.plain is not None:
            pooled, alone = own[place:].tolist()
            plain += [(pooled, self.plain.pooled)] if pooled else []
            plain += [(alone, own_ridge(self._scaled(rows), self.plain.pooled))] if alone else []
        return self._made(parts, plain)

    @property
    def shared(self) -> AdditiveModel:
        """For a client that has no rows."""
        found = self.anybody.tolist()
        parts = [(one.phi, share * one.primary.weights) for one, share in zip(self.maps, found, strict=False) if share]
        return self._made(parts, [(found[-1], self.plain.pooled)] if self.plain is not None and found[-1] else [])

    def _scaled(self, rows: NumberRows) -> NumberRows:
        return replace(rows, targets=self.scale.apply(rows.targets))

    def _made(
        self, parts: Sequence[tuple[NumberMap, Tensor]], plain: Sequence[tuple[float, PlainRidge]]
    ) -> AdditiveModel:
        """One model of what each map and each plain ridge adds, with targets in their own scale."""
        columns, landmarks = self.maps[0].phi.columns, self.maps[-1].phi.landmarks
        assert columns.mean is not None
        assert columns.std is not None
        level = torch.zeros_like(self.shift)
        linear = level.new_zeros(len(columns.mean), len(level))
        kernel = None if landmarks is None else level.new_zeros(landmarks[1].width, len(level))
        for phi, weights in parts:
            own = phi.spread_out(weights, len(columns.mean))
            level, linear = level + own[0], linear + own[1]
            kernel = kernel if own[2] is None or kernel is None else kernel + own[2]
        for share, ridge in plain:
            level = level + share * (ridge.intercept + columns.mean.to(level) @ ridge.weights)
            linear = linear + share * columns.std.to(level)[:, None] * ridge.weights
        std = self.scale.std.to(level)
        level = level * std + self.scale.mean.to(level) + self.shift
        if landmarks is None or kernel is None or not bool(kernel.any()):
            return AdditiveModel(level, linear * std, columns)
        return AdditiveModel(level, linear * std, columns, landmarks[1], landmarks[0], landmarks[1].fold(kernel * std))


def fit_numbers(clients: Sequence[NumberRows], asked: Asked, seed: int) -> Blend:
    """All models, and their shares from left-out rows."""
    clients = _all_weighted(clients)
    weights = None if clients[0].weights is None else torch.cat([_of(own) for own in clients])
    scale = Scale.of(torch.cat([own.targets for own in clients]), weights)
    scaled = [replace(own, targets=scale.apply(own.targets)) for own in clients]
    maps = [_on_map(scaled, kind, asked, seed) for kind in asked.kinds]
    plain = _plain(scaled) if asked.plain else None
    left = _left_out(maps, plain, len(clients))
    keys, settings = [own.key for own in clients], [(one.phi.kind, one.choice.settings) for one in maps]
    before = prior_of(settings, plain is not None)
    everyone = clean(shares([squared(own).cpu() for own in left], seed, before, keys)).to(left[0])
    alone = models_alone(settings, plain is not None).to(everyone.device)
    own = [own_shares(residuals, everyone, alone) for residuals in left]
    mixed = [torch.einsum("m,mnt->nt", *pair) for pair in zip(own, left, strict=True)]
    account = account_of(maps, plain, everyone) | {
        "alone": [k for k, found in enumerate(own) if found is not everyone],
        "left_out_r2": _r2(torch.cat(mixed), *(torch.cat(each) for each in zip(*map(_weighed, scaled), strict=True))),
    }
    shift = torch.zeros_like(scale.mean)
    if asked.labels:
        triples = zip(scaled, clients, mixed, strict=True)
        told = (_labelled_rows(scale, *each) for each in triples)
        thresholds = thresholds_of(reduce(add, told)).to(shift)
        shift, account["thresholds"] = 0.5 - thresholds, thresholds.tolist()
    return Blend(maps, plain, scale, everyone, own, shift, account, _anybody(maps, plain, keys, seed))


def _all_weighted(clients: Sequence[NumberRows]) -> Sequence[NumberRows]:
    """All with weights if one of them has some."""
    if all(own.weights is None for own in clients):
        return clients
    return [replace(own, weights=_of(own)) for own in clients]


def _of(rows: NumberRows) -> Tensor:
    """The weights, or ones."""
    return torch.ones_like(rows.targets[:, 0]) if rows.weights is None else rows.weights


def _labelled_rows(scale: Scale, own: NumberRows, rows: NumberRows, left: Tensor) -> Labelled:
    """Of one client's rows with scaled targets, as they are, and what the average leaves of them, times the roots."""
    if rows.weights is not None:
        left = left / rows.weights.sqrt()[:, None]
    return labelled(scale.undo(own.targets - left), rows.targets, rows.weights)


def _left_out(maps: Sequence[OnMap], plain: Plain | None, n_clients: int) -> list[Tensor]:
    """What each model leaves of each client's left-out rows, (models, n, t), times the roots of their weights."""
    left = [torch.cat([one.choice.residuals[k] for one in maps]) for k in range(n_clients)]
    return left if plain is None else [torch.cat(pair) for pair in zip(left, plain.left_out, strict=True)]


def models_alone(settings: Sequence[tuple[str, Sequence[Setting]]], plain: bool) -> Tensor:
    """Which models a client fits to its own rows alone, (models,), of those on each map."""
    found = [weight == 0 for _, tried in settings for weight, *_ in tried]
    return torch.tensor(found + [False, True] * plain)


def prior_of(settings: Sequence[tuple[str, Sequence[Setting]]], plain: bool) -> Tensor:
    """Simple models count for more before any row is seen: what few rows cannot tell apart is settled by it."""
    found = [SIMPLE if kind == "linear" and weight else 1.0 for kind, tried in settings for weight, *_ in tried]
    return torch.tensor(found + [POOLED, 1.0] * plain)


def _anybody(maps: Sequence[OnMap], plain: Plain | None, keys: Sequence[int], seed: int) -> Tensor:
    """Shares of the shared models, for a client that has no rows."""
    errors = []
    for k in range(len(keys)):
        own = [squared(one.choice.primary[k]) for one in maps]
        own += [] if plain is None else [squared(plain.left_out[k][0])]
        errors.append(torch.stack(own).cpu())
    return clean(shares(errors, seed, keys=keys)).to(maps[0].primary.weights)


def account_of(maps: Sequence[OnMap], plain: Plain | None, everyone: Tensor) -> dict[str, Any]:
    """Every model with its share; first of all the one with the largest."""
    sizes = [len(one.choice.settings) for one in maps] + ([] if plain is None else [2])
    found = torch.split(everyone, sizes)
    models = [model for one, share in zip(maps, found, strict=False) for model in one.accounts(share)]
    if plain is not None:
        width, ridge = len(plain.pooled.weights) + 1, plain.pooled.ridge
        models += [
            {"map": f"plain, {whose}", "width": width, "gamma": ridge, "weight": weight, "share": share}
            for (whose, weight), share in zip((("pooled", 1.0), ("alone", 0.0)), found[-1].tolist(), strict=True)
        ]
    return {**max(models, key=lambda model: float(model["share"])), "models": models}


@dataclass(frozen=True, eq=False)
class Labelled:
    """How many left-out rows are above each threshold, and how many of these have the label; it adds up over clients.

    Thresholds are in the order of `_tried_thresholds`. Rows with weights count as these, in float64.
    """

    given: Tensor  # (t, thresholds), int64
    right: Tensor  # (t, thresholds), int64
    held: Tensor  # (t,), int64: rows that have the label

    def __add__(self, other: Labelled) -> Labelled:
        return Labelled(self.given + other.given, self.right + other.right, self.held + other.held)


def _tried_thresholds() -> Tensor:
    """Those nearest to one half first."""
    return torch.tensor(sorted(THRESHOLDS, key=lambda each: abs(each - 0.5)), dtype=torch.float64)


def labelled(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> Labelled:
    """Of one client's left-out scores (n, t), NaN for rows that cannot be judged, labels, and weights (n,)."""
    judged = ~scores.isnan().any(1)
    scores, held = scores[judged].cpu(), labels[judged].cpu() > 0.5
    given = scores[:, :, None] > _tried_thresholds()  # (n, t, thresholds)
    found = given, given & held[:, :, None], held
    if weights is None:
        return Labelled(*(each.sum(0) for each in found))
    return Labelled(*(torch.einsum("n,n...->...", weights[judged].cpu(), each.double()) for each in found))


def thresholds_of(told: Labelled) -> Tensor:
    """For each label the threshold with the highest F1 of left-out rows, nearest to one half; 0.5 if nobody has it."""
    tried = _tried_thresholds()
    either = told.given + told.held[:, None]
    f1 = 2 * told.right / torch.where(either > 0, either, 1)
    best = tried[f1.argmax(1)]
    return torch.where(told.held > 0, best, torch.full_like(best, 0.5))


def clean(found: Tensor) -> Tensor:
    """Without shares that cost time and change nothing."""
    kept = torch.where(found < LEAST_SHARE, 0.0, found)
    return kept / kept.sum()


def own_shares(left: Tensor, everyone: Tensor, alone: Tensor) -> Tensor:
    """Of one client: everyone's, or going alone if its own rows are clearly better off."""
    if not alone.any() or alone.all():
        return everyone
    errors, mixed = squared(left), squared(torch.einsum("m,mnt->nt", everyone, left))
    sums = torch.where(alone, errors.nansum(1), math.inf)
    best = int(sums.argmin())
    if not clearly_less(errors[best], mixed, CLEARLY):
        return everyone
    return torch.nn.functional.one_hot(torch.tensor(best), len(everyone)).to(everyone)


def _weighed(rows: NumberRows) -> tuple[Tensor, Tensor]:
    """Targets (n, t) and ones (n, 1), times the roots of the weights."""
    return rows.weighed(rows.targets), rows.weighed(torch.ones_like(rows.targets[:, :1]))


def _r2(left: Tensor, targets: Tensor, roots: Tensor) -> float:
    """Of the rows that are judged, about their own mean: copies would move it away from the others."""
    judged = ~left.isnan().any(1)
    targets, roots = targets[judged], roots[judged]
    mean = (roots * targets).sum(0) / roots.square().sum()
    energy = float((targets - roots * mean).square().sum())
    return 1 - float(left[judged].square().sum()) / energy if energy else math.nan


def _plain(clients: Sequence[NumberRows]) -> Plain:
    """The plain ridges, and what they leave of left-out rows."""
    rows, targets = (torch.cat([getattr(own, each) for own in clients]) for each in ("features", "targets"))
    groups = _joined([own.leaving.groups for own in clients], [*map(_size, clients)])
    weights = None if clients[0].weights is None else torch.cat([_of(own) for own in clients])
    pooled = plain_ridge(rows, targets, groups, weights=weights)
    of_pooled = torch.split(pooled.left_out, [*map(_size, clients)])
    left = []
    for each, shared in zip(clients, of_pooled, strict=True):
        ridge = own_ridge(each, None)
        alone = shared if ridge is None else ridge.left_out
        left.append(torch.stack([each.weighed(shared), each.weighed(alone)]))
    return Plain(pooled, left)


def _size(rows: NumberRows) -> int:
    return len(rows.features)


def own_ridge(rows: NumberRows, otherwise: PlainRidge | None) -> Any:
    """A client's own plain ridge; with too few rows ``otherwise``."""
    if _size(rows) < FEW:
        return otherwise
    return plain_ridge(rows.features, rows.targets, rows.leaving.groups, weights=rows.weights)


def _joined(groups: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """The groups of all clients, told apart; None if every row leaves alone."""
    if all(own is None for own in groups):
        return None
    parts, n = [], 0
    for own, size in zip(groups, sizes, strict=True):
        codes = np.arange(size) if own is None else np.unique(own.cpu().numpy(), return_inverse=True)[1].reshape(-1)
        parts.append(torch.from_numpy(n + codes.astype(np.int64)))
        n += size
    return torch.cat(parts)


def _block(phi: NumberMap, rows: NumberRows) -> Block:
    return Block(rows.weighed(phi(rows.features)), rows.weighed(rows.targets), *rows.leaving)


def _on_map(clients: Sequence[NumberRows], kind: str, asked: Asked, seed: int) -> OnMap:
    """A map, the primary on the sums of all clients, and the settings."""
    phi = _mapped(clients, kind, asked.width, seed)
    blocks = [_block(phi, own) for own in clients]
    summed = total(
        number_statistics(b.phi, b.targets, int(own.leaving.copies.sum())) for b, own in _with(blocks, clients)
    )
    used = 1.0 if asked.gamma is None and summed.n_samples < 2 else asked.gamma
    primary = solve(summed, used)
    return OnMap(phi, blocks, primary, choose(blocks, primary, asked.fixed))


def _with(blocks: Sequence[Block], clients: Sequence[NumberRows]) -> Any:
    return zip(blocks, clients, strict=True)


def _mapped(clients: Sequence[NumberRows], kind: str, width: int | None, seed: int) -> NumberMap:
    features, weights = [own.features for own in clients], _relative(clients)
    check_features("standardise", features)
    both = list(zip(features, weights, strict=True))
    shared = reduce(add, (moments(rows, weights=own) for rows, own in both))
    columns = normaliser("standardise", shared)
    if kind == "linear":
        return NumberMap(kind, columns, None)
    scaling = normaliser("columns", shared)
    n, n_in = shared.n_samples, scaling.width(features[0].shape[1])
    full = n >= ROWS_FOR_EACH_COLUMN * n_in
    products = reduce(add, (spread(scaling(rows.double()), full=full, weights=own) for rows, own in both))
    d = landmark_number(n, features[0].shape[1]) if width is None else width
    return NumberMap(kind, columns, (scaling, landmark_map(draw_points(d, seed, products).to(features[0].device))))


def _relative(clients: Sequence[NumberRows]) -> list[Tensor | None]:
    """The weights of each client's rows, with a mean of one over all clients."""
    if clients[0].weights is None:
        return [None] * len(clients)
    mean = torch.cat([_of(own) for own in clients]).mean()
    return [_of(own) / mean for own in clients]


def landmark_number(n: int, n_features: int) -> int:
    """How many landmarks so many rows are given."""
    return min(MOST, width_for(n, n_features), max(n, 2))
