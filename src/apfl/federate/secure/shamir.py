"""Shamir's secret sharing of 32-byte secrets (CACM 1979), over the integers modulo the first prime above 2^256.

    f(x) = secret + a_1 x + ... + a_(t-1) x^(t-1)  mod p,   share of holder x: f(x)

Any t shares give f(0), by Lagrange's formula; t - 1 shares say nothing about it. This is the one primitive of our own:
PyCryptodome's shares 16 bytes at a time and took 0.3 s for 67 of 100 holders of one secret. Neither is constant in
time: a site shares only secrets that it drew for one round, once, and on its own machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

from apfl.errors import InputError

__all__ = ["PRIME", "SHARE_BYTES", "join", "split"]

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    """Shares by holder; ``holders`` are distinct numbers from 1, at least ``threshold`` of them."""
    holders = sorted(holders)
    if len(secret) != SECRET_BYTES:
        raise InputError(f"a secret to share has {SECRET_BYTES} bytes; {len(secret)} given")
    if not 1 <= threshold <= len(holders):
        raise InputError(f"{threshold} of {len(holders)} holders can never meet; the threshold is 1 to their number")
    if holders[0] < 1 or len(set(holders)) != len(holders):
        raise InputError("holders are distinct numbers from 1; at 0 the share would be the secret itself")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: evaluate(coefficients, x, PRIME).to_bytes(SHARE_BYTES) for x in holders}


def join(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret, from the shares of the first ``threshold`` holders; None if these are not of one secret.

    Other false shares give another secret: compare it with what its owner committed to.
    """
    if len(shares) < threshold:
        raise InputError(f"{len(shares)} shares of a secret; {threshold} are needed")
    points = {x: int.from_bytes(shares[x]) for x in sorted(shares)[:threshold]}
    secret = interpolate(points, PRIME)
    return None if secret >> 8 * SECRET_BYTES else secret.to_bytes(SECRET_BYTES)


def evaluate(coefficients: list[int], x: int, prime: int) -> int:
    """f(x), by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


def interpolate(points: Mapping[int, int], prime: int) -> int:
    """f(0) of the polynomial through ``points``."""
    weights = _weights(tuple(points), prime)
    return sum(weight * y for weight, y in zip(weights, points.values(), strict=True)) % prime


@lru_cache(maxsize=64)
def _weights(xs: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Lagrange's weights at 0: the product of x_j / (x_j - x_i) over all other j."""
    weights = []
    for x in xs:
        above, below = 1, 1
        for other in xs:
            if other != x:
                above, below = above * other % prime, below * (other - x) % prime
        weights.append(above * pow(below, -1, prime) % prime)
    return tuple(weights)
