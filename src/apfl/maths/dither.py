"""Random numbers for rounding: the same on every device, from a key and a place, in pieces of any size.

    word(i)  = mix(key + i * GOLDEN)  modulo 2^64       SplitMix64 (Steele, Lea and Flood, 2014), four numbers each
    number   = (16 bits of it + 1/2) / 2^16             strictly inside (0, 1)

So a client rounds by the same numbers on a CPU and on a GPU, and many clients' numbers are drawn at once. Rounding by
16 bits is unbiased to 2^-17 of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Dither", "Uniform", "dither", "uniform"]

Uniform = Callable[[int, int], Tensor]  # rows, columns -> numbers in [0, 1)
GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # odd, as signed integers
WITHOUT_SIGN = 2**33 - 1  # what a shift by 31 leaves of 64 bits
NUMBERS = 4  # of a word
_WORDS = 2**15  # at a time, so that they stay in the cache


class Dither:
    """The numbers of one client's message, one after another; of several, (b, ...), with a key for each."""

    def __init__(self, keys: Sequence[int], device: torch.device) -> None:
        self.keys, self.device, self.position = tuple(keys), device, 0

    @cached_property
    def _keys(self) -> Tensor:
        return torch.tensor(self.keys, device=self.device)[:, None]

    @staticmethod
    def together(each: Sequence[Dither]) -> Dither:
        """Several clients' numbers, from their beginning."""
        return Dither([key for own in each for key in own.keys], each[0].device)

    def __call__(self, rows: int, columns: int) -> Tensor:
        """The next numbers, (rows, columns), or (b, rows, columns) of several clients; float32."""
        start, stop = self.position, self.position + rows * columns
        self.position = stop
        first, last = start // NUMBERS, -(-stop // NUMBERS)
        numbers = torch.empty(len(self.keys), NUMBERS * (last - first), device=self.device)
        step = _WORDS if self.device.type == "cpu" else max(1, last - first)
        for at in range(first, last, step):
            lanes = _words(self._keys, at, min(at + step, last)).view(torch.int16)
            place = NUMBERS * (at - first)
            torch.add(lanes, 2**15 + 0.5, out=numbers[:, place : place + lanes.shape[1]])
        drawn = numbers.mul_(2**-16)[:, start - NUMBERS * first : stop - NUMBERS * first]
        return drawn.reshape(rows, columns) if len(self.keys) == 1 else drawn.reshape(-1, rows, columns)


def _words(keys: Tensor, start: int, stop: int) -> Tensor:
    """Words (b, stop - start), int64. Arithmetic shifts lose a bit of the argument alone; the last must lose none."""
    words = torch.arange(start + 1, stop + 1, device=keys.device).mul_(GOLDEN) + keys
    words.bitwise_xor_(words >> 30).mul_(FIRST)
    words.bitwise_xor_(words >> 27).mul_(SECOND)
    return words.bitwise_xor_((words >> 31).bitwise_and_(WITHOUT_SIGN))


def uniform(seed: int, device: torch.device) -> Dither:
    """Numbers from a seed that the client keeps to itself."""
    return dither(seed, "", device)


def dither(seed: int, purpose: str, device: torch.device) -> Dither:
    """The numbers of one message of a client: no two of its messages are rounded by the same."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return Dither([int.from_bytes(digest[:8], "big", signed=True)], device)
