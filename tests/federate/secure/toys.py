"""Small rounds for the tests of masked sums, phase by phase."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from apfl.federate.secure import PHASES, Aggregator, Member, Round, enlist

Vectors = dict[str, NDArray[np.int64]]


def names(n: int) -> list[str]:
    return [f"site-{i:02}" for i in range(n)]


def draw(members: Collection[str], length: int, bits: int, seed: int = 0) -> Vectors:
    """Vectors whose entries take all of b bits, also as negative numbers."""
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return {name: rng.integers(low, high, length, endpoint=True) for name in members}


def plain_sum(vectors: Mapping[str, NDArray[np.int64]], bits: int) -> list[int]:
    """The sum modulo 2^b in Python's integers."""
    columns = zip(*(vector.tolist() for vector in vectors.values()), strict=True)
    return [sum(column) % 2**bits for column in columns]


def new_round(member: Member, *, number: int = 1, length: int = 5, bits: int = 16) -> Round:
    return Round(member.federation, member.roster.fingerprint, number, "test", length, bits)


def ask(member: Member, phase: str, question: bytes, vector: NDArray[np.int64]) -> bytes:
    """A member's answer in a phase."""
    return member.mask(question, vector) if phase == "mask" else bytes(getattr(member, phase)(question))


class Play:
    """A round with all messages kept: ``questions[phase][name]`` and ``answers[phase][name]``."""

    def __init__(
        self, n: int = 5, *, bits: int = 16, length: int = 5, members: dict[str, Member] | None = None
    ) -> None:
        self.members = members or enlist(names(n))
        self.vectors = draw(self.members, length, bits)
        first = next(iter(self.members.values()))
        number = first.progress.last + 1
        self.round_ = new_round(first, number=number, length=length, bits=bits)
        self.server = Aggregator(first.roster, self.round_)
        self.questions: dict[str, dict[str, bytes]] = {"advertise": self.server.questions()}
        self.answers: dict[str, dict[str, bytes]] = {}

    @property
    def roster(self):
        return self.server.roster

    def step(self, phase: str, *, without: Collection[str] = ()) -> None:
        """Ask everyone in a phase but some, and close it."""
        self.collect(phase, without=without)
        following = self.server.close()
        if phase != PHASES[-1]:
            self.questions[PHASES[PHASES.index(phase) + 1]] = following

    def collect(self, phase: str, *, without: Collection[str] = ()) -> None:
        self.answers[phase] = {}
        for name in sorted(self.questions[phase].keys() - set(without)):
            answer = ask(self.members[name], phase, self.questions[phase][name], self.vectors[name])
            self.answers[phase][name] = answer
            self.server.receive(name, answer)

    def until(self, phase: str) -> Play:
        """All phases before this one."""
        for before in PHASES[: PHASES.index(phase)]:
            self.step(before)
        return self
