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
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    "NumberStatistics",
    "Primary",
    "choose",
    "clearly_less",
    "fit_client",
    "number_statistics",
    "shares",
    "solve",
    "squared",
]

Setting = tuple[float, float, float]  # w, beta, balance
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
    """One client's rows on the map; ``groups`` and ``copies`` as `leaveout.leaving` gives them."""

    phi: Tensor  # (n, d)
    targets: Tensor  # (n, t)
    groups: Tensor | None = None
    copies: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Primary:
    """The shared stream, and what leaving rows out of it takes."""

    weights: Tensor  # G (d, t)
    factor: Tensor  # L (d, d), of the summed system
    gamma: float
    unit: float  # mean squared length of a row of Phi


def solve(stats: Statistics, gamma: float | None) -> Primary:
    """The primary stream with this gamma, or with the likeliest."""
    used = _likeliest(stats) if gamma is None else gamma
    factor = factorise(stats, used)
    return Primary(torch.cholesky_solve(stats.crosscorrelation, factor), factor, used, feature_energy(stats) or 1.0)


def _likeliest(stats: Statistics) -> float:
    """The gamma of the highest marginal likelihood."""
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    real = values > TINY * values[-1].clamp_min(math.ulp(0.0))
    values = values[real]
    reached = (vectors[:, real].T @ stats.crosscorrelation).square().sum(1) / values  # of tr(Y'Y), by each direction
    beyond = max(0.0, stats.target_energy - float(reached.sum()))
    unit = feature_energy(stats) or 1.0
    gammas = [unit * 10**decade for decade in reversed(GAMMAS)]
    return _best_ridge(gammas, stats.n_samples - stats.n_copies, [(values, reached, beyond)])


def _best_ridge(ridges: Sequence[float], n: int, spectra: Sequence[tuple[Tensor, Tensor, float]]) -> float:
    """The ridge of the highest likelihood of n rows in blocks; of equals the first, from large to small.

    A block has the eigenvalues of Phi Phi', the energy of Y in each direction, and that beyond all of them. The degrees
    of freedom that are left must be clear of zero: if one row stands at two clients, the likelihood has no bound.
    """
    values, reached = torch.cat([own for own, *_ in spectra]), torch.cat([own for _, own, _ in spectra])
    beyond, best = sum(own for *_, own in spectra), (math.inf, ridges[0])
    for ridge in ridges:
        keep = ridge / (values + ridge)
        if n - len(keep) + float(keep.sum()) < max(LEAST_LEFT * n, min(3.0, n / 2)):
            break
        left = max(beyond + float((reached * keep).sum()), LEAST)
        badness = n * math.log(left) + float(torch.log1p(values / ridge).sum())
        best = min(best, (badness, ridge), key=lambda found: found[0])
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


def shares(errors: Sequence[Tensor], seed: int, prior: Tensor | None = None) -> Tensor:
    """The share of each of m models in their average, (m,), from its squared errors of left-out rows, (m, n) by client.

    Likelihood of the left-out rows under each model, made to sum to one, and averaged over Bayesian bootstraps of the
    rows: pseudo-BMA+ (Yao, Vehtari, Simpson and Gelman, 2018). Models that the rows cannot tell apart share. A client
    would send `DRAWS` x m numbers, which add over clients. ``prior`` (m,) weighs models before any row is seen.
    """
    rng = np.random.default_rng(seed)
    summed, weight, n = torch.zeros(DRAWS, len(errors[0]), dtype=torch.float64), torch.zeros(DRAWS, 1).double(), 0
    for own in errors:
        for part in torch.split(own[:, ~own.isnan().any(0)], AT_ONCE, 1):
            drawn = torch.from_numpy(rng.standard_exponential((DRAWS, part.shape[1])))
            summed, weight, n = summed + drawn @ part.T, weight + drawn.sum(1, keepdim=True), n + part.shape[1]
    if not n:
        before = torch.ones(len(errors[0]), dtype=torch.float64) if prior is None else prior.double()
        return before / before.sum()
    likelihood = -n / 2 * (summed / weight).clamp_min(LEAST).log()
    return torch.softmax(likelihood if prior is None else likelihood + prior.double().log(), 1).mean(0)


def clearly_less(one: Tensor, other: Tensor, times: float = 1.0) -> bool:
    """Whether errors of the same rows are less on average, by so many standard errors of the difference."""
    gains = (other - one)[~(one.isnan() | other.isnan())]
    if len(gains) < 3:
        return False
    return float(gains.mean()) > times * float(gains.std()) / math.sqrt(len(gains))


def choose(blocks: Sequence[Block], primary: Primary, fixed: tuple[float | None, float | None, float | None]) -> Choice:
    """The models with w, beta and balance; those that are ``fixed`` (not None) are not chosen."""
    settings = _tried(blocks, primary, fixed)
    left = [_left_out(block, primary, settings) for block in blocks]
    return Choice(settings, [models for models, _ in left], [alone for _, alone in left])


def _tried(
    blocks: Sequence[Block], primary: Primary, fixed: tuple[float | None, float | None, float | None]
) -> list[Setting]:
    """Simple ones first."""
    tried: list[Setting] = []
    for weight in (1.0, 0.0) if fixed[0] is None else (fixed[0],):
        beta = _likeliest_beta(blocks, primary, weight) if fixed[1] is None else fixed[1]
        if weight and fixed[2] is None:
            tried.append((weight, beta, 0.0))  # the primary alone
        tried.append((weight, beta, 1.0 if fixed[2] is None else fixed[2]))
    return tried


def _likeliest_beta(blocks: Sequence[Block], primary: Primary, weight: float) -> float:
    spectra, n = [], 0
    for block in blocks:
        rows = slice(None) if block.copies is None else ~block.copies
        phi, targets = block.phi[rows], block.targets[rows]
        residual, hat = targets - weight * (phi @ primary.weights), hat_basis(phi)
        reached = (hat.basis.T @ residual).square().sum(1)
        spectra.append((hat.values, reached, max(0.0, float(residual.square().sum() - reached.sum()))))
        n += len(phi)
    return _best_ridge([primary.unit * 10**decade for decade in reversed(DECADES)], n, spectra)


def _left_out(block: Block, primary: Primary, settings: Sequence[Setting]) -> tuple[Tensor, Tensor]:
    """What each model leaves of each left-out row, (settings, n, t), and what the primary alone leaves, (n, t)."""
    residual = block.targets - block.phi @ primary.weights
    whole = LeftOut(
        hat_basis(block.phi), whiten(block.phi, primary.factor), residual, block.groups, copies=block.copies
    )
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
