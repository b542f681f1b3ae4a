"""The pilot: which normalisation suits the features, by left-out hits on a narrow map of landmarks.

Every candidate gets a map of at most `WIDTH` landmarks, statistics, a primary and a table of left-out hits, as the full
map does later. At most about `MOST_ROWS` rows take part, the same share of every client's. The landmarks come from the
mean and the variance of each column under the candidate, which clients add up with their other moments. They are drawn
number by number from a seed that everybody knows, so they do not travel.

The rule of the moments (`Described.usual`) says what is usual for such features. Another candidate replaces it only
if it clearly has more hits (`hits.prefer`): of few rows, or of candidates that are level, none does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apfl.maths.landmarks import LandmarkMap, landmark_map
from apfl.maths.maps import normals
from apfl.maths.normalise import WITH_CONSTANT, Moments, Normaliser, moments, normaliser, one_sided, resolve

__all__ = [
    "BITS",
    "CANDIDATES",
    "MOST_ROWS",
    "WIDTH",
    "Described",
    "describe",
    "pilot_map",
    "pilot_points",
    "pilot_rows",
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
        return {how: normaliser(how, self.root if how == "centred" else self.features) for how in CANDIDATES}

    @property
    def usual(self) -> str:
        """What the moments stand for: as `normalise.resolve`, with the side of zero judged from rows at one length.

        Large rows cannot hide the side there. Between machines without a pilot those moments are not known.
        """
        how = resolve("auto", self.features)
        return how if how == "columns" else "root" if one_sided(self.row) else "row"


def describe(features: Tensor) -> Described:
    """One client's part of what all candidates are made from."""
    return Described(moments(features), moments(features, "root"), moments(features, "row"))


def pilot_points(scaling: Normaliser, shared: Described, n: int, seed: int) -> Tensor:
    """n points like rows under this normalisation, as far as the moments of single columns tell, (n, l), float64.

    Only their directions matter. If a constant is appended, rows differ in length before they are brought to one.
    """
    of = {"row": shared.row, "columns": shared.features}.get(scaling.how, shared.root)
    noise = normals(seed, n, len(of.sums)) * of.variance.sqrt().cpu()
    if scaling.how not in WITH_CONSTANT:
        return noise + of.mean.cpu()
    assert scaling.std is not None
    constant = torch.full((n, 1), math.sqrt(len(of.sums)), dtype=torch.float64)
    return torch.cat([noise / scaling.std.cpu(), constant], 1)


def pilot_map(scaling: Normaliser, shared: Described, n_samples: int, seed: int) -> LandmarkMap:
    """The narrow map of one candidate; with few rows as many landmarks as these."""
    return landmark_map(pilot_points(scaling, shared, max(1, min(WIDTH, n_samples)), seed))


def pilot_rows(n: int, n_all: int, seed: int) -> Tensor:
    """The places of a client's rows that take part, in their order: all of n, or its share of `MOST_ROWS` of n_all.

    >>> pilot_rows(3, 10_000, 0).tolist(), len(pilot_rows(900, 45_000, 0))
    ([0, 1, 2], 200)
    """
    if n_all <= MOST_ROWS:
        return torch.arange(n)
    chosen = np.random.default_rng(seed).permutation(n)[: math.ceil(n * MOST_ROWS / n_all)]
    return torch.from_numpy(np.sort(chosen))
