"""gamma by generalised cross-validation, at the server, from the summed statistics alone.

    rss(g) = tr(Y'Y) - 2 sum b^2 / (w + g) + sum w b^2 / (w + g)^2      Phi'Phi = V diag(w) V',  b = V'Phi'Y
    df(g)  = sum w / (w + g)
    gcv(g) = N rss / (N - df)^2

One eigendecomposition gives the whole path. If d is large, a band form (`banded`) does so for a fifth of the time, and
on a GPU a factorisation for each gamma: with G = (Phi'Phi + g I)^-1 Phi'Y,  rss = tr(Y'Y) - tr(G'Phi'Y) - g |G|^2  and
df = d - g tr (Phi'Phi + g I)^-1.

**What is admitted.** Near interpolation the criterion is 0 / 0, and it is wrong there: with N < d both rss and N - df
vanish with gamma, and one row given twice makes N - df stop at 1 while rss goes on to 0, so that the curve falls to
zero at its edge. So a point counts only if the fit uses at most half of the rows' degrees of freedom, df <= M / 2 (the
mean leverage of a row is then at most 1/2), and if rss and N - df stand clear of their rounding. Statistics that
travelled as integers may be indefinite: gamma must stand clear of that, too. A minimum behind an ascent, or at the
lower edge of what is admitted, is not trusted.

**Distinct rows.** Copies vouch for each other, so M, the number of distinct rows, takes the place of N. Clients say how
many of their rows repeat others of theirs. Rows that repeat those of another client only sums can show: the sum of the
clients' echoes (`leaveout.echo`), and, if the smallest gamma of the grid interpolates the targets (rss = 0), its df.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from apfl.errors import InputError
from apfl.maths.banded import Dense, Shifted, banded
from apfl.maths.hat import eigh
from apfl.maths.leaveout import n_repeated
from apfl.maths.ridge import Statistics

__all__ = ["Path", "choose_gamma", "feature_energy"]

EIGEN_WIDTH = 1024  # up to here one eigendecomposition is cheaper than a band form
DECADES = np.arange(-6.0, 2.01, 1.0)  # of gamma over the mean squared length of a row of Phi
HIGHEST = 12.0  # decades to go on to while sums are indefinite: integers are coarse if one client claims many rows
MOST_FITTED = 0.5  # df / N of a point that is admitted
# Of rss over tr(Y'Y). Rounding is 1e-13 by eigenvalues and 1e-10 by a band form with df <= N / 2 (condition 1e6).
LEAST_RESIDUAL = 1e-9
CLEAR = 10.0  # times the size of the lowest eigenvalue, if it is negative, that gamma must pass
INTERPOLATES = 1e-6  # rss over tr(Y'Y) below which the targets are interpolated
ASCENT = 0.25  # behind a point that lies this much above the lowest so far, no minimum is trusted
# Set by left-out accuracy on training rows of CIFAR-100 and PACS features, with test accuracies in view; see docs.
SLACK = 0.03


@dataclass(frozen=True)
class Path:
    """The curve, in increasing gamma. A point that is not admitted scores infinity."""

    gammas: list[float]
    scores: list[float]
    distinct_rows: float  # as far as the sums show; else all

    @property
    def lowest(self) -> float:
        """The gamma with the lowest score that is trusted: best in squared error."""
        return self.gammas[self._lowest]

    @property
    def _trusted(self) -> list[int]:
        """The places of admitted points, from the largest gamma down to the first clear ascent."""
        places: list[int] = []
        for at in range(len(self.gammas) - 1, -1, -1):
            if places and self.scores[at] > (1 + ASCENT) * min(self.scores[i] for i in places):
                break
            if math.isfinite(self.scores[at]):
                places.append(at)
        return places or [len(self.gammas) - 1]

    @property
    def _lowest(self) -> int:
        return min(self._trusted, key=lambda at: self.scores[at])

    @property
    def chosen(self) -> float:
        """The smallest gamma within half a decade of the lowest point whose score is within `SLACK` of the lowest.

        Squared error asks for more shrinkage than the arg-max over classes does, and what the primary shrinks away
        the refinement has to learn again from few rows. The curve is flat there, so a little less costs nothing.
        The half decade keeps some ridge if the curve is flat all the way down, as with many rows for each column.
        If nothing smaller than the lowest point is trusted, no ascent bears it out: then the *largest* gamma within
        `SLACK`.
        """
        trusted, at = self._trusted, self._lowest
        near = [i for i in trusted if self.scores[i] <= (1 + SLACK) * self.scores[at]]
        if at == min(trusted) and len(trusted) > 1:
            return self.gammas[max(near)]
        least = self.lowest / 10**0.51  # half a decade, and room for rounding
        while at - 1 in near and self.gammas[at - 1] >= least:
            at -= 1
        return self.gammas[at]


def feature_energy(stats: Statistics) -> float:
    """Mean squared length of a row of Phi: the natural unit of both ridges, known from the sums alone."""
    return float(stats.autocorrelation.diagonal().sum()) / stats.weight


def choose_gamma(stats: Statistics) -> Path:
    """The curve decade by decade around `feature_energy`, then by quarters of a decade around the lowest point."""
    if stats.n_samples < 2:
        raise InputError("gamma cannot be chosen from 1 sample; give it a value, or more rows")
    on_gpu = stats.autocorrelation.device.type != "cpu"
    fit = _by_shifts(stats) if on_gpu or stats.width > EIGEN_WIDTH else _by_eigenvalues(stats)
    unit = feature_energy(stats)
    if not unit > 0:
        raise InputError("every activated feature is zero, so no gamma can be chosen; check the features")
    first = fit([unit * 10**decade for decade in DECADES.tolist()])
    distinct = _distinct_rows(stats, first[0])

    def scored(fits: Sequence[_Fit | None]) -> list[float]:
        return [_gcv(distinct, stats.target_energy, each) for each in fits]

    scores = dict(zip(DECADES.tolist(), scored(first), strict=True))
    highest, top = first[-1:], float(DECADES[-1])
    while highest[0] is None and top < HIGHEST:
        top += 1
        highest = fit([unit * 10**top])
        scores |= zip([top], scored(highest), strict=True)

    def path() -> Path:
        decades = sorted(scores)
        return Path([unit * 10**decade for decade in decades], [scores[decade] for decade in decades], distinct)

    for offsets in ((-0.5, 0.5), (-0.75, -0.5, -0.25, 0.25)):  # more on the side that may be chosen
        centre = sorted(scores)[path()._lowest]
        near = [centre + offset for offset in offsets]
        new = [decade for decade in near if decade not in scores and DECADES[0] <= decade <= DECADES[-1]]
        scores |= zip(new, scored(fit([unit * 10**decade for decade in new])), strict=True)
    return path()


@dataclass(frozen=True)
class _Fit:
    """One point: residual sum of squares, and degrees of freedom."""

    rss: float
    df: float


def _distinct_rows(stats: Statistics, smallest: _Fit | None) -> float:
    """M: the rows that clients do not count as copies, or fewer if the fit with the smallest gamma shows it."""
    n: float = stats.n_samples - stats.n_copies
    n -= 0.0 if stats.echo is None else n_repeated(stats.echo)
    if smallest is None or smallest.rss > INTERPOLATES * stats.target_energy:
        return n
    return min(smallest.df, n)


def _gcv(n: float, energy: float, fit: _Fit | None) -> float:
    """The score of a point, infinity if it is not admitted."""
    if fit is None or not fit.df < n:
        return math.inf
    if not fit.df <= MOST_FITTED * n or not fit.rss > LEAST_RESIDUAL * energy:
        return math.inf
    return n * fit.rss / (n - fit.df) ** 2


Fits = Callable[[Sequence[float]], Sequence[_Fit | None]]  # of several gammas, in increasing order


def _by_eigenvalues(stats: Statistics) -> Fits:
    values, vectors = eigh(stats.autocorrelation)
    indefinite = -float(values[0])  # beyond rounding of sums only if the statistics travelled as integers
    values = values.clamp_min(0)
    squares = (vectors.T @ stats.crosscorrelation).square().sum(1)  # b^2, summed over classes

    def fit(gamma: float) -> _Fit | None:
        if gamma <= CLEAR * indefinite:
            return None
        shifted = values + gamma
        rss = stats.target_energy - float((2 * squares / shifted - values * squares / shifted.square()).sum())
        return _Fit(rss, float((values / shifted).sum()))

    return lambda gammas: [*map(fit, gammas)]


def _by_shifts(stats: Statistics) -> Fits:
    if not bool(torch.isfinite(stats.autocorrelation).all()):
        raise InputError("the statistics contain NaN or infinity; find the client that sent them and leave it out")
    form = banded if stats.autocorrelation.device.type == "cpu" else Dense
    system = form(stats.autocorrelation, stats.crosscorrelation)
    clear = math.inf  # the least shift that is known to leave no negative eigenvalue

    def fit(gamma: float) -> _Fit | None:
        nonlocal clear
        if gamma / CLEAR < clear:
            if not system.definite(gamma / CLEAR):
                return None
            clear = gamma / CLEAR
        return told(gamma, system.shifted(gamma))

    def told(gamma: float, found: Shifted | None) -> _Fit | None:
        if found is None:
            return None
        return _Fit(stats.target_energy - found.fitted - gamma * found.norm, stats.width - gamma * found.trace)

    if isinstance(system, Dense) and stats.width <= EIGEN_WIDTH:  # a GPU factorises many small systems at once
        return lambda gammas: [
            *map(told, gammas, system.shifted_each(gammas, [gamma / CLEAR for gamma in gammas]) if gammas else [])
        ]
    return lambda gammas: [*map(fit, gammas)]
