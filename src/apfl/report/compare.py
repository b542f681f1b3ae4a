"""How far one method is from another, and how sure that is.

    D = mean over the S seeds of D_s        D_s = sum_k w_k (a_sk - b_sk) / sum_k w_k
                                            a, b: accuracies of client k with seed s

The 95 % interval is the widest of those that apply, because each alone can be too narrow:

* *clients*: draw clients with replacement within each seed, keep the pairs, take D again; between the 2.5 and the 97.5
  percentile of the draws. If clients are the same people in every seed (partition ``given``) draw a client with all its
  seeds.
* *seeds*, if S > 1: D +- t sqrt(B), where B = var(D_s) / S and t has S - 1 degrees of freedom. B contains the spread of
  clients, who are others in every seed.
* *both*, if S > 1 and clients are the same in every seed, so that B does not contain their spread: D +- t sqrt(B + C),
  where C is the variance of the draws of clients and t has Satterthwaite's degrees of freedom.

Seeds are not drawn with replacement: three seeds have ten different draws and two thirds of the variance, and a 95 %
interval from such draws covers 82 % if seeds differ three times as much as clients explain. Random-effects
meta-analysis has the same problem, few studies of known precision, and a like answer: Hartung and Knapp (2001), never
narrower than the precision allows (Roever, Knapp and Friede 2015). With one seed the interval speaks of clients only.

The p-value is the largest of those that belong to the intervals, so the interval excludes zero if and only if p < 0.05.
That of the draws is twice the smaller share on either side of zero. `holm` adjusts several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

__all__ = ["DRAWS", "FEW_SEEDS", "Difference", "Pairs", "holm", "paired_difference"]

DRAWS = 10_000
FEW_SEEDS = 5  # below, the quantile of t is more than 1.5 times the normal one
TINY = 1e-12  # accuracies are ratios of small integers: what is below is rounding
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pairs:
    """One seed: the same clients with both methods."""

    ours: Floats  # (K,)
    theirs: Floats  # (K,)
    weights: Floats  # (K,)


@dataclass(frozen=True)
class Difference:
    """Ours minus theirs."""

    value: float
    low: float
    high: float
    p: float
    n_seeds: int
    n_clients: int  # over all seeds
    p_holm: float | None = None

    @property
    def clear(self) -> bool:
        """Whether it differs from zero at the 5 % level, after Holm where that was asked for."""
        return (self.p if self.p_holm is None else self.p_holm) < 0.05

    @property
    def speaks_of(self) -> str:
        """What the interval speaks of, and from how many seeds."""
        if self.n_seeds == 1:
            return "clients only, 1 seed"
        return f"seeds and clients, {self.n_seeds} seeds" + (": few" if self.n_seeds < FEW_SEEDS else "")


def paired_difference(
    seeds: Sequence[Pairs], *, same_clients: bool = False, n_draws: int = DRAWS, seed: int = 0
) -> Difference:
    """The difference with its interval.

    >>> alike = Pairs(np.array([0.9, 0.7]), np.array([0.8, 0.6]), np.ones(2))
    >>> found = paired_difference([alike])
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3), found.speaks_of
    (0.1, 0.1, 0.1, 'clients only, 1 seed')

    Another seed in which the methods are level leaves the order open:

    >>> level = Pairs(np.array([0.8, 0.6]), np.array([0.8, 0.6]), np.ones(2))
    >>> found = paired_difference([alike, level])
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3), found.speaks_of
    (0.05, -0.585, 0.685, 'seeds and clients, 2 seeds: few')
    """
    means = np.array([_mean(pairs, np.ones((1, len(pairs.ours))))[0] for pairs in seeds])  # (S,)
    draws = np.zeros(n_draws)
    for i, pairs in enumerate(seeds):
        draws += _mean(pairs, _counts(len(pairs.ours), n_draws, seed, 0 if same_clients else i)) / len(seeds)
    judged = [_over_clients(draws)]
    if len(seeds) > 1:
        judged += _over_seeds(means, draws, max(_tested(pairs) for pairs in seeds) if same_clients else None)
    low, high, p = min(j[0] for j in judged), max(j[1] for j in judged), max(j[2] for j in judged)
    return Difference(float(means.mean()), low, high, p, len(seeds), sum(map(_tested, seeds)))


def _tested(pairs: Pairs) -> int:
    return int((pairs.weights > 0).sum())


Judged = tuple[float, float, float]  # low, high, p


def _over_clients(draws: Floats) -> Judged:
    """Percentiles, as order statistics: with so many draws beyond zero, and no more, p is below 0.05."""
    n, ordered = len(draws), np.sort(draws)
    beyond = max(0, ceil(0.025 * (n + 1)) - 2)
    side = min((draws <= TINY).sum(), (draws >= -TINY).sum())
    return float(ordered[beyond]), float(ordered[n - 1 - beyond]), min(1.0, 2 * float(side + 1) / (n + 1))


def _over_seeds(means: Floats, draws: Floats, n_same_clients: int | None) -> list[Judged]:
    value, freedom = float(means.mean()), len(means) - 1
    between = float(means.var(ddof=1)) / len(means)
    judged = [_student(value, between, freedom)]
    if n_same_clients is not None:
        others = max(1, n_same_clients - 1)
        clients = float(draws.var()) * n_same_clients / others  # drawing K of K shows (K - 1) / K of the variance
        total = between + clients
        shared = total**2 / (between**2 / freedom + clients**2 / others) if total > 0 else freedom
        judged.append(_student(value, total, shared))
    return judged


def _student(value: float, variance: float, freedom: float) -> Judged:
    error = sqrt(variance)
    half = float(stdtrit(freedom, 0.975)) * error
    if error <= TINY:
        return value, value, float(abs(value) <= TINY)
    return value - half, value + half, 2 * float(stdtr(freedom, -abs(value) / error))


@lru_cache(maxsize=8)  # all opponents in one federation are judged on the same draws
def _counts(n_clients: int, n_draws: int, seed: int, stratum: int) -> Floats:
    """How often each client is drawn, (draws, clients)."""
    rng = np.random.default_rng((seed, stratum))
    return rng.multinomial(n_clients, np.full(n_clients, 1 / n_clients), size=n_draws).astype(float)


def _mean(pairs: Pairs, counts: Floats) -> Floats:
    """The weighted mean difference of every draw, (draws,)."""
    total: Floats = counts @ pairs.weights
    drawn: Floats = (counts @ (pairs.weights * (pairs.ours - pairs.theirs))) / np.where(total > 0, total, 1.0)
    return drawn


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given (Holm 1979): the i-th smallest of m times m - i + 1, never decreasing.

    >>> [round(p, 6) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    adjusted = [1.0] * len(p_values)
    reached = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = reached
    return adjusted
