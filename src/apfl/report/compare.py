"""How far one method is from another, and how sure that is.

    D = mean over seeds of ( sum_k w_k (a_sk - b_sk) / sum_k w_k )        a, b: accuracies of client k with seed s

The paired cluster bootstrap draws clients with replacement within each seed, keeps the pairs, and takes D again; the
95 % interval is between the 2.5 and the 97.5 percentile. Where clients are the same people in every seed (partition
``given``) a client is drawn with all its seeds. Seeds themselves are not drawn: the interval speaks of other clients
like these, not of other draws of the partition.

A p-value is twice the smaller share of draws on either side of zero; `holm` adjusts several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["DRAWS", "Difference", "Pairs", "holm", "paired_bootstrap"]

DRAWS = 10_000
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


def paired_bootstrap(
    seeds: Sequence[Pairs], *, same_clients: bool = False, n_draws: int = DRAWS, seed: int = 0
) -> Difference:
    """The difference with its interval.

    >>> alike = Pairs(np.array([0.9, 0.7]), np.array([0.8, 0.6]), np.ones(2))
    >>> found = paired_bootstrap([alike])
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
    (0.1, 0.1, 0.1)
    """
    draws = np.zeros(n_draws)
    for i, pairs in enumerate(seeds):
        draws += _mean(pairs, _counts(len(pairs.ours), n_draws, seed, 0 if same_clients else i)) / len(seeds)
    value = float(np.mean([_mean(pairs, np.ones((1, len(pairs.ours))))[0] for pairs in seeds]))
    low, high = np.quantile(draws, [0.025, 0.975])
    tiny = 1e-12  # accuracies are ratios of small integers: what is below is rounding
    side = min((draws <= tiny).sum(), (draws >= -tiny).sum())
    p = min(1.0, 2 * float(side + 1) / (n_draws + 1))
    n_clients = sum(int((pairs.weights > 0).sum()) for pairs in seeds)
    return Difference(value, float(low), float(high), p, len(seeds), n_clients)


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
