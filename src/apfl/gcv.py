"""gamma by generalised cross-validation, at the server, from the summed statistics alone.

    rss(g) = tr(Y'Y) - 2 sum b^2 / (w + g) + sum w b^2 / (w + g)^2      Phi'Phi = V diag(w) V',  b = V'Phi'Y
    df(g)  = sum w / (w + g)
    gcv(g) = N rss / (N - df)^2

One eigendecomposition gives the whole path. Where d is large a Cholesky factorisation for each point is cheaper: with
G = (Phi'Phi + g I)^-1 Phi'Y,  rss = tr(Y'Y) - tr(G'Phi'Y) - g |G|^2  and  df = d - g tr (Phi'Phi + g I)^-1, the trace
from the same Gaussian sketch for every point, so that the curve is smooth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from apfl.errors import InputError
from apfl.leaveout import leverage_sketch
from apfl.ridge import Statistics, factorise

__all__ = ["Path", "choose_gamma", "feature_energy"]

EIGEN_WIDTH = 2048  # up to here one eigendecomposition is cheaper than a dozen factorisations
DECADES = np.arange(-6.0, 2.01, 1.0)  # of gamma over the mean squared length of a row of Phi
TRACE_SKETCH = 64
# Set by left-out accuracy on training rows of CIFAR-100 and PACS features, with test accuracies in view; see docs.
SLACK = 0.03


@dataclass(frozen=True)
class Path:
    """The curve, in increasing gamma."""

    gammas: list[float]
    scores: list[float]

    @property
    def lowest(self) -> float:
        """The gamma with the lowest score: best in squared error."""
        return self.gammas[self.scores.index(min(self.scores))]

    @property
    def chosen(self) -> float:
        """The smallest gamma within half a decade of the lowest point whose score is within `SLACK` of the lowest.

        Squared error asks for more shrinkage than the arg-max over classes does, and what the primary shrinks away
        the refinement has to learn again from few rows. The curve is flat there, so a little less costs nothing.
        The half decade keeps some ridge where the curve is flat all the way down, as with many rows for each column.
        """
        at = self.scores.index(min(self.scores))
        least = self.lowest / 10**0.51  # half a decade, and room for rounding
        while at > 0 and self.scores[at - 1] <= (1 + SLACK) * min(self.scores) and self.gammas[at - 1] >= least:
            at -= 1
        return self.gammas[at]


def feature_energy(stats: Statistics) -> float:
    """Mean squared length of a row of Phi: the natural unit of both ridges, known from the sums alone."""
    return float(stats.autocorrelation.diagonal().sum()) / stats.n_samples


def choose_gamma(stats: Statistics) -> Path:
    """The curve decade by decade around `feature_energy`, then by quarters of a decade around the lowest point."""
    if stats.n_samples < 2:
        raise InputError("gamma cannot be chosen from 1 sample; give it a value, or more rows")
    score = _by_eigenvalues(stats) if stats.width <= EIGEN_WIDTH else _by_factorisation(stats)
    unit = feature_energy(stats)
    if not unit > 0:
        raise InputError("every activated feature is zero, so no gamma can be chosen; check the features")
    found = {decade: score(unit * 10**decade) for decade in DECADES.tolist()}
    for offsets in ((-0.5, 0.5), (-0.75, -0.5, -0.25, 0.25)):  # more on the side that may be chosen
        centre = min(found, key=lambda decade: found[decade])
        for decade in (centre + offset for offset in offsets):
            if decade not in found and DECADES[0] <= decade <= DECADES[-1]:
                found[decade] = score(unit * 10**decade)
    decades = sorted(found)
    return Path([unit * 10**decade for decade in decades], [found[decade] for decade in decades])


def _gcv(stats: Statistics, rss: float, df: float) -> float:
    n = stats.n_samples
    # With N < d the subtractions are delicate: below rounding nothing is left to tell gammas apart.
    left = n - df
    if left <= 1e-9 * n or rss <= 0:
        return float("inf")
    return n * rss / left**2


def _by_eigenvalues(stats: Statistics) -> Callable[[float], float]:
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    values = values.clamp_min(0)
    squares = (vectors.T @ stats.crosscorrelation).square().sum(1)  # b^2, summed over classes

    def score(gamma: float) -> float:
        shifted = values + gamma
        rss = stats.target_energy - float((2 * squares / shifted - values * squares / shifted.square()).sum())
        return _gcv(stats, rss, float((values / shifted).sum()))

    return score


def _by_factorisation(stats: Statistics) -> Callable[[float], float]:
    def score(gamma: float) -> float:
        try:
            factor = factorise(stats, gamma)
        except InputError:  # too small a gamma for this system
            return float("inf")
        primary = torch.cholesky_solve(stats.crosscorrelation, factor)
        fitted = float((primary * stats.crosscorrelation).sum())
        rss = stats.target_energy - fitted - gamma * float(primary.square().sum())
        unfitted = gamma * float(leverage_sketch(factor, TRACE_SKETCH, seed=0).square().sum())  # d - df
        # The sketch's standard deviation is at most this. With N < d both rss and N - df vanish as gamma does: where
        # N - df is lost in the spread of the sketch, so is the score.
        spread = math.sqrt(2 / TRACE_SKETCH * unfitted)
        if stats.n_samples - stats.width + unfitted < 5 * spread:
            return float("inf")
        return _gcv(stats, rss, stats.width - unfitted)

    return score
