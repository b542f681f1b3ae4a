"""From summed statistics to personal streams, with every setting that is left open chosen in closed form.

    gamma                  generalised cross-validation of the sums, at the server (`gcv`)
    beta, balance, tau     left-out hits of both streams, added over clients (`hits`, `leaveout`)

No row is held out and no test row is seen. What one client computes stands here once, in `leave_out` and `refine`:
the method, its late clients, a site of a federation, the scikit-learn estimator and the oracle all use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from apfl.maths.gcv import choose_gamma, feature_energy
from apfl.maths.hits import Grid, Scope, choose, grid, hits, left_out_prior, local_prior
from apfl.maths.leaveout import LeftOut, fit_refinement, hat_basis, leverage_sketch, whiten
from apfl.maths.ridge import Statistics, factorise, one_hot

__all__ = [
    "Auto",
    "Choice",
    "LeftOutHits",
    "LeftOutScores",
    "Personal",
    "Personalised",
    "Primary",
    "Rows",
    "Shared",
    "leave_out",
    "personalise",
    "refine",
    "solve_primary",
    "width_for",
]

Auto = Literal["auto"]
Setting = tuple[float, float, float]  # beta, balance, tau
R = TypeVar("R")
FEW_ROWS = 250  # with fewer, the best of 882 settings flatters itself, and no left-out accuracy is stated
MOST_NOISE = 0.01  # left-out accuracy that a second dose of the sketch's noise may add or take away
MOST_UNJUDGED = 0.05  # share of rows that cannot be judged beyond which no left-out accuracy is stated


@dataclass(frozen=True, eq=False)
class Rows:
    """One client's rows as the streams see them; ``groups`` and ``copies`` are those of `leaveout.leaving`."""

    phi: Tensor  # (n, d_P)
    psi: Tensor  # (n, d_R)
    labels: Tensor  # (n,)
    groups: Tensor | None = None  # (n,)
    copies: Tensor | None = None  # bool (n,)
    seen: Tensor | None = None  # bool (n,): rows behind the primary; without it, all

    @property
    def n_copies(self) -> int:
        return 0 if self.copies is None else int(self.copies.sum())


@dataclass(frozen=True)
class Choice:
    """The settings of the refinement, those left ``auto`` to be chosen; `APFL` has the defaults."""

    beta: float | Auto
    balance: float | Auto
    tau: float | Auto
    scope: Scope
    smoothing: float  # of the label counts behind the local prior

    @property
    def open(self) -> bool:
        """Whether anything is left to choose."""
        return "auto" in (self.beta, self.balance, self.tau)

    def fixed(self, name: str) -> float | None:
        """The value of a setting, None if it is to be chosen."""
        value = getattr(self, name)
        return None if value == "auto" else float(value)

    def grid(self, unit: float) -> Grid:
        """The settings to try; ``unit`` is the mean squared length of a row of Psi."""
        return grid(unit, beta=self.fixed("beta"), balance=self.fixed("balance"), tau=self.fixed("tau"))


@dataclass(frozen=True, eq=False)
class Shared:
    """What a client is given of the primary stream. The factor never leaves a process: it tells the summed system."""

    weights: Tensor  # G (d_P, c)
    class_counts: Tensor  # of the rows behind it (c,)
    sketch: Tensor | None = None  # of its leverage (d_P, m)
    factor: Tensor | None = None  # instead of the sketch, for exact leverage (d_P, d_P)

    def residual(self, rows: Rows) -> Tensor:
        """E = Y - Phi_k G, (n, c): what the refinement is fitted to."""
        return self._one_hot(rows) - rows.phi.to(torch.float64) @ self.weights

    def counts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Rows of each class at the client, and at everyone: rows that the primary has not seen are added."""
        own = self._one_hot(rows)
        unseen = own[:0] if rows.seen is None else own[~rows.seen]
        return own.sum(0), self.class_counts + unseen.sum(0)

    def whitened(self, rows: Rows) -> Tensor:
        """V (n, any), with V V' the primary's hat matrix: zero for rows that it has not seen."""
        phi = rows.phi.to(torch.float64)
        if self.sketch is None:
            assert self.factor is not None, "leverage needs a sketch or the factor"
            columns = whiten(phi, self.factor)
        else:
            columns = phi @ self.sketch
        return columns if rows.seen is None else columns * rows.seen[:, None]

    def _one_hot(self, rows: Rows) -> Tensor:
        return one_hot(rows.labels, self.weights.shape[1])


@dataclass(frozen=True, eq=False)
class Primary:
    """The primary stream and what the server knows about it."""

    weights: Tensor  # G (d_P, c)
    factor: Tensor  # L of Phi'Phi + gamma I
    gamma: float
    path: dict[str, list[float | None]] | None  # the curve gamma was chosen on; None where it is not finite
    distinct_rows: float  # as far as the sums show; else all
    stats: Statistics

    def unit(self, width: int) -> float:
        """The mean squared length of a row of Psi with this many columns, as that of Phi lets expect."""
        return feature_energy(self.stats) * width / self.stats.width

    @property
    def shared(self) -> Shared:
        """What clients need to refine with given settings."""
        return Shared(self.weights, self.stats.class_counts)

    def with_leverage(self, sketch_width: int, seed: int) -> Shared:
        """What they need to leave rows out: a sketch of m columns too, or with 0 the factor itself."""
        if sketch_width:
            return replace(self.shared, sketch=leverage_sketch(self.factor, sketch_width, seed))
        return replace(self.shared, factor=self.factor)


@dataclass(frozen=True, eq=False)
class Personal:
    """What one client ends up with."""

    refinement: Tensor  # P_k (d_R, c)
    beta: float
    balance: float
    tau: float
    prior: Tensor | None  # (c,)

    @property
    def setting(self) -> Setting:
        return self.beta, self.balance, self.tau


def width_for(n_samples: int, n_features: int) -> int:
    """The default d_P: a power of two near the number of rows, from 256 to 8192; the same at every site because N is.

    With few rows of many features it is four times the number of features instead, rounded up, to 2048 at most: a
    narrower map would lose what a ridge on the features themselves sees.

    >>> width_for(1300, 64), width_for(45_000, 1280), width_for(20, 64), width_for(300, 1280)
    (1024, 8192, 256, 2048)
    """
    power = max(round(math.log2(n_samples)), math.ceil(math.log2(min(4 * n_features, 2048))))
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


@dataclass(frozen=True, eq=False)
class LeftOutScores:
    """Left-out scores of one client's rows, (n, c) each, for every beta tried."""

    alone: Tensor  # of the primary stream
    refinement: Mapping[float, Tensor]  # of the refinement stream, by beta
    prior: Tensor

    def at(self, setting: Setting) -> Tensor:
        """Of the client's model with this setting."""
        beta, balance, tau = setting
        return self.alone + balance * self.refinement[beta] + tau * self.prior


@dataclass(frozen=True, eq=False)
class LeftOutHits:
    """What one client learns by leaving its rows out."""

    table: Tensor  # of hits (betas, balances, taus), int64
    n_rows: int
    n_copies: int
    n_unjudged: int  # others whose leverage is too high, or not known well enough
    noise: float  # hits that the noise of the sketch may have added
    scores: LeftOutScores | None  # if asked for


def leave_out(rows: Rows, shared: Shared, smoothing: float, tried: Grid, *, keep_scores: bool = False) -> LeftOutHits:
    """How many of a client's rows each setting gets right once they are left out, from one decomposition of Psi."""
    left = LeftOut(
        hat_basis(rows.psi), shared.whitened(rows), shared.residual(rows), rows.groups,
        sketched=shared.sketch is not None, copies=rows.copies,
    )  # fmt: skip
    own, everyone = shared.counts(rows)
    table = hits(left, rows.labels, own, everyone, smoothing, tried)
    scores = None
    if keep_scores:
        targets = one_hot(rows.labels, len(own))
        scores = LeftOutScores(
            targets - left.primary,
            {beta: left.refinement(beta) for beta in tried.betas},
            left_out_prior(targets, own, everyone, rows.groups, smoothing),
        )
    n, n_copies = len(rows.labels), rows.n_copies
    return LeftOutHits(table, n, n_copies, n - n_copies - int(left.judged.sum()), left.noise(rows.labels), scores)


def refine(rows: Rows, shared: Shared, setting: Setting, smoothing: float) -> Personal:
    """One client's refinement with this beta, balance and tau, fitted to its in-sample residuals as in the paper."""
    beta, balance, tau = setting
    prior = tau * local_prior(*shared.counts(rows), smoothing) if tau else None
    return Personal(fit_refinement(rows.psi, shared.residual(rows), beta), beta, balance, tau, prior)


class OverClients(Protocol):
    """``[work(client) for client in clients]``, on some device and in whatever order."""

    def __call__(self, work: Callable[[int], R], clients: Sequence[int], device: torch.device) -> list[R]: ...


def in_turn(work: Callable[[int], R], clients: Sequence[int], device: torch.device) -> list[R]:
    """One client after another."""
    return [work(client) for client in clients]


@dataclass(frozen=True, eq=False)
class Personalised:
    """Every client's refinement, and what was chosen for it."""

    clients: list[Personal]
    account: dict[str, Any]  # for the record
    scores: list[LeftOutScores]  # if asked for


def personalise(
    rows_of: Callable[[int], Rows],
    n_clients: int,
    primary: Primary,
    choice: Choice,
    sketch_width: int,
    seed: int,
    *,
    over: OverClients = in_turn,
    keep_scores: bool = False,
) -> Personalised:
    """Choose the settings that are open, and refine every client with them.

    ``rows_of(k)`` gives client k's rows, and may be asked twice. ``sketch_width`` is m; 0 means exact leverage.
    ``keep_scores`` keeps the left-out scores of every row.
    """
    device, ks = primary.weights.device, range(n_clients)
    tried = choice.grid(primary.unit(rows_of(0).psi.shape[1]))
    left_out: list[LeftOutHits] = []
    if choice.open or keep_scores:
        sketched = primary.with_leverage(sketch_width, seed)
        left_out = over(
            lambda k: leave_out(rows_of(k), sketched, choice.smoothing, tried, keep_scores=keep_scores), ks, device
        )
    settings = _settings([own.table for own in left_out] if choice.open else [], n_clients, tried, choice.scope)
    personal = over(lambda k: refine(rows_of(k), primary.shared, settings[k], choice.smoothing), ks, device)
    account = _account(primary, left_out if choice.open else [], settings, tried)
    return Personalised(personal, account, [own.scores for own in left_out if own.scores is not None])


def _settings(tables: Sequence[Tensor], n_clients: int, tried: Grid, scope: Scope) -> list[Setting]:
    """(beta, balance, tau) of every client."""
    if not tables:
        return [(tried.betas[0], tried.balances[0], tried.taus[0])] * n_clients
    if scope == "client":
        return [choose(table, tried) for table in tables]
    return [choose(torch.stack(list(tables)).sum(0), tried)] * n_clients


def _account(
    primary: Primary, left_out: Sequence[LeftOutHits], settings: Sequence[Setting], tried: Grid
) -> dict[str, Any]:
    """What was chosen and why, for the record."""
    account: dict[str, Any] = {"d_primary": primary.stats.width, "gamma": primary.gamma}
    names = ("beta", "balance", "tau")
    if len(set(settings)) == 1:
        account |= dict(zip(names, settings[0], strict=True))
    else:
        account |= {f"{name}_per_client": [s[i] for s in settings] for i, name in enumerate(names)}
    n_rows = sum(own.n_rows for own in left_out)
    account["leverage_clipped"] = sum(own.n_unjudged for own in left_out) / n_rows if n_rows else 0.0
    if left_out:
        account |= _accuracies(primary, left_out, settings, tried)
    if primary.path is not None:
        account["gamma_path"] = primary.path
    return account


def _accuracies(
    primary: Primary, left_out: Sequence[LeftOutHits], settings: Sequence[Setting], tried: Grid
) -> dict[str, Any]:
    """The accuracies that the settings were chosen by, over the rows that could be judged; None if they would mislead.

    They would if there are few rows, if the sketch's noise in the leverages flatters or harms them, or if many rows
    repeat those of *another* client, which no client can see but sums show: each copy vouches for the other.
    """
    summed = torch.stack([own.table for own in left_out]).sum(0)
    n_copies, n_unjudged = sum(own.n_copies for own in left_out), sum(own.n_unjudged for own in left_out)
    n_distinct = sum(own.n_rows for own in left_out) - n_copies
    elsewhere = max(0.0, primary.stats.n_samples - primary.distinct_rows - n_copies)
    noise = sum(own.noise for own in left_out) / n_distinct
    judged = n_distinct >= FEW_ROWS and n_unjudged + 2 * elsewhere <= MOST_UNJUDGED * n_distinct
    judged &= abs(noise) <= MOST_NOISE

    def share(right: int) -> float | None:
        return right / (n_distinct - n_unjudged) if judged else None

    account: dict[str, Any] = {
        "left_out_rows": n_distinct - n_unjudged,
        "left_out_noise": noise,
        "copies": {"at_their_client": n_copies, "elsewhere": round(elsewhere)},
        "left_out_accuracy": share(
            sum(int(own.table[tried.index(setting)]) for own, setting in zip(left_out, settings, strict=True))
        ),
    }
    if 0.0 in tried.balances and 0.0 in tried.taus:
        alone = summed[0, list(tried.balances).index(0.0), list(tried.taus).index(0.0)]
        account["left_out_accuracy_primary_alone"] = share(int(alone))
    account["table"] = {
        "beta": list(tried.betas), "balance": list(tried.balances), "tau": list(tried.taus), "hits": summed.tolist()
    }  # fmt: skip
    return account
