"""What a member knows in the middle of a round, as bytes for its own disk. They hold secrets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from apfl.errors import InputError
from apfl.federate.secure.keys import Advertisement
from apfl.federate.secure.roster import Roster, Round

__all__ = ["Progress"]

VERSION = 1
BYTES = ("encryption", "mask", "seed", "own", "partners", "vector", "survivors")


@dataclass
class Progress:
    """A member's round: secrets drawn, messages kept, phases done (the question's hash and the answer)."""

    last: int = 0  # the highest number of a round that it began
    round_: Round | None = None
    encryption: bytes = b""  # private keys, and the seed of the self-mask
    mask: bytes = b""
    seed: bytes = b""
    own: bytes = b""  # its own share of both secrets
    advertised: dict[int, Advertisement] = field(default_factory=dict)
    partners: bytes = b""  # bitmap of those that shared keys
    shares: dict[int, bytes] = field(default_factory=dict)  # of neighbours, encrypted for this member
    vector: bytes = b""  # the hash of what it masked
    survivors: bytes = b""  # the bitmap that it signed
    done: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """All of it."""
        told = {
            "version": VERSION, "last": self.last,
            "round": None if self.round_ is None else self.round_.to_bytes().decode(),
            **{name: getattr(self, name).hex() for name in BYTES},
            "advertised": {number: each.to_bytes().hex() for number, each in self.advertised.items()},
            "shares": {number: data.hex() for number, data in self.shares.items()},
            "done": {phase: [part.hex() for part in both] for phase, both in self.done.items()},
        }  # fmt: skip
        return json.dumps(told).encode()

    @staticmethod
    def from_bytes(data: bytes, roster: Roster) -> Progress:
        """What `to_bytes` wrote, for the same roster."""
        try:
            told = json.loads(data)
            if told["version"] != VERSION:
                raise ValueError("another version")
            progress = Progress(
                int(told["last"]), None if told["round"] is None else Round.from_bytes(told["round"].encode()),
                **{name: bytes.fromhex(told[name]) for name in BYTES},
                advertised={int(n): Advertisement.from_bytes(bytes.fromhex(x)) for n, x in told["advertised"].items()},
                shares={int(n): bytes.fromhex(x) for n, x in told["shares"].items()},
                done={phase: (bytes.fromhex(a), bytes.fromhex(b)) for phase, (a, b) in told["done"].items()},
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"a member's state cannot be read ({error}); it sits this round out") from error
        if progress.round_ is not None and progress.round_.roster != roster.fingerprint:
            return Progress(last=progress.last)
        return progress
