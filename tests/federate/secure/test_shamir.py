"""Shares: any t give the secret, fewer say nothing."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.federate.secure.shamir import PRIME, SHARE_BYTES, evaluate, interpolate, join, split

# https://en.wikipedia.org/wiki/Shamir%27s_secret_sharing: 1234 + 166 x + 94 x^2 modulo 1613
PUBLISHED = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}


def test_the_published_example():
    assert {x: evaluate([1234, 166, 94], x, 1613) for x in range(1, 7)} == PUBLISHED
    for three in itertools.combinations(PUBLISHED, 3):
        assert interpolate({x: PUBLISHED[x] for x in three}, 1613) == 1234


def test_the_prime_is_the_first_above_the_secrets():
    def probably_prime(n: int) -> bool:  # Miller and Rabin, 40 bases
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            powers = [pow(base, odd << i, n) for i in range(twos)]
            if powers[0] != 1 and n - 1 not in powers:
                return False
        return True

    assert probably_prime(PRIME)
    assert not any(probably_prime(n) for n in range(2**256 + 1, PRIME, 2))


def solved(points: dict[int, int]) -> int:
    """f(0) by Gaussian elimination of the Vandermonde system modulo p: no formula of Lagrange's."""
    t = len(points)
    rows = [[pow(x, power, PRIME) for power in range(t)] + [y] for x, y in points.items()]
    for column in range(t):
        pivot = next(row for row in range(column, t) if rows[row][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = pow(rows[column][column], -1, PRIME)
        rows[column] = [value * scale % PRIME for value in rows[column]]
        for row in range(t):
            if row != column:
                factor = rows[row][column]
                pairs = zip(rows[row], rows[column], strict=True)
                rows[row] = [(value - factor * other) % PRIME for value, other in pairs]
    return rows[0][-1]


@given(st.data())
def test_any_threshold_of_holders_gives_the_secret_by_two_routes(data):
    holders = data.draw(st.lists(st.integers(1, 2**20), min_size=1, max_size=9, unique=True))
    threshold = data.draw(st.integers(1, len(holders)))
    edges = st.sampled_from([bytes(32), b"\xff" * 32])
    secret = data.draw(edges | st.binary(min_size=32, max_size=32))
    shares = split(secret, threshold, holders)
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    some = data.draw(st.permutations(sorted(shares)))[:threshold]
    assert join({x: shares[x] for x in some}, threshold) == secret
    assert solved({x: int.from_bytes(shares[x]) for x in some}).to_bytes(32) == secret


def test_fewer_shares_than_the_threshold_fit_every_secret_equally_often():
    """By enumeration in a small field: two of three shares, over all polynomials of each secret."""
    prime = 7
    views = {
        secret: Counter(
            tuple(evaluate([secret, a, b], x, prime) for x in (1, 4)) for a in range(prime) for b in range(prime)
        )
        for secret in range(prime)
    }
    assert all(view == views[0] for view in views.values())


def test_shares_are_fresh():
    assert split(bytes(32), 2, [1, 2]) != split(bytes(32), 2, [1, 2])


def test_a_share_less_or_a_false_one_gives_no_secret():
    secret = b"s" * 32
    shares = split(secret, 3, [1, 2, 3, 4])
    with pytest.raises(InputError, match="2 shares of a secret; 3 are needed"):
        join({x: shares[x] for x in (1, 2)}, 3)
    two = join({x: shares[x] for x in (1, 2)}, 2)  # the line through two points of a parabola
    assert two != secret


def test_shares_of_no_secret_give_none():
    assert join({1: (PRIME - 1).to_bytes(33)}, 1) is None
    assert join({1: (2**256 - 1).to_bytes(33)}, 1) == b"\xff" * 32


@pytest.mark.parametrize(
    ("secret", "threshold", "holders", "message"),
    [
        (b"short", 1, [1], "32 bytes; 5 given"),
        (bytes(32), 3, [1, 2], "3 of 2 holders"),
        (bytes(32), 0, [1, 2], "0 of 2 holders"),
        (bytes(32), 1, [0, 1], "distinct numbers from 1"),
        (bytes(32), 2, [1, 1], "distinct numbers from 1"),
    ],
)
def test_what_cannot_be_shared_is_refused(secret, threshold, holders, message):
    with pytest.raises(InputError, match=message):
        split(secret, threshold, holders)
