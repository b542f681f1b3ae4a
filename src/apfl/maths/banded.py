"""A symmetric matrix in band form, so that shifted systems S + gamma I cost almost nothing for each gamma.

    S = Q T Q'        T block tridiagonal with blocks of b columns, Q orthogonal (4/3 d^3, nearly all of it products)

tr (S + g I)^-1 = tr (T + g I)^-1, and |(S + g I)^-1 B| = |(T + g I)^-1 Q'B|. A factorisation of T + g I takes d b^2.
(Bischof, Lang and Sun, 2000: successive band reduction, its first stage.)

A GPU spends more time on starting the many small steps of the reduction than on factorising S + g I itself, so there
`dense` takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from apfl.maths.triangular import inverse

__all__ = ["Banded", "Dense", "Shifted", "banded"]

PANEL = 96  # columns of a block
TILE = 1024  # of the trailing matrix: only tiles on and below the diagonal are kept up to date
NEVER = 1e300  # 1 / tau of a reflection that is the identity


@dataclass(frozen=True)
class Shifted:
    """What generalised cross-validation needs to know of S + g I."""

    trace: float  # tr (S + g I)^-1
    fitted: float  # tr B'(S + g I)^-1 B
    norm: float  # |(S + g I)^-1 B|^2


@dataclass(frozen=True, eq=False)
class Banded:
    """T and Q'B."""

    diagonal: list[Tensor]  # blocks (b, b); the last may be smaller
    below: list[Tensor]  # the blocks under those but the last
    right: list[Tensor]  # Q'B, (b, c) each

    def shifted(self, shift: float) -> Shifted | None:
        """Of T + shift I; None if it is not positive definite."""
        made = self._factorise(shift)
        if made is None:
            return None
        factors, steps = made
        halves: list[Tensor] = []  # of (L + M)^-1 Q'B
        for at, (factor, right) in enumerate(zip(factors, self.right, strict=True)):
            left = right - steps[at - 1] @ halves[-1] if at else right
            halves.append(torch.linalg.solve_triangular(factor, left, upper=False))
        fitted = sum(float(half.square().sum()) for half in halves)
        return Shifted(_trace(factors, steps), fitted, _norm(factors, steps, halves))

    def definite(self, shift: float) -> bool:
        """Whether T + shift I is positive definite."""
        return self._factorise(shift) is not None

    def _factorise(self, shift: float) -> tuple[list[Tensor], list[Tensor]] | None:
        """T + shift I = (L + M)(L + M)', L_i on and M_i below the diagonal."""
        factors: list[Tensor] = []
        steps: list[Tensor] = []
        for at, block in enumerate(self.diagonal):
            system = block.clone()
            system.diagonal().add_(shift)
            if at:
                steps.append(torch.linalg.solve_triangular(factors[-1], self.below[at - 1].T, upper=False).T)
                system.addmm_(steps[-1], steps[-1].T, alpha=-1)
            factor, failed = torch.linalg.cholesky_ex(system)
            if int(failed) or not bool(torch.isfinite(factor.diagonal()).all()):
                return None
            factors.append(factor)
        return factors, steps


@dataclass(frozen=True, eq=False)
class Dense:
    """S and B as they are: one factorisation for each shift."""

    matrix: Tensor  # (d, d)
    right: Tensor  # (d, c)

    def shifted(self, shift: float) -> Shifted | None:
        """Of S + shift I; None if it is not positive definite."""
        factor = self._factorise(shift)
        if factor is None:
            return None
        return Shifted(*self._told(factor).tolist())

    def shifted_each(self, shifts: Sequence[float], definite: Sequence[float]) -> list[Shifted | None]:
        """`shifted` of small systems all at once; None too if S plus one of ``definite`` is not positive."""
        both = torch.tensor([*shifts, *definite], dtype=self.matrix.dtype, device=self.matrix.device)
        systems = self.matrix + both[:, None, None] * torch.eye(len(self.matrix), dtype=both.dtype, device=both.device)
        factors, failed = torch.linalg.cholesky_ex(systems)
        wrong = (failed != 0) | ~torch.isfinite(factors.diagonal(dim1=-2, dim2=-1)).all(-1)
        told = torch.cat([self._told(factors[: len(shifts)]), wrong.to(self.matrix).view(2, -1).T], 1).tolist()
        return [None if one or other else Shifted(*own) for *own, one, other in told]

    def _told(self, factor: Tensor) -> Tensor:
        """The three numbers of `Shifted`, (..., 3): (S + g I)^-1 = lower' lower."""
        lower = inverse(factor)
        half = lower @ self.right
        parts = lower, half, lower.mT @ half
        return torch.stack([part.square().sum((-2, -1)) for part in parts], -1)

    def definite(self, shift: float) -> bool:
        """Whether S + shift I is positive definite."""
        return self._factorise(shift) is not None

    def _factorise(self, shift: float) -> Tensor | None:
        system = self.matrix.clone()
        system.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(system)
        return None if int(failed) or not bool(torch.isfinite(factor.diagonal()).all()) else factor


def _trace(factors: list[Tensor], steps: list[Tensor]) -> float:
    """Of the inverse, from its diagonal blocks: X_i = (L_i L_i')^-1 + K_i'X_{i+1} K_i, K_i = M_i L_i^-1."""
    trace, inverse = 0.0, torch.empty(0)
    for at in range(len(factors) - 1, -1, -1):
        own = torch.cholesky_inverse(factors[at])
        if at < len(steps):
            carry = torch.linalg.solve_triangular(factors[at], steps[at], upper=False, left=False)
            own += carry.T @ inverse @ carry
        trace, inverse = trace + float(own.trace()), own
    return trace


def _norm(factors: list[Tensor], steps: list[Tensor], halves: list[Tensor]) -> float:
    """|(T + g I)^-1 Q'B|^2, by back substitution."""
    norm, solution = 0.0, torch.empty(0)
    for at in range(len(factors) - 1, -1, -1):
        right = halves[at] - steps[at].T @ solution if at < len(steps) else halves[at]
        solution = torch.linalg.solve_triangular(factors[at].T, right, upper=True)
        norm += float(solution.square().sum())
    return norm


def banded(matrix: Tensor, right: Tensor, panel: int = PANEL) -> Banded:
    """Reduce a symmetric matrix (d, d), of which a copy is made, and carry a right-hand side (d, c) along."""
    rest, right = matrix.clone(), right.clone()
    d = len(rest)
    for start in range(0, d - panel, panel):
        stop = start + panel
        reflect, r = _reflector(rest[stop:, start:stop])
        rest[stop:, start:stop] = 0
        rest[stop : stop + len(r), start:stop] = r
        v, t = reflect
        right[stop:] -= v @ (t.T @ (v.T @ right[stop:]))
        _two_sided(rest[stop:, stop:], v, t)
    cuts = [slice(start, min(start + panel, d)) for start in range(0, d, panel)]
    return Banded(
        [rest[cut, cut].tril() + rest[cut, cut].tril(-1).T for cut in cuts],
        [rest[low, high].clone() for high, low in pairwise(cuts)],
        [right[cut] for cut in cuts],
    )


def _reflector(columns: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """columns = (I - V T V') [R; 0]: V (m, k), T (k, k) and R, from a QR factorisation."""
    packed, tau = torch.geqrf(columns)
    k = len(tau)
    v = packed[:, :k].tril(-1)
    v.diagonal().fill_(1)
    # T^-1 is the upper triangle of V'V with 1 / tau on its diagonal.
    system = (v.T @ v).triu(1)
    system.diagonal().copy_(torch.where(tau == 0, NEVER, 1 / tau))
    t: Tensor = torch.linalg.solve_triangular(system, torch.eye(k).to(system), upper=True)
    return (v, t), packed[:k].triu()


def _two_sided(matrix: Tensor, v: Tensor, t: Tensor) -> None:
    """(I - V T V')' A (I - V T V') = A - V W' - W V' in place, tiles on and below the diagonal alone.

    W = Y - V (T'V'Y) / 2,  Y = A V T.
    """
    m = len(matrix)
    cuts = sorted({0, *range(m, 0, -TILE)})  # counted from the end, so that the next panel has the same tiles
    tiles = [slice(*ends) for ends in pairwise(cuts)]
    product = torch.zeros_like(v)
    for at, own in enumerate(tiles):
        tile = matrix[own, own]
        product[own] += tile @ v[own]
        if at:
            left = matrix[own, : own.start]
            product[own] += left @ v[: own.start]
            product[: own.start] += left.T @ v[own]
    y = product @ t
    w = y - v @ (t.T @ (v.T @ y)) / 2
    both, other = torch.cat([v, w], 1), torch.cat([w, v], 1)
    for own in tiles:
        matrix[own, : own.stop].addmm_(both[own], other[: own.stop].T, alpha=-1)
