"""The best settings there are for `apfl`, found on the *test* rows: what no honest choice can have, to measure one by.

Everything but (gamma, beta, balance, tau) is as in the method. These come from a grid, gamma and beta in units of the
feature energy, around where generalised cross-validation lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from apfl.data.federation import Federation
from apfl.maths.gcv import feature_energy
from apfl.maths.hits import local_prior
from apfl.maths.leaveout import LeftOut, hat_basis, leverage_sketch
from apfl.maths.personalise import solve_primary
from apfl.maths.ridge import one_hot
from apfl.methods._analytic import mapped_and_summed, shared_normaliser, stream_maps
from apfl.methods.apfl import APFL

__all__ = ["BALANCES", "BETAS", "GAMMAS", "TAUS", "OnTest", "best_on_test", "on_test"]

GAMMAS = [10.0**p for p in (-3, -2, -1.5, -1, -0.5, 0, 0.5)]
BETAS = [10.0 ** (p / 2) for p in range(-6, 5)]
BALANCES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
TAUS = [0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.18, 0.25]


@dataclass(frozen=True, eq=False)
class OnTest:
    """Mean client accuracy on test rows over (gamma, beta, balance, tau), and the unit of gamma and beta."""

    accuracy: Tensor  # (gammas, betas, balances, taus)
    unit: float


def best_on_test(method: APFL, federation: Federation, seed: int) -> APFL:
    """The method with the settings that are best on this federation's test rows; ties go to the first."""
    found = on_test(method, federation, seed)
    g, b, l, t = (int(i) for i in torch.unravel_index(found.accuracy.argmax(), found.accuracy.shape))  # noqa: E741
    return replace(method, gamma=found.unit * GAMMAS[g], beta=found.unit * BETAS[b], balance=BALANCES[l], tau=TAUS[t])


def on_test(method: APFL, federation: Federation, seed: int) -> OnTest:
    """The whole grid, with every stream as the method fits it."""
    clients, tests, c = federation.train, federation.test, federation.n_classes
    features = clients[0].features
    activations = (method.activation_primary, method.activation_refinement)
    normalise = shared_normaliser(method.normalise, clients)
    widths = method.widths(sum(map(len, clients)), features.shape[1])
    maps = stream_maps(features, normalise, widths, activations, seed, method.intercept)
    phis, summed = mapped_and_summed(clients, c, normalise, maps[0])
    unit = feature_energy(summed)
    table = torch.zeros(len(GAMMAS), len(BETAS), len(BALANCES), len(TAUS), dtype=torch.float64, device=features.device)
    measured = [k for k in range(len(clients)) if len(tests[k])]
    balances = torch.tensor(BALANCES, dtype=torch.float32, device=features.device)[:, None, None]
    primaries = [solve_primary(summed, unit * gamma) for gamma in GAMMAS]
    sketches = [leverage_sketch(primary.factor, method.sketch or 128, seed) for primary in primaries]
    for k in measured:
        z, z_test = normalise(clients[k].features), normalise(tests[k].features)
        psi, phi_test = maps[1](z).double(), maps[0](z_test).double()
        hat = hat_basis(psi)
        across = (maps[1](z_test).double() @ psi.T) @ hat.basis  # Psi_test P = across diag(1 / (s + beta)) U'T
        targets = one_hot(clients[k].labels, c)
        prior = local_prior(targets.sum(0), summed.class_counts, method.smoothing)
        for g, (primary, sketch) in enumerate(zip(primaries, sketches, strict=True)):
            phi = phis[k].double()
            target = LeftOut(
                hat, phi @ sketch, targets - phi @ primary.weights, method.refinement, sketched=True
            ).target
            inner = hat.basis.T @ target
            bases = [(phi_test @ primary.weights + tau * prior).float() for tau in TAUS]
            for b, beta in enumerate(BETAS):
                refined = balances * ((across / (hat.values + unit * beta)) @ inner).float()
                for t, base in enumerate(bases):
                    hits = (base + refined).argmax(2) == tests[k].labels
                    table[g, b, :, t] += hits.double().mean(1) / len(measured)
    return OnTest(table.cpu(), unit)
