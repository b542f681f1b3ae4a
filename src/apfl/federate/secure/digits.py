"""A vector with a layout as digits of one size, so that one modulus serves parts of different ranges.

An entry becomes its code, its distance from the lowest of its part. A code of more bits than a digit has is cut into
several digits, the lowest first. Digits add, and codes add with them:

    code = sum over i of digit_i 2^(i b),   entry = low + code

A part whose sums have a known bound of their own (`most`) may be whole instead: its entries are added as they are, and
the modulus has room for the bound and for no more.

Of a part of *presence* the sum tells whether anyone has an entry other than zero, and nothing else. Whoever has one
draws it at random, and its lowest bits fill whole numbers of the sum's modulus. So a sum with one such entry or more is
uniform; it is zero by chance once in 2^`CHANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfl.errors import InputError
from apfl.federate.secure.masks import bits_for_sum
from apfl.maths.bits import Layout, Part

__all__ = ["CHANCE", "PRESENCE_BITS", "Digits"]

CHANCE = 32  # bits at least of a sum that tells presence
PRESENCE_BITS = 62  # of an entry that is drawn at random: as many as an int64 holds in one layout


@dataclass(frozen=True)
class Digits:
    """How vectors of a layout are digits in a masked sum of up to so many members.

    >>> digits = Digits(Layout((Part("a", 2, 4), Part("b", 1, 8, signed=False))), members=3)
    >>> digits.split(np.array([-7, 7, 200])).tolist(), digits.bits
    ([0, 14, 8, 12], 4)
    >>> digits.join(digits.split(np.array([-7, 7, 200])) + digits.split(np.array([1, 1, 100])), 2).tolist()
    [-6, 8, 300]
    """

    layout: Layout
    members: int
    most: Mapping[str, int] = field(default_factory=dict)  # of signed parts: the size that no entry of a sum passes

    @property
    def bits(self) -> int:
        """Of a digit."""
        return self.sum_bits - self._spare

    @cached_property
    def sum_bits(self) -> int:
        """Of the sum of a digit: of the sizes that suit one of the parts, that of the fewest bits on the wire."""
        sizes = {part.bits + self._spare for part in self.layout.parts if not part.presence}
        sizes |= {bound.bit_length() + 1 for bound in self.most.values()}
        return min((bits for bits in sizes if bits > self._spare), key=lambda bits: (self._length(bits) * bits, bits))

    @property
    def length(self) -> int:
        """Digits of a vector."""
        return self._length(self.sum_bits)

    @property
    def whole(self) -> tuple[str, ...]:
        """The parts whose sums have room for their own bound only."""
        return tuple(part.name for part in self.layout.parts if self._whole(part, self.sum_bits))

    def split(self, vector: NDArray[np.int64]) -> NDArray[np.int64]:
        """The digits of a vector whose entries are in their ranges."""
        self.layout.check(vector)
        digits = []
        for part in self.layout.parts:
            unsplit = part.presence or self._whole(part, self.sum_bits)
            mask = 2 ** (self.sum_bits if unsplit else self.bits) - 1
            codes = vector[self.layout.places[part.name]] - (0 if unsplit else part.low)
            digits += [codes >> shift & mask for shift in self._shifts(part)]
        return np.concatenate(digits)

    def join(self, total: NDArray[Any], n_vectors: int) -> NDArray[np.int64]:
        """The sum of so many vectors from the sum of their digits; refused if no such vectors have it."""
        if total.shape != (self.length,):
            raise InputError(f"{total.shape} digits given; this layout has {self.length}")
        vector, start = np.zeros(self.layout.size, np.int64), 0
        for part in self.layout.parts:
            own = vector[self.layout.places[part.name]]
            for shift in self._shifts(part):
                told = total[start : start + part.size].astype(np.int64)
                own += (told != 0) if part.presence else told << shift
                start += part.size
            if part.presence:
                np.minimum(own, 1, out=own)
                continue
            if self._whole(part, self.sum_bits):
                own -= own >> (self.sum_bits - 1) << self.sum_bits  # its highest bit is the sign
                continue
            if part.size and int(own.max()) > n_vectors * (part.high - part.low):
                raise InputError(
                    f"{part.name}: a sum that {n_vectors} sites cannot have; one of them sent numbers outside the "
                    "agreed range. Under masks the server cannot see which"
                )
            own += n_vectors * part.low
        return vector

    @property
    def _spare(self) -> int:
        """Bits that a sum needs beyond those of its numbers."""
        return bits_for_sum(0, self.members)

    def _whole(self, part: Part, sum_bits: int) -> bool:
        """Whether a sum of this part's entries fits, as they are."""
        return part.signed and part.name in self.most and self.most[part.name] < 2 ** (sum_bits - 1)

    def _shifts(self, part: Part) -> Iterator[int]:
        size = self.sum_bits if part.presence else self.bits
        return iter(range(0, size * self._digits(part, self.sum_bits), size))

    def _digits(self, part: Part, sum_bits: int) -> int:
        """Of an entry."""
        if self._whole(part, sum_bits):
            return 1
        return -(-CHANCE // sum_bits) if part.presence else -(-part.bits // (sum_bits - self._spare))

    def _length(self, sum_bits: int) -> int:
        return sum(part.size * self._digits(part, sum_bits) for part in self.layout.parts)
