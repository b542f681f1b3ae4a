"""A masked federation in one process: every message is made and read as between machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.masked.purposes import Purpose
from apfl.federate.masked.server import Cohort
from apfl.federate.masked.site import MaskedSite
from apfl.federate.secure import PHASES, Member, enlist
from apfl.federate.site import Site

__all__ = ["MaskedFederation"]

Answers = Callable[[str, str, str], bool]  # of what, phase, name -> whether this site answers


def everyone(what: str, phase: str, name: str) -> bool:
    """Nobody drops out."""
    return True


@dataclass
class MaskedFederation:
    """Sites of one roster and their server; ``answers`` says who answers which question.

    ``overhear`` gets the sum, the phase, the name and the bytes of each answer: all that a server sees of a site.
    """

    server: Coordinator
    sites: Sequence[Site]
    members: Mapping[str, Member] = field(default_factory=dict)
    answers: Answers = everyone
    overhear: Callable[[str, str, str, bytes], None] | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    payload_up: int = 0

    def __post_init__(self) -> None:
        terms = self.server.draft
        names = [site.name for site in self.sites]
        self.members = self.members or enlist(names, federation=terms.federation, minimum=terms.smallest_sum)
        self.masked = {site.name: MaskedSite(site, self.members[site.name]) for site in self.sites}
        self.cohort = Cohort(self.server, next(iter(self.members.values())).roster)

    def sum_up(self) -> None:
        """Every sum that the ledger lacks, until there is something to publish, or to choose from."""
        while (purpose := self.cohort.owed()) is not None:
            self.sum_of(purpose)

    def sum_of(self, purpose: Purpose) -> tuple[str, ...]:
        """One masked sum; who is in it."""
        if self.server.settled:
            self._hand_out_landmarks()
        round_ = self.cohort.begin(purpose)
        questions = round_.aggregator.questions()
        for phase in PHASES:
            self.cohort.enter(phase, round_)
            for name in sorted(questions):
                if name in self.masked and self.answers(purpose.what, phase, name):
                    self._ask(purpose, phase, name, questions[name], round_.aggregator.receive)
            questions = round_.aggregator.close()
        self.cohort.take(round_)
        self.payload_up += len(round_.aggregator.survivors) * round_.aggregator.round_.n_bytes
        return round_.aggregator.survivors

    def _ask(
        self, purpose: Purpose, phase: str, name: str, question: bytes, receive: Callable[[str, bytes], None]
    ) -> None:
        agreement, along = self.server.agreed.to_json().encode(), self.cohort.along(purpose, phase, name)
        answer = self.masked[name].answer(phase, question, agreement, **along)
        self.bytes_up += len(answer)
        self.bytes_down += sum(map(len, (question, agreement, *along.values())))
        if self.overhear is not None:
            self.overhear(purpose.what, phase, name, answer)
        receive(name, answer)

    def _hand_out_landmarks(self) -> None:
        agreement, data = self.server.settle(), self.server.landmarks()
        for site in self.sites:
            if site.name not in self.server.ledger.answered("landmarks"):
                site.keep_landmarks(agreement, data)
                self.server.kept_landmarks(site.name)
                self.bytes_down += len(data)

    def refine(self) -> list[Path]:
        """Everyone's model under the current publication."""
        agreement, choice = self.server.settle(), self.server.choose()
        current = self.server.current()
        if current is None:
            raise InputError("nothing is published yet")
        self._hand_out_landmarks()
        models = []
        for site in self.sites:
            models.append(site.refine(agreement, self.server.deliver(site.name), choice))
            self.server.confirm(site.name, current.number)
            self.bytes_down += len(choice) + len(current.data)
        return models

    def run(self) -> list[Path]:
        """Count, agree on a normalisation, spread, sum up, publish, choose, refine."""
        self.sum_up()
        self.server.publish()
        self.sum_up()
        return self.refine()
