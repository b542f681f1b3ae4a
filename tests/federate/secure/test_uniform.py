"""What one site sends is uniform: over fresh keys its masked numbers are as good as drawn by lot.

A vector of six 3-bit numbers, 2,000 rounds of three members with fresh keys. Chi-square for each number, for each pair
of neighbours, for each bit, and for each number's difference to the one before; all at a level divided by their number.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from apfl.federate.secure import Member, enlist
from apfl.federate.secure.masks import add_packed
from apfl.federate.secure.messages import SEALED_SHARES, SERVER, Message, write
from tests.federate.secure.attacker import Attacker
from tests.federate.secure.toys import names, new_round

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

RUNS, LENGTH, BITS = 2000, 6, 3
LEVEL = 1e-6  # of a false alarm, over all tests together
VECTOR = np.array([0, 0, 7, 1, 2, 2])


def payload(members: dict[str, Member]) -> np.ndarray:
    """The masked vector of one member of three, as the server reads it.

    The shares of the other two are zeros: the member passes nothing on before it unmasks, and looks at them only then.
    """
    victim = members["site-01"]
    round_ = new_round(victim, number=victim.progress.last + 1, length=LENGTH, bits=BITS)
    attacker = Attacker(round_, victim.roster, [])
    for member in members.values():
        attacker.take(member, member.advertise(round_.to_bytes()))
    keys = {i: attacker.advertised[i].to_bytes() for i in (0, 2)}
    victim.share(write(Message("advertisements", SERVER, records=keys), round_))
    attacker.sealed = {i: {1: bytes(SEALED_SHARES)} for i in (0, 2)}
    attacker.take(victim, victim.mask(attacker.delivery(victim, range(3)), VECTOR))
    numbers = np.zeros(LENGTH, np.uint32)
    add_packed(numbers, attacker.masked[1], BITS)
    return numbers


def smallest_p(drawn: np.ndarray) -> float:
    """The smallest p-value of all tests, times their number."""
    neighbours = drawn[:, :-1] * 2**BITS + drawn[:, 1:]
    differences = (drawn[:, 1:] - drawn[:, :-1]) % 2**BITS
    bits = (drawn[:, :, None] >> np.arange(BITS) & 1).reshape(len(drawn), -1)
    columns = [(each, n) for told, n in ((drawn, 8), (neighbours, 64), (differences, 8), (bits, 2)) for each in told.T]
    p_values = [chisquare(np.bincount(each, minlength=n)).pvalue for each, n in columns]
    assert len(p_values) == 6 + 5 + 5 + 18
    return min(p_values) * len(p_values)


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    members = enlist(names(3))
    return np.array([payload(members) for _ in range(RUNS)]).astype(int)


def test_masked_numbers_are_uniform(drawn):
    assert drawn.max() == 2**BITS - 1
    assert smallest_p(drawn) > LEVEL


def test_the_test_can_fail(drawn):
    """Payloads that are a little less than uniform: one in five of one number's is not masked."""
    less = drawn.copy()
    less[::5, 2] = VECTOR[2]
    assert smallest_p(less) < LEVEL
