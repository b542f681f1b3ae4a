"""From summed statistics to personal streams, with every setting that is left open chosen in closed form.

    gamma                  generalised cross-validation of the sums, at the server (`gcv`)
    beta, balance, tau     left-out hits of both streams, added over clients (`tables`, `leaveout`)

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

from apfl.gcv import choose_gamma, feature_energy
from apfl.leaveout import LeftOut, Refinement, hat_basis, leverage_sketch, whiten
from apfl.ridge import Statistics, factorise, one_hot
from apfl.streams import fit_refinement
from apfl.tables import Grid, Scope, choose, grid, hits, local_prior, towards_the_sum
from apfl.workers import over_clients

__all__ = ["Auto", "Choice", "Personal", "Rows", "left_out_rows", "personalise", "solve_primary", "width_for"]

Auto = Literal["auto"]


@dataclass(frozen=True, eq=False)
class Rows:
    """One client's rows as the streams see them."""

    phi: Tensor  # (n, d_P)
    psi: Tensor  # (n, d_R)
    labels: Tensor  # (n,)
    groups: Tensor | None = None


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
    path: dict[str, list[float]] | None  # the curve gamma was chosen on
    stats: Statistics


@dataclass(frozen=True, eq=False)
class Personal:
    """What one client ends up with."""

    refinement: Tensor  # P_k (d_R, c)
    beta: float
    balance: float
    tau: float
    prior: Tensor | None  # (c,)


def width_for(n_samples: int) -> int:
    """The default d_P: a power of two near N, from 256 to 8192; the same at every site because N is.

    >>> width_for(1300), width_for(45_000), width_for(20)
    (1024, 8192, 256)
    """
    return int(min(8192, max(256, 2 ** round(torch.log2(torch.tensor(float(n_samples))).item()))))


def solve_primary(stats: Statistics, gamma: float | Auto) -> Primary:
    """The primary stream with gamma given, or chosen from the sums."""
    path = choose_gamma(stats) if gamma == "auto" else None
    used = float(gamma) if path is None else path.chosen
    factor = factorise(stats, used)
    weights = torch.cholesky_solve(stats.crosscorrelation, factor).contiguous()
    curve = None
    if path is not None:
        known = [point for point in zip(path.gammas, path.scores, strict=True) if math.isfinite(point[1])]
        curve = {"gamma": [gamma for gamma, _ in known], "gcv": [score for _, score in known]}
    return Primary(weights, factor, used, curve, stats)


def left_out_rows(rows: Rows, primary: Primary, kind: Refinement, sketch: Tensor | None) -> LeftOut:
    """One client's left-out scores; through the sketch, or exactly where there is none."""
    phi = rows.phi.to(torch.float64)
    residual = one_hot(rows.labels, primary.stats.n_classes) - phi @ primary.weights
    whitened = whiten(phi, primary.factor) if sketch is None else phi @ sketch
    return LeftOut(hat_basis(rows.psi), whitened, residual, kind, rows.groups, sketched=sketch is not None)


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

    def prepare(k: int) -> tuple[Tensor, Tensor | None, Tensor, float]:
        """Target of the refinement, table of hits, label counts, share of clipped leverages."""
        rows = rows_of(k)
        counts = one_hot(rows.labels, stats.n_classes).sum(0)
        if not needs_left_out:
            phi = rows.phi.to(torch.float64)
            return one_hot(rows.labels, stats.n_classes) - phi @ primary.weights, None, counts, 0.0
        left = left_out_rows(rows, primary, choice.refinement, sketch)
        table = None
        if choice.open:
            table = hits(left, rows.labels, counts, stats.class_counts, choice.smoothing, tried)
        return left.target, table, counts, left.clipped

    prepared = over_clients(prepare, range(n_clients), device)
    settings = _settings([table for _, table, _, _ in prepared], [int(c.sum()) for *_, c, _ in prepared], tried, choice)

    def fit(k: int) -> Personal:
        beta, balance, tau = settings[k]
        target, _, counts, _ = prepared[k]
        prior = tau * local_prior(counts, stats.class_counts, choice.smoothing) if tau else None
        return Personal(fit_refinement(rows_of(k).psi, target, beta), beta, balance, tau, prior)

    personal = over_clients(fit, range(n_clients), device)
    return personal, _account(primary, prepared, settings, tried)


def _settings(
    tables: Sequence[Tensor | None], sizes: Sequence[int], tried: Grid, choice: Choice
) -> list[tuple[float, float, float]]:
    """(beta, balance, tau) of every client."""
    known = [table for table in tables if table is not None]
    if not known:
        return [(tried.betas[0], tried.balances[0], tried.taus[0])] * len(tables)
    summed = torch.stack(known).sum(0)
    if choice.scope == "federation":
        return [choose(summed, tried)] * len(tables)
    if choice.scope == "client":
        return [choose(table, tried) for table in known]
    return [choose(towards_the_sum(table, summed, n, sum(sizes)), tried) for table, n in zip(known, sizes, strict=True)]


def _account(
    primary: Primary,
    prepared: Sequence[tuple[Tensor, Tensor | None, Tensor, float]],
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
    tables = [table for _, table, _, _ in prepared if table is not None]
    if tables:
        summed = torch.stack(tables).sum(0)
        n_rows = sum(float(counts.sum()) for _, _, counts, _ in prepared)  # of the clients at hand
        right = sum(int(table[tried.index(own)]) for table, own in zip(tables, settings, strict=True))
        account["left_out_accuracy"] = right / n_rows
        if 0.0 in tried.balances and 0.0 in tried.taus:
            alone = summed[0, list(tried.balances).index(0.0), list(tried.taus).index(0.0)]
            account["left_out_accuracy_primary_alone"] = float(alone) / n_rows
        account["table"] = {
            "beta": list(tried.betas), "balance": list(tried.balances), "tau": list(tried.taus), "hits": summed.tolist()
        }  # fmt: skip
    account["leverage_clipped"] = sum(clipped for *_, clipped in prepared) / len(prepared)
    if primary.path is not None:
        account["gamma_path"] = primary.path
    return account
