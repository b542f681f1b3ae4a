"""Linear discriminant analysis from the same statistics that a ridge regression needs. One round, no training.

    W = Sigma^-1 M,   b_y = log n_y - mu_y' Sigma^-1 mu_y / 2,   Sigma = (Z'Z - sum_y n_y mu_y mu_y') / N

As in FedCGS (Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning"), whose
server builds a Gaussian classifier from the clients' sums, Gram matrices and counts. Departure: the covariance is
shrunk, (1 - s) Sigma + s mean(diag) I, because on real features it is close to singular.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.maps import raw_map
from apfl.maths.normalise import Normalise
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import mapped_and_summed, one_exchange, shared_normaliser, upload_bytes
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class FedLDA(Method):
    """Federated linear discriminant analysis: one head for everyone, nothing personal."""

    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.01
    normalise: Normalise = "row"

    personal: ClassVar[bool] = False
    grid: ClassVar[Mapping[str, Any]] = {"shrinkage": (0.001, 0.01, 0.1)}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        n_features = clients[0].features.shape[1]
        _, summed = mapped_and_summed(clients, n_classes, normalise, raw_map(normalise.width(n_features)))
        counts = summed.class_counts
        means = summed.crosscorrelation / counts.clamp_min(1)  # (l, c)
        covariance = (summed.autocorrelation - (means * counts) @ means.T) / summed.n_samples
        # Features that hardly vary leave the rounding of the subtraction, which has no inverse worth having.
        floor = 1e-10 * summed.autocorrelation.diagonal().mean() / summed.n_samples
        scale = torch.maximum(covariance.diagonal().mean(), floor).clamp_min(1e-200)
        shrunk = (1 - self.shrinkage) * covariance
        shrunk.diagonal().add_(self.shrinkage * scale)
        factor, failed = torch.linalg.cholesky_ex(shrunk)
        if int(failed):
            raise InputError(f"the covariance of the features with shrinkage {self.shrinkage:g} is singular: use more")
        weight = torch.cholesky_solve(means, factor)
        bias = (counts.log() - (means * weight).sum(0) / 2).masked_fill(counts == 0, -math.inf)
        yield one_exchange(
            [LinearHead(weight, bias, normaliser=normalise)] * len(clients), normalise, n_features,
            up=upload_bytes(clients, summed), down=nbytes({"weight": weight, "bias": bias}),
        )  # fmt: skip
