"""How backbone features are scaled before the random maps.

root         sign(z) sqrt|z|, then as row; needs nothing from anyone else. Evens out features of which a few are large,
             as pooled activations are: the power normalisation of retrieval and few-shot learning (default of `apfl`)
row          z * sqrt(l) / |z|     needs nothing from anyone else
standardise  (z - mean) / std      needs the federation's moments, which add like statistics do
none         z
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from apfl.errors import InputError, unknown

__all__ = ["Moments", "Normalise", "Normaliser", "moments", "normaliser"]

Normalise = Literal["root", "row", "standardise", "none"]


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of feature columns; additive over clients."""

    n_samples: int
    sums: Tensor  # (l,), float64
    squares: Tensor  # (l,), float64

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.n_samples + other.n_samples, self.sums + other.sums, self.squares + other.squares)

    def __sub__(self, other: Moments) -> Moments:
        return Moments(self.n_samples - other.n_samples, self.sums - other.sums, self.squares - other.squares)


def moments(features: Tensor) -> Moments:
    """The moments of one client's features (n, l)."""
    rows = features.to(torch.float64)
    return Moments(len(rows), rows.sum(0), rows.square().sum(0))


@dataclass(frozen=True, eq=False)
class Normaliser:
    """The scaling in force. With ``standardise`` its mean and std are fixed when first published.

    >>> z = normaliser("row")(torch.tensor([[3.0, 4.0]]))
    >>> round(z.square().sum().item(), 3)  # |z|^2 = l
    2.0
    """

    how: Normalise = "row"
    mean: Tensor | None = None  # (l,), float64, only with standardise
    std: Tensor | None = None  # (l,), float64, only with standardise

    def __call__(self, features: Tensor) -> Tensor:
        if self.how == "none":
            return features
        if self.how == "row":
            return _to_length(features)
        if self.how == "root":
            return _to_length(features.sign() * features.abs().sqrt())
        if self.mean is None or self.std is None:
            raise InputError("this normaliser has no mean and std: make it with normaliser('standardise', moments)")
        return (features - self.mean.to(features)) / self.std.to(features)


def _to_length(features: Tensor) -> Tensor:
    """Every row at length sqrt(l); a row of zeros stays a row of zeros."""
    norm: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    factor: Tensor = math.sqrt(features.shape[1]) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return features * factor


def normaliser(how: str, shared: Moments | None = None) -> Normaliser:
    """The normaliser named ``how``; ``standardise`` takes the summed moments of the federation."""
    if how not in get_args(Normalise):
        raise unknown("normalisation", how, get_args(Normalise))
    if how != "standardise":
        return Normaliser(how)  # type: ignore[arg-type]
    if shared is None or shared.n_samples < 1:
        raise InputError("normalise='standardise' needs the moments of at least one sample")
    mean = shared.sums / shared.n_samples
    variance = shared.squares / shared.n_samples - mean.square()
    # Below rounding of the subtraction a column is constant: it is centred and left unscaled.
    constant = variance <= 1e-12 * mean.square() + torch.finfo(torch.float64).tiny
    return Normaliser("standardise", mean, torch.where(constant, 1.0, variance.clamp_min(0)).sqrt())
