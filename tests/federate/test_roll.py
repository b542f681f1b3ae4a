"""One digest for all members, and a short proof for each."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace

import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Terms
from apfl.federate.messages import open_publication
from apfl.federate.roll import Enrolled, Proof, Roll, attached, detached, digest_of, members_told
from apfl.federate.wire import sha256
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import contribute, make_sites


def hashes(n: int) -> list[str]:
    return [sha256(str(k).encode()) for k in range(n)]


def root_by_recursion(leaves: list[str]) -> bytes:
    """RFC 6962: the left part is the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0].encode()).digest()
    left = 1 << (len(leaves) - 1).bit_length() - 1
    parts = root_by_recursion(leaves[:left]) + root_by_recursion(leaves[left:])
    return hashlib.sha256(b"\1" + parts).digest()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 33, 100])
def test_every_member_and_nobody_else_is_enrolled(n):
    members, roll = hashes(n), Roll(hashes(n)[::-1])
    assert roll.root == root_by_recursion(sorted(members)).hex()
    for each in members:
        proof = roll.proof(each)
        assert len(proof.beside) <= (n - 1).bit_length()
        told = Enrolled(roll.root, n, proof)
        assert each in told
        assert not any(other in told for other in members if other != each)  # the proof is this one's
        assert each not in Enrolled(sha256(b""), n, proof)
        assert each not in Enrolled(roll.root, n, replace(proof, place=(proof.place + 1) % max(n, 2)))
        assert each not in Enrolled(roll.root, n, replace(proof, place=n))
        assert each not in Enrolled(roll.root, n, Proof(proof.place, (*proof.beside, b"\0" * 32)))
        if proof.beside:
            assert each not in Enrolled(roll.root, n, Proof(proof.place, proof.beside[:-1]))
    assert roll.proof(sha256(b"another")) is None
    assert members[0] not in Enrolled(roll.root, n)  # without a proof nobody knows


def test_a_proof_travels_in_front_of_a_message():
    proof = Roll(hashes(4)).proof(hashes(4)[2])
    assert detached(attached(b"message", proof)) == (proof, b"message")
    assert detached(attached(b"message", None)) == (None, b"message") == detached(b"message")
    data = attached(b"", proof)
    with pytest.raises(InputError, match="a proof of 2 hashes"):
        detached(data[:-1])
    with pytest.raises(InputError, match="at most 48"):
        detached(data[:16] + (49).to_bytes(8, "little") + bytes(49 * 32))


def test_headers_of_earlier_versions_list_their_members():
    assert members_told(["a", "b"], None, "x") == {"a", "b"}
    assert members_told(digest_of(["a", "b"]), None, "x") == Enrolled(Roll(["b", "a"]).root, 2)
    for wrong in (None, "all", [1], {"n": 2}, {"n": True, "root": ""}, {"n": -1, "root": ""}, {"n": 1, "root": 1}):
        with pytest.raises(InputError, match="x must list"):
            members_told(wrong, None, "x")


def test_a_publication_is_as_large_for_many_members_and_proves_one(tmp_path):
    terms = Terms("f", method=APFL(map="random", d_primary=16, normalise="row", beta=1.0, balance=0.5, tau=0.0))
    sites = make_sites(tmp_path, (12, 20, 10, 16))
    with Coordinator(tmp_path / "server", terms) as server:
        agreement = contribute(server, sites)
        server.publish()
        common, own = server.current().data, [server.deliver(site.name) for site in sites]
        assert {detached(data)[1] for data in own} == {common}
        assert [len(data) - len(common) for data in own] == [24 + 2 * 32] * 4  # two hashes for four members
        for site, data in zip(sites, own, strict=True):
            told = open_publication(data, server.terms)
            assert [sha256(other.sent(agreement)) in told.members for other in sites] == [s is site for s in sites]
        assert server.deliver("stranger") == common


def test_a_roll_of_many_takes_little_memory():
    tracemalloc.start()
    roll = Roll(f"{k:064x}" for k in range(20_000))
    assert roll.proof(f"{7:064x}") is not None
    assert tracemalloc.get_traced_memory()[0] < 400 * 20_000
    tracemalloc.stop()
