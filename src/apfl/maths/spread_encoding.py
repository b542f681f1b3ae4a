"""The moments behind the landmarks as integers: one step and one range for everyone, as with statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from apfl.maths.bits import Layout, Part, Squeezed, squeeze
from apfl.maths.dither import Uniform
from apfl.maths.integers import Rounding
from apfl.maths.landmarks import Spread
from apfl.maths.wire import pack, unpack

__all__ = ["SPREAD_BITS", "SpreadEncoding"]

SPREAD_BITS = 24  # a product of two columns is a small part of the largest that there can be: its first ten are zeros


@dataclass(frozen=True)
class SpreadEncoding:
    """The moments behind the landmarks as one vector of integers, and back.

    Normalised rows have the length sqrt(l), so no sum or sum of products of n of them passes n l.
    """

    n_rows: int  # the most of one client
    n_in: int  # l, after normalisation
    full: bool  # whether all products travel, or squares alone

    @cached_property
    def layout(self) -> Layout:
        n_products = self.n_in * (self.n_in + 1) // 2 if self.full else self.n_in
        return Layout(
            (
                Part("sums", self.n_in, SPREAD_BITS),
                Part("products", n_products, SPREAD_BITS),
                Part("n_samples", 1, 32, signed=False),
            )
        )

    @property
    def rounding(self) -> Rounding:
        return Rounding(SPREAD_BITS, self.n_rows * self.n_in * (1 + 1e-3))  # rows are scaled in single precision

    def packing(self, vector: Tensor) -> Squeezed:
        """How this vector takes the fewest bytes."""
        return squeeze(self.layout, vector)

    def encode(self, own: Spread, draw: Uniform) -> tuple[Tensor, int]:
        """The vector (int64), and how many entries saturated."""
        vector, saturated = self.encode_each([own], draw)
        return vector[0], saturated

    def encode_each(self, clients: Sequence[Spread], draw: Uniform) -> tuple[Tensor, int]:
        """The vectors (b, size) of several clients, and how many entries saturated."""
        sums, products = (torch.stack([getattr(own, name) for own in clients]) for name in ("sums", "products"))
        values = torch.cat([sums, pack(products) if self.full else products], 1)[:, None]
        drawn = draw(1, values.shape[-1])
        rounded, saturated = self.rounding.integers(values, drawn if drawn.ndim == 3 else drawn[None])
        n_samples = torch.tensor([[own.n_samples] for own in clients], device=rounded.device)
        return torch.cat([rounded[:, 0].long(), n_samples], 1), int(saturated.sum())

    def decode(self, vector: Tensor) -> Spread:
        """What a vector says, or a sum of vectors."""
        places = self.layout.places
        sums, products = (vector[places[name]].double() * self.rounding.step for name in ("sums", "products"))
        return Spread(int(vector[-1]), sums, unpack(products) if self.full else products)
