"""Left-out scores of both streams, exactly and without refitting.

For one client, with the summed system Phi'Phi + gamma I = L L' of *all* clients:

    E = Y - Phi_k G                          residual of the primary
    C = Phi_k (L L')^-1 Phi_k' = V V'        the primary's hat matrix, its rows for this client; q = diag C
    H = Psi (Psi'Psi + beta I)^-1 Psi'       the refinement's hat matrix;                         h = diag H

Leaving the rows g (one row, or a group) out of both streams' statistics and refitting gives

    primary      Y_g - (I - C_gg)^-1 E_g
    refinement   (I - H_gg)^-1 [ (H E)_g - H_gg E_g + (H_g: C_:g - H_gg C_gg) (I - C_gg)^-1 E_g ]

The last term is there because without g the primary, and so the residual of the client's *other* rows, changes too.
Maps, normalisation and ridges are held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apfl.ridge import gram

__all__ = ["HatBasis", "hat_basis", "left_out", "whiten"]


@dataclass(frozen=True, eq=False)
class HatBasis:
    """H for every beta at once: H = U diag(s / (s + beta)) U', from one eigendecomposition."""

    basis: Tensor  # U (n, r), orthonormal columns
    values: Tensor  # s (r,)

    def shrink(self, beta: float) -> Tensor:
        """s / (s + beta), (r,)."""
        return self.values / (self.values + beta)

    def keep(self, beta: float) -> Tensor:
        """1 - shrink, without the cancellation."""
        return beta / (self.values + beta)


def hat_basis(psi: Tensor) -> HatBasis:
    """From the n x n or the d x d product of psi (n, d), whichever is smaller."""
    psi = psi.to(torch.float64)
    n, d = psi.shape
    values, vectors = torch.linalg.eigh(gram(psi))  # reads the lower triangle
    real = values > n * d * torch.finfo(torch.float64).eps * values[-1].clamp_min(0)
    values, vectors = values[real], vectors[:, real]
    return HatBasis(vectors if n < d else psi @ vectors / values.sqrt(), values)


def whiten(phi: Tensor, factor: Tensor) -> Tensor:
    """V = Phi_k L'^-1 (n, d), so that C = V V'; ``factor`` is L, of the summed system."""
    columns: Tensor = torch.linalg.solve_triangular(factor, phi.to(torch.float64).T, upper=False)
    return columns.T


def left_out(
    hat: HatBasis, beta: float, whitened: Tensor, residual: Tensor, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Left-out primary *residual* and left-out refinement, both (n, c), leaving out single rows or whole groups."""
    if groups is None:
        return _leave_rows(hat, beta, whitened, residual)
    primary, refinement = torch.empty_like(residual), torch.empty_like(residual)
    fitted = hat.basis @ (hat.shrink(beta)[:, None] * (hat.basis.T @ residual))  # H E
    across = hat.shrink(beta)[:, None] * (hat.basis.T @ whitened)  # diag(shrink) U'V, so H C = U across V'
    for group in torch.unique(groups):
        g = torch.nonzero(groups == group)[:, 0]
        basis, v = hat.basis[g], whitened[g]
        eye = torch.eye(len(g), dtype=residual.dtype, device=residual.device)
        own = (basis * hat.shrink(beta)) @ basis.T  # H_gg
        rest = (basis * hat.keep(beta)) @ basis.T + (eye - basis @ basis.T)  # I - H_gg
        primary[g] = torch.linalg.solve(eye - v @ v.T, residual[g])
        moved = (basis @ across @ v.T - own @ (v @ v.T)) @ primary[g]
        refinement[g] = torch.linalg.solve(rest, fitted[g] - own @ residual[g] + moved)
    return primary, refinement


def _leave_rows(hat: HatBasis, beta: float, whitened: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    squares = hat.basis.square()
    h = squares @ hat.shrink(beta)
    # 1 - h as a sum of positive terms: subtracting h from 1 cancels at small beta.
    rest = squares @ hat.keep(beta) + (1 - squares.sum(1)).clamp_min(0)
    q = whitened.square().sum(1)
    primary = residual / (1 - q)[:, None]
    fitted = hat.basis @ (hat.shrink(beta)[:, None] * (hat.basis.T @ residual))
    across = hat.shrink(beta)[:, None] * (hat.basis.T @ whitened)
    moved = ((hat.basis @ across) * whitened).sum(1) - h * q  # sum over j != i of H_ij C_ji
    return primary, (fitted - h[:, None] * residual + moved[:, None] * primary) / rest[:, None]
