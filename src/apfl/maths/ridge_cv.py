"""Plain ridge regression with an intercept, its ridge chosen by left-out rows: what a table is usually given first.

    w = argmin |y - b - Z w|^2 + a |w|^2        Z centred columns of unit variance; b is not penalised

and the residuals of rows (or whole groups of rows) g that are left out, without fitting anew,

    (I - H_gg)^-1 (y - H y)_g,        H = 1 1'/n + Z (Z'Z + a I)^-1 Z'

For all clients' rows together they need Z'Z, and for each a of the grid one sum of squares of each client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RIDGES", "PlainRidge", "plain_ridge"]

RIDGES = tuple(10.0 ** (step / 2) for step in range(-6, 7))  # of columns of unit variance: 0.001 to 1000
TINY = 1e-8  # of 1 - h: a row that decides its own fitted value cannot be judged


@dataclass(frozen=True, eq=False)
class PlainRidge:
    """A ridge on features as they are: x -> intercept + x weights."""

    weights: Tensor  # (l, t), of the features themselves
    intercept: Tensor  # (t,)
    ridge: float
    left_out: Tensor  # (n, t); NaN for rows that cannot be judged


def plain_ridge(
    rows: Tensor, targets: Tensor, groups: Tensor | None = None, ridges: Sequence[float] = RIDGES
) -> PlainRidge:
    """The ridge of least left-out squared error of rows (n, l) and targets (n, t).

    >>> rows = torch.linspace(0, 1, 20)[:, None]
    >>> found = plain_ridge(rows, 3 * rows + 1)
    >>> found.ridge, round(float(found.intercept), 2)
    (0.001, 1.0)
    """
    rows, targets = rows.double(), targets.double()
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    spread = torch.where(spread > 1e-12 * mean.abs(), spread, torch.inf)  # a constant column has no say
    level = targets.mean(0)
    left, size, right = torch.linalg.svd((rows - mean) / spread, full_matrices=False)
    turned = left.T @ (targets - level)
    tried = []
    for ridge in ridges:
        residuals = _left_out(left, size.square() / (size.square() + ridge), turned, targets - level, groups)
        error = float(residuals.square().nansum())
        tried.append((error if bool(residuals.isfinite().any()) else math.inf, ridge, residuals))
    _, ridge, residuals = min(tried, key=lambda found: found[0])
    weights = (right.T @ ((size / (size.square() + ridge))[:, None] * turned)) / spread[:, None]
    return PlainRidge(weights, level - mean @ weights, ridge, residuals)


def _left_out(left: Tensor, kept: Tensor, turned: Tensor, centred: Tensor, groups: Tensor | None) -> Tensor:
    residual, n = centred - left @ (kept[:, None] * turned), len(left)
    if groups is None:
        outside = 1 - 1 / n - left.square() @ kept
        return (residual / outside[:, None]).masked_fill((outside < TINY)[:, None], math.nan)
    found = torch.full_like(residual, math.nan)
    for group in torch.unique(groups):
        own = (groups == group).nonzero().flatten()
        system = torch.eye(len(own), dtype=left.dtype) - 1 / n - (left[own] * kept) @ left[own].T
        if float(torch.linalg.eigvalsh(system)[0]) >= TINY:
            found[own] = torch.linalg.solve(system, residual[own])
    return found
