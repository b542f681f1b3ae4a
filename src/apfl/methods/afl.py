"""AFL: one least-squares head on the backbone's own features, for everyone.

He et al., "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models", CVPR 2025.
A client sends C_k = Z_k'Z_k + gamma I and W_k = C_k^-1 Z_k'Y_k; the server aggregates by the absolute aggregation law
and removes all K gamma, so the result is *unregularised* least squares on the union of the rows, whatever gamma was
(apfl keeps one gamma). The sum of statistics is that result directly; a test follows the published law instead.

Where Z'Z is singular (constant columns, fewer rows than features) the law has no answer: the smallest ridge that
makes the system solvable is added and recorded as ``ridge``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.errors import InputError
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import Statistics, factorise
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import ANY_TARGET, one_exchange, summed_features, upload_bytes
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class AFL(Method):
    """One analytic linear head shared by all clients: federated least squares, nothing personal."""

    normalise: Normalise = "row"

    personal: ClassVar[bool] = False
    predicts: ClassVar[Sequence[Target]] = ANY_TARGET
    grid: ClassVar[Mapping[str, Any]] = {}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise, feature_map, summed = summed_features(clients, n_classes, self.normalise)
        ridge, factor = smallest_ridge(summed)
        head = torch.cholesky_solve(summed.crosscorrelation, factor)
        model = DualStream(feature_map, head, normaliser=normalise)
        yield one_exchange(
            [model] * len(clients), normalise, clients[0].features.shape[1],
            up=upload_bytes(clients, summed), down=nbytes({"head": head}),
            chosen={"ridge": ridge},
        )  # fmt: skip


def smallest_ridge(stats: Statistics) -> tuple[float, torch.Tensor]:
    """The smallest ridge, 0 or a power of ten times the mean diagonal, that can be solved, with its Cholesky factor.

    Solvable: the smallest pivot stands clear of the rounding of the largest.
    """
    scale = float(stats.autocorrelation.diagonal().mean()) or 1.0
    for ridge in (0.0, *(scale * 10.0**power for power in range(-14, 1))):
        try:
            factor = factorise(stats, ridge)
        except InputError:
            continue
        pivots = factor.diagonal().square()
        if float(pivots.min()) > stats.width * torch.finfo(torch.float64).eps * float(pivots.max()):
            return ridge, factor
    raise InputError("the summed statistics cannot be solved with any ridge; check the features for NaN or infinity")
