"""The tables of left-out hits of all clients, bounded and summed one at a time.

The rule is that of `apfl.maths.hits.bounded` and `bounded_weights`. What bounds a table is known from the largest and
the smallest hits of each, so the tables are read twice and never held together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Sent", "Summed", "summed_tables"]

Sent = tuple[str, Tensor, int]  # hash, hits, rows of one client


@dataclass(frozen=True, eq=False)
class Summed:
    """The bounded tables' sum, the rows behind it, and the hashes of the tables."""

    hits: Tensor
    n_rows: int
    hashes: list[str]


def summed_tables(read: Callable[[], Iterable[Sent]], n_weights: int) -> Summed:
    """The sum of the bounded tables; ``read`` gives them, the same each time."""
    hashes, n_rows, ends = [], [], []
    for digest, hits, n in read():
        by_weight = hits.reshape(n_weights, -1)
        hashes.append(digest)
        n_rows.append(n)
        ends.append(torch.stack([by_weight.amax(1), by_weight.amin(1)]).numpy())
    bounds = _Bounds(np.array(ends).reshape(-1, 2, n_weights), np.array(n_rows))
    summed: Tensor | None = None
    for k, (_, hits, _) in enumerate(read()):
        own = bounds(hits, k)
        summed = own.clone() if summed is None else summed.add_(own)
    return Summed(torch.zeros(0) if summed is None else summed, sum(n_rows), hashes)


class _Bounds:
    """How far below its best a client's settings may lie, in hits."""

    def __init__(self, ends: np.ndarray, n_rows: np.ndarray) -> None:
        self.best, least = ends[:, 0], ends[:, 1]  # (K, weights)
        self.free = len(n_rows) < 3  # neither of two is more usual than the other
        if not self.free:
            self.n_rows = n_rows
            shares = (self.best - least) / n_rows[:, None]
            self.usual = [_of_median_row(own, n_rows) for own in shares.T]
            self.apart = _of_median_row((self.best.max(1) - self.best.min(1)) / n_rows, n_rows)

    def __call__(self, hits: Tensor, k: int) -> Tensor:
        if self.free:
            return hits
        n, best = int(self.n_rows[k]), self.best[k]
        table = hits.reshape(len(best), -1)
        lowest = int(best.max()) - round(self.apart * n)
        rows = [
            own.clamp_min(int(top) - round(usual * n)) + max(lowest - int(top), 0)
            for own, top, usual in zip(table, best, self.usual, strict=True)
        ]
        return torch.stack(rows).reshape(hits.shape)


def _of_median_row(shares: np.ndarray, n_rows: np.ndarray) -> float:
    """The share of the client with the median row, clients in the order of their shares."""
    order = np.lexsort((n_rows, shares))
    behind = np.cumsum(n_rows[order])
    return float(shares[order[np.searchsorted(2 * behind, behind[-1])]])
