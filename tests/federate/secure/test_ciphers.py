"""The library does what the RFCs say, through our few lines around it; every key and signature has one use."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.federate.secure import ciphers
from apfl.federate.secure.ciphers import agree, derive, is_signed, labelled, new_key, public_of, sign, verifying_key
from apfl.federate.secure.keys import Advertisement, Pair, masked_with, seed_commitment, seed_key, survived
from apfl.federate.secure.roster import Round

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

ROUND, LATER = (Round("f", "0" * 64, number, "test", 10, 16) for number in (1, 2))
KEYS = [bytes([i]) * 32 for i in range(1, 5)]


def test_x25519_agrees_as_in_rfc_7748():
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert public_of(alice).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    secret = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert agree(alice, public_of(bob)).hex() == agree(bob, public_of(alice)).hex() == secret


def test_keys_are_derived_as_in_rfc_5869():
    salt, info = bytes(range(13)), bytes(range(0xF0, 0xFA))
    first_32_of_42 = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
    assert derive(b"\x0b" * 22, salt, info).hex() == first_32_of_42


def test_signatures_are_as_in_rfc_8032():
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = verifying_key(private)
    assert public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert sign(private, b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert is_signed(public, sign(private, b""), b"")
    assert not is_signed(public, sign(private, b""), b"x")
    assert not is_signed(public, b"short", b"")


@pytest.mark.parametrize("public", [bytes(32), (1).to_bytes(32, "little")])
def test_a_public_key_of_low_order_is_refused(public):
    with pytest.raises(InputError, match="not one to agree with"):
        agree(new_key(), public)


def test_what_is_encrypted_opens_with_its_key_and_for_its_use_only():
    sealed = ciphers.encrypt(KEYS[0], b"share", b"round")
    assert ciphers.decrypt(KEYS[0], sealed, b"round") == b"share"
    assert ciphers.decrypt(KEYS[1], sealed, b"round") is None
    assert ciphers.decrypt(KEYS[0], sealed, b"other") is None
    for i in range(len(sealed)):
        assert ciphers.decrypt(KEYS[0], sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], b"round") is None
    assert len(sealed) == len(b"share") + ciphers.SEALED_BYTES
    assert ciphers.encrypt(KEYS[0], b"share", b"round") != sealed


parts = st.lists(st.binary(max_size=6), max_size=4)


@given(parts, parts)
def test_different_parts_have_different_labels(some, others):
    assert (labelled("x", *some) == labelled("x", *others)) == (some == others)


def test_both_sides_make_the_same_mask_key_and_one_adds_it():
    a, b = new_key(), new_key()
    here, there = Pair(ROUND, "a", "b"), Pair(ROUND, "b", "a")
    assert here.mask_key(a, public_of(b)) == there.mask_key(b, public_of(a))
    assert here.sending_key(a, public_of(b)) == there.receiving_key(b, public_of(a))
    assert here.adds is not there.adds


def test_every_key_and_every_statement_has_one_use():
    """The same secrets throughout: what differs is the purpose, the names, the direction and the round."""
    private, public = KEYS[0], public_of(KEYS[1])
    made = []
    for round_ in (ROUND, LATER, Round("g", "0" * 64, 1, "test", 10, 16)):
        for theirs in ("b", "c"):
            pair = Pair(round_, "a", theirs)
            made += [pair.mask_key(private, public), pair.sending_key(private, public)]
            made += [pair.receiving_key(private, public)]
        for name in ("a", "b"):
            bare = Advertisement(*KEYS[:3])
            made += [seed_key(round_, name, KEYS[0]), seed_commitment(round_, name, KEYS[0])]
            made += [bare._statement(round_, name), masked_with(round_, name, b"\1")]
        made += [masked_with(round_, "a", b"\2"), survived(round_, b"\1"), survived(round_, b"\2")]
    made += [Advertisement(*keys)._statement(ROUND, "a") for keys in combinations(KEYS[::-1], 3)]
    assert len(set(made)) == len(made)


def test_an_advertisement_is_of_whoever_signed_it():
    from apfl.federate.secure.roster import Roster

    roster = Roster({name: verifying_key(key) for name, key in zip("abc", KEYS, strict=False)})
    told = Advertisement(*KEYS[:3]).signed_by(KEYS[0], ROUND, "a")
    assert Advertisement.from_bytes(told.to_bytes()) == told
    assert told.is_of("a", ROUND, roster)
    assert not told.is_of("b", ROUND, roster)
    assert not told.is_of("a", LATER, roster)
    for field in ("encryption", "mask", "commitment"):
        changed = Advertisement(**{**told.__dict__, field: bytes(32)})
        assert not changed.is_of("a", ROUND, roster)
