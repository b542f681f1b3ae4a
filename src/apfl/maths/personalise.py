"""From summed statistics to personal streams, with every setting that is left open chosen in closed form.

    gamma                  generalised cross-validation of the sums, at the server (`gcv`)
    beta, balance, tau     left-out hits of both streams, added over clients (`hits`, `leaveout`)

No row is held out and no test row is seen. The same code serves the method, where clients see the primary's leverage
through a sketch as they would in a federation, and the scikit-learn estimator, where it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from apfl.machine import over_clients
from apfl.maths.gcv import choose_gamma, feature_energy
from apfl.maths.hits import Grid, Scope, choose, grid, hits, local_prior, towards_the_sum
from apfl.maths.leaveout import Leaving, LeftOut, Refinement, fit_refinement, hat_basis, leverage_sketch, whiten
from apfl.maths.ridge import Statistics, factorise, one_hot

__all__ = ["Auto", "Choice", "Personal", "Rows", "left_out_rows", "personalise", "solve_primary", "width_for"]

Auto = Literal["auto"]
FEW_ROWS = 250  # with fewer, the best of 882 settings flatters itself, and no left-out accuracy is stated
MOST_NOISE = 0.01  # left-out accuracy that a second dose of the sketch's noise may add or take away
MOST_UNJUDGED = 0.05  # share of rows that cannot be judged beyond which no left-out accuracy is stated


@dataclass(frozen=True, eq=False)
class Rows:
    """One client's rows as the streams see them."""

    phi: Tensor  # (n, d_P)
    psi: Tensor  # (n, d_R)
    labels: Tensor  # (n,)
    leaving: Leaving


@dataclass(frozen=True)
class Choice:
    """The settings of the refinement; those left ``auto`` are chosen."""

    beta: float | Auto = "auto"
    balance: float | Auto = "auto"
    tau: float | Auto = "auto"
    scope: Scope = "federation"
    refinement: Refinement = "cross-fitted"
    smoothing: float = 0.03  # of the label counts behind the local prior

    def fixed(self, name: str) -> float | None:
        """The value of a setting, None if it is to be chosen."""
        value = getattr(self, name)
        return None if value == "auto" else float(value)

    @property
    def open(self) -> bool:
        """Whether anything is left to choose."""
        return "auto" in (self.beta, self.balance, self.tau)


@dataclass(frozen=True, eq=False)
class Primary:
    """The primary stream and what the server knows about it."""

    weights: Tensor  # G (d_P, c)
    factor: Tensor  # L of Phi'Phi + gamma I
    gamma: float
    path: dict[str, list[float | None]] | None  # the curve gamma was chosen on; None where it is not finite
    distinct_rows: float  # as far as the sums show; else all
    stats: Statistics


@dataclass(frozen=True, eq=False)
class Personal:
    """What one client ends up with."""

    refinement: Tensor  # P_k (d_R, c)
    beta: float
    balance: float
    tau: float
    prior: Tensor | None  # (c,)


def width_for(n_samples: int, n_features: int) -> int:
    """The default d_P: a power of two near the number of rows, from 256 to 8192; the same at every site because N is.

    With few rows of many features it is the number of features instead, rounded up, to 2048 at most: a narrower map
    would lose what a ridge on the features themselves sees.

    >>> width_for(1300, 64), width_for(45_000, 1280), width_for(20, 64), width_for(300, 1280)
    (1024, 8192, 256, 2048)
    """
    power = max(round(math.log2(n_samples)), math.ceil(math.log2(min(n_features, 2048))))
    return min(8192, max(256, int(2**power)))


def solve_primary(stats: Statistics, gamma: float | Auto) -> Primary:
    """The primary stream with gamma given, or chosen from the sums."""
    path = choose_gamma(stats) if gamma == "auto" else None
    used = float(gamma) if path is None else path.chosen
    factor = factorise(stats, used)
    weights = torch.cholesky_solve(stats.crosscorrelation, factor).contiguous()
    curve: dict[str, list[float | None]] | None = None
    if path is not None:
        curve = {"gamma": [*path.gammas], "gcv": [_finite(score) for score in path.scores]}
    distinct = stats.n_samples if path is None else path.distinct_rows
    return Primary(weights, factor, used, curve, distinct, stats)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows no infinity


def left_out_rows(rows: Rows, primary: Primary, kind: Refinement, sketch: Tensor | None) -> LeftOut:
    """One client's left-out scores; through the sketch, or exactly where there is none."""
    phi = rows.phi.to(torch.float64)
    residual = one_hot(rows.labels, primary.stats.n_classes) - phi @ primary.weights
    whitened = whiten(phi, primary.factor) if sketch is None else phi @ sketch
    groups, copies = rows.leaving
    return LeftOut(hat_basis(rows.psi), whitened, residual, kind, groups, sketch is not None, copies)


def personalise(
    rows_of: Callable[[int], Rows], n_clients: int, primary: Primary, choice: Choice, sketch_width: int, seed: int
) -> tuple[list[Personal], dict[str, Any]]:
    """Every client's refinement, and what was chosen for it.

    ``rows_of(k)`` gives client k's rows, and may be asked twice. ``sketch_width`` is m; 0 means exact leverage.
    """
    stats, device = primary.stats, primary.weights.device
    sketch = leverage_sketch(primary.factor, sketch_width, seed) if sketch_width else None
    needs_left_out = choice.open or choice.refinement == "cross-fitted"
    unit = feature_energy(stats) * rows_of(0).psi.shape[1] / stats.width
    tried = grid(unit, beta=choice.fixed("beta"), balance=choice.fixed("balance"), tau=choice.fixed("tau"))

    def prepare(k: int) -> _Prepared:
        rows = rows_of(k)
        targets = one_hot(rows.labels, stats.n_classes)
        counts = targets.sum(0)
        if not needs_left_out:
            return _Prepared(targets - rows.phi.to(torch.float64) @ primary.weights, None, counts)
        left = left_out_rows(rows, primary, choice.refinement, sketch)
        table = None
        if choice.open:
            table = hits(left, rows.labels, counts, stats.class_counts, choice.smoothing, tried)
        n_copies = int(rows.leaving.copies.sum())
        n_unjudged = len(targets) - n_copies - int(left.judged.sum())
        return _Prepared(left.target, table, counts, n_copies, n_unjudged, left.noise(rows.labels))

    prepared = over_clients(prepare, range(n_clients), device)
    settings = _settings(prepared, tried, choice)

    def fit(k: int) -> Personal:
        beta, balance, tau = settings[k]
        prior = tau * local_prior(prepared[k].counts, stats.class_counts, choice.smoothing) if tau else None
        return Personal(fit_refinement(rows_of(k).psi, prepared[k].target, beta), beta, balance, tau, prior)

    personal = over_clients(fit, range(n_clients), device)
    return personal, _account(primary, prepared, settings, tried)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What a client knows before the settings are chosen."""

    target: Tensor  # of the refinement (n, c)
    table: Tensor | None  # of left-out hits, if anything is to be chosen
    counts: Tensor  # of its labels (c,)
    n_copies: int = 0
    n_unjudged: int = 0  # others whose leverage is too high, or not known well enough
    noise: float = 0.0  # hits that the noise of the sketch may have added


def _settings(prepared: Sequence[_Prepared], tried: Grid, choice: Choice) -> list[tuple[float, float, float]]:
    """(beta, balance, tau) of every client."""
    tables = [each.table for each in prepared if each.table is not None]
    if not tables:
        return [(tried.betas[0], tried.balances[0], tried.taus[0])] * len(prepared)
    summed = torch.stack(tables).sum(0)
    if choice.scope == "federation":
        return [choose(summed, tried)] * len(prepared)
    if choice.scope == "client":
        return [choose(table, tried) for table in tables]
    sizes = [int(each.counts.sum()) for each in prepared]
    return [
        choose(towards_the_sum(table, summed, n, sum(sizes)), tried) for table, n in zip(tables, sizes, strict=True)
    ]


def _account(
    primary: Primary,
    prepared: Sequence[_Prepared],
    settings: Sequence[tuple[float, float, float]],
    tried: Grid,
) -> dict[str, Any]:
    """What was chosen and why, for the record."""
    account: dict[str, Any] = {"d_primary": primary.stats.width, "gamma": primary.gamma}
    names = ("beta", "balance", "tau")
    if len(set(settings)) == 1:
        account |= dict(zip(names, settings[0], strict=True))
    else:
        account |= {f"{name}_per_client": [s[i] for s in settings] for i, name in enumerate(names)}
    n_rows = sum(int(each.counts.sum()) for each in prepared)
    account["leverage_clipped"] = sum(each.n_unjudged for each in prepared) / n_rows
    if any(each.table is not None for each in prepared):
        account |= _left_out(primary, prepared, settings, tried)
    if primary.path is not None:
        account["gamma_path"] = primary.path
    return account


def _left_out(
    primary: Primary,
    prepared: Sequence[_Prepared],
    settings: Sequence[tuple[float, float, float]],
    tried: Grid,
) -> dict[str, Any]:
    """The accuracies that the settings were chosen by, over the rows that could be judged; None if they would mislead.

    They would if there are few rows, if the sketch's noise in the leverages flatters or harms them, or if many rows
    repeat those of *another* client, which no client can see but sums show: each copy vouches for the other.
    """
    tables = [each.table for each in prepared if each.table is not None]
    summed = torch.stack(tables).sum(0)
    n_copies, n_unjudged = sum(each.n_copies for each in prepared), sum(each.n_unjudged for each in prepared)
    n_distinct = sum(int(each.counts.sum()) for each in prepared) - n_copies
    elsewhere = max(0.0, primary.stats.n_samples - primary.distinct_rows - n_copies)
    noise = sum(each.noise for each in prepared) / n_distinct
    judged = n_distinct >= FEW_ROWS and n_unjudged + 2 * elsewhere <= MOST_UNJUDGED * n_distinct
    judged &= abs(noise) <= MOST_NOISE

    def share(right: int) -> float | None:
        return right / (n_distinct - n_unjudged) if judged else None

    account: dict[str, Any] = {
        "left_out_rows": n_distinct - n_unjudged,
        "left_out_noise": noise,
        "copies": {"at_their_client": n_copies, "elsewhere": round(elsewhere)},
        "left_out_accuracy": share(
            sum(int(table[tried.index(own)]) for table, own in zip(tables, settings, strict=True))
        ),
    }
    if 0.0 in tried.balances and 0.0 in tried.taus:
        alone = summed[0, list(tried.balances).index(0.0), list(tried.taus).index(0.0)]
        account["left_out_accuracy_primary_alone"] = share(int(alone))
    account["table"] = {
        "beta": list(tried.betas), "balance": list(tried.balances), "tau": list(tried.taus), "hits": summed.tolist()
    }  # fmt: skip
    return account
