"""The best settings there are for `apfl`, found on the *test* rows: what no honest choice can have, to measure one by.

Of gamma, beta, balance and tau those that the method leaves open come from a grid, gamma and beta in units of the
feature energy, around where generalised cross-validation lies. Everything else is as in the method, but that every
client has the same weight on the primary: 1 if the method leaves it open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apfl.data.federation import Federation
from apfl.errors import InputError
from apfl.maths.gcv import feature_energy
from apfl.maths.hits import local_prior
from apfl.maths.leaveout import hat_basis
from apfl.maths.personalise import Rows, Shared, solve_primary
from apfl.maths.ridge import Statistics
from apfl.methods.apfl import APFL

__all__ = ["BALANCES", "BETAS", "GAMMAS", "TAUS", "OnTest", "best_on_test", "on_test"]

GAMMAS = [10.0**p for p in (-3, -2, -1.5, -1, -0.5, 0, 0.5)]
BETAS = [10.0 ** (p / 2) for p in range(-6, 5)]
BALANCES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
TAUS = [0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.18, 0.25]


@dataclass(frozen=True, eq=False)
class OnTest:
    """Mean client accuracy on test rows over (gamma, beta, balance, tau), and the values that were tried of each."""

    accuracy: Tensor  # (gammas, betas, balances, taus)
    tried: dict[str, list[float]]

    @property
    def best(self) -> dict[str, float]:
        """The settings with the highest accuracy; ties go to the first."""
        where = torch.unravel_index(self.accuracy.argmax(), self.accuracy.shape)
        return {name: values[int(i)] for (name, values), i in zip(self.tried.items(), where, strict=True)}


def best_on_test(method: APFL, federation: Federation, seed: int) -> APFL:
    """The method with the settings that are best on this federation's test rows."""
    return replace(method, **on_test(method, federation, seed).best)  # type: ignore[arg-type]


def on_test(method: APFL, federation: Federation, seed: int) -> OnTest:
    """The whole grid, with every stream as the method fits it."""
    clients, tests, c = federation.train, federation.test, federation.n_classes
    features = clients[0].features
    made_of = method.streams(clients, c, seed)
    normalise, maps = made_of.normalise, (made_of.primary_map, made_of.refinement_map)
    phis, summed = made_of.phis, made_of.stats
    tried = _tried(method, feature_energy(summed))
    gammas, betas, balances, taus = tried.values()
    table = torch.zeros([*map(len, tried.values())], dtype=torch.float64, device=features.device)
    weights = torch.tensor(balances, dtype=torch.float32, device=features.device)[:, None, None]
    primaries = _primaries(summed, gammas)
    weight = 1.0 if method.weight == "auto" else method.weight
    measured = [k for k in range(len(clients)) if len(tests[k])]
    for k in measured:
        z_test = normalise(tests[k].features)
        phi_test = maps[0](z_test).double()
        rows = Rows(phis[k], maps[1](normalise(clients[k].features)).double(), clients[k].labels)
        hat = hat_basis(rows.psi)
        across = (maps[1](z_test).double() @ rows.psi.T) @ hat.basis  # Psi_test P = across diag(1 / (s + beta)) U'E
        for g, shared in primaries.items():
            inner = hat.basis.T @ shared.residual(rows, weight)
            prior = local_prior(*shared.counts(rows), method.smoothing)
            bases = [(weight * (phi_test @ shared.weights) + tau * prior).float() for tau in taus]
            for b, beta in enumerate(betas):
                refined = weights * ((across / (hat.values + beta)) @ inner).float()
                for t, base in enumerate(bases):
                    right = (base + refined).argmax(2) == tests[k].labels
                    table[g, b, :, t] += right.double().mean(1) / len(measured)
    return OnTest(table.cpu(), tried)


def _primaries(summed: Statistics, gammas: Sequence[float]) -> dict[int, Shared]:
    """The primary of each gamma, by its place; of sums that travelled as integers the smallest may have none."""
    found, refused = {}, None
    for g, gamma in enumerate(gammas):
        try:
            found[g] = solve_primary(summed, gamma).shared
        except InputError as error:
            refused = error
    if refused is not None and not found:
        raise refused
    return found


def _tried(method: APFL, unit: float) -> dict[str, list[float]]:
    """The values of each setting: the grid's, or the one that the method has fixed."""
    grids = {
        "gamma": [unit * gamma for gamma in GAMMAS], "beta": [unit * beta for beta in BETAS],
        "balance": BALANCES, "tau": TAUS,
    }  # fmt: skip
    fixed = {name: getattr(method, name) for name in grids}
    return {name: values if fixed[name] == "auto" else [float(fixed[name])] for name, values in grids.items()}
