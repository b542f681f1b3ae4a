"""Who is behind a message to everyone: one digest for all, and for each member a proof that it is among them.

The digest is the root of a Merkle tree over the members' hashes (SHA-256, leaves and nodes told apart as in RFC 6962).
A list of K hashes for each of K members would be K^2 hashes on the network; a proof has log2 K. It travels in front of
the message, which is the same for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from apfl.errors import InputError

__all__ = ["Enrolled", "Members", "OfMembers", "Proof", "Roll", "attached", "detached", "digest_of", "members_told"]

SIZE = 32  # bytes of a hash
MAGIC = b"APFLroll"  # read as the length of a header this is more than any message has
LONGEST = 48  # hashes of a proof
Members = Container[str]  # a list of hashes, or `Enrolled`


class Roll:
    """The members of a sum, known by their hashes (64 hexadecimal digits).

    >>> roll = Roll(["aa" * 32, "bb" * 32, "cc" * 32])
    >>> "bb" * 32 in Enrolled(roll.root, len(roll), roll.proof("bb" * 32))
    True
    """

    def __init__(self, hashes: Iterable[str]) -> None:
        leaves = sorted(set(hashes))
        self._places = {each: k for k, each in enumerate(leaves)}
        self._levels = [b"".join(map(_leaf, leaves))]
        while len(self._levels[-1]) > SIZE:
            self._levels.append(_above(self._levels[-1]))

    def __len__(self) -> int:
        return len(self._places)

    @property
    def root(self) -> str:
        """The digest of all."""
        return self._levels[-1].hex() if self._places else hashlib.sha256(b"").hexdigest()

    def proof(self, digest: str) -> Proof | None:
        """What shows that this one is a member; None if it is not."""
        place = self._places.get(digest)
        if place is None:
            return None
        beside, at = [], place
        for level in self._levels[:-1]:
            neighbour = SIZE * (at ^ 1)
            if neighbour < len(level):  # the last of an odd number goes up as it is
                beside.append(level[neighbour : neighbour + SIZE])
            at //= 2
        return Proof(place, tuple(beside))


@dataclass(frozen=True)
class Proof:
    """The place of a member, and the hashes beside its way to the root."""

    place: int
    beside: tuple[bytes, ...]

    def leads(self, digest: str, root: str, n: int) -> bool:
        """Whether this hash is in its place among so many with this root."""
        at, size, beside = self.place, n, list(self.beside)
        if not 0 <= at < n:
            return False
        found = _leaf(digest)
        while size > 1:
            if (at ^ 1) < size:
                if not beside:
                    return False
                own, other = (found, beside.pop(0)) if at % 2 == 0 else (beside.pop(0), found)
                found = _node(own, other)
            at, size = at // 2, (size + 1) // 2
        return not beside and found.hex() == root


@dataclass(frozen=True)
class Enrolled:
    """Members of which a site knows how many there are, their digest, and whether it is one of them."""

    root: str
    n: int
    proof: Proof | None = field(default=None, compare=False)

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and self.proof is not None and self.proof.leads(digest, self.root, self.n)

    def __len__(self) -> int:
        return self.n


class OfMembers(Protocol):
    """What a client is sent that has a part of several clients in it."""

    @property
    def members(self) -> Members:
        """The hashes of what these contributed."""


def digest_of(hashes: Iterable[str]) -> dict[str, Any]:
    """What a header says of its members."""
    roll = Roll(hashes)
    return {"n": len(roll), "root": roll.root}


def members_told(told: Any, proof: Proof | None, what: str) -> Members:
    """The members as a header tells them: their digest, or in messages of earlier versions the list."""
    if isinstance(told, list) and all(isinstance(each, str) for each in told):
        return frozenset(told)
    if isinstance(told, dict) and _whole(told.get("n")) and isinstance(told.get("root"), str):
        return Enrolled(told["root"], told["n"], proof)
    raise InputError(f"{what} must list the hashes of its members, or give their digest")


def attached(message: bytes, proof: Proof | None) -> bytes:
    """The message for one member, with its proof in front."""
    if proof is None:
        return message
    head = [MAGIC, proof.place.to_bytes(8, "little"), len(proof.beside).to_bytes(8, "little")]
    return b"".join((*head, *proof.beside, message))


def detached(data: bytes) -> tuple[Proof | None, bytes]:
    """The proof in front of a message, if there is one, and the message."""
    if not data.startswith(MAGIC):
        return None, data
    place, n = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16))
    end = 24 + SIZE * n
    if n > LONGEST or len(data) < end:
        raise InputError(f"a proof of {n} hashes in {len(data)} bytes; at most {LONGEST} are allowed. Send it again")
    return Proof(place, tuple(data[at : at + SIZE] for at in range(24, end, SIZE))), data[end:]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**40


def _leaf(digest: str) -> bytes:
    return hashlib.sha256(b"\0" + digest.encode()).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _above(level: bytes) -> bytes:
    """The next level of the tree; the last of an odd number goes up as it is."""
    pairs = range(0, len(level), 2 * SIZE)
    return b"".join(
        _node(level[at : at + SIZE], level[at + SIZE : at + 2 * SIZE]) if at + SIZE < len(level) else level[at:]
        for at in pairs
    )
