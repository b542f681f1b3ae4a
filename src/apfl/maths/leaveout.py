"""Left-out scores of both streams, exactly and without refitting.

For one client, with the summed system Phi'Phi + gamma I = L L' of *all* clients:

    E = Y - Phi_k G                          residual of the primary
    C = Phi_k (L L')^-1 Phi_k' = V V'        the primary's hat matrix, its rows for this client; q = diag C
    H = Psi (Psi'Psi + beta I)^-1 Psi'       the refinement's hat matrix;                         h = diag H

Leaving the rows g (one row, or a group) out of both streams' statistics and refitting gives

    primary residual   E_g(-g) = (I - C_gg)^-1 E_g
    refinement         (I - H_gg)^-1 [ sum over j not in g of H_gj T_j(-g) ]

with T_j(-g), the target of row j once g has gone: its residual then, E_j + C_jg (I - C_gg)^-1 E_g.
Maps, normalisation and ridges are held fixed.

V is exact (`whiten`), or comes from a sketch that the server sends, d x m numbers instead of the factor's d^2 / 2.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from apfl.errors import InputError, not_finite
from apfl.maths.leaveout_groups import Groups
from apfl.maths.ridge import Statistics, gram, one_hot

__all__ = [
    "HatBasis",
    "Leaving",
    "LeftOut",
    "echo",
    "fit_refinement",
    "hat_basis",
    "leaving",
    "leverage_sketch",
    "n_repeated",
    "whiten",
    "with_copies",
]

MOST_LEVERAGE = 0.99  # a sketched q may come out at 1 or more
EXACT_MOST_LEVERAGE = 1 - 1e-10  # an exact one only by rounding
MOST_SKETCHED = 0.8  # with 128 columns, 1 - q is then known to half of itself
REPEATED = 0.02
ECHO = 2**14  # buckets: 1 to 4 % of rows that repeat another client's show, for up to 100,000 rows; fewer do no harm


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
    if n < d:
        return HatBasis(vectors, values)
    # Of small eigenvalues few digits are right; columns divided by their roots would not quite have length 1.
    columns = psi @ vectors
    return HatBasis(columns / columns.norm(dim=0), columns.square().sum(0))


def whiten(phi: Tensor, factor: Tensor) -> Tensor:
    """V = Phi_k L'^-1 (n, d), so that C = V V'; ``factor`` is L, of the summed system."""
    columns: Tensor = torch.linalg.solve_triangular(factor, phi.to(torch.float64).T, upper=False)
    return columns.T


def leverage_sketch(factor: Tensor, m: int, seed: int) -> Tensor:
    """Q = L'^-1 Omega / sqrt(m) (d, m): V = Phi_k Q has E[V V'] = C, each q with relative spread sqrt(2 / m)."""
    omega = np.random.default_rng(seed).standard_normal((len(factor), m)) / np.sqrt(m)
    sketch: Tensor = torch.linalg.solve_triangular(factor.T, torch.from_numpy(omega).to(factor), upper=True)
    return sketch


class Leaving(NamedTuple):
    """Which rows of a client are left out together, and which are copies of an earlier row."""

    groups: Tensor | None  # (n,); None if every row leaves alone
    copies: Tensor  # bool (n,)


def leaving(features: Tensor, labels: Tensor, groups: Tensor | None) -> Leaving:
    """Copies leave together, because they would vouch for each other, and so do given groups.

    Equal rows with equal labels are copies, unless the labels of equal rows differ in more than `REPEATED` of them:
    then they are repeated measurements, as in a table of few discrete columns, and each is evidence of its own.
    Groups that hold copies become one.

    >>> groups, copies = leaving(torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0]), None)
    >>> groups.tolist(), copies.tolist()
    ([0, 1, 0], [False, False, True])
    """
    places: dict[bytes, int] = {}
    first = np.array([places.setdefault(row, i) for i, row in enumerate(_as_bytes(features))])
    own, n = labels.cpu().numpy(), len(features)
    differs = own != own[first]
    repeated = int((np.bincount(first, minlength=n)[first] > 1).sum())
    if not repeated or differs.sum() > REPEATED * repeated:
        return Leaving(groups, torch.zeros(n, dtype=torch.bool, device=features.device))
    copies = torch.from_numpy((first < np.arange(n)) & ~differs).to(features.device)
    if groups is None:
        return Leaving(torch.from_numpy(first), copies)
    codes = np.unique(groups.cpu().numpy(), return_inverse=True)[1]
    # A graph of the rows (0 to n - 1) and the groups (from n on).
    edges = coo_array((np.ones(2 * n), (np.tile(np.arange(n), 2), np.concatenate([first, n + codes]))), (2 * n, 2 * n))
    return Leaving(torch.from_numpy(connected_components(edges, directed=False)[1][:n].astype(np.int64)), copies)


def with_copies(stats: Statistics, features: Tensor, copies: Tensor) -> Statistics:
    """A client's statistics with what they say about repeated rows."""
    return replace(stats, n_copies=int(copies.sum()), echo=echo(features))


def echo(features: Tensor) -> Tensor:
    """How many of a client's distinct rows a hash puts into each of `ECHO` buckets, (ECHO,), int64.

    Summed over clients: a row that stands at several fills one bucket only, so the share of empty buckets tells how
    many rows are distinct (linear counting; Whang et al., 1990).

    >>> rows = torch.arange(600.0).reshape(300, 2)
    >>> n_repeated(echo(rows)), 280 < n_repeated(echo(rows) + echo(rows)) < 320
    (0.0, True)
    """
    hashes = {hashlib.blake2b(row, digest_size=8).digest() for row in _as_bytes(features.double())}
    places = np.array([int.from_bytes(each) % ECHO for each in hashes], dtype=np.int64)
    return torch.from_numpy(np.bincount(places, minlength=ECHO))


def n_repeated(summed: Tensor) -> float:
    """How many rows repeat a row of another client, from the summed echoes; 0 if too few to tell, or too many rows."""
    total = int(summed.sum())
    load = total / ECHO
    empty = float((summed == 0).double().mean())
    if not empty or load > 6:
        return 0.0
    repeated = total + ECHO * math.log(empty)
    return repeated if repeated > 4 * math.sqrt(ECHO * (math.exp(load) - load - 1)) else 0.0


def _as_bytes(features: Tensor) -> list[bytes]:
    """Equal rows as equal bytes."""
    rows = np.ascontiguousarray((features + 0.0).cpu().numpy())  # + 0.0: a negative zero equals zero
    return [row.tobytes() for row in rows]


@dataclass(frozen=True, eq=False)
class LeftOut:
    """One client's rows, each (or each group) left out of both streams, for any beta.

    ``primary`` is the left-out residual of the primary stream; `refinement` the left-out refinement; both (n, c).
    """

    hat: HatBasis
    whitened: Tensor  # V (n, any)
    residual: Tensor  # E (n, c)
    groups: Tensor | None = None  # (n,); without them every row is a group of its own
    sketched: bool = False  # whether V comes from a sketch
    copies: Tensor | None = None  # bool (n,): copies of an earlier row

    @property
    def judged(self) -> Tensor:
        """Rows whose left-out score says something, bool (n,): no copies, and a leverage that is known well below 1."""
        sure = ~self.clipped_rows
        if self.sketched:  # 1 - q is known to q sqrt(2 / m) alone
            sure = sure & ((self._grouped.leverage if self._grouped else self._own_hat) <= MOST_SKETCHED)
        return sure if self.copies is None else sure & ~self.copies

    @property
    def _most(self) -> float:
        return MOST_LEVERAGE if self.sketched else EXACT_MOST_LEVERAGE

    @cached_property
    def leverage(self) -> Tensor:
        """q, (n,), below 1."""
        return self._own_hat.clamp_max(self._most)

    @cached_property
    def clipped_rows(self) -> Tensor:
        """Rows whose leverage had to be clipped, or an eigenvalue of their group's C_gg, bool (n,)."""
        return self._grouped.clipped_rows if self._grouped else self._own_hat > self._most

    @property
    def clipped(self) -> float:
        """The share of `clipped_rows` among all rows."""
        return float(self.clipped_rows.double().mean())

    def noise(self, labels: Tensor) -> float:
        """By how many hits of the primary alone a second dose of the sketch's noise in q would flatter or harm them."""
        if not self.sketched:
            return 0.0
        spread = math.sqrt(2 / self.whitened.shape[1])
        own = one_hot(labels, self.residual.shape[1]).to(self.residual)

        def right(dose: float) -> int:
            leverage = (self._own_hat * (1 + dose)).clamp_max(self._most)
            return int(((own - self.residual / (1 - leverage)[:, None]).argmax(1) == labels)[self.judged].sum())

        return (right(spread) + right(-spread)) / 2 - right(0.0)

    @cached_property
    def primary(self) -> Tensor:
        """Y minus the left-out score of the primary stream, (n, c)."""
        return self._grouped.primary if self._grouped else self.residual / (1 - self.leverage)[:, None]

    def refinement(self, beta: float) -> Tensor:
        """The left-out score of the refinement stream, (n, c)."""
        if beta not in self._refinements:
            self._refinements[beta] = self._leave_rows(beta) if self._grouped is None else self._leave_groups(beta)
        return self._refinements[beta]

    @cached_property
    def _refinements(self) -> dict[float, Tensor]:
        """By beta: they are asked for to count hits, and again for the scores themselves."""
        return {}

    def _leave_groups(self, beta: float) -> Tensor:
        assert self._grouped is not None
        return self._grouped.refinement(self.hat.shrink(beta), self.hat.keep(beta))

    def _leave_rows(self, beta: float) -> Tensor:
        basis, shrink = self.hat.basis, self.hat.shrink(beta)
        squares = basis.square()
        h = squares @ shrink
        # 1 - h as a sum of positive terms: subtracting h from 1 cancels at small beta.
        rest = squares @ self.hat.keep(beta) + (1 - squares.sum(1)).clamp_min(0)
        fitted = basis @ (shrink[:, None] * (basis.T @ self.residual)) - h[:, None] * self.residual
        moved = (basis * self._primary_hat_of_basis) @ shrink - h * self._own_hat  # sum over j != i of H_ij C_ji
        return (fitted + moved[:, None] * self.primary) / rest[:, None]

    @cached_property
    def _grouped(self) -> Groups | None:
        if self.groups is None:
            return None
        return Groups(self.groups, self.hat.basis, self.whitened, self.residual, self._most)

    @cached_property
    def _own_hat(self) -> Tensor:
        """q before clipping, (n,)."""
        return self.whitened.square().sum(1)

    @cached_property
    def _primary_hat_of_basis(self) -> Tensor:
        """C U, (n, r): with it the sum over j of H_ij C_ji costs n r for each beta."""
        return self.whitened @ (self.whitened.T @ self.hat.basis)


def fit_refinement(psi: Tensor, residual: Tensor, ridge: float) -> Tensor:
    """``P = argmin |residual - psi P|^2 + ridge |P|^2``, (d, c), in float64.

    Primal (d x d) or dual (n x n) by whichever is smaller; the answer is the same. The paper uses the primal form.

    >>> psi = torch.eye(2, dtype=torch.float64)
    >>> fit_refinement(psi, psi, ridge=3.0).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    psi, residual = psi.to(torch.float64), residual.to(torch.float64)
    n, d = psi.shape
    if not ridge > 0:
        raise InputError(f"ridge {ridge} given for the refinement stream; it must be greater than 0")
    if n < d:  # P = psi' (psi psi' + ridge I)^-1 residual
        # Written as (alpha' psi)' because LAPACK's alpha is column-major, for which this product is twice as fast.
        return (_solve_lower(gram(psi), residual, ridge).T @ psi).T.contiguous()
    return _solve_lower(gram(psi), psi.T @ residual, ridge).contiguous()


def _solve_lower(system: Tensor, right: Tensor, ridge: float) -> Tensor:
    system.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(system)
    solution = torch.cholesky_solve(right, factor)
    if int(failed) or not bool(torch.isfinite(solution).all()):
        if not bool(torch.isfinite(system.diagonal()).all()) or not bool(torch.isfinite(right).all()):
            raise not_finite("the features")
        raise InputError(f"the refinement system with ridge {ridge:g} cannot be solved: use a larger ridge")
    return solution
