"""Rows times the inverse of a triangular factor: X L'^-1, whatever the precision and the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Lower", "inverse"]

_BLOCK = 512
_SMALL = 64  # columns of a block that is inverted by substitution


def inverse(lower: Tensor) -> Tensor:
    """L^-1 of lower triangular matrices (..., n, n): blocks on the diagonal all at once, the rest products by halves.

    >>> inverse(torch.tensor([[2.0, 0.0], [1.0, 4.0]])).tolist()
    [[0.5, 0.0], [-0.125, 0.25]]
    """
    n = lower.shape[-1]
    small = n if n <= 2 * _SMALL else _SMALL if n <= 4096 else 4 * _SMALL
    made = torch.zeros_like(lower, memory_format=torch.contiguous_format)
    blocks, even = n // small, n // small * small
    into, of = (_diagonal_blocks(each[..., :even, :even], blocks) for each in (made, lower))
    into.copy_(_by_substitution(of))
    if even < n:
        made[..., even:, even:] = _by_substitution(lower[..., even:, even:])

    def fill(start: int, stop: int) -> None:
        if stop - start <= small:
            return
        middle = start + -(-(stop - start) // (2 * small)) * small
        fill(start, middle)
        fill(middle, stop)
        first, last = slice(start, middle), slice(middle, stop)
        made[..., last, first] = -(made[..., last, last] @ (lower[..., last, first] @ made[..., first, first]))

    fill(0, n)
    return made


def _diagonal_blocks(matrix: Tensor, blocks: int) -> Tensor:
    """(..., blocks, n, n), a view."""
    n = matrix.shape[-1] // blocks
    parts = matrix.view(*matrix.shape[:-2], blocks, n, blocks, n)
    return parts.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _by_substitution(lower: Tensor) -> Tensor:
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    found: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return found


class Lower:
    """A lower triangular L (d, d), float64, to be undone for many rows.

    In double precision on a CPU by substitution. In single precision, and on a GPU, by blocks: the inverse of each
    block on the diagonal is known, and all else is products, which are faster there than LAPACK's substitution.
    """

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def undo(self, rows: Tensor) -> Tensor:
        """X L'^-1 (n, d), in the precision of the rows X."""
        if rows.dtype == torch.float64 and rows.device.type == "cpu":
            undone: Tensor = torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
            return undone.T
        made = torch.empty_like(rows)
        for block, left, inverse in self._blocks(rows.dtype):
            own = rows[:, block]
            if block.start:
                own = torch.addmm(own, made[:, : block.start], left, alpha=-1)
            torch.mm(own, inverse, out=made[:, block])
        return made

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some columns, the rows of L' above them, and the inverse of their own block of L'."""
        factor = self._in_single if dtype == torch.float32 else self.factor
        for start, inverse in zip(range(0, len(factor), _BLOCK), self._inverses, strict=True):
            block = slice(start, min(start + _BLOCK, len(factor)))
            yield block, factor[block, :start].T, inverse.to(dtype)

    @cached_property
    def _in_single(self) -> Tensor:
        return self.factor.float()

    @cached_property
    def _inverses(self) -> list[Tensor]:
        """Of the blocks on the diagonal of L'."""
        found = []
        for start in range(0, len(self.factor), _BLOCK):
            own = self.factor[start : start + _BLOCK, start : start + _BLOCK]
            found.append(_by_substitution(own).T.contiguous())
        return found
