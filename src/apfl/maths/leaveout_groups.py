"""Left-out scores of groups of rows, for all groups of a size at once.

In the terms of `apfl.maths.leaveout`, with N_g = (I - C_gg)^-1/2, Et_g = N_g E_g and X_gj = N_g C_gj N_j:

    primary residual   E_g(-g) = N_g Et_g
    in-sample          sum over j not in g of H_gj T_j(-g) = (HE)_g - H_gg E_g + ((HC)_gg - H_gg C_gg) E_g(-g)
    cross-fitted       T_j(-g) = N_j (I - X_jg X_jg')^-1 (Et_j + X_jg Et_g)

In-sample, no group meets another: the time is linear in the number of groups. Cross-fitted, every pair of groups meets,
as every pair of rows does without groups. The smaller group of a pair decides what the pair costs:
(I - X X')^-1 = I + X (I - X'X)^-1 X'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Groups"]

BLOCK_ROWS = 1024  # rows of a block, unless one group has more: 8 MB for a matrix between two blocks
KEPT_ROWS = 4096  # up to here what pairs need for every beta is kept, two (n, n) matrices; beyond, it is made each time
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Block:
    """Some groups of one size; their rows follow each other."""

    start: int
    count: int  # of groups
    size: int  # rows of each

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count * self.size)

    def of(self, rows: Tensor) -> Tensor:
        """(n, any) -> (count, size, any)."""
        return rows[self.rows].view(self.count, self.size, -1)


@dataclass(frozen=True, eq=False)
class Groups:
    """One client's groups, each left out of both streams. Results are in the order of the client's rows."""

    names: Tensor  # (n,), the same for rows of one group
    basis: Tensor  # U (n, r)
    whitened: Tensor  # V (n, any)
    residual: Tensor  # E (n, c)
    most: float  # eigenvalues of C_gg above it are clipped: a sketch may take them past 1

    @cached_property
    def clipped_rows(self) -> Tensor:
        """Rows of a group whose C_gg had an eigenvalue that was clipped, bool (n,)."""
        return self.leverage > self.most

    @cached_property
    def leverage(self) -> Tensor:
        """The largest eigenvalue of C_gg before clipping, for each row of the group, (n,)."""
        return self._in_order(self._roots[b][1][:, None].expand(-1, b.size) for b in self._blocks)

    @cached_property
    def primary(self) -> Tensor:
        """E_g(-g), (n, c)."""
        return self._in_order(self._scale(b, self._scaled_e) for b in self._blocks)

    def in_sample(self, shrink: Tensor, keep: Tensor) -> Tensor:
        """The left-out refinement (n, c) that is fitted to residuals; H = U diag(shrink) U', keep = 1 - shrink."""
        weighted = self._u * shrink
        fitted = weighted @ (self._u.T @ self._e)  # H E

        def of_others(g: Block) -> Tensor:
            own = _times(g.of(weighted), g.of(self._u), g.of(self._own_targets))
            return g.of(fitted) - own + _times(g.of(weighted), g.of(self._hat_of_u), self._scale(g, self._scaled_e))

        return self._in_order(_refit(g.of(self._u), shrink, keep, of_others(g)) for g in self._blocks)

    def cross_fitted(self, shrink: Tensor, keep: Tensor) -> Tensor:
        """The left-out refinement (n, c) that is fitted to left-out residuals."""
        weighted = self._u * shrink

        def of_one(g: Block, j: Block) -> Tensor:
            x, inverse = self._kept[g, j] if len(self.names) <= KEPT_ROWS else self._pairs(g, j)
            hat = (weighted[g.rows] @ self._scaled_u[j.rows].T).view(x.shape)  # H_gj N_j
            if g == j:
                hat.diagonal(dim1=0, dim2=2).zero_()  # j not in g
            weights = _weights(hat, x, inverse).flatten(2)  # (count_g, size_g, rows of j)
            return weights @ self._scaled_e[j.rows] + _times(weights, x.flatten(2), g.of(self._scaled_e))

        def of_others(g: Block) -> Tensor:
            return sum((of_one(g, j) for j in self._met_by(g)), start=torch.zeros_like(g.of(self._e)))

        return self._in_order(_refit(g.of(self._u), shrink, keep, of_others(g)) for g in self._blocks)

    @cached_property
    def _kept(self) -> dict[tuple[Block, Block], tuple[Tensor, Tensor]]:
        return {(g, j): self._pairs(g, j) for g in self._blocks for j in self._met_by(g)}

    def _met_by(self, g: Block) -> list[Block]:
        """The blocks that hold other groups than those of g, or several."""
        return [j for j in self._blocks if j != g or g.count > 1]

    def _pairs(self, g: Block, j: Block) -> tuple[Tensor, Tensor]:
        """X_gj (count_g, size_g, count_j, size_j), and what `_inverse` makes of it.

        A sketch may take eigenvalues of X X' past 1, too. They are clipped so that no eigenvalue of
        N_j^-1 (I - X_jg X_jg') N_j^-1, the system left to j once g has gone, is below 1 - most; so it is with rows.
        """
        x = (self._scaled_v[g.rows] @ self._scaled_v[j.rows].T).view(g.count, g.size, j.count, j.size)
        top = self._roots[j][1].clamp_max(self.most)
        return x, _inverse(x, 1 - (1 - self.most) / (1 - top))

    @cached_property
    def _layout(self) -> tuple[list[Block], Tensor]:
        """The blocks, and where they have the client's rows, (n,).

        Groups whose sizes differ by a factor of at most sqrt(2) share blocks: the smaller ones are filled up with rows
        of zeros, which change nothing. So there are few blocks, whatever the sizes.
        """
        _, member, sizes = torch.unique(self.names, return_inverse=True, return_counts=True)
        levels = sizes.double().log2().mul(2).ceil()
        begins, blocks, start = torch.empty_like(sizes), [], 0
        for level in torch.unique(levels).tolist():
            size, alike = int(sizes[levels == level].max()), torch.nonzero(levels == level)[:, 0]
            for some in torch.split(alike, max(BLOCK_ROWS // size, 1)):
                begins[some] = start + size * torch.arange(len(some), device=sizes.device)
                blocks.append(Block(start, len(some), size))
                start += len(some) * size
        together = torch.argsort(member, stable=True)
        places = (begins - sizes.cumsum(0) + sizes)[member[together]] + torch.arange(len(member), device=sizes.device)
        return blocks, torch.empty_like(places).index_copy_(0, together, places).to(self.basis.device)

    @property
    def _blocks(self) -> list[Block]:
        return self._layout[0]

    def _laid_out(self, rows: Tensor) -> Tensor:
        """(n, any) -> (rows of all blocks, any)."""
        last = self._blocks[-1].rows.stop
        return rows.new_zeros(last, rows.shape[1]).index_copy_(0, self._layout[1], rows)

    def _in_order(self, parts: Iterable[Tensor]) -> Tensor:
        """(count, size, ...) of every block -> (n, ...), in the order of the client's rows."""
        return torch.cat([part.flatten(0, 1) for part in parts])[self._layout[1]]

    # From here on rows are as in the blocks.

    @cached_property
    def _u(self) -> Tensor:
        return self._laid_out(self.basis)

    @cached_property
    def _v(self) -> Tensor:
        return self._laid_out(self.whitened)

    @cached_property
    def _e(self) -> Tensor:
        return self._laid_out(self.residual)

    @cached_property
    def _roots(self) -> dict[Block, tuple[Tensor, Tensor]]:
        return {b: _root(b.of(self._v), self.most) for b in self._blocks}

    def _scale(self, b: Block, rows: Tensor) -> Tensor:
        """N_g times each group's rows, (count, size, any)."""
        own, v, (core, _) = b.of(rows), b.of(self._v), self._roots[b]
        return core @ own if len(core[0]) == b.size else own + v @ (core @ (v.mT @ own))

    def _scaled(self, rows: Tensor) -> Tensor:
        return torch.cat([self._scale(b, rows).flatten(0, 1) for b in self._blocks])

    @cached_property
    def _scaled_u(self) -> Tensor:
        return self._scaled(self._u)

    @cached_property
    def _scaled_v(self) -> Tensor:
        return self._scaled(self._v)

    @cached_property
    def _scaled_e(self) -> Tensor:
        return self._scaled(self._e)

    @cached_property
    def _hat_of_u(self) -> Tensor:
        """C U, (n, r)."""
        return self._v @ (self._v.T @ self._u)

    @cached_property
    def _own_targets(self) -> Tensor:
        """E_g + C_gg E_g(-g), (n, c): what a group's own rows would add to the sum over all rows."""
        parts = [_times(b.of(self._v), b.of(self._v), self._scale(b, self._scaled_e)) for b in self._blocks]
        return self._e + torch.cat([part.flatten(0, 1) for part in parts])


def _root(v: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Of groups' V (count, size, any): N = (I - V V')^-1/2, or K if it is smaller, with N = I + V K V'; and the largest
    eigenvalue of V V', before clipping."""
    wide = v.shape[2] >= v.shape[1]
    values, vectors = torch.linalg.eigh(v @ v.mT if wide else v.mT @ v)
    values = values.clamp_min(TINY)
    larger = (1 - values.clamp_max(most)).rsqrt()
    larger = larger if wide else (larger - 1) / values
    return (vectors * larger[:, None, :]) @ vectors.mT, values[:, -1]


def _inverse(x: Tensor, room: Tensor) -> Tensor:
    """(I - X_jg X_jg')^-1 if j is not the larger group, else (I - X_gj X_gj')^-1; eigenvalues clipped at ``room`` of j.

    (count_g, count_j, s, s) with s the smaller size; if that is 1, (count_g, 1, count_j, 1).
    """
    on_j = x.shape[3] <= x.shape[1]

    def inverted(values: Tensor, room: Tensor) -> Tensor:
        values = values.clamp_min(TINY)
        clipped = torch.minimum(values, room)
        return 1 / (1 - clipped) if on_j else clipped / values / (1 - clipped)

    if min(x.shape[1], x.shape[3]) == 1:
        return inverted(x.square().sum((1, 3), keepdim=True), room[:, None])
    squares = torch.einsum("gajb,gajc->gjbc" if on_j else "gbja,gcja->gjbc", x, x)
    doubtful = squares.diagonal(dim1=2, dim2=3).sum(2) > room  # the trace bounds every eigenvalue
    identity = torch.eye(squares.shape[2]).to(x)
    # Inverted, not solved with: it serves every beta.
    found: Tensor = torch.linalg.inv(identity - squares.masked_fill(doubtful[:, :, None, None], 0))
    if doubtful.any():
        values, vectors = torch.linalg.eigh(squares[doubtful])
        bounds = room.expand_as(doubtful)[doubtful]
        found[doubtful] = (vectors * inverted(values, bounds[:, None])[:, None, :]) @ vectors.mT
    return found


def _weights(hat: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """H_gj N_j (I - X_jg X_jg')^-1, (count_g, size_g, count_j, size_j), from what `_inverse` gives."""
    if x.shape[3] == 1:
        return hat * inverse
    if x.shape[1] == 1:
        return hat + (hat * x).sum(3, keepdim=True) * inverse * x
    if x.shape[3] <= x.shape[1]:
        return torch.einsum("gajb,gjbc->gajc", hat, inverse)
    across = torch.einsum("gajb,gcjb->gjac", hat, x) @ inverse
    return hat + torch.einsum("gjac,gcjb->gajb", across, x)


def _refit(u: Tensor, shrink: Tensor, keep: Tensor, of_others: Tensor) -> Tensor:
    """(I - H_gg)^-1 of_others, (count, size, c), on the smaller side of U_g (count, size, r).

    Both sides are sums of what is not negative: subtracting H_gg from I cancels at small beta.
    """
    _, size, r = u.shape
    if size <= r:
        rest = (u * keep) @ u.mT + (torch.eye(size).to(u) - u @ u.mT)
        solution: Tensor = torch.linalg.solve(rest, of_others)
        return solution
    root = shrink.sqrt()
    rest = torch.diag(keep) + root[:, None] * (torch.eye(r).to(u) - u.mT @ u) * root
    inner: Tensor = torch.linalg.solve(rest, (u * root).mT @ of_others)
    return of_others + (u * root) @ inner


def _times(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """a b' rows for each group, in the cheaper order."""
    return (a @ b.mT) @ rows if a.shape[1] <= rows.shape[2] else a @ (b.mT @ rows)
