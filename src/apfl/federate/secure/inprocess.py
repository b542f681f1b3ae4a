"""A masked sum in one process: every message is made and read as between machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from apfl.errors import InputError, unknown
from apfl.federate.secure.aggregator import Aggregator
from apfl.federate.secure.ciphers import new_key, verifying_key
from apfl.federate.secure.masks import Words
from apfl.federate.secure.member import MINIMUM, PHASES, Member
from apfl.federate.secure.roster import Roster, Round

__all__ = ["MaskedSum", "enlist", "masked_sum"]

FEDERATION = "in-process"


@dataclass(frozen=True)
class MaskedSum:
    """The sum modulo 2^bits, whose vectors are in it, and the bytes that went up and down, by member."""

    total: Words
    survivors: tuple[str, ...]
    sent: Mapping[str, int]
    received: Mapping[str, int]


def enlist(names: list[str], *, federation: str = FEDERATION, minimum: int = MINIMUM) -> dict[str, Member]:
    """Members with fresh identities, and one roster of them."""
    identities = {name: new_key() for name in names}
    roster = Roster({name: verifying_key(identity) for name, identity in identities.items()})
    return {
        name: Member(name, identity, roster, federation=federation, minimum=minimum)
        for name, identity in identities.items()
    }


def masked_sum(
    vectors: Mapping[str, NDArray[Any]], bits: int, *, members: Mapping[str, Member] | None = None,
    drop: Mapping[str, str] | None = None, number: int = 1, purpose: str = "sum",
    overhear: Callable[[str, str, bytes], None] | None = None,
) -> MaskedSum:  # fmt: skip
    """The sum of the members' integer vectors modulo 2^bits, in which nobody sees a single one.

    ``drop`` names members and the phase from which on they no longer answer. ``members`` (from `enlist`) may be used
    for several sums, with rising numbers; all of them are in the roster, also those without a vector. ``overhear`` is
    called with the phase, the name and the bytes of each answer.
    """
    members, drop = members or enlist(list(vectors)), drop or {}
    aggregator = _aggregator(vectors, bits, members, drop, number, purpose)
    questions, gone = aggregator.questions(), members.keys() - vectors.keys()
    sent, received = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
    for phase in PHASES:
        gone |= {name for name, when in drop.items() if when == phase}
        for name in sorted(questions.keys() - gone):
            answer = _answer(members[name], phase, questions[name], vectors[name])
            received[name] += len(questions[name])
            sent[name] += len(answer)
            if overhear is not None:
                overhear(phase, name, answer)
            aggregator.receive(name, answer)
        questions = aggregator.close()
    return MaskedSum(aggregator.total, aggregator.survivors, sent, received)


def _aggregator(
    vectors: Mapping[str, NDArray[Any]], bits: int, members: Mapping[str, Member], drop: Mapping[str, str],
    number: int, purpose: str,
) -> Aggregator:  # fmt: skip
    """The server of a round in which all this fits together."""
    for phase in drop.values():
        if phase not in PHASES:
            raise unknown("phase", phase, PHASES)
    for name in (*vectors, *drop):
        if name not in members:
            raise unknown("member", name, members)
    lengths = {len(vector) for vector in vectors.values()}
    if len(lengths) != 1:
        raise InputError(f"vectors of one length are needed; {sorted(lengths)} given")
    first = next(iter(members.values()))
    round_ = Round(first.federation, first.roster.fingerprint, number, purpose, lengths.pop(), bits)
    return Aggregator(first.roster, round_, max(member.minimum for member in members.values()))


def _answer(member: Member, phase: str, question: bytes, vector: NDArray[Any]) -> bytes:
    return member.mask(question, vector) if phase == "mask" else bytes(getattr(member, phase)(question))
