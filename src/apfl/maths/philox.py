"""numpy's Philox on any device: the same uniform numbers, bit by bit, where the landmarks are needed.

    counter (c0, c1, c2, c3), key (k0, k1)            Philox 4x64-10 (Salmon, Moraes, Dror and Shaw, 2011)
    (h0, l0) = M0 * c0,   (h1, l1) = M1 * c2          128 bits each, above and below
    counter <- (h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0),  key <- key + W,  ten times

torch has no such words: the upper half of a product of 64 bits comes from four products of 32. What is drawn on a GPU
need not be copied there.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["uniform_from_philox"]

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # of the key
ROUNDS, WORDS = 10, 4  # of a counter
AT_ONCE = 2**24  # numbers, of whole counters, so that what they are made from takes less than a gigabyte
LOWER = 2**32 - 1


def uniform_from_philox(seed: int, n: int, device: torch.device) -> Tensor:
    """The first n numbers of ``Generator(Philox(key=seed, counter=0)).random``, float64 (n,)."""
    made = torch.empty(n, dtype=torch.float64, device=device)
    for start, some in zip(range(0, n, AT_ONCE), torch.split(made, AT_ONCE), strict=True):
        first = start // WORDS + 1  # numpy counts before it draws
        words = _words(torch.arange(first, first - (-len(some) // WORDS), device=device), seed)
        torch.mul((words >> 11).bitwise_and_(2**53 - 1)[: len(some)].double(), 2.0**-53, out=some)
    return made


def _words(counter: Tensor, key: int) -> Tensor:
    """The words of these counters, which have 64 bits, one after another: int64 (4 b,)."""
    device = counter.device
    parts = [[[each >> 32] for each in MULTIPLIERS], [[each & LOWER] for each in MULTIPLIERS]]
    upper, lower = torch.tensor(parts, device=device)  # (2, 1) each
    keys = [[[_signed(own + at * step)] for own, step in zip((key, 0), STEPS, strict=True)] for at in range(ROUNDS)]
    even, odd = torch.zeros(2, 2, len(counter), dtype=torch.int64, device=device)  # c0 and c2, c1 and c3
    even[0] = counter
    for own in torch.tensor(keys, device=device):
        high, low = _product(even, upper, lower)
        even, odd = high.flip(0) ^ odd ^ own, low.flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]], 1).flatten()


def _product(values: Tensor, upper: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """128 bits of each product with the multiplier of its row. No sum of parts has more than 64."""
    above, below = _above(values), values & LOWER
    carried = (above * lower).add_(_above(below * lower))
    across = (below * upper).add_(carried & LOWER)
    return (above * upper).add_(_above(carried)).add_(_above(across)), values * ((upper << 32) + lower)


def _above(values: Tensor) -> Tensor:
    """The upper 32 of 64 bits: a shift of signed integers repeats the first bit, which is taken off again."""
    return (values >> 32).bitwise_and_(LOWER)


def _signed(word: int) -> int:
    """The last 64 bits as a signed integer."""
    return (word + 2**63) % 2**64 - 2**63
