"""From summed statistics to personal streams, with every setting that is left open chosen in closed form.

    gamma                  generalised cross-validation of the sums, at the server (`gcv`)
    beta, balance, tau     left-out hits of both streams, added over clients (`hits`, `leaveout`)
    weight                 the same for the federation; a client takes another only if its own rows say so clearly

No row is held out and no test row is seen. What one client computes is in `refine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from apfl.maths.gcv import choose_gamma, feature_energy
from apfl.maths.hat import Hat
from apfl.maths.hits import Grid, Scope, best_of, choose, grid, narrowed, prefer, summed
from apfl.maths.leaveout import leverage_sketch
from apfl.maths.machine import ALIKE, alike, available
from apfl.maths.refine import (
    LeftOutHits,
    LeftOutScores,
    Personal,
    Rows,
    Setting,
    Shared,
    leave_out,
    leave_out_each,
    left_out_scores,
    refine,
    refine_each,
    stacked,
)  # fmt: skip
from apfl.maths.ridge import Statistics, factorise

__all__ = [
    "Auto",
    "Choice",
    "LeftOutHits",
    "LeftOutScores",
    "Personal",
    "Personalised",
    "Plan",
    "Primary",
    "Rows",
    "Setting",
    "Shared",
    "landmarks_for",
    "leave_out",
    "left_out_tables",
    "own_weight",
    "own_weights",
    "personalise",
    "plan_of",
    "refine",
    "refine_all",
    "rule_of",
    "solve_primary",
    "width_for",
]

Auto = Literal["auto"]
T = TypeVar("T")
R = TypeVar("R")
NAMES = ("beta", "balance", "tau")
WEIGHTS = (1.0, 0.0)  # on the primary, that are tried; those between never gained anything (docs/results/landmarks.md)
CLEARLY = 1.0  # standard errors, and one row, by which a weight must beat the federation's on a client's own rows
USUAL_BALANCE, USUAL_TAU = 0.3, 0.01  # of a cautious client (docs/privacy.md, "What it costs")
FEW_ROWS = 250  # with fewer, the best of 882 settings flatters itself, and no left-out accuracy is stated
MOST_NOISE = 0.01  # left-out accuracy that a second dose of the sketch's noise may add or take away
MOST_ARE_COPIED = 1.5  # clients that hold a row on average; with fewer, the mean is wrong for most rows
MOST_KEPT = 2**31  # bytes of all clients' mapped rows and their decompositions
ROWS_ON_A_CORE, ROWS_ON_A_GPU = 1024, 2**18  # that such clients have together; a larger client stands alone
FEW_ON_A_GPU = 512  # rows of a client whose systems cost a GPU less than it costs to start
MOST_UNJUDGED = 0.05  # share of rows that cannot be judged beyond which no left-out accuracy is stated


@dataclass(frozen=True)
class Choice:
    """The settings of the refinement, those left ``auto`` to be chosen; `APFL` has the defaults."""

    beta: float | Auto
    balance: float | Auto
    tau: float | Auto
    scope: Scope
    smoothing: float  # of the label counts behind the local prior
    weight: float | Auto = 1.0
    cautious: bool = False  # with scope "client": whether to leave the usual setting only if own rows clearly say so

    @property
    def open(self) -> bool:
        """Whether anything is left to choose."""
        return "auto" in (self.beta, self.balance, self.tau, self.weight)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights on the primary to try, the usual one first."""
        return WEIGHTS if self.weight == "auto" else (float(self.weight),)

    def fixed(self, name: str) -> float | None:
        """The value of a setting, None if it is to be chosen."""
        value = getattr(self, name)
        return None if value == "auto" else float(value)

    def grid(self, unit: float) -> Grid:
        """The settings to try; ``unit`` is the mean squared length of a row of Psi."""
        return grid(unit, beta=self.fixed("beta"), balance=self.fixed("balance"), tau=self.fixed("tau"))


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
        """What they need to leave rows out: a sketch of m columns too, or with 0 the factor itself.

        Both are for a row *and its copies at other clients*, which nobody can see, but sums show how many there are: of
        r equal rows that leave together the leverage is r times that of one, so each row has the mean number.
        """
        root = math.sqrt(self.copies_of_a_row)
        if sketch_width:
            return replace(self.shared, sketch=root * leverage_sketch(self.factor, sketch_width, seed))
        return replace(self.shared, factor=self.factor if root == 1 else self.factor / root)

    @property
    def copies_of_a_row(self) -> float:
        """How many clients hold a row, on average and as far as the sums show; 1 if most stand at one."""
        mean = (self.stats.n_samples - self.stats.n_copies) / max(self.distinct_rows, 1.0)
        return mean if mean > MOST_ARE_COPIED else 1.0


def landmarks_for(n_samples: int, n_features: int) -> int:
    """The default number of landmarks: a power of two below the number of rows, from 256 to 4096, or 5120.

    Landmarks need about half the columns of a random map for the same accuracy (docs/results/landmarks.md). With few
    rows of many features the rule is that of `width_for`.

    >>> landmarks_for(1300, 64), landmarks_for(45_000, 1280), landmarks_for(20, 64), landmarks_for(300, 1280)
    (1024, 5120, 256, 2048)
    """
    power = max(math.floor(math.log2(n_samples)), _few_rows(n_features))
    return min(5120, max(256, int(2**power)))


def _few_rows(n_features: int) -> int:
    return math.ceil(math.log2(min(4 * n_features, 2048)))


def width_for(n_samples: int, n_features: int) -> int:
    """The default d_P: a power of two near the number of rows, from 256 to 8192; the same at every site because N is.

    With few rows of many features it is four times the number of features instead, rounded up, to 2048 at most: a
    narrower map would lose what a ridge on the features themselves sees.

    >>> width_for(1300, 64), width_for(45_000, 1280), width_for(20, 64), width_for(300, 1280)
    (1024, 8192, 256, 2048)
    """
    power = max(round(math.log2(n_samples)), _few_rows(n_features))
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


class OverClients(Protocol):
    """``[work(client) for client in clients]``, on some device and in whatever order."""

    def __call__(self, work: Callable[[T], R], clients: Sequence[T], device: torch.device) -> list[R]: ...


def in_turn(work: Callable[[T], R], clients: Sequence[T], device: torch.device) -> list[R]:
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
    sizes: Sequence[int],
    primary: Primary,
    choice: Choice,
    sketch_width: int,
    seed: int,
    *,
    over: OverClients = in_turn,
    keep_scores: bool = False,
    fit: bool = True,
) -> Personalised:
    """Choose the settings that are open, and refine every client with them.

    ``rows_of(k)`` gives client k's rows, and may be asked twice. ``sketch_width`` is m; 0 means exact leverage.
    ``keep_scores`` keeps the left-out scores of every row. Without ``fit`` the clients have settings and weights, and
    no refinement: whoever cannot hold those of all makes them one by one (`refine`). ``sizes`` are the clients' rows:
    those of like sizes are worked on at once.
    """
    device, n_clients = primary.weights.device, len(sizes)
    tried, smoothing = choice.grid(primary.unit(rows_of(0).psi.shape[1])), choice.smoothing
    left_out: list[LeftOutHits] = []
    memory = _Memory(rows_of, n_clients, device)
    buckets = _buckets(sizes, device)
    if choice.open or keep_scores:
        sketched = primary.with_leverage(sketch_width, seed)
        leave = partial(leave_out_each, weights=choice.weights, keep_scores=keep_scores)
        left_out = _left_out(
            rows_of, buckets, lambda rows: leave(rows, sketched, smoothing, tried), over, device, memory.keep
        )
    plans = _plans(left_out if choice.open else [], n_clients, tried, choice)

    def personal(bucket: Sequence[int]) -> list[tuple[int, Personal]]:
        made: list[tuple[int, Personal]] = []
        for ks, rows in memory.take(bucket):
            own = [plans[k] for k in ks]
            weights = [plan.weight for plan in own]
            if any(_may_object(left_out[k], plans[k], tried) for k in ks if choice.weight == "auto"):
                weights = own_weights(rows, sketched, own, smoothing)
            settings = [plan.settings[weight] for plan, weight in zip(own, weights, strict=True)]
            if fit:
                made += zip(ks, refine_each(rows, primary.shared, settings, smoothing, weights), strict=True)
            else:
                none = primary.weights.new_zeros(0, primary.shared.n_classes)
                made += [
                    (k, Personal(none, *setting, None, weight))
                    for k, setting, weight in zip(ks, settings, weights, strict=True)
                ]
        return made

    made = _in_order(over(personal, buckets, device))
    account = _account(primary, left_out if choice.open else [], made, tried)
    if len(choice.weights) > 1 or choice.weights != (1.0,):
        account |= _weights(made, plans, choice.scope)
    return Personalised(made, account, [own.scores for own in left_out if own.scores is not None])


def left_out_tables(
    rows_of: Callable[[int], Rows],
    sizes: Sequence[int],
    shared: Shared,
    smoothing: float,
    tried: Grid,
    *,
    over: OverClients = in_turn,
) -> list[Tensor]:
    """The table of left-out hits of every client, (betas, balances, taus) each, `narrowed`, with the usual weight."""
    device = shared.weights.device
    found = _left_out(
        rows_of, _buckets(sizes, device), lambda rows: leave_out_each(rows, shared, smoothing, tried), over, device
    )
    return [own.table for own in found]


def _left_out(
    rows_of: Callable[[int], Rows],
    buckets: Sequence[Sequence[int]],
    leave: Callable[[Rows], list[LeftOutHits]],
    over: OverClients,
    device: torch.device,
    keep: Callable[[list[int], Rows], None] | None = None,
) -> list[LeftOutHits]:
    """What leaving out gives for each client, with narrow tables; ``keep`` is told the rows."""

    def hits_of(bucket: Sequence[int]) -> list[tuple[int, LeftOutHits]]:
        made: list[tuple[int, LeftOutHits]] = []
        for ks, rows in _units(rows_of, bucket):
            made += zip(ks, map(_narrow, leave(rows)), strict=True)
            if keep is not None:
                keep(ks, rows)
        return made

    return _in_order(over(hits_of, buckets, device))


def _narrow(own: LeftOutHits) -> LeftOutHits:
    return replace(own, tables={weight: narrowed(table) for weight, table in own.tables.items()})


def refine_all(
    rows_of: Callable[[int], Rows], sizes: Sequence[int], shared: Shared, beta: float, *, over: OverClients = in_turn
) -> list[Tensor]:
    """The refinement of every client with the same beta, (d_R, c) each."""

    def refined(bucket: Sequence[int]) -> list[tuple[int, Tensor]]:
        made: list[tuple[int, Tensor]] = []
        for ks, rows in _units(rows_of, bucket):
            fitted = rows.fit(shared.residual(rows), beta)
            made += zip(ks, fitted[None] if rows.sizes is None else fitted, strict=True)
        return made

    device = shared.weights.device
    return _in_order(over(refined, _buckets(sizes, device), device))


def _buckets(sizes: Sequence[int], device: torch.device) -> list[list[int]]:
    """Clients to be worked on at once: as many as the device has use for."""
    if device.type == "cpu":
        return alike(sizes, ROWS_ON_A_CORE, len(sizes))
    # There few kernels matter more than rows of zeros, most of all if all clients are small.
    factor = 4.0 if max(sizes, default=0) <= FEW_ON_A_GPU else 2 * ALIKE - 1
    return alike(sizes, ROWS_ON_A_GPU, len(sizes), factor)


def _units(rows_of: Callable[[int], Rows], bucket: Sequence[int]) -> Iterator[tuple[list[int], Rows]]:
    """The rows of these clients together; those of a client with groups by themselves."""
    rows = {k: rows_of(k) for k in bucket}
    plain = [k for k in bucket if rows[k].groups is None]
    if plain:
        yield plain, stacked([rows[k] for k in plain])
    for k in bucket:
        if rows[k].groups is not None:
            yield [k], rows[k]


def _in_order(made: Sequence[Sequence[tuple[int, R]]]) -> list[R]:
    """What was made for each client, in the order of the clients."""
    return [each for _, each in sorted((pair for some in made for pair in some), key=lambda pair: pair[0])]


class _Memory:
    """Clients' rows from leaving out to refining, so that Psi is mapped and decomposed once.

    Each client may take the same share of the room, whoever comes first: what is kept decides the last digits.
    """

    def __init__(self, rows_of: Callable[[int], Rows], n_clients: int, device: torch.device) -> None:
        self._rows_of, self._kept = rows_of, dict[int, tuple[list[int], Rows | Hat]]()
        self._room = min(MOST_KEPT, (available(device) or 0) // 4) // n_clients

    def keep(self, ks: list[int], rows: Rows) -> None:
        """Remember them if they fit."""
        if rows.nbytes <= len(ks) * self._room:
            copied = rows.psi is rows.phi and len(ks) > 1  # of Phi, for clients to be in one
            self._kept[ks[0]] = ks, rows.hat if copied else rows

    def take(self, bucket: Sequence[int]) -> Iterator[tuple[list[int], Rows]]:
        """The rows of these clients, which are forgotten."""
        kept = [self._kept.pop(k) for k in bucket if k in self._kept]
        for ks, held in kept:
            yield ks, held if isinstance(held, Rows) else stacked([self._rows_of(k) for k in ks]).decomposed(held)
        known = {k for ks, _ in kept for k in ks}
        missing = [k for k in bucket if k not in known]
        if missing:
            yield from _units(self._rows_of, missing)


@dataclass(frozen=True)
class Plan:
    """The best setting for each weight on the primary, and the weight to take unless a client's rows object."""

    settings: Mapping[float, Setting]
    weight: float

    @property
    def setting(self) -> Setting:
        return self.settings[self.weight]


def _plans(left_out: Sequence[LeftOutHits], n_clients: int, tried: Grid, choice: Choice) -> list[Plan]:
    """That of every client: everyone's, or by its own rows alone."""
    if not left_out:
        (weight, *_) = choice.weights
        return [Plan({weight: (tried.betas[0], tried.balances[0], tried.taus[0])}, weight)] * n_clients
    if choice.scope == "client":
        return [_plan([own], tried, choice.cautious) for own in left_out]
    return [_plan(left_out, tried)] * n_clients


def _plan(left_out: Sequence[LeftOutHits], tried: Grid, cautious: bool = False) -> Plan:
    """From the sums of these clients' tables."""
    n_rows, n_distinct = sum(own.n_rows for own in left_out), sum(own.n_rows - own.n_copies for own in left_out)
    return plan_of(_summed(left_out), tried, n_rows, n_distinct, rule_of(cautious))


def plan_of(
    tables: Mapping[float, Tensor],
    tried: Grid,
    n_rows: int,
    n_distinct: int | None = None,
    choice: Callable[[Tensor, Grid, int], Setting] = choose,
) -> Plan:
    """From the table of hits of each weight, the usual one first, over rows of which so many are no copies."""
    (usual, *_) = tables
    best = prefer(
        {w: best_of(table)[1] for w, table in tables.items()}, n_rows if n_distinct is None else n_distinct, usual
    )
    return Plan({w: choice(table, tried, n_rows) for w, table in tables.items()}, best)


def rule_of(cautious: bool) -> Callable[[Tensor, Grid, int], Setting]:
    """How a table chooses; a ``cautious`` client leaves the usual setting for clear gains only."""
    return _unless_clear if cautious else choose


def _unless_clear(table: Tensor, tried: Grid, n_rows: int) -> Setting:
    """The middle beta, `USUAL_BALANCE` and `USUAL_TAU`, or what one client's rows choose if they clearly say so."""
    balance = min(tried.balances, key=lambda each: abs(each - USUAL_BALANCE))
    usual = tried.betas[len(tried.betas) // 2], balance, min(tried.taus, key=lambda each: abs(each - USUAL_TAU))
    own = choose(table, tried, n_rows)
    return prefer({s: float(table[tried.index(s)]) for s in (usual, own)}, n_rows, usual)


def _summed(left_out: Sequence[LeftOutHits]) -> dict[float, Tensor]:
    """The table of each weight, over clients."""
    return {w: summed(own.tables[w] for own in left_out) for w in left_out[0].tables}


def _may_object(own: LeftOutHits, plan: Plan, tried: Grid) -> bool:
    """Whether a client's rows could choose another weight: mostly its tables, which are there, already say no."""
    hits = {w: float(own.tables[w][tried.index(setting)]) for w, setting in plan.settings.items()}
    return max(hits.values()) > hits[plan.weight] + 1


def own_weight(rows: Rows, shared: Shared, plan: Plan, smoothing: float) -> float:
    """`own_weights` of one client."""
    (weight,) = own_weights(rows, shared, [plan], smoothing)
    return weight


def own_weights(rows: Rows, shared: Shared, plans: Sequence[Plan], smoothing: float) -> list[float]:
    """The weight that each client takes: its plan's, unless with another clearly more of its left-out rows are right.

    Two models differ on rows that one of them alone gets right, each of which falls either way if they are equally
    good: the variance of the difference is their number. One row is asked for beyond that, so that no two decide, and a
    client of few rows stays with the federation.
    """
    betas = {weight: [plan.settings[weight][0] for plan in plans] for weight in plans[0].settings}
    found = left_out_scores(rows, shared, smoothing, betas)
    labels = rows.each(rows.labels)
    worth = rows.each(torch.ones_like(rows.labels) if rows.importance is None else rows.importance)
    own = zip(found, labels, worth, plans, strict=True)
    # A GPU is asked once for all clients.
    told = torch.stack([_gains(scores, label, each, plan) for scores, label, each, plan in own]).tolist()
    return [_clear_weight(gains, variances, plan) for (gains, variances), plan in zip(told, plans, strict=True)]


def _gains(scores: LeftOutScores, labels: Tensor, worth: Tensor, plan: Plan) -> Tensor:
    """By how much each weight beats the plan's, and the variance of that: (2, weights)."""
    worth = worth.double() * scores.judged
    right = torch.stack([_leads(scores.at(setting, w), labels) for w, setting in plan.settings.items()])
    usual = right[list(plan.settings).index(plan.weight)]
    gains = (worth * right).sum(1) - (worth * usual).sum()
    return torch.stack([gains, (worth.square() * (right != usual)).sum(1)])


def _leads(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether a row's own class is above all others, bool (n,): as in tables of hits a tie is none."""
    own = scores.gather(1, labels[:, None])
    return (scores >= own).sum(1) == 1


def _clear_weight(gains: Sequence[float], variances: Sequence[float], plan: Plan) -> float:
    found = dict(zip(plan.settings, zip(gains, variances, strict=True), strict=True))
    clear = [w for w, (gain, variance) in found.items() if gain > 1 + CLEARLY * math.sqrt(variance)]
    return max(clear, key=lambda w: found[w][0], default=plan.weight)


def _account(
    primary: Primary, left_out: Sequence[LeftOutHits], made: Sequence[Personal], tried: Grid
) -> dict[str, Any]:
    """What was chosen and why, for the record."""
    account: dict[str, Any] = {"d_primary": primary.stats.width, "gamma": primary.gamma}
    settings = [own.setting for own in made]
    if len(set(settings)) == 1:
        account |= dict(zip(NAMES, settings[0], strict=True))
    else:
        account |= {f"{name}_per_client": [s[i] for s in settings] for i, name in enumerate(NAMES)}
    n_rows = sum(own.n_rows for own in left_out)
    account["leverage_clipped"] = sum(own.n_unjudged for own in left_out) / n_rows if n_rows else 0.0
    if left_out:
        account |= _accuracies(primary, left_out, made, tried)
    if primary.path is not None:
        account["gamma_path"] = primary.path
    return account


def _weights(made: Sequence[Personal], plans: Sequence[Plan], scope: Scope) -> dict[str, Any]:
    """The weights on the primary, for the record; of the whole federation, what a client takes that comes later."""
    weights, account = [own.weight for own in made], {}
    if scope == "federation":
        account = {"weight": plans[0].weight, **dict(zip(NAMES, plans[0].setting, strict=True))}
    return account | ({} if len(set(weights)) == 1 and account else {"weight_per_client": weights})


def _accuracies(
    primary: Primary, left_out: Sequence[LeftOutHits], made: Sequence[Personal], tried: Grid
) -> dict[str, Any]:
    """The accuracies that the settings were chosen by, over the rows that could be judged; None if they would mislead.

    They would if there are few rows, if the sketch's noise in the leverages flatters or harms them, or if many rows
    repeat those of *another* client, which no client can see but sums show: each copy vouches for the other.
    """
    tables = _summed(left_out)
    n_copies, n_unjudged = sum(own.n_copies for own in left_out), sum(own.n_unjudged for own in left_out)
    n_distinct = sum(own.n_rows for own in left_out) - n_copies
    elsewhere = max(0.0, primary.stats.n_samples - primary.distinct_rows - n_copies)
    noise = sum(own.noise for own in left_out) / n_distinct
    judged = n_distinct >= FEW_ROWS and n_unjudged + 2 * elsewhere <= MOST_UNJUDGED * n_distinct
    judged &= abs(noise) <= MOST_NOISE

    def share(right: float) -> float | None:
        return right / (n_distinct - n_unjudged) if judged else None

    account: dict[str, Any] = {
        "left_out_rows": n_distinct - n_unjudged,
        "left_out_noise": noise,
        "copies": {"at_their_client": n_copies, "elsewhere": round(elsewhere)},
        "left_out_accuracy": share(
            sum(own.tables[p.weight][tried.index(p.setting)].item() for own, p in zip(left_out, made, strict=True))
        ),
    }
    if 0.0 in tried.balances and 0.0 in tried.taus and 1.0 in tables:
        alone = tables[1.0][0, list(tried.balances).index(0.0), list(tried.taus).index(0.0)]
        account["left_out_accuracy_primary_alone"] = share(alone.item())
    (usual, *others) = tables
    account["table"] = {
        "beta": list(tried.betas), "balance": list(tried.balances), "tau": list(tried.taus),
        "hits": tables[usual].tolist(),
    }  # fmt: skip
    if others:
        account["table"]["most_hits_by_weight"] = {str(w): best_of(table)[1] for w, table in tables.items()}
    return account
