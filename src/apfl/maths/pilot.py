"""The pilot: which normalisation suits the features, by left-out hits on a narrow map of landmarks.

Every candidate gets a map of at most `WIDTH` landmarks, statistics, a primary and a table of left-out hits, as the full
map does later. At most about `MOST_ROWS` rows take part, the same share of every client's. The landmarks come from the
mean and the variance of each column under the candidate, which clients add up with their other moments. They are drawn
number by number from a seed that everybody knows, so they do not travel.

The rule of the moments (`Described.usual`) says what is usual for such features. Another candidate replaces it only
if it clearly has more hits (`hits.prefer`): of few rows, or of candidates that are level, none does.

This stands here once: the method in one process and the sites and the server of a federation all use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.hits import best_of, bounded, prefer, summed
from apfl.maths.integers import Encoding, Rounding
from apfl.maths.landmarks import SYNTHETIC, LandmarkMap, independent, rounded_landmarks
from apfl.maths.maps import normals
from apfl.maths.normalise import (
    WITH_CONSTANT,
    Moments,
    Normaliser,
    check_features,
    moments,
    normaliser,
    one_sided,
    resolve,
)
from apfl.maths.wire import publication_bytes, table_bytes

__all__ = [
    "BITS",
    "CANDIDATES",
    "MOST_ROWS",
    "WIDTH",
    "Candidate",
    "Described",
    "Judged",
    "PilotBytes",
    "candidate",
    "describe",
    "drawn_landmarks",
    "fits",
    "judge",
    "judge_sum",
    "n_points",
    "pilot_bytes",
    "pilot_points",
    "pilot_rows",
    "rows_of_pilot",
]

CANDIDATES = ("root", "row", "columns", "centred")
WIDTH = 512
BITS = 12  # of an entry of the pilot's statistics, if integers travel
MOST_ROWS = 10_000  # of all clients


@dataclass(frozen=True, eq=False)
class Described:
    """The moments of some clients' rows as they are, at the root and at one length; additive."""

    features: Moments
    root: Moments
    row: Moments

    def __add__(self, other: Described) -> Described:
        return Described(self.features + other.features, self.root + other.root, self.row + other.row)

    @property
    def normalisers(self) -> dict[str, Normaliser]:
        """Every candidate as it would be used."""
        return {how: normaliser(how, self.behind(how)) for how in CANDIDATES}

    def behind(self, how: str) -> Moments:
        """The moments that a normalisation is made from, if it needs any."""
        return self.root if how == "centred" else self.features

    @property
    def usual(self) -> str:
        """What the moments stand for: as `normalise.resolve`, with the side of zero judged from rows at one length.

        Large rows cannot hide the side there. Without a pilot those moments are not known.
        """
        how = resolve("auto", self.features)
        return how if how == "columns" else "root" if one_sided(self.row) else "row"


def describe(features: Tensor) -> Described:
    """One client's part of what all candidates are made from."""
    return Described(moments(features), moments(features, "root"), moments(features, "row"))


def fits(how: str, features: Sequence[Tensor]) -> bool:
    """Whether no row drowns the others under this normalisation."""
    try:
        check_features(how, features)
    except InputError:
        return False
    return True


# ------------------------------------------------------------------------------------------------- the narrow maps


@dataclass(frozen=True, eq=False)
class Candidate:
    """A normalisation, its narrow map, and D, the unit of each column of what travels."""

    scaling: Normaliser
    feature_map: LandmarkMap
    mean_squares: Tensor  # D (d,)

    def phi(self, features: Tensor) -> Tensor:
        """Rows on the narrow map."""
        return self.feature_map(self.scaling(features))

    def encoding(self, n_classes: int, most_rows: int) -> Encoding:
        """How statistics are integers, of clients with at most so many rows in the pilot."""
        return Encoding(Rounding.for_rows(BITS, most_rows), self.mean_squares, n_classes, self.feature_map.basis)


def pilot_points(scaling: Normaliser, shared: Described, n: int, seed: int) -> Tensor:
    """n points like rows under this normalisation, as far as the moments of single columns tell, (n, l), float64.

    They are made where the moments are. Only their directions matter. If a constant is appended, rows differ in length
    before they are brought to one.
    """
    of = {"row": shared.row, "columns": shared.features}.get(scaling.how, shared.root)
    noise = _noise(seed, n, len(of.sums), device=of.sums.device) * of.variance.sqrt()
    if scaling.how not in WITH_CONSTANT:
        return noise + of.mean
    assert scaling.std is not None
    return torch.cat([noise / scaling.std, noise.new_full((n, 1), math.sqrt(len(of.sums)))], 1)


_noise = lru_cache(2)(normals)  # the same for all candidates


def n_points(n_samples: int, widest: int = WIDTH) -> int:
    """How many landmarks are drawn for a candidate; with few rows as many as these."""
    return max(1, min(widest, WIDTH, MOST_ROWS, n_samples))


def drawn_landmarks(scaling: Normaliser, shared: Described, seed: int, widest: int = WIDTH) -> LandmarkMap:
    """The landmarks of one candidate, before those that others nearly determine are left out.

    They are the same on every machine. Which of them stand clear of the others (`independent`) is not: it follows from
    a factorisation, on whose last digit no two machines agree.
    """
    return rounded_landmarks(pilot_points(scaling, shared, n_points(shared.features.n_samples, widest), 2 * seed))


def candidate(
    scaling: Normaliser, shared: Described, seed: int, like: Tensor | None = None, kept: Tensor | None = None,
    widest: int = WIDTH,
) -> Candidate:  # fmt: skip
    """One candidate, on the device of ``like``; ``kept`` are the places of its landmarks, if they are known."""
    drawn = drawn_landmarks(scaling, shared, seed, widest)
    drawn = drawn if like is None else drawn.like(like)
    feature_map = drawn.subset(independent(drawn) if kept is None else kept.to(drawn.points.device))
    synthetic = pilot_points(scaling, shared, SYNTHETIC, 2 * seed + 1).to(feature_map.points.device)
    return Candidate(scaling, feature_map, feature_map.mean_squares(synthetic.float()))


# --------------------------------------------------------------------------------------------------- rows and hits


def rows_of_pilot(n: int, n_all: int) -> int:
    """How many of a client's n rows take part: all, or its share of `MOST_ROWS` of n_all.

    >>> rows_of_pilot(3, 10_000), rows_of_pilot(900, 45_000)
    (3, 200)
    """
    return n if n_all <= MOST_ROWS else math.ceil(n * MOST_ROWS / n_all)


def pilot_rows(n: int, n_all: int, seed: int) -> Tensor:
    """The places of a client's rows that take part, in their order.

    >>> pilot_rows(3, 10_000, 0).tolist(), len(pilot_rows(900, 45_000, 0))
    ([0, 1, 2], 200)
    """
    if n_all <= MOST_ROWS:
        return torch.arange(n)
    chosen = np.random.default_rng(seed).permutation(n)[: rows_of_pilot(n, n_all)]
    return torch.from_numpy(np.sort(chosen))


@dataclass(frozen=True)
class Judged:
    """The normalisation that was chosen, and why."""

    normalise: str
    usual: str
    n_rows: int  # that were left out, copies not counted
    hits: Mapping[str, float]  # of each candidate with its best setting

    def account(self, widths: Mapping[str, int], gammas: Mapping[str, float]) -> dict[str, Any]:
        """For the record."""
        return {
            "usual": self.usual, "rows": self.n_rows, "width": dict(widths),
            "hits": {how: round(hits, 2) for how, hits in self.hits.items()}, "gamma": dict(gammas),
        }  # fmt: skip


def judge(tried: Sequence[str], tables: Sequence[Tensor], n_rows: Sequence[int], usual: str) -> Judged:
    """The candidate that the clients' tables choose.

    A client's table is (candidates, betas, balances, taus), in the order of ``tried``; ``n_rows`` are the rows behind
    it. No client's candidates differ by more of its rows than at the median row's client (`hits.bounded`).

    >>> judge(["root", "row"], [torch.tensor([[[[90]]], [[[80]]]])] * 3, [100] * 3, "row").normalise
    'root'
    """
    return judge_sum(tried, summed(bounded(tables, n_rows)), sum(n_rows), usual)


def judge_sum(tried: Sequence[str], summed: Tensor, n_rows: int, usual: str) -> Judged:
    """The candidate that the sum of the bounded tables chooses, with so many rows behind it."""
    hits = {how: best_of(table)[1] for how, table in zip(tried, summed, strict=True)}
    return Judged(prefer(hits, n_rows, usual), usual, n_rows, hits)


# ---------------------------------------------------------------------------------------------------- what it weighs


@dataclass(frozen=True)
class PilotBytes:
    """What the pilot adds, without the statistics: of each client up, and to each client down."""

    up: int
    down: int


def pilot_bytes(
    widths: Sequence[int],
    n_features: int,
    n_classes: int,
    n_samples: int,
    shape: Sequence[int],
    sketch: int,
    dtype: torch.dtype,
) -> PilotBytes:
    """Two more sets of moments and a table of hits for each candidate go up.

    The sums of all three sets, for each candidate which landmarks stand clear of the others, and the primaries with one
    set of class counts come down. A table has this ``shape`` for each candidate.
    """
    up = 2 * 16 * n_features + len(widths) * table_bytes(shape)
    primaries = sum(publication_bytes(d, n_classes, sketch=sketch, dtype=dtype) for d in widths)
    counts = 8 * n_classes * (len(widths) - 1)
    return PilotBytes(up, 3 * 16 * n_features + len(widths) * n_points(n_samples) + primaries - counts)
