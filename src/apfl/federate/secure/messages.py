"""The messages of a masked sum as bytes: one layout, read with exact sizes, in one way only.

    "APMS" | version | kind | round id (32) | sender (4) | number of records (4) | fixed part | records

A record is a member's number (4) and bytes whose size the kind decides; records are in rising order of members. The
reader knows all sizes before it reads, and refuses everything that the writer would not have written. So no two
different messages mean the same, and nothing is allocated for sizes that somebody claims.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from apfl.errors import InputError
from apfl.federate.secure.ciphers import KEY_BYTES, SEALED_BYTES, SIGNATURE_BYTES
from apfl.federate.secure.masks import packed_bytes
from apfl.federate.secure.roster import Roster, Round
from apfl.federate.secure.shamir import SHARE_BYTES

__all__ = ["SERVER", "Message", "bitmap", "kind_of", "members_of", "read", "write"]

MAGIC, VERSION = b"APMS", 1
HEAD = struct.Struct(">4sBB32sII")
SERVER: Final = 2**32 - 1  # the sender of questions
# Answers of members and questions of the server, in turn; the first question is the round itself.
KINDS = (
    *("advertisement", "advertisements", "shares", "delivery", "masked"),
    *("survivors", "confirmation", "confirmations", "unmasking"),
)
ADVERTISEMENT = 3 * KEY_BYTES + SIGNATURE_BYTES  # two public keys, the commitment to the seed, the signature
SEALED_SHARES = 2 * SHARE_BYTES + SEALED_BYTES
REVEALED = 1 + SHARE_BYTES  # which secret it is of, and the share


@dataclass(frozen=True)
class Message:
    """A kind of message from somebody: a part of fixed size, and bytes for each of some members."""

    kind: str
    sender: int
    fixed: bytes = b""
    records: Mapping[int, bytes] = field(default_factory=dict)


def write(message: Message, round_: Round) -> bytes:
    """The message's bytes."""
    numbers = sorted(message.records)
    head = HEAD.pack(MAGIC, VERSION, KINDS.index(message.kind), round_.id, message.sender, len(numbers))
    return b"".join([head, message.fixed, *(number.to_bytes(4) + message.records[number] for number in numbers)])


def kind_of(data: bytes) -> str:
    """The kind of message, by its head."""
    if len(data) < HEAD.size:
        raise InputError(f"{len(data)} bytes that are no message of a masked sum; send it again")
    magic, version, kind, *_ = HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or kind >= len(KINDS):
        raise InputError("bytes that are no message of a masked sum, or of another version of apfl")
    return KINDS[kind]


def read(data: bytes, kind: str, round_: Round, roster: Roster, sender: int = SERVER) -> Message:
    """A message of this kind, round and sender; anything else is an `InputError`."""
    if kind_of(data) != kind:
        raise InputError(f"a message of kind '{kind_of(data)}' given; a '{kind}' is needed now")
    _, _, _, round_id, found_sender, n = HEAD.unpack_from(data)
    if round_id != round_.id:
        raise InputError(f"a {kind} of another round given; this is round {round_.number}")
    if found_sender != sender:
        raise InputError(f"a {kind} of another sender given")
    fixed, record = _sizes(kind, round_, roster)
    if n > (len(roster) if record else 0) or len(data) != HEAD.size + fixed + n * (4 + record):
        raise InputError(f"a {kind} of a wrong size given: {len(data)} bytes; send it again")
    start = HEAD.size + fixed
    return Message(kind, sender, data[HEAD.size : start], _records(kind, data[start:], 4 + record, len(roster)))


def bitmap(members: Collection[int], roster: Roster) -> bytes:
    """A set of members as one bit each."""
    bits = sum(1 << member for member in members)
    return bits.to_bytes(_bitmap_bytes(roster), "little")


def members_of(bits: bytes, roster: Roster) -> frozenset[int]:
    """The set of members that a bitmap tells."""
    number = int.from_bytes(bits, "little")
    if number >> len(roster):
        raise InputError("a list of members names some that are not on the roster")
    return frozenset(i for i in range(len(roster)) if number >> i & 1)


def _bitmap_bytes(roster: Roster) -> int:
    return (len(roster) + 7) // 8


def _sizes(kind: str, round_: Round, roster: Roster) -> tuple[int, int]:
    """Bytes of the fixed part and of each record; 0 for no records."""
    listed = _bitmap_bytes(roster)
    sizes = {
        "advertisement": (ADVERTISEMENT, 0), "advertisements": (0, ADVERTISEMENT),
        "shares": (0, SEALED_SHARES), "delivery": (listed, SEALED_SHARES),
        "masked": (SIGNATURE_BYTES + packed_bytes(round_.length, round_.bits), 0),
        "survivors": (listed, SIGNATURE_BYTES), "confirmation": (SIGNATURE_BYTES, 0),
        "confirmations": (0, SIGNATURE_BYTES), "unmasking": (0, REVEALED),
    }  # fmt: skip
    return sizes[kind]


def _records(kind: str, data: bytes, size: int, members: int) -> dict[int, bytes]:
    records: dict[int, bytes] = {}
    last = -1
    for start in range(0, len(data), size):
        number = int.from_bytes(data[start : start + 4])
        if not last < number < members:
            raise InputError(f"the records of a {kind} are not of members of the roster in their order")
        records[number] = data[start + 4 : start + size]
        last = number
    return records
