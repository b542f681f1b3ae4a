"""Maps without weights after which a linear head is a quadratic one, or a sum of looked-up tables.

    Products   Z (n, l) -> (z, z_i^2), or (z, z_i z_j for i <= j): Gaussian classes with covariances of their own
    Buckets    Z (n, l) -> a one-hot code of each group of bits (z_i > t): tables of 2^bits rows, one for each group

Nothing is learnt and nothing but the seed is drawn: every party makes the same map from its `spec`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.maps import FeatureMap, normals

__all__ = ["Buckets", "Lift", "Products", "map_from_spec"]


@dataclass(frozen=True)
class Products:
    """The features, and after them their squares, or with ``pairs`` all products of two.

    >>> Products(2)(torch.tensor([[2.0, 3.0]])).tolist(), Products(2, pairs=True)(torch.tensor([[2.0, 3.0]])).tolist()
    ([[2.0, 3.0, 4.0, 9.0]], [[2.0, 3.0, 4.0, 6.0, 9.0]])
    """

    n_in: int
    pairs: bool = False

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The columns i and j of each product."""
        if self.pairs:
            i, j = torch.triu_indices(self.n_in, self.n_in)
            return i, j
        return torch.arange(self.n_in), torch.arange(self.n_in)

    @property
    def width(self) -> int:
        return self.n_in + len(self.factors[0])

    def __call__(self, features: Tensor) -> Tensor:
        _check(features, self.n_in)
        i, j = self.factors
        return torch.cat([features, features[:, i] * features[:, j]], dim=1)

    def spec(self) -> dict[str, Any]:
        """What another party needs to make the same map."""
        return {"lift": "products", **asdict(self)}


@dataclass(frozen=True)
class Buckets:
    """Bits z_i > t_l at the quantiles t_1 .. t_L of a standard normal, shuffled, in groups; each group one-hot.

    A group of g bits is a number below 2^g, so a linear head after it looks up one row of 2^g for each group.

    >>> lift = Buckets(1, levels=2, bits=2, groups=1)
    >>> lift.thresholds.tolist(), lift.width
    ([-0.43072..., 0.43072...], 4)
    >>> lift(torch.tensor([[-1.0], [0.0], [1.0]])).sum(1).tolist()
    [1.0, 1.0, 1.0]
    """

    n_in: int
    levels: int = 7
    bits: int = 5
    groups: int = 128
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The number of groups and of bits in each: as asked, if there are so many bits; what is over is left out."""
        there = self.n_in * self.levels
        bits = min(self.bits, there)
        return min(self.groups, there // bits), bits

    @property
    def width(self) -> int:
        groups, bits = self.shape
        return groups << bits

    @cached_property
    def thresholds(self) -> Tensor:
        return torch.from_numpy(ndtri(np.arange(1, self.levels + 1) / (self.levels + 1)))

    @cached_property
    def chosen(self) -> tuple[Tensor, Tensor]:
        """The column and the threshold of each bit, group by group."""
        groups, bits = self.shape
        order = normals(self.seed, self.n_in * self.levels).argsort(stable=True)[: groups * bits]
        return order // self.levels, self.thresholds[order % self.levels]

    def places(self, features: Tensor) -> Tensor:
        """Which column of each group's one-hot code is 1, (n, groups)."""
        _check(features, self.n_in)
        groups, bits = self.shape
        columns, thresholds = self.chosen
        on = (features[:, columns.to(features.device)].double() > thresholds.to(features.device)).long()
        powers = 1 << torch.arange(bits, device=features.device)
        numbers: Tensor = (on.view(-1, groups, bits) * powers).sum(2)
        return numbers + (torch.arange(groups, device=features.device) << bits)

    def __call__(self, features: Tensor) -> Tensor:
        return features.new_zeros(len(features), self.width).scatter_(1, self.places(features), 1.0)

    def spec(self) -> dict[str, Any]:
        """What another party needs to make the same map."""
        return {"lift": "buckets", **asdict(self)}


Lift = Products | Buckets


def map_from_spec(spec: dict[str, Any]) -> FeatureMap | Lift:
    """The map that the ``spec`` of any of them describes.

    >>> map_from_spec(Products(3).spec())
    Products(n_in=3, pairs=False)
    """
    kinds: dict[str, type[Lift]] = {"products": Products, "buckets": Buckets}
    if "lift" not in spec:
        return FeatureMap.from_spec(spec)
    return kinds[spec["lift"]](**{name: value for name, value in spec.items() if name != "lift"})


def _check(features: Tensor, n_in: int) -> None:
    if features.ndim != 2 or features.shape[1] != n_in:
        raise InputError(f"features of shape {tuple(features.shape)} given; this model was made for (n, {n_in})")
