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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from apfl.maths.hat import Hat, HatBasis, HatFactors, Parts, fit_refinement, hat_basis, hat_of
from apfl.maths.leaveout_groups import Groups
from apfl.maths.ridge import Statistics, one_hot

__all__ = [
    "HatBasis",
    "Leaving",
    "LeftOut",
    "echo",
    "first_equal",
    "fit_refinement",
    "hashed_copies",
    "hat_basis",
    "hat_of",
    "leaving",
    "leverage_sketch",
    "n_repeated",
    "row_hashes",
    "whiten",
    "with_copies",
]

MOST_LEVERAGE = 0.99  # a sketched q may come out at 1 or more
EXACT_MOST_LEVERAGE = 1 - 1e-10  # an exact one only by rounding
MOST_SKETCHED = 0.8  # with 128 columns, 1 - q is then known to half of itself
REPEATED = 0.02
# Of a left-out refinement, relative to the largest residual: rounding. If nothing of a class is left behind, its score
# is zero, and must not decide between classes that are level.
NOTHING = 1e-12
Hashes = NDArray[np.int64]
_HASHED = 2**15  # entries at a time, so that they stay in the cache
ECHO = 2**14  # buckets: 1 to 4 % of rows that repeat another client's show, for up to 100,000 rows; fewer do no harm


def whiten(phi: Tensor, factor: Tensor) -> Tensor:
    """V = Phi_k L'^-1 (..., n, d), so that C = V V'; ``factor`` is L, of the summed system."""
    rows = phi.to(torch.float64).flatten(0, -2)
    columns: Tensor = torch.linalg.solve_triangular(factor, rows.T, upper=False)
    return columns.T.view(phi.shape)


def leverage_sketch(factor: Tensor, m: int, seed: int) -> Tensor:
    """Q = L'^-1 Omega / sqrt(m) (d, m): V = Phi_k Q has E[V V'] = C, each q with relative spread sqrt(2 / m)."""
    omega = np.random.default_rng(seed).standard_normal((len(factor), m)) / np.sqrt(m)
    sketch: Tensor = torch.linalg.solve_triangular(factor.T, torch.from_numpy(omega).to(factor), upper=True)
    return sketch


class Leaving(NamedTuple):
    """Which rows of a client are left out together, and which are copies of an earlier row."""

    groups: Tensor | None  # (n,); None if every row leaves alone
    copies: Tensor  # bool (n,)


def leaving(features: Tensor, labels: Tensor, groups: Tensor | None, hashes: Hashes | None = None) -> Leaving:
    """Copies leave together, because they would vouch for each other, and so do given groups.

    Equal rows with equal labels are copies, unless the labels of equal rows differ in more than `REPEATED` of them:
    then they are repeated measurements, as in a table of few discrete columns, and each is evidence of its own.
    Groups that hold copies become one. ``hashes`` are those of `row_hashes`, if they are known.

    >>> groups, copies = leaving(torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([0, 1, 0]), None)
    >>> groups.tolist(), copies.tolist()
    ([0, 1, 0], [False, False, True])
    """
    n = len(features)
    first = first_equal(features, hashes)
    found = _copies(first, labels.cpu().numpy())
    copies = torch.from_numpy(found).to(features.device)
    if not found.any():
        return Leaving(groups, copies)
    if groups is None:
        return Leaving(torch.from_numpy(first), copies)
    codes = np.unique(groups.cpu().numpy(), return_inverse=True)[1]
    # A graph of the rows (0 to n - 1) and the groups (from n on).
    edges = coo_array((np.ones(2 * n), (np.tile(np.arange(n), 2), np.concatenate([first, n + codes]))), (2 * n, 2 * n))
    return Leaving(torch.from_numpy(connected_components(edges, directed=False)[1][:n].astype(np.int64)), copies)


def _copies(first: Hashes, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows are copies, bool (n,), from the place of the first row that equals each."""
    differs = labels != labels[first]
    repeated = int((np.bincount(first, minlength=len(first))[first] > 1).sum())
    if not repeated or differs.sum() > REPEATED * repeated:
        return np.zeros(len(first), bool)
    return np.asarray((first < np.arange(len(first))) & ~differs)


def hashed_copies(hashes: Hashes, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The copies of `leaving` by `row_hashes` alone, bool (n,), for rows that are no longer there to be compared.

    >>> hashed_copies(np.array([7, 8, 7]), np.array([0, 1, 0])).tolist()
    [False, False, True]
    """
    _, where, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return _copies(where[inverse], labels)


def with_copies(stats: Statistics, features: Tensor, copies: Tensor) -> Statistics:
    """A client's statistics with what they say about repeated rows."""
    return replace(stats, n_copies=int(copies.sum()), echo=echo(features))


def echo(features: Tensor, hashes: Hashes | None = None) -> Tensor:
    """How many of a client's distinct rows a hash puts into each of `ECHO` buckets, (ECHO,), int64.

    Summed over clients: a row that stands at several fills one bucket only, so the share of empty buckets tells how
    many rows are distinct (linear counting; Whang et al., 1990).

    >>> rows = torch.arange(600.0).reshape(300, 2)
    >>> n_repeated(echo(rows)), 280 < n_repeated(echo(rows) + echo(rows)) < 320
    (0.0, True)
    """
    distinct = np.unique(row_hashes(features) if hashes is None else hashes)
    return torch.from_numpy(np.bincount(distinct % ECHO, minlength=ECHO))


def n_repeated(summed: Tensor) -> float:
    """How many rows repeat a row of another client, from the summed echoes; 0 if too few to tell, or too many rows."""
    total = int(summed.sum())
    load = total / ECHO
    empty = float((summed == 0).double().mean())
    if not empty or load > 6:
        return 0.0
    repeated = total + ECHO * math.log(empty)
    return repeated if repeated > 4 * math.sqrt(ECHO * (math.exp(load) - load - 1)) else 0.0


def row_hashes(features: Tensor) -> Hashes:
    """A hash of 64 bits for each row, the same on every machine and device, int64 (n,).

    The sum of the entries' bits, each times an odd number of its own, modulo 2^64: rows that differ have the same one
    by chance alone (Dietzfelbinger et al., 1997). Whoever wants to can make two such rows; a copy is therefore told by
    comparing the rows themselves.
    """
    multipliers = torch.from_numpy(np.random.Philox(key=0).random_raw(features.shape[1]).view(np.int64) | 1)
    multipliers = multipliers.to(features.device)
    step = max(1, _HASHED // max(1, features.shape[1])) if features.device.type == "cpu" else max(1, len(features))
    parts = [_mixed(rows, multipliers) for rows in torch.split(features, step)]
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.int64)


def _mixed(rows: Tensor, multipliers: Tensor) -> Tensor:
    bits = (rows.double() + 0.0).view(torch.int64)  # + 0.0: a negative zero equals zero
    bits = bits ^ (bits >> 32)  # of float32 the lower bits are zero
    mixed = (bits * multipliers).sum(1)
    for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):  # the finaliser of MurmurHash3: every bit decides all
        mixed = (mixed ^ (mixed >> 33)) * factor
    return mixed ^ (mixed >> 33)


def first_equal(features: Tensor, hashes: Hashes | None = None) -> Hashes:
    """For each row the place of the first row that equals it, (n,)."""
    hashes = row_hashes(features) if hashes is None else hashes
    _, where, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first, own = where[inverse], np.arange(len(hashes))
    later = np.flatnonzero(first != own)
    if len(later):
        places = [torch.from_numpy(at[later]).to(features.device) for at in (own, first)]
        equal = (features[places[0]] == features[places[1]]).all(1).cpu().numpy()
        other = later[~equal]  # of the same hash by chance, or by somebody's intent
        if len(other):
            first[other] = other[first_equal(features[torch.from_numpy(other).to(features.device)], hashes[other])]
    return first


@dataclass(frozen=True, eq=False)
class LeftOut:
    """One client's rows, each (or each group) left out of both streams, for any beta.

    ``primary`` is the left-out residual of the primary stream; `refinement` the left-out refinement; both (n, c). With
    rows of several clients at once (b, n, ...), which have no groups, everything has their dimension in front.
    """

    hat: Hat
    whitened: Tensor  # V (n, any)
    residual: Tensor  # E (n, c)
    groups: Tensor | None = None  # (n,); without them every row is a group of its own
    sketched: bool = False  # whether V comes from a sketch
    copies: Tensor | None = None  # bool (n,): copies of an earlier row, and rows that fill up

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

    def noise(self, labels: Tensor) -> Tensor:
        """By how many hits of the primary alone a second dose of the sketch's noise in q would flatter or harm them.

        Of each client, (): float64.
        """
        if not self.sketched:
            return self._own_hat.new_zeros(labels.shape[:-1])
        spread = math.sqrt(2 / self.whitened.shape[-1])
        own, judged = one_hot(labels, self.residual.shape[-1]).to(self.residual), self.judged

        def right(dose: float) -> Tensor:
            leverage = (self._own_hat * (1 + dose)).clamp_max(self._most)
            scores = own - self.residual / (1 - leverage)[..., None]
            return ((scores.argmax(-1) == labels) & judged).sum(-1).double()

        return (right(spread) + right(-spread)) / 2 - right(0.0)

    @cached_property
    def primary(self) -> Tensor:
        """Y minus the left-out score of the primary stream, (n, c)."""
        return self._grouped.primary if self._grouped else self.residual / (1 - self.leverage)[..., None]

    def refinement(self, beta: float) -> Tensor:
        """The left-out score of the refinement stream, (n, c)."""
        return self.refinements([beta])[0]

    def refinements(self, betas: Sequence[float]) -> Tensor:
        """The left-out scores of the refinement stream for each beta, (betas, n, c)."""
        key = tuple(betas)
        if key not in self._refinements:
            self._keep(key, self._leave_rows(key) if self._grouped is None else self._leave_groups(key))
        return self._refinements[key]

    def beside(self, other: LeftOut, betas: Sequence[float]) -> None:
        """Make the refinements of ``other`` with these: the same rows without a primary, and another residual.

        Whoever factorises for each beta does so once for both.
        """
        if not isinstance(self.hat, HatFactors):
            return
        key, c = tuple(betas), self.residual.shape[-1]
        both = self.hat.parts(key, torch.cat([self.residual, other.residual], -1), self.whitened)
        other._keep(key, other._left(both._replace(fitted=both.fitted[..., c:], moved=torch.zeros_like(both.moved))))
        self._keep(key, self._left(both._replace(fitted=both.fitted[..., :c])))

    def _keep(self, betas: tuple[float, ...], left: Tensor) -> None:
        self._refinements[betas] = torch.nn.functional.hardshrink(left, NOTHING * float(self.residual.abs().max()))

    @cached_property
    def _refinements(self) -> dict[tuple[float, ...], Tensor]:
        """By betas: they are asked for to count hits, and again for the scores themselves."""
        return {}

    def _leave_groups(self, betas: Sequence[float]) -> Tensor:
        grouped, hat = self._grouped, self.hat
        assert grouped is not None
        assert isinstance(hat, HatBasis)
        return torch.stack([grouped.refinement(hat.shrink(beta), hat.keep(beta)) for beta in betas])

    def _leave_rows(self, betas: Sequence[float]) -> Tensor:
        return self._left(self.hat.parts(betas, self.residual, self.whitened))

    def _left(self, parts: Parts) -> Tensor:
        """The left-out refinement (betas, n, c); H E and diag(H C) are overwritten."""
        h, rest, fitted, moved = parts
        q, most, residual = (each.to(fitted) for each in (self._own_hat, self.leverage, self.residual))
        moved -= h * q[..., None]  # the sum over j != i of H_ij C_ji
        own = moved / (1 - most)[..., None] - h  # of the row's own residual: H_ii leaves, C_ji comes
        left = fitted.addcmul_(own[..., None], residual[..., None, :]).div_(rest[..., None])
        return left.movedim(-2, 0)

    @cached_property
    def _grouped(self) -> Groups | None:
        if self.groups is None:
            return None
        assert isinstance(self.hat, HatBasis), "groups need a basis"
        return Groups(self.groups, self.hat.basis, self.whitened, self.residual, self._most)

    @cached_property
    def _own_hat(self) -> Tensor:
        """q before clipping, (n,)."""
        return self.whitened.square().sum(-1)
