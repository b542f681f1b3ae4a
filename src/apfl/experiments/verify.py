"""The paper's theorems, checked on given data and reported as measured differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.leaveout import fit_refinement
from apfl.maths.maps import FeatureMap, random_map
from apfl.maths.normalise import Normaliser
from apfl.maths.recursion import fold, upload
from apfl.maths.ridge import Statistics, one_hot, solve, statistics, total

__all__ = ["Check", "verify"]


@dataclass(frozen=True)
class Check:
    """One statement, how far it is from holding exactly, and how far rounding may take it."""

    statement: str
    difference: float  # relative
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the difference is within rounding; NaN is not."""
        return self.difference <= self.tolerance


def verify(
    clients: Sequence[Shard], n_classes: int, *, width: int = 256, gamma: float = 1.0, beta: float = 1.0, seed: int = 0
) -> Iterator[Check]:
    """Check Theorems 1 to 3, the recursion and leaving, in float64, with two maps of ``width``."""
    clients = [Shard(shard.features.to("cpu", torch.float64), shard.labels.cpu()) for shard in clients]
    streams = _Streams(clients[0].features.shape[1], n_classes, width, gamma, beta, seed)
    parts = [streams.statistics(shard) for shard in clients]
    primary = solve(total(parts), gamma)

    pooled = Shard(torch.cat([s.features for s in clients]), torch.cat([s.labels for s in clients]))
    yield Check(
        "Theorem 1: sum of the clients' statistics = least squares on the pooled rows",
        _difference(primary, streams.central(pooled)),
        1e-9,
    )

    gradients = [streams.gradient(shard, primary) for shard in clients]
    yield Check("Theorem 2: every client's refinement has gradient zero", max(gradients), 1e-9)

    moved = _reshuffle_others(clients, np.random.default_rng(seed))
    primary_moved = solve(total(streams.statistics(shard) for shard in moved), gamma)
    own, own_moved = streams.refinement(clients[0], primary), streams.refinement(moved[0], primary_moved)
    yield Check(
        "Theorem 3: a client's model stays the same while all other rows change hands",
        max(_difference(primary_moved, primary), _difference(own_moved, own)),
        1e-9,
    )

    # The recursion solves K systems in a row and each multiplies the error by a condition number: hence 1e-6.
    yield Check(
        "Equations 5 to 8: the paper's recursion = the sum",
        _difference(fold([upload(part, gamma) for part in parts], gamma), primary),
        1e-6,
    )

    if len(clients) > 1:
        left = solve(total(parts) - parts[-1], gamma)
        yield Check(
            "A client that left = a client that never joined", _difference(left, solve(total(parts[:-1]), gamma)), 1e-9
        )


class _Streams:
    """Both streams with fixed settings, as plain formulas."""

    def __init__(self, n_in: int, n_classes: int, width: int, gamma: float, beta: float, seed: int) -> None:
        self.n_classes, self.gamma, self.beta = n_classes, gamma, beta
        self.maps: list[FeatureMap] = [random_map(n_in, width, "relu", 2 * seed + stream) for stream in (0, 1)]

    def rows(self, shard: Shard, stream: int) -> Tensor:
        return self.maps[stream](Normaliser("row")(shard.features))

    def statistics(self, shard: Shard) -> Statistics:
        return statistics(self.rows(shard, 0), one_hot(shard.labels, self.n_classes))

    def residual(self, shard: Shard, primary: Tensor) -> Tensor:
        return one_hot(shard.labels, self.n_classes) - self.rows(shard, 0) @ primary

    def refinement(self, shard: Shard, primary: Tensor) -> Tensor:
        return fit_refinement(self.rows(shard, 1), self.residual(shard, primary), self.beta)

    def gradient(self, shard: Shard, primary: Tensor) -> float:
        """|Psi'(E - Psi P) - beta P| / |Psi'E|."""
        psi, residual = self.rows(shard, 1), self.residual(shard, primary)
        refinement = fit_refinement(psi, residual, self.beta)
        gradient = psi.T @ (residual - psi @ refinement) - self.beta * refinement
        return float(gradient.norm() / (psi.T @ residual).norm().clamp_min(1e-300))

    def central(self, pooled: Shard) -> Tensor:
        """Another route to the same minimum: QR of the rows with sqrt(gamma) I below them, no normal equations."""
        phi = self.rows(pooled, 0)
        ridge_rows = self.gamma**0.5 * torch.eye(phi.shape[1], dtype=phi.dtype)
        targets = torch.cat([one_hot(pooled.labels, self.n_classes), phi.new_zeros(phi.shape[1], self.n_classes)])
        solution: Tensor = torch.linalg.lstsq(torch.cat([phi, ridge_rows]), targets, driver="gels").solution
        return solution


def _reshuffle_others(clients: Sequence[Shard], rng: np.random.Generator) -> list[Shard]:
    """The first client as it is; all other rows dealt out anew, in other numbers."""
    if len(clients) < 2:
        return list(clients)
    features = torch.cat([shard.features for shard in clients[1:]])
    labels = torch.cat([shard.labels for shard in clients[1:]])
    n_parts = min(len(clients), len(labels))
    cuts = np.sort(rng.permutation(np.arange(1, len(labels)))[: n_parts - 1])
    return [
        clients[0],
        *(
            Shard(features[torch.from_numpy(rows)], labels[torch.from_numpy(rows)])
            for rows in np.split(rng.permutation(len(labels)), cuts)
        ),
    ]


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
