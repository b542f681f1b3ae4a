"""What one client computes: the hits of its left-out rows, and its refinement.

    E = Y - w Phi_k G                       w the weight on the primary, 1 in the paper
    scores = w Phi G + balance Psi P_k + tau log(p_k / p)

With w = 0 the client goes alone; with w = 1 and balance 0 it has the primary alone. The left-out residual of the
primary is linear in w, and so is all that follows from it: with R the left-out score of the refinement,

    E(w) = (1 - w) Y + w E(1)               R(w) = (1 - w) R(0) + w R(1)

so two sets of left-out scores serve every weight. This stands here once: the method, its late clients, a site of a
federation, the scikit-learn estimator and the oracle all use it.

Rows may have weights: both ridges then minimise the sum of w_i |y_i - score_i|^2. Such rows hold sqrt(w) times Phi, Psi
and Y (`weighted`), and everything is as it was, but for the scores of left-out rows, which are divided by sqrt(w).

Many clients of like sizes are worked on at once: `stacked` fills their rows up with zeros, (b, n, ...), and every
function here takes such rows too. Rows of zeros change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from apfl.maths.hat import Hat, fit_refinement, hat_basis, hat_of
from apfl.maths.hits import Grid, hits, left_out_prior, local_prior
from apfl.maths.leaveout import LeftOut, whiten
from apfl.maths.ridge import one_hot

__all__ = [
    "LeftOutHits",
    "LeftOutScores",
    "Personal",
    "Rows",
    "Setting",
    "Shared",
    "leave_out",
    "leave_out_each",
    "left_out_of",
    "left_out_scores",
    "refine",
    "refine_each",
    "stacked",
    "weighted",
]

Setting = tuple[float, float, float]  # beta, balance, tau


@dataclass(frozen=True, eq=False)
class Rows:
    """One client's rows as the streams see them; ``groups`` and ``copies`` are those of `leaveout.leaving`."""

    phi: Tensor  # (n, d_P)
    psi: Tensor  # (n, d_R)
    labels: Tensor  # (n,)
    groups: Tensor | None = None  # (n,)
    copies: Tensor | None = None  # bool (n,)
    seen: Tensor | None = None  # bool (n,): rows behind the primary; without it, all
    sizes: tuple[int, ...] | None = None  # of several clients in one (b, n, ...): then `copies` are the rows of zeros
    weights: Tensor | None = None  # (n,), above 0; phi and psi are multiplied by their roots (`weighted`)
    importance: Tensor | None = None  # (n,): what a left-out row counts that is right; without it, one

    @property
    def n_copies(self) -> int:
        return 0 if self.copies is None or self.sizes is not None else int(self.copies.sum())

    @property
    def hat(self) -> Hat:
        """The hat matrix of Psi, decomposed when first asked for.

        Before Python 3.12 a `cached_property` would have clients wait for each other, who are decomposed side by side.
        """
        self.decompose()
        found: Hat = self.__dict__["hat"]
        return found

    def decompose(self, least: float = 0.0) -> None:
        """Make the hat matrix for ridges of ``least`` or more, unless it is there."""
        if "hat" not in self.__dict__:
            self.__dict__["hat"] = hat_of(self.psi, least) if self.groups is None else hat_basis(self.psi)

    def decomposed(self, hat: Hat) -> Rows:
        """The same rows with their hat matrix, which is known already."""
        self.__dict__["hat"] = hat
        return self

    @property
    def nbytes(self) -> int:
        """Of Psi, if it is not Phi, of its decomposition, and of products with Phi."""
        own = 0 if self.psi is self.phi else self.psi.numel() * self.psi.element_size()
        return own + self.hat.nbytes + sum(8 * made.numel() for _, made in self._products.values())

    def targets(self, n_classes: int) -> Tensor:
        """Y (n, c), times the root of the weights; zero for rows of zeros."""
        own = self.indicators(n_classes)
        return own if self.root is None else own * self.root

    def counted(self, n_classes: int) -> Tensor:
        """The labels as they count in sums (n, c)."""
        own = self.indicators(n_classes)
        return own if self.weights is None else own * self.weights[..., None]

    def indicators(self, n_classes: int) -> Tensor:
        """One-hot labels (n, c); zero for rows of zeros."""
        own = one_hot(self.labels, n_classes)
        return own if self.sizes is None or self.copies is None else own * ~self.copies[..., None]

    @property
    def root(self) -> Tensor | None:
        """sqrt(w), (n, 1)."""
        return None if self.weights is None else self.weights.sqrt()[..., None]

    def times(self, columns: Tensor) -> Tensor:
        """Phi times columns of the shared stream, float64; kept, as leaving out, weighing and refining ask for it."""
        known = self._products.get(id(columns))
        if known is None:  # the columns are kept too, so that nothing else gets their id
            known = self._products[id(columns)] = columns, (self.phi @ columns.to(self.phi)).double()
        return known[1]

    @cached_property
    def _products(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def fit(self, residual: Tensor, beta: float | Tensor) -> Tensor:
        """The refinement (d_R, c): from the decomposition if there is one already, else by Cholesky."""
        hat = self.__dict__.get("hat")
        if hat is None and isinstance(beta, float):
            return fit_refinement(self.psi, residual, beta)
        return self.hat.fit(self.psi, residual, beta)

    def each(self, of_rows: Tensor) -> list[Tensor]:
        """(b, n, ...) -> (n, ...) of each client, or the client's own as they are."""
        if self.sizes is None:
            return [of_rows]
        return [own[:n] for own, n in zip(of_rows, self.sizes, strict=True)]


def weighted(rows: Rows, weights: Tensor | None, importance: Tensor | None = None) -> Rows:
    """The rows with these weights in both ridges, float64 (n,), above 0."""
    if weights is None:
        return replace(rows, importance=importance)
    root = weights.sqrt()[:, None]
    phi = root * rows.phi
    psi = phi if rows.psi is rows.phi else root * rows.psi
    return replace(rows, phi=phi, psi=psi, weights=weights, importance=importance)


def stacked(clients: Sequence[Rows]) -> Rows:
    """The rows of several clients in one, (b, n, ...); none of them may have groups."""

    def filled(parts: Sequence[Tensor]) -> Tensor:
        return parts[0][None] if len(parts) == 1 else pad_sequence(list(parts), batch_first=True)

    first, sizes = clients[0], tuple(len(own.labels) for own in clients)
    phi, labels = filled([own.phi for own in clients]), filled([own.labels for own in clients])
    psi = phi if first.psi is first.phi else filled([own.psi for own in clients])
    places = torch.arange(labels.shape[1], device=labels.device)
    beyond = places >= torch.tensor(sizes, device=labels.device)[:, None]
    seen = None if first.seen is None else filled([_of(own.seen) for own in clients])
    weights = None if first.weights is None else filled([_of(own.weights) for own in clients]) + beyond.double()
    importance = None if first.importance is None else filled([_of(own.importance) for own in clients])
    return Rows(phi, psi, labels, None, beyond, seen, sizes, weights, importance)


def _of(seen: Tensor | None) -> Tensor:
    assert seen is not None, "either all clients say it of their rows, or none"
    return seen


@dataclass(frozen=True, eq=False)
class Shared:
    """What a client is given of the primary stream. The factor never leaves a process: it tells the summed system."""

    weights: Tensor  # G (d_P, c)
    class_counts: Tensor  # of the rows behind it (c,)
    sketch: Tensor | None = None  # of its leverage (d_P, m)
    factor: Tensor | None = None  # instead of the sketch, for exact leverage (d_P, d_P)

    def residual(self, rows: Rows, weight: float | Tensor = 1.0) -> Tensor:
        """E = Y - w Phi_k G, (n, c): what the refinement is fitted to; one weight, or one for each client (b,)."""
        weight = weight[:, None, None] if isinstance(weight, Tensor) else weight
        return rows.targets(self.n_classes) - weight * rows.times(self.weights)

    def counts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Rows of each class at the client, and at everyone, (..., c): rows that the primary has not seen are added.

        Everyone has no fewer than the client, whatever noise says.
        """
        targets = rows.counted(self.n_classes)
        own = targets.sum(-2)
        unseen = 0.0 if rows.seen is None else (targets * ~rows.seen[..., None]).sum(-2)
        return own, torch.maximum(self.class_counts + unseen, own)

    def whitened(self, rows: Rows) -> Tensor:
        """V (n, any), with V V' the primary's hat matrix: zero for rows that it has not seen."""
        if self.sketch is None:
            assert self.factor is not None, "leverage needs a sketch or the factor"
            columns = whiten(rows.phi, self.factor)
        else:
            columns = rows.times(self.sketch)
        return columns if rows.seen is None else columns * rows.seen[..., None]

    @property
    def n_classes(self) -> int:
        return self.weights.shape[1]


@dataclass(frozen=True, eq=False)
class Personal:
    """What one client ends up with."""

    refinement: Tensor  # P_k (d_R, c)
    beta: float
    balance: float
    tau: float
    prior: Tensor | None  # (c,)
    weight: float = 1.0  # of the primary

    @property
    def setting(self) -> Setting:
        return self.beta, self.balance, self.tau


@dataclass(frozen=True, eq=False)
class LeftOutScores:
    """Left-out scores of one client's rows, (n, c) each, for every beta tried."""

    alone: Tensor  # of the primary stream
    refinement: Mapping[float, Tensor]  # of the refinement stream, by beta
    prior: Tensor
    judged: Tensor  # bool (n,): rows whose scores say something (`LeftOut.judged`)
    unaided: Mapping[float, Tensor] = field(default_factory=dict)  # of a refinement without a primary, if asked for

    def at(self, setting: Setting, weight: float = 1.0) -> Tensor:
        """Of the client's model with this setting."""
        beta, balance, tau = setting
        refined = _blended(weight, lambda: self.unaided[beta], lambda: self.refinement[beta])
        return weight * self.alone + balance * refined + tau * self.prior


@dataclass(frozen=True, eq=False)
class LeftOutHits:
    """What one client learns by leaving its rows out."""

    tables: Mapping[float, Tensor]  # of hits (betas, balances, taus), int64, for each weight on the primary tried
    n_rows: int
    n_copies: int
    n_unjudged: int  # others whose leverage is too high, or not known well enough
    noise: float  # hits that the noise of the sketch may have added
    scores: LeftOutScores | None  # if asked for

    @property
    def table(self) -> Tensor:
        """With the usual weight, the first of those tried."""
        return next(iter(self.tables.values()))


@dataclass(frozen=True, eq=False)
class _Weighted:
    """Left-out rows with a weight on the primary: between those of no primary and those of a whole one."""

    none: LeftOut
    whole: LeftOut
    weight: float

    @property
    def groups(self) -> Tensor | None:
        return self.whole.groups

    @property
    def judged(self) -> Tensor:
        return self.whole.judged

    @property
    def primary(self) -> Tensor:
        return (1 - self.weight) * self.none.primary + self.weight * self.whole.primary

    def refinements(self, betas: Sequence[float]) -> Tensor:
        return _blended(self.weight, lambda: self.none.refinements(betas), lambda: self.whole.refinements(betas))


def _blended(weight: float, none: Callable[[], Tensor], whole: Callable[[], Tensor]) -> Tensor:
    """Between the scores of no primary and those of a whole one; scores that have no share are not made."""
    if weight in (0, 1):
        return whole() if weight else none()
    return (1 - weight) * none() + weight * whole()


@dataclass(frozen=True, eq=False)
class _Unscaled:
    """Left-out rows as they are, from those times the root of their weights."""

    scaled: LeftOut | _Weighted
    root: Tensor  # (n, 1)

    @property
    def groups(self) -> Tensor | None:
        return self.scaled.groups

    @property
    def judged(self) -> Tensor:
        return self.scaled.judged

    @property
    def primary(self) -> Tensor:
        return self.scaled.primary / self.root

    def refinements(self, betas: Sequence[float]) -> Tensor:
        return self.scaled.refinements(betas) / self.root


def _unscaled(left: LeftOut | _Weighted, rows: Rows) -> LeftOut | _Weighted | _Unscaled:
    return left if rows.root is None else _Unscaled(left, rows.root)


def left_out_of(rows: Rows, shared: Shared, weight: float = 1.0) -> LeftOut | _Weighted:
    """The rows, each left out of both streams, with this weight on the primary."""
    whole = LeftOut(
        rows.hat, shared.whitened(rows), shared.residual(rows), rows.groups,
        sketched=shared.sketch is not None, copies=rows.copies,
    )  # fmt: skip
    return whole if weight == 1 else _with_weight(whole, rows, shared, weight)


def _with_weight(whole: LeftOut, rows: Rows, shared: Shared, weight: float) -> _Weighted:
    targets, columns = rows.targets(shared.n_classes), 0 if rows.groups is None else 1  # groups want one
    return _Weighted(
        replace(whole, whitened=targets.new_zeros(*targets.shape[:-1], columns), residual=targets), whole, weight
    )


def leave_out(
    rows: Rows,
    shared: Shared,
    smoothing: float,
    tried: Grid,
    *,
    weights: Sequence[float] = (1.0,),
    keep_scores: bool = False,
) -> LeftOutHits:
    """How many of a client's rows each setting gets right once they are left out, from one decomposition of Psi."""
    (only,) = leave_out_each(rows, shared, smoothing, tried, weights=weights, keep_scores=keep_scores)
    return only


def leave_out_each(
    rows: Rows,
    shared: Shared,
    smoothing: float,
    tried: Grid,
    *,
    weights: Sequence[float] = (1.0,),
    keep_scores: bool = False,
) -> list[LeftOutHits]:
    """`leave_out` of every client in these rows."""
    rows.decompose(min(tried.betas))
    left = left_out_of(rows, shared)
    assert isinstance(left, LeftOut)
    unaided = _with_weight(left, rows, shared, 0.0).none
    own, everyone = shared.counts(rows)
    if len(weights) > 1:
        left.beside(unaided, tried.betas)

    def table(weight: float) -> Tensor:
        of = _unscaled(left if weight == 1 else _Weighted(unaided, left, weight), rows)
        counts = rows.labels, own, everyone, smoothing, tried
        found = hits(of, *counts, weights=rows.weights, importance=rows.importance)
        if weight == 0:  # without a refinement either, the prior alone is no model of the rows
            found[..., [balance == 0 for balance in tried.balances], :] = 0
        return found

    tables = torch.stack([table(weight) for weight in weights]).cpu()  # (weights, ..., betas, balances, taus)
    told = torch.stack([left.judged.sum(-1).double(), left.noise(rows.labels)]).cpu()
    if rows.sizes is None:
        tables, told = tables[:, None], told[:, None]
    scores = None
    if keep_scores:
        betas = dict.fromkeys(weights, tried.betas)
        scores = _scores(rows, left, unaided, (own, everyone), smoothing, betas)
    n_copies, made = rows.n_copies, []
    for k, n in enumerate(rows.sizes or (len(rows.labels),)):
        judged, noise = told[:, k].tolist()
        own_tables = dict(zip(weights, tables[:, k], strict=True))
        own_scores = None if scores is None else scores[k]
        made.append(LeftOutHits(own_tables, n, n_copies, n - n_copies - int(judged), noise, own_scores))
    return made


def left_out_scores(
    rows: Rows, shared: Shared, smoothing: float, betas: Mapping[float, Sequence[float]]
) -> list[LeftOutScores]:
    """The left-out scores of each client with these betas for each weight, without tables of hits."""
    rows.decompose(min(min(own) for own in betas.values()))
    left = left_out_of(rows, shared)
    assert isinstance(left, LeftOut)
    unaided = _with_weight(left, rows, shared, 0.0).none
    return _scores(rows, left, unaided, shared.counts(rows), smoothing, betas)


def _scores(
    rows: Rows,
    left: LeftOut,
    unaided: LeftOut,
    counts: tuple[Tensor, Tensor],
    smoothing: float,
    betas: Mapping[float, Sequence[float]],
) -> list[LeftOutScores]:
    """The left-out scores of each client, of the streams that have a share in one of the weights."""
    c = left.residual.shape[-1]
    alone, judged = rows.each(rows.indicators(c) - _unscaled(left, rows).primary), rows.each(left.judged)
    prior = rows.each(left_out_prior(rows.counted(c), *counts, rows.groups, smoothing))

    def by_beta(of: LeftOut, no_share: float) -> list[dict[float, Tensor]]:
        asked = sorted({beta for weight, own in betas.items() if weight != no_share for beta in own})
        if not asked:
            return [{} for _ in alone]
        found = [rows.each(each) for each in _unscaled(of, rows).refinements(asked)]
        return [dict(zip(asked, each, strict=True)) for each in zip(*found, strict=True)]

    refined, without = by_beta(left, 0.0), by_beta(unaided, 1.0)
    return [LeftOutScores(*own) for own in zip(alone, refined, prior, judged, without, strict=True)]


def refine(rows: Rows, shared: Shared, setting: Setting, smoothing: float, weight: float = 1.0) -> Personal:
    """One client's refinement with this beta, balance and tau, fitted to its in-sample residuals as in the paper."""
    (only,) = refine_each(rows, shared, [setting], smoothing, [weight])
    return only


def refine_each(
    rows: Rows, shared: Shared, settings: Sequence[Setting], smoothing: float, weights: Sequence[float]
) -> list[Personal]:
    """`refine` of every client in these rows, each with a setting and a weight of its own."""
    beta, weight = (_one_or_each(given, rows) for given in ([each[0] for each in settings], weights))
    fitted = rows.fit(shared.residual(rows, weight), beta)
    if rows.sizes is None:
        fitted = fitted[None]
    priors = _priors(rows, shared, [tau for _, _, tau in settings], smoothing)
    return [
        Personal(own, *setting, prior, w)
        for own, setting, prior, w in zip(fitted, settings, priors, weights, strict=True)
    ]


def _priors(rows: Rows, shared: Shared, taus: Sequence[float], smoothing: float) -> list[Tensor | None]:
    """tau log(p_k / p) of each client, (c,)."""
    if not any(taus):
        return [None] * len(taus)
    found = local_prior(*shared.counts(rows), smoothing)
    return [
        tau * own if tau else None for tau, own in zip(taus, found[None] if rows.sizes is None else found, strict=True)
    ]


def _one_or_each(values: Sequence[float], rows: Rows) -> float | Tensor:
    """A number if all clients have the same, else (b,)."""
    if len(set(values)) == 1:
        return float(values[0])
    return torch.tensor(values, dtype=torch.float64, device=rows.labels.device)
