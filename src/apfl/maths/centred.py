"""The landmark map about a public mean: what its rows have in common is no news, and noise would drown the rest.

    phi_c(z) = (phi(z) - m) / s         m the mean, s the median length of phi - m, over synthetic points

Most of phi is m. Statistics under noise count rows of length 1 at most, so s uses that length up; the longer half of
the rows is brought back to 1 (`within`) there, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apfl.maths.landmarks import LandmarkMap

__all__ = ["CentredMap", "centred", "within"]


@dataclass(frozen=True, eq=False)
class CentredMap:
    """Z (n, n_in) -> phi_c (n, d), float64. Make one with `centred`."""

    landmarks: LandmarkMap
    mean: Tensor  # m (d,)
    scale: float  # s

    @property
    def n_in(self) -> int:
        return self.landmarks.n_in

    @property
    def width(self) -> int:
        """d."""
        return self.landmarks.width

    def __call__(self, features: Tensor) -> Tensor:
        """phi_c of each row, of any length."""
        return (self.landmarks(features) - self.mean).div_(self.scale)

    def fold(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """A (d, c) and b (c,): phi_c(z)'W = k(z, V) A + b."""
        return self.landmarks.fold(weights / self.scale), -(self.mean @ weights) / self.scale


def centred(drawn: LandmarkMap, points: Tensor) -> CentredMap:
    """The map about the mean of these synthetic points, which are nobody's rows."""
    phi = drawn(points)
    mean = phi.mean(0)
    scale = float(torch.linalg.vector_norm(phi - mean, dim=1).median())
    return CentredMap(drawn, mean, scale or 1.0)


def within(phi: Tensor) -> Tensor:
    """Rows longer than 1 brought back to 1."""
    length: Tensor = torch.linalg.vector_norm(phi, dim=1, keepdim=True)
    return phi / length.clamp_min(1)
