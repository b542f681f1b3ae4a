"""Left-out scores of groups of rows, for all groups of a size at once.

In the terms of `apfl.maths.leaveout`, with E_g(-g) = (I - C_gg)^-1 E_g:

    sum over j not in g of H_gj T_j(-g) = (HE)_g - H_gg E_g + ((HC)_gg - H_gg C_gg) E_g(-g)

No group meets another: the time is linear in the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Groups"]

BLOCK_ROWS = 1024  # rows of a block, unless one group has more
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
        return self._in_order(self._inverses[b][1][:, None].expand(-1, b.size) for b in self._blocks)

    @cached_property
    def primary(self) -> Tensor:
        """E_g(-g), (n, c)."""
        return self._in_order(b.of(self._left) for b in self._blocks)

    def refinement(self, shrink: Tensor, keep: Tensor) -> Tensor:
        """The left-out refinement (n, c); H = U diag(shrink) U', keep = 1 - shrink."""
        weighted = self._u * shrink
        fitted = weighted @ (self._u.T @ self._e)  # H E

        def of_others(g: Block) -> Tensor:
            own = _times(g.of(weighted), g.of(self._u), g.of(self._own_targets))
            return g.of(fitted) - own + _times(g.of(weighted), g.of(self._hat_of_u), g.of(self._left))

        return self._in_order(_refit(g.of(self._u), shrink, keep, of_others(g)) for g in self._blocks)

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
            for block in torch.split(alike, max(BLOCK_ROWS // size, 1)):
                begins[block] = start + size * torch.arange(len(block), device=sizes.device)
                blocks.append(Block(start, len(block), size))
                start += len(block) * size
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
    def _inverses(self) -> dict[Block, tuple[Tensor, Tensor]]:
        return {b: _inverse(b.of(self._v), self.most) for b in self._blocks}

    @cached_property
    def _left(self) -> Tensor:
        """E_g(-g), (n, c)."""

        def of_block(b: Block) -> Tensor:
            own, v, (core, _) = b.of(self._e), b.of(self._v), self._inverses[b]
            return core @ own if len(core[0]) == b.size else own + v @ (core @ (v.mT @ own))

        return torch.cat([of_block(b).flatten(0, 1) for b in self._blocks])

    @cached_property
    def _hat_of_u(self) -> Tensor:
        """C U, (n, r)."""
        return self._v @ (self._v.T @ self._u)

    @cached_property
    def _own_targets(self) -> Tensor:
        """E_g + C_gg E_g(-g), (n, c): what a group's own rows would add to the sum over all rows."""
        parts = [_times(b.of(self._v), b.of(self._v), b.of(self._left)) for b in self._blocks]
        return self._e + torch.cat([part.flatten(0, 1) for part in parts])


def _inverse(v: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Of groups' V (count, size, any): (I - V V')^-1, or K if it is smaller, with (I - V V')^-1 = I + V K V'; and the
    largest eigenvalue of V V', before clipping."""
    wide = v.shape[2] >= v.shape[1]
    values, vectors = torch.linalg.eigh(v @ v.mT if wide else v.mT @ v)
    values = values.clamp_min(TINY)
    larger = 1 / (1 - values.clamp_max(most))
    larger = larger if wide else (larger - 1) / values
    return (vectors * larger[:, None, :]) @ vectors.mT, values[:, -1]


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
