"""Both streams with numbers as targets: the same ridges, chosen by left-out squared error.

    primary       G = argmin |Y - Phi G|^2 + gamma |G|^2                over everyone's rows; gamma by `gcv`
    refinement    P_k = argmin |Y_k - w Phi_k G - Phi_k P|^2 + beta |P|^2     over the client's own
    prediction    w Phi G + balance Phi P_k

w = 1 is the paper's model, w = 0 (then balance = 1) a client's own ridge. w, beta and balance have the least squared
error of left-out rows, added over clients, if that is clearly less than that of the primary alone. A client takes w = 0
for itself if its own rows say so clearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    "solve",
]

Setting = tuple[float, float, float]  # w, beta, balance
DECADES = [-4 + step / 2 for step in range(13)]  # of beta over the mean squared length of a row of Phi
GAMMAS = [-10 + step / 4 for step in range(53)]  # decades, likewise
LEAST_LEFT = 0.02  # of the rows: degrees of freedom that a fit must leave
TINY = 1e-13  # of the largest eigenvalue
BALANCES = (0.25, 0.5, 0.75, 1.0)


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
    """The primary stream with this gamma, or with the one of the lowest generalised cross-validation."""
    used = _lowest_gcv(stats) if gamma is None else gamma
    factor = factorise(stats, used)
    return Primary(torch.cholesky_solve(stats.crosscorrelation, factor), factor, used, feature_energy(stats) or 1.0)


def _lowest_gcv(stats: Statistics) -> float:
    """As `gcv.choose_gamma`, for targets that may have no noise: then the best fit does pass through nearly all rows.

    What is left of the degrees of freedom must be clear of zero, or one row at two clients would make the curve fall to
    zero at its edge.
    """
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    real = values > TINY * values[-1].clamp_min(math.ulp(0.0))
    values = values[real]
    reached = (vectors[:, real].T @ stats.crosscorrelation).square().sum(1) / values  # of tr(Y'Y), by each direction
    beyond = max(0.0, stats.target_energy - float(reached.sum()))
    n, unit = stats.n_samples - stats.n_copies, feature_energy(stats) or 1.0
    found = (math.inf, unit)
    for decade in reversed(GAMMAS):
        gamma = unit * 10**decade
        left = n - float((values / (values + gamma)).sum())
        if left < max(LEAST_LEFT * n, min(3.0, n / 2)):
            break
        rss = beyond + float((reached * (gamma / (values + gamma)).square()).sum())  # a sum, where nothing cancels
        found = min(found, (n * rss / left**2, gamma))
    return found[1]


@dataclass(frozen=True, eq=False)
class Choice:
    """Every setting that was tried, the squared error of each left-out row under it, and the best."""

    settings: list[Setting]
    errors: list[Tensor]  # of each client, (settings, n); NaN for rows that cannot be judged
    best: int

    @property
    def of_best(self) -> Tensor:
        """The errors of all rows under the best setting, (N,)."""
        return torch.cat([own[self.best] for own in self.errors])

    def own(self, client: int) -> Setting:
        """The setting of one client: everyone's, or going alone if its own rows are clearly better off."""
        errors = self.errors[client]
        alone = [i for i, (weight, *_) in enumerate(self.settings) if weight == 0]
        if not alone or self.settings[self.best][0] == 0:
            return self.settings[self.best]
        other = min(alone, key=lambda i: float(errors[i].nansum()))
        return self.settings[other if clearly_less(errors[other], errors[self.best], 2.0) else self.best]


def clearly_less(one: Tensor, other: Tensor, times: float = 1.0) -> bool:
    """Whether errors of the same rows are less on average, by so many standard errors of the difference."""
    gains = (other - one)[~(one.isnan() | other.isnan())]
    if len(gains) < 3:
        return False
    return float(gains.mean()) > times * float(gains.std()) / math.sqrt(len(gains))


def choose(blocks: Sequence[Block], primary: Primary, fixed: tuple[float | None, float | None, float | None]) -> Choice:
    """w, beta and balance by left-out squared error; those that are ``fixed`` (not None) are not chosen."""
    settings = _tried(primary.unit, fixed)
    errors = [_errors(block, primary, settings) for block in blocks]
    total = sum(own.nansum(1) for own in errors)
    assert isinstance(total, Tensor)
    best, everyone = int(total.argmin()), torch.cat(errors, 1)
    return Choice(settings, errors, best if clearly_less(everyone[best], everyone[0]) else 0)


def _tried(unit: float, fixed: tuple[float | None, float | None, float | None]) -> list[Setting]:
    """Simple ones first: of equals the first is taken."""
    weights = (1.0, 0.0) if fixed[0] is None else (fixed[0],)
    betas = [unit * 10**decade for decade in reversed(DECADES)] if fixed[1] is None else [fixed[1]]
    tried: list[Setting] = []
    for weight in weights:
        balances = (fixed[2],) if fixed[2] is not None else BALANCES if weight else (1.0,)
        if weight and fixed[2] is None:
            tried.append((weight, betas[0], 0.0))  # the primary alone
        tried += [(weight, beta, balance) for beta in betas for balance in balances]
    return tried


def _errors(block: Block, primary: Primary, settings: Sequence[Setting]) -> Tensor:
    """Of each left-out row under each setting, (settings, n)."""
    residual = block.targets - block.phi @ primary.weights
    whole = LeftOut(
        hat_basis(block.phi), whiten(block.phi, primary.factor), residual, block.groups, copies=block.copies
    )
    none = replace(whole, whitened=whole.whitened.new_zeros(len(residual), 1), residual=block.targets)
    rows = []
    for weight, beta, balance in settings:
        error = weight * whole.primary + (1 - weight) * block.targets
        if balance:
            for part, share in ((whole, weight), (none, 1 - weight)):
                if share:
                    error = error - balance * share * part.refinement(beta)
        rows.append(error.square().sum(1))
    return torch.stack(rows).masked_fill(~whole.judged, math.nan)


def fit_client(block: Block, primary: Primary, setting: Setting) -> Tensor:
    """w G + balance P_k, (d, t): one matrix, because both streams have the same map."""
    weight, beta, balance = setting
    shared = weight * primary.weights
    if not balance:
        return shared
    return shared + balance * fit_refinement(block.phi, block.targets - block.phi @ shared, beta)
