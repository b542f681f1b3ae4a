"""Everyone's sum with its maps: what a site needs to leave its rows out, and to fit its model.

Sums on the map of features and landmarks hold those on each alone: Phi'Phi and Phi'Y of some of its columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from apfl.data.targets import Scale
from apfl.federate.landmarks import Landmarks
from apfl.federate.terms import Terms
from apfl.maths.normalise import Normaliser
from apfl.maths.regression import (
    Block,
    Choice,
    NumberStatistics,
    Primary,
    Setting,
    likeliest,
    open_weights,
    primary_of,
    settings_of,
)
from apfl.maths.ridge_cv import CONSTANT, PlainRidge, PlainSystem, plain_system
from apfl.methods._numbers import MAPS, Asked, Blend, NumberMap, NumberRows, OnMap, Plain

__all__ = ["STAGES", "Chosen", "Shared", "asked_of", "gammas_of", "maps_of", "scale_of", "stages_of"]

STAGES = ("likelihoods", "errors", "thresholds")  # of what sites send once everyone's sum is published


def asked_of(terms: Terms) -> Asked:
    """What is fitted under these terms."""
    return terms.method.numbers(terms.target)


def stages_of(terms: Terms) -> tuple[str, ...]:
    """The stages of the choice: nothing is asked for that the terms state."""
    asked = asked_of(terms)
    first = STAGES[:1] if open_weights(asked.fixed) or asked.plain else ()
    return (*first, STAGES[1], *(STAGES[2:] if asked.labels else ()))


def scale_of(terms: Terms) -> Scale:
    """The agreed scale of the targets."""
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (terms.target_mean or (), terms.target_std or ()))
    return Scale(mean, std)


def maps_of(terms: Terms, landmarks: Landmarks) -> list[NumberMap]:
    """Phi of each kind; the last is the widest."""
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (terms.mean or (), terms.std or ()))
    columns, drawn = Normaliser("standardise", mean, std), (terms.normaliser(), landmarks.feature_map)
    return [NumberMap(kind, columns, None if kind == "linear" else drawn) for kind in MAPS]


def _places(kind: str, terms: Terms) -> Tensor:
    """The columns of the widest map that a map has."""
    n_features, width = terms.n_features or 0, terms.width
    ends = {"linear": (1, 1 + n_features), "landmarks": (1 + n_features, width), "both": (1, width)}
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(*ends[kind])])


def _on_map(stats: NumberStatistics, kind: str, terms: Terms) -> NumberStatistics:
    """Sums on the widest map as those on another."""
    at = _places(kind, terms)
    return NumberStatistics(
        stats.autocorrelation[at][:, at], stats.crosscorrelation[at], stats.class_counts, stats.n_samples,
        stats.target_energy, stats.n_copies,
    )  # fmt: skip


def gammas_of(stats: NumberStatistics, terms: Terms) -> list[float]:
    """The ridge of the primary on each map: as stated, or the likeliest."""
    stated = asked_of(terms).gamma
    return [likeliest(_on_map(stats, kind, terms)) if stated is None else stated for kind in MAPS]


@dataclass(frozen=True, eq=False)
class Chosen:
    """What the stages have chosen so far; None: not yet."""

    betas: tuple[dict[float, float], ...]  # of each map, by the weight on the primary, where it was open
    ridge: float | None = None  # of the plain ridge over everyone's rows, if there is one
    shares: tuple[float, ...] | None = None  # of the models
    anybody: tuple[float, ...] | None = None  # of those that are shared, for a site that has no rows
    thresholds: tuple[float, ...] | None = None  # of the labels


@dataclass(frozen=True, eq=False)
class Shared:
    """Everyone's sum on the widest map, and the ridges of the primaries."""

    terms: Terms
    maps: Sequence[NumberMap]
    stats: NumberStatistics
    gammas: Sequence[float]

    @cached_property
    def asked(self) -> Asked:
        """What is fitted."""
        return asked_of(self.terms)

    @cached_property
    def primaries(self) -> list[Primary]:
        """On each map."""
        pairs = zip(MAPS, self.gammas, strict=True)
        return [primary_of(_on_map(self.stats, kind, self.terms), gamma) for kind, gamma in pairs]

    @cached_property
    def plain(self) -> PlainSystem:
        """The plain ridge over everyone's rows, in standardised features."""
        stats, columns, n = _on_map(self.stats, "linear", self.terms), self.maps[0].columns, self.stats.n_samples
        assert columns.mean is not None
        assert columns.std is not None
        n_features = len(columns.mean)
        root, level, least = math.sqrt(n_features), stats.class_counts / n, CONSTANT * columns.mean.abs() / columns.std
        sums, products = root * stats.autocorrelation[0, 1:], n_features * stats.autocorrelation[1:, 1:]
        return plain_system(n, sums, products, level, root * stats.crosscorrelation[1:], least)

    def standardised(self, rows: NumberRows) -> Tensor:
        """The features that the plain system is about."""
        return self.maps[0].columns(rows.features.double())

    def settings(self, chosen: Chosen) -> list[tuple[str, list[Setting]]]:
        """The models on each map."""
        found = zip(MAPS, chosen.betas or ({},) * len(MAPS), strict=True)
        return [(kind, settings_of(self.asked.fixed, betas)) for kind, betas in found]

    def blocks(self, rows: NumberRows, seen: Tensor) -> list[Block]:
        """A client's rows on each map, with targets to scale."""
        phi, gone = self.maps[-1](rows.features), rows.leaving
        return [Block(phi[:, _places(kind, self.terms)], rows.targets, *gone, seen=seen) for kind in MAPS]

    def plain_ridge(self, ridge: float) -> PlainRidge:
        """The plain ridge over everyone's rows, of the features as they are."""
        fitted, columns = self.plain.fit(ridge, self.stats.class_counts), self.maps[0].columns
        assert columns.mean is not None
        assert columns.std is not None
        weights = fitted.weights / columns.std[:, None]
        return PlainRidge(weights, fitted.intercept - columns.mean @ weights, ridge, fitted.left_out)

    def blend(self, chosen: Chosen, account: Mapping[str, Any] | None = None) -> Blend:
        """The average that was chosen."""
        assert chosen.shares is not None
        assert chosen.anybody is not None
        on_maps = [
            OnMap(phi, [], primary, Choice(settings, [], []))
            for phi, primary, (_, settings) in zip(self.maps, self.primaries, self.settings(chosen), strict=True)
        ]
        scale = scale_of(self.terms)
        shift = torch.zeros_like(scale.mean)
        if chosen.thresholds is not None:
            shift = 0.5 - torch.tensor(chosen.thresholds, dtype=torch.float64)
        plain = None if chosen.ridge is None else Plain(self.plain_ridge(chosen.ridge), [])
        shares, anybody = (torch.tensor(each, dtype=torch.float64) for each in (chosen.shares, chosen.anybody))
        return Blend(on_maps, plain, scale, shares, [], shift, dict(account or {}), anybody)
