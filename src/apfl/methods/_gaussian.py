"""The head of Gaussian classes with one covariance, from summed statistics: what `fedlda` and `fedcgs` share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.normalise import Normaliser
from apfl.maths.ridge import Statistics
from apfl.maths.wire import nbytes
from apfl.methods._head import Head
from apfl.models.linear_head import LinearHead

__all__ = ["gaussian_head", "scale_of"]


def scale_of(covariance: Tensor, summed: Statistics) -> Tensor:
    """The mean variance of a column, and never zero.

    Features that hardly vary leave the rounding of the subtraction, which has no inverse worth having.
    """
    floor = 1e-10 * summed.autocorrelation.diagonal().mean() / summed.n_samples
    return torch.maximum(covariance.diagonal().mean(), floor).clamp_min(1e-200)


def gaussian_head(summed: Statistics, covariance: Tensor, normalise: Normaliser, how: str, up: Sequence[int]) -> Head:
    """W = Sigma^-1 M, b_y = log n_y - mu_y' Sigma^-1 mu_y / 2; ``how`` says in an error what made it singular."""
    counts = summed.class_counts
    means = summed.crosscorrelation / counts.clamp_min(1)  # M (l, c)
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if int(failed):
        raise InputError(f"the covariance of the features with {how} is singular: use more")
    weight = torch.cholesky_solve(means, factor)
    bias = (counts.log() - (means * weight).sum(0) / 2).masked_fill(counts == 0, -math.inf)
    model = LinearHead(weight, bias, normaliser=normalise)
    return Head(model, counts, up, nbytes({"weight": weight, "bias": bias}))
