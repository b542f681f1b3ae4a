"""Plain ridge regression with an intercept, its ridge chosen by left-out rows: what a table is usually given first.

    w = argmin |y - b - Z w|^2 + a |w|^2        Z centred columns of unit variance; b is not penalised

and the residuals of rows (or whole groups of rows) g that are left out, without fitting anew,

    (I - H_gg)^-1 (y - H y)_g,        H = 1 1'/n + Z (Z'Z + a I)^-1 Z'

Weights of rows multiply their squares in all of it; the mean weight counts as one, so that the same grid of a serves.

For all clients' rows together the ridge needs Z'Z, and for each a of the grid one sum of squares of each client
(`PlainSystem`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CONSTANT", "RIDGES", "PlainRidge", "PlainSystem", "plain_ridge", "plain_system"]

RIDGES = tuple(10.0 ** (step / 2) for step in range(-6, 7))  # of columns of unit variance: 0.001 to 1000
CONSTANT = 1e-12  # of a column's mean: a standard deviation that is rounding
TINY = 1e-8  # of 1 - h: a row that decides its own fitted value cannot be judged


@dataclass(frozen=True, eq=False)
class PlainRidge:
    """A ridge on features as they are: x -> intercept + x weights."""

    weights: Tensor  # (l, t), of the features themselves
    intercept: Tensor  # (t,)
    ridge: float
    left_out: Tensor  # (n, t), in the targets' own units; NaN for rows that cannot be judged


def plain_ridge(
    rows: Tensor,
    targets: Tensor,
    groups: Tensor | None = None,
    ridges: Sequence[float] = RIDGES,
    weights: Tensor | None = None,
) -> PlainRidge:
    """The ridge of least left-out squared error of rows (n, l) and targets (n, t), which may have weights (n,).

    >>> rows = torch.linspace(0, 1, 20)[:, None]
    >>> found = plain_ridge(rows, 3 * rows + 1)
    >>> found.ridge, round(float(found.intercept), 2)
    (0.001, 1.0)
    """
    rows, targets = rows.double(), targets.double()
    mean, spread, level = _level_and_spread(rows, targets, weights)
    spread = torch.where(spread > CONSTANT * mean.abs(), spread, torch.inf)  # a constant column has no say
    root = torch.ones_like(rows[:, 0]) if weights is None else (weights.double() / weights.double().mean()).sqrt()
    left, size, right = torch.linalg.svd(root[:, None] * ((rows - mean) / spread), full_matrices=False)
    centred = root[:, None] * (targets - level)
    turned = left.T @ centred
    tried = []
    for ridge in ridges:
        residuals = _left_out(left, size.square() / (size.square() + ridge), turned, centred, groups, root)
        error = float(residuals.square().nansum())
        tried.append((error if bool(residuals.isfinite().any()) else math.inf, ridge, residuals))
    _, ridge, residuals = min(tried, key=lambda found: found[0])
    fitted = (right.T @ ((size / (size.square() + ridge))[:, None] * turned)) / spread[:, None]
    return PlainRidge(fitted, level - mean @ fitted, ridge, residuals / root[:, None])


def _level_and_spread(rows: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of the columns of features, (l,), and the mean of the targets, (t,)."""
    if weights is None:
        return rows.mean(0), rows.std(0, correction=0), targets.mean(0)
    parts = weights.double() / weights.double().sum()
    mean = parts @ rows
    return mean, (parts @ (rows - mean).square()).sqrt(), parts @ targets


@dataclass(frozen=True, eq=False)
class PlainSystem:
    """The rows of all clients as their sums: the ridge for each a, and what it leaves of one client's rows."""

    n_samples: int
    mean: Tensor  # (l,)
    level: Tensor  # (t,), the mean of the targets
    right: Tensor  # (l, r), x - mean -> the directions of Z, one unit long for all rows together
    turned: Tensor  # (r, t), Y in these directions
    squares: Tensor  # (r,), eigenvalues of Z'Z

    def fit(self, ridge: float, left_out: Tensor) -> PlainRidge:
        """The fit with this ridge."""
        weights = self.right @ (self._kept(ridge)[:, None] * self.turned)
        return PlainRidge(weights, self.level - self.mean @ weights, ridge, left_out)

    def left_out(
        self, rows: Tensor, targets: Tensor, groups: Tensor | None, seen: Tensor | None, ridge: float
    ) -> Tensor:
        """What this ridge leaves of each of a client's rows once it is left out, (n, t); NaN if it cannot be judged.

        Rows that are not ``seen`` are not in the sums: nothing changes without them.
        """
        left, kept = (rows.double() - self.mean) @ self.right, self._kept(ridge)
        residual = targets.double() - self.level - left @ (kept[:, None] * self.turned)
        inside = torch.ones(len(rows), dtype=torch.float64, device=rows.device) if seen is None else seen.double()
        return _divided(residual, left * inside[:, None], kept, inside / math.sqrt(self.n_samples), groups)

    def _kept(self, ridge: float) -> Tensor:
        return self.squares / (self.squares + ridge)


def plain_system(
    n: int, sums: Tensor, products: Tensor, level: Tensor, crossed: Tensor, least: Tensor | None = None
) -> PlainSystem:
    """From the sums (l,) and products X'X (l, l) of n rows, the mean of their targets (t,), and X'Y (l, t).

    Columns far from zero lose digits here: give sums of centred ones, and the ``least`` spread of one that is not
    constant.

    >>> rows = torch.linspace(-1, 1, 21).double()[:, None]
    >>> y = 3 * rows + 1
    >>> told = plain_system(21, rows.sum(0), rows.T @ rows, y.mean(0), rows.T @ y)
    >>> round(float(told.fit(0.001, y).intercept), 4)
    1.0
    """
    mean = sums / n
    centred = products - torch.outer(sums, mean)
    spread = (centred.diagonal() / n).clamp_min(0).sqrt()
    spread = torch.where(spread > (CONSTANT * mean.abs() if least is None else least), spread, torch.inf)
    squares, vectors = torch.linalg.eigh(centred / spread[:, None] / spread)
    real = squares > 1e-13 * squares[-1].clamp_min(math.ulp(0.0))
    squares, vectors = squares[real], vectors[:, real]
    right = vectors / spread[:, None] / squares.sqrt()
    return PlainSystem(n, mean, level, right, right.T @ (crossed - torch.outer(sums, level)), squares)


def _left_out(
    left: Tensor, kept: Tensor, turned: Tensor, centred: Tensor, groups: Tensor | None, root: Tensor
) -> Tensor:
    """Of all rows, times the root of their weights (n,): ``left`` (n, r) has columns of length one."""
    residual, n = centred - left @ (kept[:, None] * turned), len(left)
    return _divided(residual, left, kept, root / math.sqrt(n), groups)


def _divided(residual: Tensor, left: Tensor, kept: Tensor, constant: Tensor, groups: Tensor | None) -> Tensor:
    """(I - H_gg)^-1 of the residuals; ``constant`` (n,) is the direction of the intercept."""
    if groups is None:
        outside = 1 - constant.square() - left.square() @ kept
        return (residual / outside[:, None]).masked_fill((outside < TINY)[:, None], math.nan)
    found = torch.full_like(residual, math.nan)
    for group in torch.unique(groups):
        own = (groups == group).nonzero().flatten()
        system = torch.eye(len(own), dtype=left.dtype) - torch.outer(constant[own], constant[own])
        system -= (left[own] * kept) @ left[own].T
        if float(torch.linalg.eigvalsh(system)[0]) >= TINY:
            found[own] = torch.linalg.solve(system, residual[own])
    return found
