"""Who may be in a sum, and who is whose neighbour."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate.secure import Roster, Round, ring
from apfl.federate.secure import roster as roster_module
from apfl.federate.secure.ring import FAILURE, at_least, degree, failure, threshold


def roster(n: int, first: str = "a") -> Roster:
    return Roster({f"{first}{i}": i.to_bytes(32) for i in range(n)})


@pytest.mark.parametrize("members", range(3, 60))
def test_two_lists_cannot_both_have_the_threshold_if_fewer_than_a_third_collude(members):
    """The honest sign once; those who collude sign both lists."""
    colluding = (members - 1) // 3
    assert colluding < members / 3 <= colluding + 1
    assert 2 * (threshold(members) - colluding) > members - colluding


def test_the_fingerprint_changes_with_every_name_and_key_and_not_with_the_order():
    keys = dict(roster(4).keys)
    assert Roster(dict(reversed(keys.items()))).fingerprint == roster(4).fingerprint
    renamed = {("z" if name == "a0" else name): key for name, key in keys.items()}
    rekeyed = keys | {"a0": b"k" * 32}
    swapped = keys | {"a0": keys["a1"], "a1": keys["a0"]}
    found = {Roster(each).fingerprint for each in (keys, renamed, rekeyed, swapped)}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"a": b"k" * 32}, "2 to 100000 members; 1 given"),
        ({"a": b"k" * 32, "b": b"k" * 32}, "the same key"),
        ({"a": b"k" * 31, "b": b"l" * 32}, "a key of 32 bytes"),
        ({"a\n": b"k" * 32, "b": b"l" * 32}, "is not a name"),
    ],
)
def test_rosters_that_cannot_be_are_refused(keys, message):
    with pytest.raises(InputError, match=message):
        Roster(keys)


@pytest.mark.parametrize(("n", "k"), [(5, 4), (6, 5), (17, 6), (16, 8)])
def test_neighbours_are_mutual_and_as_many_as_the_degree(n, k, monkeypatch):
    monkeypatch.setattr(roster_module, "degree", lambda members: k)
    everyone = roster(n)
    near = {i: everyone.neighbours(i) for i in range(n)}
    assert {len(each) for each in near.values()} == {k}
    assert all(i in near[j] and i != j for i in near for j in near[i])
    assert everyone.holders_needed == threshold(k + 1)


def test_the_ring_is_another_one_for_another_roster(monkeypatch):
    monkeypatch.setattr(roster_module, "degree", lambda members: 4)
    assert roster(20)._ring != roster(20, "b")._ring != tuple(range(20))
    assert sorted(roster(20)._ring) == list(range(20))


def test_enough_survivors_of_each_stretch_connect_the_honest_ones(monkeypatch):
    """By enumeration: 12 members, stretches of 4 of which 3 must survive, 2 that collude in any places.

    No stretch has 3 that collude, so the honest survivors must be connected whatever list members accept.
    """
    monkeypatch.setattr(roster_module, "degree", lambda members: 8)
    everyone = roster(12)
    accepted = refused = 0
    for n_dropped in (0, 1, 2, 3):
        for dropped in combinations(range(12), n_dropped):
            survivors = set(range(12)) - set(dropped)
            try:
                everyone.check_survivors(survivors, 3)
            except InputError:
                refused += 1
                continue
            accepted += 1
            for colluding in combinations(range(12), 2):
                assert connected(everyone, survivors - set(colluding))
    assert accepted > 30
    assert refused > 30


def connected(everyone: Roster, members: set[int]) -> bool:
    reached, queue = set(), [min(members)]
    while queue:
        member = queue.pop()
        reached.add(member)
        queue += (everyone.neighbours(member) & members) - reached
    return reached == members


def test_a_stretch_that_lost_too_many_is_refused_and_scattered_losses_are_not(monkeypatch):
    monkeypatch.setattr(roster_module, "degree", lambda members: 16)
    everyone = roster(40)
    order = everyone._ring
    scattered, together = {order[0], order[10], order[20], order[30]}, set(order[38:] + order[:1])
    everyone.check_survivors(set(range(40)) - scattered, 3)
    everyone.check_survivors(set(range(40)) - set(order[:2]), 3)  # a quarter of 8
    with pytest.raises(InputError, match="neighbours dropped out"):
        everyone.check_survivors(set(range(40)) - together, 3)


def test_up_to_200_members_everyone_is_a_neighbour():
    assert [degree(n) for n in (3, 100, 200)] == [2, 99, 199]
    assert degree(201) < 200


@pytest.mark.parametrize(("members", "k"), [(250, 182), (300, 196), (500, 236), (1000, 276)])
def test_the_degree_is_the_smallest_that_fails_less_often_than_allowed(members, k):
    """And is what the docstring says."""
    assert degree(members) == k
    assert failure(members, k) <= FAILURE < failure(members, k - 2)


def test_failures_are_as_frequent_as_they_are_said_to_be():
    """Random places of those who collude, on a ring so small that it happens: the bound holds, and is not idle."""
    members, k, rng = 30, 6, np.random.default_rng(0)
    colluding, half = (members - 1) // 3, k // 2
    bad = 0
    for _ in range(4000):
        marked = np.zeros(members, bool)
        marked[rng.choice(members, colluding, replace=False)] = True
        around = np.concatenate([marked, marked])
        stretches = [around[i : i + half].sum() for i in range(members)]
        holders = [around[i : i + k + 1].sum() for i in range(members) if not around[i + half]]
        bad += max(stretches) >= at_least(half) or max(holders) >= threshold(k + 1)
    assert 0.05 < bad / 4000 <= float(failure(members, k)) * 1.1  # 4,000 draws: off by a tenth at most


def test_the_tail_adds_up():
    assert ring._tail(10, 4, 5, 0) == 1
    assert ring._tail(10, 4, 5, 4) == Fraction(comb(6, 1), comb(10, 5))
    assert ring._tail(10, 4, 5, 5) == 0


# -------------------------------------------------------------------------------------------------------- rounds

ROUND = Round("f", "0" * 64, 1, "statistics", 10, 16)


def test_a_round_comes_back_and_every_field_changes_its_id():
    assert Round.from_bytes(ROUND.to_bytes()) == ROUND
    told = json.loads(ROUND.to_bytes())
    others = [
        Round(**told | {field: value + 1 if isinstance(value, int) else value + "1"}) for field, value in told.items()
    ]
    assert len(told) == 6
    assert len({ROUND.id, *(each.id for each in others)}) == 7


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 900, ROUND.to_bytes() + b" ", ROUND.to_bytes().replace(b": 1,", b": 1.0,"),
        ROUND.to_bytes().replace(b": 1,", b": 0,"), ROUND.to_bytes().replace(b": 10,", b": true,"),
        ROUND.to_bytes().replace(b": 16", b": 99"), ROUND.to_bytes().replace(b'"f"', b'""'),
        ROUND.to_bytes().replace(b'"f"', b'"' + b"f" * 2000 + b'"'), ROUND.to_bytes().replace(b'"f"', b"7"),
    ],
)  # fmt: skip
def test_a_round_that_cannot_be_is_refused(data):
    assert data != ROUND.to_bytes()
    with pytest.raises(InputError):
        Round.from_bytes(data)


def test_a_changed_round_is_refused_or_another_round():
    """Of 400 rounds with a changed byte: none raises anything else, and none that is read has the id of the first."""
    rng, accepted, data = random.Random(0), 0, ROUND.to_bytes()
    for _ in range(400):
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        if bytes(changed) == data:
            continue
        try:
            told = Round.from_bytes(bytes(changed))
        except InputError:
            continue
        accepted += 1
        assert told.id != ROUND.id
        assert told.to_bytes() == bytes(changed)
    assert 40 < accepted < 200  # digits of numbers, and letters of names and of the purpose
