"""A vector with a layout as digits of one size, so that one modulus serves parts of different ranges.

An entry becomes its code, its distance from the lowest of its part. A code of more bits than a digit has is cut into
several digits, the lowest first. Digits add, and codes add with them:

    code = sum over i of digit_i 2^(i b),   entry = low + code

Of a part of *presence* the sum tells whether anyone has an entry other than zero, and nothing else. Whoever has one
draws it at random, and its lowest bits fill whole numbers of the sum's modulus. So a sum with one such entry or more is
uniform; it is zero by chance once in 2^`CHANCE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    @property
    def bits(self) -> int:
        """Of a digit: of the parts' sizes the one that makes the fewest bits on the wire."""
        sizes = {part.bits for part in self.layout.parts if not part.presence}
        return min(sizes, key=lambda bits: (self._wire(bits), bits))

    @property
    def sum_bits(self) -> int:
        """Of the sum of a digit."""
        return bits_for_sum(self.bits, self.members)

    @property
    def length(self) -> int:
        """Digits of a vector."""
        return self._length(self.bits)

    def split(self, vector: NDArray[np.int64]) -> NDArray[np.int64]:
        """The digits of a vector whose entries are in their ranges."""
        self.layout.check(vector)
        digits = []
        for part in self.layout.parts:
            mask = 2 ** (self.sum_bits if part.presence else self.bits) - 1
            codes = vector[self.layout.places[part.name]] - part.low
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
            if part.size and int(own.max()) > n_vectors * (part.high - part.low):
                raise InputError(
                    f"{part.name}: a sum that {n_vectors} sites cannot have; one of them sent numbers outside the "
                    "agreed range. Under masks the server cannot see which"
                )
            own += n_vectors * part.low
        return vector

    def _shifts(self, part: Part) -> Iterator[int]:
        size = self.sum_bits if part.presence else self.bits
        return iter(range(0, size * self._digits(part, self.bits), size))

    def _digits(self, part: Part, bits: int) -> int:
        """Of an entry."""
        return -(-CHANCE // bits_for_sum(bits, self.members)) if part.presence else -(-part.bits // bits)

    def _length(self, bits: int) -> int:
        return sum(part.size * self._digits(part, bits) for part in self.layout.parts)

    def _wire(self, bits: int) -> int:
        return self._length(bits) * bits_for_sum(bits, self.members)
