"""Linear discriminant analysis from the same statistics that a ridge regression needs. One round, no training.

    W = Sigma^-1 M,   b_y = log n_y - mu_y' Sigma^-1 mu_y / 2,   Sigma = (Z'Z - sum_y n_y mu_y mu_y') / N

The Gaussian classifier with the covariance *within* classes, as in GH-OFL's LDA head (Turazza et al., "The
Gaussian-Head OFL Family", ICLR 2026); `fedcgs` has the covariance of all rows. The covariance is shrunk,
(1 - s) Sigma + s mean(diag) I, because on real features it is close to singular.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.methods._analytic import summed_features, upload_bytes
from apfl.methods._gaussian import gaussian_head, scale_of
from apfl.methods._head import Head, OneHead


@dataclass(frozen=True)
class FedLDA(OneHead):
    """Federated linear discriminant analysis: one head for everyone, nothing personal."""

    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.01
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"shrinkage": (0.001, 0.01, 0.1)}

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise, _, summed = summed_features(clients, n_classes, self.normalise)
        counts = summed.class_counts
        means = summed.crosscorrelation / counts.clamp_min(1)  # (l, c)
        covariance = (summed.autocorrelation - (means * counts) @ means.T) / summed.n_samples
        shrunk = (1 - self.shrinkage) * covariance
        shrunk.diagonal().add_(self.shrinkage * scale_of(covariance, summed))
        how = f"shrinkage {self.shrinkage:g}"
        return gaussian_head(summed, shrunk, normalise, how, upload_bytes(clients, summed))
