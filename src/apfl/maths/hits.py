"""Federated leave-one-out: beta, balance and tau from how many left-out rows each setting gets right.

A client's table of hits is a small additive statistic. The server adds the tables and picks one setting for everyone
(``federation``); or every client picks by its own (``client``).

The third setting weighs a *local prior*: tau * log(p_k(class) / p(class)), what the client's own label frequencies say
beyond everyone's. With tau = 0 there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from apfl.maths.leaveout import LeftOut
from apfl.maths.ridge import one_hot

__all__ = ["Grid", "Scope", "choose", "grid", "hits", "left_out_prior", "local_prior"]

Scope = Literal["federation", "client"]
FEW_HITS = 5000  # below so many, the best of 882 settings is the best by chance


@dataclass(frozen=True)
class Grid:
    """The settings tried. All clients must use the same, or their tables would not add."""

    betas: Sequence[float]
    balances: Sequence[float]
    taus: Sequence[float]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.betas), len(self.balances), len(self.taus)

    def index(self, setting: tuple[float, float, float]) -> tuple[int, int, int]:
        """Where a setting stands in a table."""
        beta, balance, tau = setting
        return list(self.betas).index(beta), list(self.balances).index(balance), list(self.taus).index(tau)


def grid(unit: float, *, beta: float | None, balance: float | None, tau: float | None) -> Grid:
    """The default grid, at most 2,000 entries; a setting that is fixed has one.

    Betas spread over three decades of ``unit``, the mean squared length of a row of Psi, so that they fit the spectrum
    whatever the width, the map or the scale of the features. Smaller ones were never the best of a large federation,
    and with few rows they were chosen by chance.
    """
    return Grid(
        [unit * 10 ** (step / 2) for step in range(-4, 3)] if beta is None else [beta],
        [step / 10 for step in range(14)] if balance is None else [balance],
        [0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.17, 0.25] if tau is None else [tau],
    )


def local_prior(counts: Tensor, total_counts: Tensor, smoothing: float) -> Tensor:
    """log(p_k / p) up to a constant, (..., c), from counts smoothed by a small number.

    A client of few rows is smoothed by one over their number instead: its one row says little about what else it has.
    """
    own = (1 / counts.sum(-1, keepdim=True).clamp_min(1)).clamp_min(smoothing)
    return torch.log(counts + own) - torch.log(total_counts + smoothing)


def hits(
    left_out: LeftOut, labels: Tensor, counts: Tensor, total_counts: Tensor, smoothing: float, tried: Grid
) -> Tensor:
    """How many of a client's left-out rows each setting gets right, (betas, balances, taus), int64.

    The labels of what is left out, a row or its group, are taken out of the counts before they judge it. A tie for the
    highest score is no hit, and neither is a row that cannot be judged (`LeftOut.judged`).

    For given beta and tau every other class sets one bound on the balances with which it stays below the row's own,
    so a row is right on an interval of balances: two reductions serve all balances.
    """
    own = one_hot(labels, len(counts)).to(counts.device)
    primary = own - left_out.primary
    prior = left_out_prior(own, counts, total_counts, left_out.groups, smoothing)
    balances = torch.tensor(tried.balances, dtype=torch.float32, device=labels.device)
    # Single precision decides a comparison differently only where two scores agree to seven digits.
    leads = [_lead((primary + tau * prior).float(), labels) for tau in tried.taus]
    table = torch.zeros(tried.shape, dtype=torch.int64, device=labels.device)
    for b, beta in enumerate(tried.betas):
        gain = _lead(left_out.refinement(beta).float(), labels)
        for t, lead in enumerate(leads):
            low, high = _interval(lead, gain, labels)
            low.masked_fill_(~left_out.judged, float("inf"))
            table[b, :, t] = ((low < balances[:, None]) & (balances[:, None] < high)).sum(1)
    return table


def left_out_prior(
    own: Tensor, counts: Tensor, total_counts: Tensor, groups: Tensor | None, smoothing: float
) -> Tensor:
    """The prior that each row meets without its own label, or its group's, which must not vouch for it; (n, c).

    ``own`` (n, c) are the rows' one-hot labels.
    """
    gone = own if groups is None else _summed_by(own, groups)
    return local_prior(counts - gone, total_counts - gone, smoothing)


def _summed_by(rows: Tensor, groups: Tensor) -> Tensor:
    """For each row the sum over its group, (n, c)."""
    names, member = torch.unique(groups, return_inverse=True)
    member = member.to(rows.device)
    return rows.new_zeros(len(names), rows.shape[1]).index_add_(0, member, rows)[member]


def _lead(scores: Tensor, labels: Tensor) -> Tensor:
    """By how much the score of a row's own class exceeds the others', (n, c)."""
    return scores.gather(1, labels[:, None]) - scores


def _interval(lead: Tensor, gain: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Where lead + balance * gain > 0 in every class but a row's own: low < balance < high, (n,) each."""
    bound = -lead / gain
    infinity = float("inf")
    # Without gain the sign of the lead decides for every balance; the row's own class never bounds.
    low = torch.where(gain > 0, bound, torch.where((gain == 0) & (lead <= 0), infinity, -infinity))
    high = torch.where(gain < 0, bound, infinity)
    low.scatter_(1, labels[:, None], -infinity)
    return low.amax(1), high.amin(1)


def choose(table: Tensor, tried: Grid) -> tuple[float, float, float]:
    """The setting with most hits; of equal ones that with the largest beta, then the smallest balance and tau.

    Of few rows one more or less decides between settings that are nearly level: then a setting counts with its
    neighbours on the grid.
    """
    if int(table.max()) < FEW_HITS:
        table = _with_neighbours(table)
    best = torch.nonzero(table == table.max()).tolist()
    b, k, t = max(best, key=lambda index: (index[0], -index[1], -index[2]))
    return tried.betas[b], tried.balances[k], tried.taus[t]


def _with_neighbours(table: Tensor) -> Tensor:
    """The mean over the settings at most one step away in each direction, of those there are, rounded to 1e-6."""
    box = torch.ones(1, 1, 3, 3, 3, dtype=torch.float64, device=table.device)
    counted, settings = (
        torch.nn.functional.conv3d(each.double()[None, None], box, padding=1)[0, 0]
        for each in (table, torch.ones_like(table))
    )
    return (counted / settings).mul(1e6).round()
