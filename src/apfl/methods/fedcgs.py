"""FedCGS: a Gaussian classifier from the sum of all clients' class sums, counts and Gram matrices. One round.

    W = S^-1 M,   b_y = log(n_y / N) - mu_y' S^-1 mu_y / 2,   S = (Z'Z - N mu mu') / (N - 1) + shrinkage mean(diag) I

Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025, whose public code takes the
covariance about the *overall* mean, not within classes: `fedlda` is the same head with the latter. By the matrix
inversion lemma both give W up to an invertible matrix on the classes' side, so they are not the same classifier.
Departures: the authors invert S as it is (their gamma is 0), which has no inverse on real features with constant or
collinear columns; a class that nobody has is ruled out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.methods._analytic import summed_features, upload_bytes
from apfl.methods._gaussian import gaussian_head, scale_of
from apfl.methods._head import Head, OneHead


@dataclass(frozen=True)
class FedCGS(OneHead):
    """A Gaussian classifier with the covariance of all rows: one head for everyone."""

    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.001
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"shrinkage": (1e-5, 0.001, 0.01, 0.1)}

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise, _, summed = summed_features(clients, n_classes, self.normalise)
        n, total = summed.n_samples, summed.crosscorrelation.sum(1)
        covariance = (summed.autocorrelation - torch.outer(total, total) / n) / max(n - 1, 1)
        covariance.diagonal().add_(self.shrinkage * scale_of(covariance, summed))
        how = f"shrinkage {self.shrinkage:g}"
        return gaussian_head(summed, covariance, normalise, how, upload_bytes(clients, summed))
