"""Both streams with numbers as targets: the same ridges, chosen by likelihood and judged by left-out squared error.

    primary       G = argmin |Y - Phi G|^2 + gamma |G|^2                over everyone's rows
    refinement    P_k = argmin |Y_k - w Phi_k G - Phi_k P|^2 + beta |P|^2     over the client's own
    prediction    w Phi G + balance Phi P_k

w = 1 is the paper's model, w = 0 (then balance = 1) a client's own ridge. gamma and beta have the highest marginal
likelihood of Y ~ N(0, s^2 (Phi Phi' / ridge + I)), with s^2 at its best: it needs Phi'Phi, Phi'Y and tr(Y'Y) alone, and
unlike cross-validation it does not take a fit that passes through the rows for a good one.

What is left to choose are few models: the primary alone, refined, and going alone, on each map. They are averaged with
the shares of `shares`. A client goes alone for itself if its own rows say so clearly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.gcv import feature_energy
from apfl.maths.leaveout import LeftOut, fit_refinement, hat_basis, whiten
from apfl.maths.ridge import Statistics, factorise

__all__ = [
    "Block",
    "Choice",
    "Drawn",
    "Evidence",
    "Fixed",
    "NumberStatistics",
    "Primary",
    "Setting",
    "beta_evidence",
    "choose",
    "clearly_less",
    "drawn",
    "fit_client",
    "left_out",
    "likeliest",
    "likeliest_beta",
    "number_statistics",
    "open_weights",
    "primary_of",
    "settings_of",
    "shares",
    "shares_of",
    "solve",
    "squared",
]

Setting = tuple[float, float, float]  # w, beta, balance
Fixed = tuple[float | None, float | None, float | None]  # those that are not None are not chosen
DECADES = [-6 + step / 2 for step in range(19)]  # of beta over the mean squared length of a row of Phi
GAMMAS = [-10 + step / 4 for step in range(53)]  # decades, likewise
TINY = 1e-13  # of the largest eigenvalue
LEAST_LEFT = 0.02  # of the rows: degrees of freedom that a fit must leave
LEAST = 1e-300  # of what a logarithm is taken of
DRAWS = 400  # of `shares`
AT_ONCE = 4096  # rows


class NumberStatistics(Statistics):
    """Statistics whose targets are numbers; ``class_counts`` are the column sums of Y."""

    def __post_init__(self) -> None:
        d, t = self.crosscorrelation.shape
        if self.autocorrelation.shape != (d, d) or self.class_counts.shape != (t,):
            raise InputError("statistics do not fit together: expected (d, d), (d, t), (t,)")


def number_statistics(phi: Tensor, targets: Tensor, n_copies: int = 0) -> NumberStatistics:
    """Of one client's rows phi (n, d) and targets (n, t); they add."""
    phi, targets = phi.double(), targets.double()
    energy = float(targets.square().sum())
    return NumberStatistics(phi.T @ phi, phi.T @ targets, targets.sum(0), len(phi), energy, n_copies)


@dataclass(frozen=True, eq=False)
class Block:
    """One client's rows on the map; ``groups`` and ``copies`` as `leaveout.leaving` gives them.

    Rows that are not ``seen`` are not in the sums behind the primary: leaving them out changes nothing about it.
    """

    phi: Tensor  # (n, d)
    targets: Tensor  # (n, t)
    groups: Tensor | None = None
    copies: Tensor | None = None
    seen: Tensor | None = None  # bool (n,); None: all


@dataclass(frozen=True, eq=False)
class Primary:
    """The shared stream, and what leaving rows out of it takes."""

    weights: Tensor  # G (d, t)
    factor: Tensor  # L (d, d), of the summed system
    gamma: float
    unit: float  # mean squared length of a row of Phi


def solve(stats: Statistics, gamma: float | None) -> Primary:
    """The primary stream with this gamma, or with the likeliest."""
    return primary_of(stats, likeliest(stats) if gamma is None else gamma)


def primary_of(stats: Statistics, gamma: float) -> Primary:
    """The primary stream with this gamma."""
    factor = factorise(stats, gamma)
    return Primary(torch.cholesky_solve(stats.crosscorrelation, factor), factor, gamma, feature_energy(stats) or 1.0)


def likeliest(stats: Statistics) -> float:
    """The gamma of the highest marginal likelihood."""
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    real = values > TINY * values[-1].clamp_min(math.ulp(0.0))
    values = values[real]
    reached = (vectors[:, real].T @ stats.crosscorrelation).square().sum(1) / values  # of tr(Y'Y), by each direction
    beyond = max(0.0, stats.target_energy - float(reached.sum()))
    unit = feature_energy(stats) or 1.0
    gammas = [unit * 10**decade for decade in reversed(GAMMAS)]
    return _best_ridge(gammas, _evidence(gammas, stats.n_samples - stats.n_copies, values, reached, beyond))


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the likelihood of each ridge needs to know of some rows; it adds up over clients."""

    n: int
    lost: Tensor  # (ridges,), degrees of freedom that the fit takes
    left: Tensor  # (ridges,), of tr(Y'Y), what the fit leaves, by Y'(Phi Phi' / ridge + I)^-1 Y
    volume: Tensor  # (ridges,), log det(Phi Phi' / ridge + I)

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            self.n + other.n, self.lost + other.lost, self.left + other.left, self.volume + other.volume
        )  # fmt: skip


def _evidence(ridges: Sequence[float], n: int, values: Tensor, reached: Tensor, beyond: float) -> Evidence:
    """Of n rows with these eigenvalues of Phi Phi', the energy of Y in each direction, and that beyond all of them."""
    lost, left, volume = [], [], []
    for ridge in ridges:
        keep = ridge / (values + ridge)
        lost.append((values / (values + ridge)).sum())
        left.append(beyond + (reached * keep).sum())
        volume.append(torch.log1p(values / ridge).sum())
    return Evidence(n, *(torch.stack(each).double().cpu() for each in (lost, left, volume)))


def _best_ridge(ridges: Sequence[float], told: Evidence) -> float:
    """The ridge of the highest likelihood; of equals the first, from large to small.

    The degrees of freedom that are left must be clear of zero: if one row stands at two clients, the likelihood has no
    bound.
    """
    n, best = told.n, (math.inf, ridges[0])
    for ridge, lost, left, volume in zip(
        ridges, *(each.tolist() for each in (told.lost, told.left, told.volume)), strict=True
    ):
        if n - lost < max(LEAST_LEFT * n, min(3.0, n / 2)):
            break
        best = min(best, (n * math.log(max(left, LEAST)) + volume, ridge), key=lambda found: found[0])
    return best[1]


@dataclass(frozen=True, eq=False)
class Choice:
    """The models on one map, and what each leaves of the rows that are left out."""

    settings: list[Setting]
    residuals: list[Tensor]  # of each client, (settings, n, t); NaN for rows that cannot be judged
    primary: list[Tensor]  # likewise of the primary alone, (n, t)


def squared(residuals: Tensor) -> Tensor:
    """The squared error of each row, (..., n)."""
    return residuals.square().sum(-1)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Squared errors of left-out rows in Bayesian bootstraps of the rows; it adds up over clients."""

    errors: Tensor  # (DRAWS, m), each row's weighed by what was drawn for it
    weights: Tensor  # (DRAWS,), the sums of what was drawn
    n: int  # rows that can be judged

    def __add__(self, other: Drawn) -> Drawn:
        return Drawn(self.errors + other.errors, self.weights + other.weights, self.n + other.n)


def drawn(errors: Tensor, seed: Sequence[int]) -> Drawn:
    """Of one client's squared errors of left-out rows under each of m models, (m, n)."""
    rng = np.random.default_rng(seed)
    summed, weights, n = torch.zeros(DRAWS, len(errors), dtype=torch.float64), torch.zeros(DRAWS).double(), 0
    for part in torch.split(errors[:, ~errors.isnan().any(0)], AT_ONCE, 1):
        weighing = torch.from_numpy(rng.standard_exponential((DRAWS, part.shape[1])))
        summed, weights, n = summed + weighing @ part.T, weights + weighing.sum(1), n + part.shape[1]
    return Drawn(summed, weights, n)


def shares(
    errors: Sequence[Tensor], seed: int, prior: Tensor | None = None, keys: Sequence[int] | None = None
) -> Tensor:
    """The share of each of m models in their average, (m,), from its squared errors of left-out rows, (m, n) by client.

    Likelihood of the left-out rows under each model, made to sum to one, and averaged over Bayesian bootstraps of the
    rows: pseudo-BMA+ (Yao, Vehtari, Simpson and Gelman, 2018). Models that the rows cannot tell apart share. A client
    sends `Drawn`, which adds up over clients. ``prior`` (m,) weighs models before any row is seen. What is drawn
    for a client's rows follows from the seed and its key: that of its place, if no ``keys`` are given.
    """
    of_clients = range(len(errors)) if keys is None else keys
    return shares_of(reduce(add, (drawn(own, (seed, key)) for own, key in zip(errors, of_clients, strict=True))), prior)


def shares_of(summed: Drawn, prior: Tensor | None = None) -> Tensor:
    """The shares from the sum over clients."""
    n, m = summed.n, summed.errors.shape[1]
    if not n:
        before = torch.ones(m, dtype=torch.float64) if prior is None else prior.double()
        return before / before.sum()
    likelihood = -n / 2 * (summed.errors / summed.weights[:, None]).clamp_min(LEAST).log()
    return torch.softmax(likelihood if prior is None else likelihood + prior.double().log(), 1).mean(0)


def clearly_less(one: Tensor, other: Tensor, times: float = 1.0) -> bool:
    """Whether errors of the same rows are less on average, by so many standard errors of the difference."""
    gains = (other - one)[~(one.isnan() | other.isnan())]
    if len(gains) < 3:
        return False
    return float(gains.mean()) > times * float(gains.std()) / math.sqrt(len(gains))


def choose(blocks: Sequence[Block], primary: Primary, fixed: Fixed) -> Choice:
    """The models with w, beta and balance; those that are ``fixed`` (not None) are not chosen."""
    betas = {
        weight: likeliest_beta(primary, reduce(add, (beta_evidence(block, primary, weight) for block in blocks)))
        for weight in open_weights(fixed)
    }
    settings = settings_of(fixed, betas)
    left = [left_out(block, primary, settings) for block in blocks]
    return Choice(settings, [models for models, _ in left], [alone for _, alone in left])


def open_weights(fixed: Fixed) -> tuple[float, ...]:
    """The weights on the primary for which beta is to be chosen."""
    return _weights(fixed) if fixed[1] is None else ()


def _weights(fixed: Fixed) -> tuple[float, ...]:
    return (1.0, 0.0) if fixed[0] is None else (fixed[0],)


def settings_of(fixed: Fixed, betas: Mapping[float, float]) -> list[Setting]:
    """The models that are tried, simple ones first; ``betas`` are those that were chosen, by weight."""
    tried: list[Setting] = []
    for weight in _weights(fixed):
        beta = betas[weight] if fixed[1] is None else fixed[1]
        if weight and fixed[2] is None:
            tried.append((weight, beta, 0.0))  # the primary alone
        tried.append((weight, beta, 1.0 if fixed[2] is None else fixed[2]))
    return tried


def _betas(primary: Primary) -> list[float]:
    """From large to small."""
    return [primary.unit * 10**decade for decade in reversed(DECADES)]


def beta_evidence(block: Block, primary: Primary, weight: float) -> Evidence:
    """What one client's rows say of each beta."""
    rows = slice(None) if block.copies is None else ~block.copies
    phi, targets = block.phi[rows], block.targets[rows]
    residual, hat = targets - weight * (phi @ primary.weights), hat_basis(phi)
    reached = (hat.basis.T @ residual).square().sum(1)
    beyond = max(0.0, float(residual.square().sum() - reached.sum()))
    return _evidence(_betas(primary), len(phi), hat.values, reached, beyond)


def likeliest_beta(primary: Primary, told: Evidence) -> float:
    """The likeliest beta by what all clients' rows say."""
    return _best_ridge(_betas(primary), told)


def left_out(block: Block, primary: Primary, settings: Sequence[Setting]) -> tuple[Tensor, Tensor]:
    """What each model leaves of each left-out row, (settings, n, t), and what the primary alone leaves, (n, t)."""
    residual = block.targets - block.phi @ primary.weights
    whitened = whiten(block.phi, primary.factor)
    if block.seen is not None:
        whitened = whitened * block.seen[:, None]
    whole = LeftOut(hat_basis(block.phi), whitened, residual, block.groups, copies=block.copies)
    none = replace(whole, whitened=whole.whitened.new_zeros(len(residual), 1), residual=block.targets)
    models = []
    for weight, beta, balance in settings:
        left = weight * whole.primary + (1 - weight) * block.targets
        if balance:
            for part, share in ((whole, weight), (none, 1 - weight)):
                if share:
                    left = left - balance * share * part.refinement(beta)
        models.append(left)
    unjudged = ~whole.judged[:, None]
    return torch.stack(models).masked_fill(unjudged, math.nan), whole.primary.masked_fill(unjudged, math.nan)


def fit_client(block: Block, primary: Primary, setting: Setting) -> Tensor:
    """w G + balance P_k, (d, t): one matrix, because both streams have the same map."""
    weight, beta, balance = setting
    shared = weight * primary.weights
    if not balance:
        return shared
    return shared + balance * fit_refinement(block.phi, block.targets - block.phi @ shared, beta)
