"""What each key and each signature of a round is for; members and the server build them here, and only here."""

from __future__ import annotations

from dataclasses import dataclass

from apfl.federate.secure.ciphers import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    agree,
    derive,
    digest,
    is_signed,
    labelled,
    public_of,
    sign,
)  # fmt: skip
from apfl.federate.secure.roster import Roster, Round

__all__ = ["Advertisement", "Pair", "masked_with", "seed_commitment", "seed_key", "survived"]


@dataclass(frozen=True)
class Advertisement:
    """A member's public keys of one round, for encryption and for masks, and its commitment to the self-mask's seed."""

    encryption: bytes
    mask: bytes
    commitment: bytes
    signature: bytes = b""

    def to_bytes(self) -> bytes:
        """As it travels."""
        return self.encryption + self.mask + self.commitment + self.signature

    @staticmethod
    def from_bytes(data: bytes) -> Advertisement:
        """The keys and the signature, by their places."""
        encryption, mask, commitment = (data[start : start + KEY_BYTES] for start in range(0, 3 * KEY_BYTES, KEY_BYTES))
        return Advertisement(encryption, mask, commitment, data[-SIGNATURE_BYTES:])

    def signed_by(self, identity: bytes, round_: Round, name: str) -> Advertisement:
        """The same with a member's signature."""
        return Advertisement(self.encryption, self.mask, self.commitment, sign(identity, self._statement(round_, name)))

    def is_of(self, name: str, round_: Round, roster: Roster) -> bool:
        """Whether the member of this name signed it, for this round."""
        return is_signed(roster.keys[name], self.signature, self._statement(round_, name))

    def _statement(self, round_: Round, name: str) -> bytes:
        return labelled("advertisement", round_.id, name.encode(), self.encryption, self.mask, self.commitment)


@dataclass(frozen=True)
class Pair:
    """Two members of a round, as the first of them (or whoever holds its private key) sees it."""

    round_: Round
    mine: str
    theirs: str

    def mask_key(self, private: bytes, public: bytes) -> bytes:
        """The key of the mask that the one adds and the other subtracts: the same for both."""
        first, second = sorted([self.mine.encode(), self.theirs.encode()])
        return derive(agree(private, public), self.round_.id, labelled("mask", self._federation, first, second))

    @property
    def adds(self) -> bool:
        """Whether this side adds the mask."""
        return self.mine < self.theirs

    def sending_key(self, private: bytes, public: bytes) -> bytes:
        """The key for shares from this side to the other one."""
        return self._share_key(private, public, self.mine, self.theirs)

    def receiving_key(self, private: bytes, public: bytes) -> bytes:
        """The key for shares from the other side to this one."""
        return self._share_key(private, public, self.theirs, self.mine)

    def _share_key(self, private: bytes, public: bytes, sender: str, receiver: str) -> bytes:
        label = labelled("share", self._federation, sender.encode(), receiver.encode())
        return derive(agree(private, public), self.round_.id, label)

    @property
    def _federation(self) -> bytes:
        return self.round_.federation.encode()


def seed_key(round_: Round, name: str, seed: bytes) -> bytes:
    """The key of a member's self-mask."""
    return derive(seed, round_.id, labelled("self-mask", round_.federation.encode(), name.encode()))


def seed_commitment(round_: Round, name: str, seed: bytes) -> bytes:
    """What a member advertises of its seed, so that wrong shares are noticed; it hides 32 random bytes."""
    return digest(labelled("seed", round_.id, name.encode(), seed))


def masked_with(round_: Round, name: str, partners: bytes) -> bytes:
    """What a member signs with its masked vector: against which list (a bitmap) it masked."""
    return labelled("masked", round_.id, name.encode(), partners)


def survived(round_: Round, survivors: bytes) -> bytes:
    """What members sign before they unmask: the list of survivors (a bitmap) of this very round."""
    return labelled("survivors", round_.id, survivors)


def is_private_of(private: bytes, public: bytes) -> bool:
    """Whether these keys belong together."""
    return public_of(private) == public
