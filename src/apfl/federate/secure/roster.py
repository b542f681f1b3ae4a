"""The roster: who may be in a sum. Every member confirms its fingerprint out of band, so no server can invent members.

A member is its name and the public key of its Ed25519 identity. The roster is the cohort: thresholds count over all of
its members, whether they answer or not. For a part of the federation make a roster of that part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from apfl.errors import InputError, printable
from apfl.federate.secure.ciphers import KEY_BYTES, digest, labelled
from apfl.federate.secure.masks import packed_bytes, word
from apfl.federate.secure.ring import at_least, degree, threshold

__all__ = ["Roster", "Round"]

LARGEST_ROSTER = 100_000
LONGEST_VECTOR = 2**32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ROUND_BYTES = 1000


@dataclass(frozen=True)
class Roster:
    """Names and the public keys of their identities; a member's number is its place in the order of names."""

    keys: Mapping[str, bytes]

    def __post_init__(self) -> None:
        names = sorted(self.keys)
        if not 2 <= len(names) <= LARGEST_ROSTER:
            raise InputError(f"a roster has 2 to {LARGEST_ROSTER} members; {len(names)} given")
        for name in names:
            if not NAME.fullmatch(name) or len(self.keys[name]) != KEY_BYTES:
                raise InputError(f"the roster's entry {printable(name, 80)!r} is not a name with a key of 32 bytes")
        if len(set(self.keys.values())) != len(names):
            raise InputError("two members of the roster have the same key; each needs an identity of its own")
        object.__setattr__(self, "keys", {name: bytes(self.keys[name]) for name in names})

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.keys)

    @cached_property
    def fingerprint(self) -> str:
        """What people compare: it changes with every name and every key."""
        entries = (part for name, key in self.keys.items() for part in (name.encode(), key))
        return digest(labelled("roster", *entries)).hex()

    @property
    def threshold(self) -> int:
        """How many must survive, and sign the same list of survivors."""
        return threshold(len(self))

    @property
    def holders_needed(self) -> int:
        """How many of a member's holders give a secret of it."""
        return threshold(degree(len(self)) + 1)

    def number(self, name: str) -> int:
        """A member's place in the roster."""
        if name not in self.keys:
            raise InputError(f"'{printable(name, 80)}' is not on the roster {self.fingerprint[:16]}")
        return self.names.index(name)

    @cached_property
    def _ring(self) -> tuple[int, ...]:
        """All members in the order of a hash that nothing but the roster decides."""
        seed = bytes.fromhex(self.fingerprint)
        return tuple(sorted(range(len(self)), key=lambda i: digest(labelled("ring", seed, i.to_bytes(4)))))

    @cached_property
    def _place(self) -> dict[int, int]:
        return {member: place for place, member in enumerate(self._ring)}

    def neighbours(self, member: int) -> frozenset[int]:
        """Those with whom a member shares masks and to whom it gives shares."""
        if degree(len(self)) == len(self) - 1:
            return frozenset(range(len(self))) - {member}
        place, half, n = self._place[member], degree(len(self)) // 2, len(self)
        return frozenset(self._ring[(place + step) % n] for step in range(-half, half + 1) if step)

    def check_survivors(self, survivors: Collection[int], least: int) -> None:
        """Raise unless so many are left, the threshold, and enough of each stretch of the ring."""
        needed = max(self.threshold, least)
        if len(survivors) < needed:
            raise InputError(
                f"{len(survivors)} of {len(self)} members are left and {needed} are needed; nothing is unmasked. "
                "Start a new round when more of them answer"
            )
        if degree(len(self)) < len(self) - 1 and self._thinnest(survivors) < at_least(degree(len(self)) // 2):
            raise InputError(
                "too many members that are neighbours dropped out; nothing is unmasked. Start a new round when more "
                "of them answer"
            )

    def _thinnest(self, survivors: Collection[int]) -> int:
        """The fewest survivors in a stretch of k / 2 members."""
        half, n = degree(len(self)) // 2, len(self)
        left = [member in survivors for member in self._ring]
        count = sum(left[:half])
        fewest = count
        for start in range(n):
            count += left[(start + half) % n] - left[start]
            fewest = min(fewest, count)
        return fewest


@dataclass(frozen=True)
class Round:
    """One sum: of which federation and roster, of what, of how many numbers modulo 2^bits, under a rising number."""

    federation: str
    roster: str  # its fingerprint
    number: int
    purpose: str
    length: int
    bits: int

    def __post_init__(self) -> None:
        texts = (self.federation, self.roster, self.purpose)
        if not all(isinstance(text, str) and 0 < len(text) <= 100 for text in texts):
            raise InputError("a round names its federation, roster and purpose, each in up to 100 characters")
        for what, value, most in (("number", self.number, 2**63), ("length", self.length, LONGEST_VECTOR)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InputError(f"a round's {what} is 1 to {most}; {printable(value, 40)} given")
        word(self.bits)

    @cached_property
    def id(self) -> bytes:
        """What binds every message, key and signature to this round."""
        return digest(labelled("round", self.to_bytes()))

    @property
    def n_bytes(self) -> int:
        """Of a member's masked vector, without what is around it."""
        return packed_bytes(self.length, self.bits)

    def to_bytes(self) -> bytes:
        """The round as it travels."""
        return json.dumps({field: getattr(self, field) for field in self.__dataclass_fields__}, sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Round:
        """A round as it arrived."""
        try:
            if len(data) > ROUND_BYTES:
                raise ValueError("too long")
            found = Round(**json.loads(data.decode()))
        except InputError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError("a round that cannot be read; all need the same version of apfl") from error
        if found.to_bytes() != data:
            raise InputError("a round that is not written as apfl writes it; all need the same version of apfl")
        return found
