"""The refinement's hat matrix for every ridge at once, and the refinement itself.

H = Psi (Psi'Psi + beta I)^-1 Psi' = U diag(s / (s + beta)) U'      from one eigendecomposition
P = (Psi'Psi + beta I)^-1 Psi'E                                     from it too, or by Cholesky for one beta

Rows in single precision are decomposed in it too, which takes half the time, if every ridge to come stands clear of its
rounding. One ridge is then solved with the product that was decomposed, in double precision.

On a GPU a factorisation for each beta costs less than an eigendecomposition: H = I - beta (Psi Psi' + beta I)^-1.
Everything here takes one client's rows (n, d), or those of several clients (b, n, d) filled up with rows of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError, not_finite
from apfl.maths.ridge import gram
from apfl.maths.triangular import inverse

__all__ = ["CLEAR", "Hat", "HatBasis", "HatFactors", "Parts", "eigh", "fit_refinement", "hat_basis", "hat_of"]

_ENTRIES = 2**28  # of the systems that are factorised at once
CLEAR = 32  # times the rounding of all eigenvalues, or of the longest column: the least ridge and length to be trusted
Ridge = float | Tensor  # one beta, or one for each client (b,)


class Parts(NamedTuple):
    """What leaving rows out takes of H and of the primary's hat matrix C = V V', for several betas B."""

    leverage: Tensor  # h = diag H, (..., n, B)
    rest: Tensor  # 1 - h, without the cancellation, (..., n, B)
    fitted: Tensor  # H E, (..., n, B, c)
    moved: Tensor  # diag(H C), (..., n, B)


@dataclass(frozen=True, eq=False)
class HatBasis:
    """H for every beta at once: H = U diag(s / (s + beta)) U', from one eigendecomposition.

    Directions without rows have s = 0. Their columns of U are zero if n >= d, and orthonormal too if not.
    """

    basis: Tensor  # U (..., n, r)
    values: Tensor  # s (..., r)
    directions: Tensor | None = None  # W (..., d, r) with Psi W = U diag(sqrt s), if it was made from Psi'Psi
    single: bool = False  # whether Psi was in single precision: then so are products that only compare rows
    system: Tensor | None = None  # the smaller product of Psi with itself, if U is in single precision

    def shrink(self, beta: float) -> Tensor:
        """s / (s + beta), (..., r)."""
        return self.values / (self.values + beta)

    def keep(self, beta: float) -> Tensor:
        """1 - shrink, without the cancellation."""
        return beta / (self.values + beta)

    @property
    def nbytes(self) -> int:
        held = (self.basis, self.values, self.directions, self.system)
        return sum(each.numel() * each.element_size() for each in held if each is not None)

    def parts(self, betas: Sequence[float], residual: Tensor, whitened: Tensor) -> Parts:
        """For residuals E (..., n, c) and V (..., n, m), in the precision of Psi. Each product serves all betas.

        Without columns of V there is no primary, and nothing to multiply.
        """
        h, rest = self._leverages(tuple(betas))
        basis = self._narrow
        shrink = torch.stack([self.shrink(beta) for beta in betas], -1).to(basis)
        shrunk = shrink[..., None] * (basis.mT @ residual.to(basis))[..., None, :]  # (..., r, B, c)
        fitted = (basis @ shrunk.flatten(-2)).view(*h.shape, residual.shape[-1])
        if not whitened.shape[-1]:
            return Parts(h, rest, fitted, torch.zeros_like(h))
        # diag(H C) costs n r for each beta once C U is known.
        own = whitened.to(basis)
        return Parts(h, rest, fitted, (own @ (own.mT @ basis)).mul_(basis) @ shrink)

    def _leverages(self, betas: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """h and 1 - h, (..., n, B). They are asked for with each weight on the primary."""
        if betas not in self._known:
            shrink, keep = (torch.stack([of(beta) for beta in betas], -1) for of in (self.shrink, self.keep))
            squares = self._narrow.square() if self.system is not None else self.basis.double().square()
            h = squares @ shrink.to(squares)
            if self.system is None:
                # 1 - h as a sum of positive terms: subtracting h from 1 cancels at small beta.
                rest = squares @ keep + (1 - squares.sum(-1)).clamp_min(0)[..., None]
            else:  # columns of small eigenvalues are rounded coarsely, and have little part in h alone
                rest = (1 - h).maximum(keep.amin(-2, keepdim=True).to(h))
            self._known[betas] = h.to(self._narrow), rest.to(self._narrow)
        return self._known[betas]

    @cached_property
    def _known(self) -> dict[tuple[float, ...], tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def _narrow(self) -> Tensor:
        """U in the precision of Psi. Products with it differ from those in double precision by less than Psi does."""
        return self.basis.float() if self.single else self.basis

    def fit(self, psi: Tensor, residual: Tensor, beta: Ridge) -> Tensor:
        """`fit_refinement` of the rows that this was made from, without a second factorisation."""
        residual = residual.to(torch.float64)
        if self.system is not None:
            return _fit(psi, self.system.clone(), residual, beta)
        shifted = (self.values + _column(beta))[..., None]
        if self.directions is None:
            return _from_dual(psi, self.basis @ ((self.basis.mT @ residual) / shifted))
        # P = W diag(1 / (s + beta)) W'Psi'E: also directions whose s is below rounding have a part in it.
        return self.directions @ ((self.directions.mT @ (psi.to(torch.float64).mT @ residual)) / shifted)


@dataclass(frozen=True, eq=False)
class HatFactors:
    """H for one beta after another, each by a Cholesky factorisation of Psi Psi' + beta I."""

    system: Tensor  # Psi Psi' (..., n, n)

    @property
    def nbytes(self) -> int:
        return self.system.numel() * self.system.element_size()

    def parts(self, betas: Sequence[float], residual: Tensor, whitened: Tensor) -> Parts:
        """As `HatBasis.parts`, from the inverse M of Psi Psi' + beta I: H = I - beta M."""
        c, own = residual.shape[-1], whitened.square().sum(-1)
        right = torch.cat([residual, whitened], -1)
        made: list[tuple[Tensor, Tensor, Tensor]] = []
        for some in torch.split(torch.tensor(betas, dtype=torch.float64), max(1, _ENTRIES // self.system.numel())):
            each = some.to(self.system.device).view(-1, *[1] * (self.system.ndim - 2))
            lower, beta = self._inverse_factor(each), each[..., None]  # M = lower' lower, for all of these at once
            solved = lower.mT @ (lower @ right)
            fitted = residual - beta[..., None] * solved[..., :c]
            moved = own - beta * (solved[..., c:] * whitened).sum(-1)
            made.append((beta * lower.square().sum(-2), fitted, moved))
        rest, fitted, moved = (torch.cat(each) for each in zip(*made, strict=True))
        rest = rest.movedim(0, -1)
        return Parts(1 - rest, rest, fitted.movedim(0, -2), moved.movedim(0, -1))

    def fit(self, psi: Tensor, residual: Tensor, beta: Ridge) -> Tensor:
        """`fit_refinement` of the rows that this was made from."""
        lower = self._inverse_factor(beta)
        return _from_dual(psi, lower.mT @ (lower @ residual.to(torch.float64)))

    def _inverse_factor(self, beta: Ridge) -> Tensor:
        """L^-1 with L L' = Psi Psi' + beta I."""
        ridge = beta[..., None, None] if isinstance(beta, Tensor) else beta
        identity = torch.eye(self.system.shape[-1], dtype=self.system.dtype, device=self.system.device)
        factor, failed = torch.linalg.cholesky_ex(self.system + ridge * identity)
        if bool(failed.any()):
            raise not_finite("the features")
        return inverse(factor)


Hat = HatBasis | HatFactors


def hat_of(psi: Tensor, least: float = 0.0) -> Hat:
    """The hat matrix of psi (..., n, d), in the form that is cheaper on its device, for ridges of ``least`` or more."""
    n, d = psi.shape[-2:]
    if psi.device.type == "cpu" or n > 2 * d:  # up to there, factorising n x n costs less than decomposing d x d
        return hat_basis(psi, least)
    return HatFactors((psi @ psi.mT).double())


def hat_basis(psi: Tensor, least: float = 0.0) -> HatBasis:
    """Of psi (..., n, d), from the n x n or the d x d product, whichever is smaller."""
    n, d = psi.shape[-2:]
    system = _gram(psi)
    if psi.device.type == "cpu" and psi.dtype == torch.float32 and _rounding(system) <= least:
        return _in_single(psi, system)
    values, vectors = eigh(system)
    real = values > n * d * torch.finfo(torch.float64).eps * values[..., -1:].clamp_min(0)
    values, single = torch.where(real, values, 0.0), psi.dtype == torch.float32
    if n < d:
        return HatBasis(vectors, values, single=single)
    # Of small eigenvalues few digits are right; columns divided by their roots would not quite have length 1.
    columns = psi.to(torch.float64) @ vectors * real[..., None, :]
    lengths = columns.norm(dim=-2)
    columns.div_(torch.where(real, lengths, 1.0)[..., None, :])
    return HatBasis(columns, lengths.square(), vectors, single)


def _rounding(system: Tensor) -> float:
    """More than eigenvalues in single precision may be wrong by: none is larger than the trace."""
    trace = system.diagonal(dim1=-2, dim2=-1).sum(-1).max()
    return CLEAR * torch.finfo(torch.float32).eps * float(trace)


def _in_single(psi: Tensor, system: Tensor) -> HatBasis:
    n, d = psi.shape[-2:]
    values, vectors = torch.linalg.eigh(system.float())
    if n < d:
        return HatBasis(vectors, values.clamp_min(0).double(), None, True, system)
    columns = psi @ vectors
    lengths = columns.norm(dim=-2)
    real = lengths > CLEAR * torch.finfo(torch.float32).eps * lengths.amax(-1, keepdim=True)
    columns.mul_((real / torch.where(real, lengths, 1.0))[..., None, :])
    return HatBasis(columns, (lengths * real).double().square(), None, True, system)


def _gram(psi: Tensor) -> Tensor:
    """The smaller product of psi with itself, float64: computed in the precision of psi, half of it for one client."""
    if len(psi.shape) == 2:
        return gram(psi)
    if len(psi) == 1:
        return gram(psi[0])[None]
    return (psi @ psi.mT if psi.shape[-2] < psi.shape[-1] else psi.mT @ psi).double()


def eigh(system: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; on a CPU numpy's, as right as torch's, a quarter faster, and side by side."""
    if system.device.type != "cpu":
        values, vectors = torch.linalg.eigh(system)
        return values, vectors
    try:
        found = np.linalg.eigh(system.numpy())
    except np.linalg.LinAlgError:
        raise not_finite("the features") from None
    return torch.from_numpy(found.eigenvalues), torch.from_numpy(found.eigenvectors)


def _column(beta: Ridge) -> Ridge:
    """One ridge for each client as (b, 1)."""
    return beta[..., None] if isinstance(beta, Tensor) else beta


def _from_dual(psi: Tensor, dual: Tensor) -> Tensor:
    """P = Psi'alpha, (..., d, c). Written as (alpha'Psi)', which is twice as fast if alpha is column-major."""
    return (dual.mT.to(psi) @ psi).mT.double().contiguous()


def fit_refinement(psi: Tensor, residual: Tensor, ridge: float) -> Tensor:
    """``P = argmin |residual - psi P|^2 + ridge |P|^2``, (d, c), in float64.

    Primal (d x d) or dual (n x n) by whichever is smaller; the answer is the same. The paper uses the primal form.

    >>> psi = torch.eye(2, dtype=torch.float64)
    >>> fit_refinement(psi, psi, ridge=3.0).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    if not ridge > 0:
        raise InputError(f"ridge {ridge} given for the refinement stream; it must be greater than 0")
    return _fit(psi, _gram(psi), residual.to(torch.float64), ridge)


def _fit(psi: Tensor, system: Tensor, residual: Tensor, ridge: Ridge) -> Tensor:
    """From the smaller product of psi with itself, which is overwritten."""
    if psi.shape[-2] < psi.shape[-1]:  # P = psi' (psi psi' + ridge I)^-1 residual
        return _from_dual(psi, _solve_lower(system, residual, ridge))
    return _solve_lower(system, psi.to(torch.float64).mT @ residual, ridge).contiguous()


def _solve_lower(system: Tensor, right: Tensor, ridge: Ridge) -> Tensor:
    system.diagonal(dim1=-2, dim2=-1).add_(_column(ridge))
    factor, failed = torch.linalg.cholesky_ex(system)
    solution = torch.cholesky_solve(right, factor)
    if bool(failed.any()) or not bool(torch.isfinite(solution).all()):
        if not bool(torch.isfinite(system).all()) or not bool(torch.isfinite(right).all()):
            raise not_finite("the features")
        least = float(torch.as_tensor(ridge).min())
        raise InputError(f"the refinement system with ridge {least:g} cannot be solved: use a larger ridge")
    return solution
