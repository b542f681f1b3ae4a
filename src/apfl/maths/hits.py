"""Federated leave-one-out: beta, balance and tau from how many left-out rows each setting gets right.

A client's table of hits is a small additive statistic. The server adds the tables and picks one setting for everyone
(``federation``); or every client picks by its own (``client``).

The third setting weighs a *local prior*: tau * log(p_k(class) / p(class)), what the client's own label frequencies say
beyond everyone's. With tau = 0 there is none.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from apfl.maths.ridge import one_hot

__all__ = [
    "Grid", "Scope", "best_of", "bounded", "bounded_weights", "choose", "grid", "hits", "left_out_prior", "local_prior",
    "narrowed", "prefer", "summed",
]  # fmt: skip

Scope = Literal["federation", "client"]
K = TypeVar("K", bound=Hashable)
CLEARLY = 1.0  # standard errors, and one row, by which one of several candidates must beat the usual one
FEW_HITS = 5000  # below so many, the best of 882 settings is the best by chance
ENTRIES = 2**17  # of a block of rows, classes and betas: half a megabyte in single precision
AT_ONCE = 256  # tables that are added at once
STEEPEST = 1e30  # of a bound in tau: single precision ends at 3e38
FAR = 1e38  # from a bound that does not count
BEHIND = 1e-25  # by which a class that is level is taken to lead: no sum of scores in single precision is so small
LEVEL = 0.45  # of the square root of the fewest misses: settings whose hits differ by less are about as good


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


class LeftOutRows(Protocol):
    """One client's rows, each left out of both streams: `leaveout.LeftOut`, or with a weight on the primary."""

    @property
    def groups(self) -> Tensor | None: ...
    @property
    def judged(self) -> Tensor: ...
    @property
    def primary(self) -> Tensor: ...
    def refinements(self, betas: Sequence[float]) -> Tensor: ...  # (betas, n, c)


def hits(
    left_out: LeftOutRows,
    labels: Tensor,
    counts: Tensor,
    total_counts: Tensor,
    smoothing: float,
    tried: Grid,
    *,
    weights: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """How many of a client's left-out rows each setting gets right, (betas, balances, taus), int64.

    ``weights`` (n,) are those of the rows in the counts. With ``importance`` (n,), as much as rows that are right have
    of it, float64.

    The labels of what is left out, a row or its group, are taken out of the counts before they judge it. A tie for the
    highest score is no hit, and neither is a row that cannot be judged (`LeftOut.judged`).

    For given beta and tau every other class sets one bound on the balances with which it stays below the row's own,
    so a row is right on an interval of balances, whose ends say where it begins and ceases to count.

    Rows of several clients at once, (b, n), with counts (b, c), give a table for each, (b, betas, balances, taus).
    """
    own, n = one_hot(labels, counts.shape[-1]).to(counts.device), labels.shape[-1]
    counted = own if weights is None else own * weights[..., None]
    prior = left_out_prior(counted, counts, total_counts, left_out.groups, smoothing).flatten(0, -2)
    refined = left_out.refinements(tried.betas).flatten(1, -2)  # (betas, rows, c)
    primary, of = (own - left_out.primary).flatten(0, -2), labels.flatten()
    ends: list[tuple[Tensor, Tensor]] = []
    step = _rows_of_a_block(refined)
    for start in range(0, len(of), step):
        block = slice(start, start + step)
        # Single precision decides a comparison differently only where two scores agree to seven digits.
        lead, more, gain = (_lead(each[..., block, :].float(), of[block]) for each in (primary, prior, refined))
        ends.append(_intervals(lead, more, gain, of[block], tried.taus))
    low, high = (torch.cat(each, -1) for each in zip(*ends, strict=True))
    low, high = (each.view(*each.shape[:-1], -1, n) for each in (low, high))  # (betas, taus, b, n)
    low += torch.where(left_out.judged.view(-1, n), 0.0, math.inf)
    table = _counted(low, high, tried.balances, importance).movedim(-1, 0)  # (b, betas, balances, taus)
    if importance is not None:
        table = table.round(decimals=9)  # so that settings that get the same rows right are level
    return table.reshape(*labels.shape[:-1], *tried.shape)


def _counted(low: Tensor, high: Tensor, balances: Sequence[float], importance: Tensor | None) -> Tensor:
    """The rows with low < balance < high, or their importance: (betas, balances, taus, b) from (betas, taus, b, n)."""
    if importance is not None:
        worth = importance.view(-1, low.shape[-1], 1).double()
        inside = (((low < at) & (at < high)).double()[..., None, :] @ worth for at in balances)
        return torch.stack([each[..., 0, 0] for each in inside], 1)
    if low.device.type != "cpu":
        at = torch.tensor(balances, dtype=low.dtype).to(low.device)[:, None, None, None]
        return ((low[:, None] < at) & (at < high[:, None])).sum(-1)
    first, last = low.numpy(), high.numpy()  # numpy compares and counts in a third of the time
    found = [np.count_nonzero((first < at) & (at < last), axis=-1) for at in map(np.float32, balances)]
    return torch.from_numpy(np.stack(found, 1))


def _rows_of_a_block(refined: Tensor) -> int:
    """So many rows that what is computed of them stays in the cache; on a GPU, as many as fill it."""
    entries = ENTRIES if refined.device.type == "cpu" else 2**9 * ENTRIES
    return max(1, entries // (refined.shape[0] * refined.shape[2]))


def left_out_prior(
    own: Tensor, counts: Tensor, total_counts: Tensor, groups: Tensor | None, smoothing: float
) -> Tensor:
    """The prior that each row meets without its own label, or its group's, which must not vouch for it; (..., n, c).

    ``own`` (..., n, c) are the rows' one-hot labels, as they weigh; ``counts`` and ``total_counts`` are (..., c).
    """
    gone = own if groups is None else _summed_by(own, groups)
    return local_prior(counts[..., None, :] - gone, total_counts[..., None, :] - gone, smoothing)


def _summed_by(rows: Tensor, groups: Tensor) -> Tensor:
    """For each row the sum over its group, (n, c)."""
    names, member = torch.unique(groups, return_inverse=True)
    member = member.to(rows.device)
    return rows.new_zeros(len(names), rows.shape[1]).index_add_(0, member, rows)[member]


def _lead(scores: Tensor, labels: Tensor) -> Tensor:
    """By how much the score of a row's own class exceeds the others', (..., n, c)."""
    own = labels[:, None].expand(*scores.shape[:-1], 1)
    return scores.gather(-1, own) - scores


def _intervals(
    lead: Tensor, more: Tensor, gain: Tensor, labels: Tensor, taus: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Where lead + tau * more + balance * gain > 0 in every class but a row's own: low < balance < high.

    ``lead`` and ``more`` are (n, c), ``gain`` is (betas, n, c); both ends are (betas, taus, n). The bound of a class is
    linear in tau: one sum and one reduction for each tau and end. It bounds from below if it gains, else from above:
    `FAR` is added to the bounds that do not count, which costs a tenth of choosing entries by a mask. A class without
    gain has its bound far above every balance if it is level or ahead of the row's own, and else far below.
    """
    lead = (lead - BEHIND).scatter_(-1, labels[:, None], 1.0)  # a tie is no hit, and a row's own class never bounds
    slope = (-1 / gain).clamp_(-STEEPEST, STEEPEST)
    at, by = lead * slope, more * slope
    away = torch.copysign(gain.new_full((), FAR), gain)
    lows, highs = at + (away - FAR), at + (away + FAR)
    low = torch.stack([torch.add(lows, by, alpha=tau).amax(-1) for tau in taus], 1)
    high = torch.stack([torch.add(highs, by, alpha=tau).amin(-1) for tau in taus], 1)
    return low, high


def narrowed(table: Tensor) -> Tensor:
    """A table of hits in as few bytes as hold it: those of all clients are there at once, with thousands of entries."""
    if table.is_floating_point():
        return table
    most = int(table.max())
    small = next((dtype for dtype in (torch.int16, torch.int32) if most <= torch.iinfo(dtype).max), torch.int64)
    return table.to(small)


def summed(tables: Iterable[Tensor]) -> Tensor:
    """The sum of the clients' tables, narrow or not, int64; float64 if rows count by their importance."""
    (*left,) = tables
    parts = [torch.stack(left[k : k + AT_ONCE]).sum(0) for k in range(0, len(left), AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def bounded(tables: Sequence[Tensor], n_rows: Sequence[int]) -> list[Tensor]:
    """Tables of several clients, in none of which settings differ by more of its rows than at the median row's client.

    By rows, since many small clients of one class see no difference between settings at all. A client's best settings
    keep their hits, and its worst are raised. Between the settings that honest clients would choose from, tables differ
    by few hits: one that says "all right here, all wrong elsewhere" would decide alone. Two tables are left as they
    are, since neither is more usual than the other.

    >>> honest, liar = torch.tensor([[[90, 80]]]), torch.tensor([[[0, 100]]])
    >>> [table.tolist() for table in bounded([honest, honest, liar], [100, 100, 100])]
    [[[[90, 80]]], [[[90, 80]]], [[[90, 100]]]]
    """
    if len(tables) < 3:
        return list(tables)
    shares = [int(table.max() - table.min()) / n for table, n in zip(tables, n_rows, strict=True)]
    usual = _of_median_row(shares, n_rows)
    return [
        table.clamp_min(max(0, int(table.max()) - round(usual * n))) for table, n in zip(tables, n_rows, strict=True)
    ]


def bounded_weights(tables: Sequence[Tensor], n_rows: Sequence[int]) -> list[Tensor]:
    """`bounded` for tables of several weights on the primary, (weights, betas, balances, taus).

    Settings are bounded for each weight by itself, and so are the weights' best settings: all hits of a weight that
    lies further below a client's best one than at the median row's client are raised by the same number.

    >>> honest, liar = torch.tensor([[[[90, 80]]], [[[88, 78]]]]), torch.tensor([[[[0, 0]]], [[[100, 90]]]])
    >>> [table.tolist() for table in bounded_weights([honest, honest, liar], [100, 100, 100])][2]
    [[[[98, 98]]], [[[100, 90]]]]
    """
    if len(tables) < 3:
        return list(tables)
    by_weight = [bounded(own, n_rows) for own in zip(*tables, strict=True)]
    within = [torch.stack(own) for own in zip(*by_weight, strict=True)]
    best = [table.flatten(1).amax(1) for table in within]
    usual = _of_median_row([int(own.max() - own.min()) / n for own, n in zip(best, n_rows, strict=True)], n_rows)
    least = [int(own.max()) - round(usual * n) for own, n in zip(best, n_rows, strict=True)]
    return [
        table + (low - own).clamp_min(0)[:, None, None, None]
        for table, own, low in zip(within, best, least, strict=True)
    ]


def _of_median_row(shares: Sequence[float], n_rows: Sequence[int]) -> float:
    """The share of the client with the median row, clients in the order of their shares."""
    spread = sorted(zip(shares, n_rows, strict=True))
    behind = accumulate(n for _, n in spread)
    return next(share for (share, _), rows in zip(spread, behind, strict=True) if 2 * rows >= sum(n_rows))


def choose(table: Tensor, tried: Grid, n_rows: int) -> tuple[float, float, float]:
    """The setting with most hits of ``n_rows``; of equal ones the largest beta, then the smallest balance and tau.

    Of few rows one more or less decides between settings that are nearly level, and settings far apart may be: then it
    is the middle of those that are about as good (`_middle`), which no single row moves far.
    """
    b, k, t = _middle(table, n_rows) if int(table.max()) < FEW_HITS else best_of(table)[0]
    return tried.betas[b], tried.balances[k], tried.taus[t]


def best_of(table: Tensor) -> tuple[tuple[int, int, int], float]:
    """The place of the setting with most hits, and these: if there are few, their mean with the neighbours'."""
    few = int(table.max()) < FEW_HITS
    counted = _with_neighbours(table) if few else table
    b, k, t = max(torch.nonzero(counted == counted.max()).tolist(), key=lambda at: (at[0], -at[1], -at[2]))
    return (b, k, t), float(counted[b, k, t]) / (1e6 if few else 1)


def _middle(table: Tensor, n_rows: int) -> tuple[int, int, int]:
    """The mean place of all settings, each weighted by exp((hits - most) / (LEVEL sqrt(misses))), rounded.

    Hits count with their neighbours', so that a single setting that is best by chance does not pull the mean off a
    plateau. Along an axis that makes no difference it is the cautious end: the largest beta, the smallest balance and
    tau.
    """
    hits = _with_neighbours(table) / 1e6
    weight = ((hits - hits.max()) / (LEVEL * (n_rows - hits.max()).clamp_min(1).sqrt())).exp()
    b, k, t = (_mean_place(weight.transpose(0, axis).flatten(1).sum(1)) for axis in range(3))
    return (len(table) - 1 if b is None else b), k or 0, t or 0


def _mean_place(weight: Tensor) -> int | None:
    """Along one axis; None if all places are alike."""
    if float(weight.max() - weight.min()) <= 1e-9 * float(weight.max()):
        return None
    places = torch.arange(len(weight), dtype=weight.dtype, device=weight.device)
    return round(float((weight * places).sum() / weight.sum()))


def prefer(hits: Mapping[K, float], n_rows: int, usual: K) -> K:
    """The candidate with most hits of ``n_rows`` if it is clearly better than the usual one, which else stays.

    Both models get most rows right; they differ on rows that one of them gets wrong. If half of these differ, the
    difference in hits has a variance of about the misses of one.

    >>> prefer({"root": 900.0, "row": 908.0}, 1000, "root"), prefer({"root": 900.0, "row": 930.0}, 1000, "root")
    ('root', 'row')
    """
    best = max(hits, key=lambda candidate: (hits[candidate], candidate == usual))
    error = math.sqrt(max(n_rows - hits[usual], 1.0))
    return best if hits[best] - hits[usual] > 1 + CLEARLY * error else usual


def _with_neighbours(table: Tensor) -> Tensor:
    """The mean over the settings at most one step away in each direction, of those there are, rounded to 1e-6."""
    box = torch.ones(1, 1, 3, 3, 3, dtype=torch.float64, device=table.device)
    counted, settings = (
        torch.nn.functional.conv3d(each.double()[None, None], box, padding=1)[0, 0]
        for each in (table, torch.ones_like(table))
    )
    return (counted / settings).mul(1e6).round()
