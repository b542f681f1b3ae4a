"""A run under masked terms: the phases of masked sums as questions to the sites of a roster.

What is lacking follows from the ledger, as in `conversation`: a sum that is finished is never asked for again. A sum
itself is all or nothing. Its state is in memory, and a run that is killed in the middle begins a new round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.flower.conversation import PAUSE, Policy
from apfl.federate.flower.events import Events
from apfl.federate.flower.fleet import largest_reply
from apfl.federate.flower.instructor import Instructor
from apfl.federate.flower.presence import Presence
from apfl.federate.flower.wire import is_whole, parts, pulled, reason
from apfl.federate.masked.purposes import Purpose
from apfl.federate.masked.rosters import rosters_of
from apfl.federate.masked.server import Cohort
from apfl.federate.masked.tables import summed
from apfl.federate.secure import PHASES
from apfl.files import check_room

__all__ = ["MaskedConversation"]

ATTEMPTS = 5  # for a site whose connection breaks while it is asked
AGAIN = 3.0  # seconds before the next attempt
GONE = 20.0  # seconds after which a site that was connected and no longer is will not answer this question

Payloads = dict[str, bytes]
Take = Callable[[str, Payloads], None]  # a site's name and what it answered; raises if that is refused


@dataclass
class _Asked:
    """One question to one site."""

    name: str
    payloads: Payloads
    message: str = ""  # its id while it is on its way
    attempts: int = 0
    not_before: float = 0.0
    seen: float = 0.0  # when the site was last connected; 0: never in this run


@dataclass
class MaskedConversation:
    """One run over one ledger, with the rosters in the server's folder."""

    grid: Grid
    coordinator: Coordinator
    policy: Policy
    events: Events
    folder: Path
    seen: dict[str, float] = field(default_factory=dict)  # when each site was last connected

    def __post_init__(self) -> None:
        rosters = rosters_of(self.folder)
        if not rosters:
            raise InputError(f"{self.folder} has no roster yet; make one: apfl federate roster {self.folder}")
        self.sites = Presence(self.grid, self.folder)
        self.instructor = Instructor(self.coordinator, self.folder, self.events.run)
        self.cohorts = [Cohort(self.coordinator, roster) for roster in rosters]

    def run(self) -> bool:
        """All sums that are lacking, the publication, and everyone's model; whether there is a primary."""
        self._sum_up()
        if self.coordinator.ready():
            done = self.coordinator.publish()
            self.events("published", number=done.number, members=list(done.members), n=done.n_samples, gamma=done.gamma)
        if self.coordinator.current() is None:
            return False
        self._sum_up()
        self._refine()
        if self.policy.evaluate and not self.coordinator.draft.private:
            self._measure()
        return True

    # ---------------------------------------------------------------------------------------------------- sums

    def _sum_up(self) -> None:
        """Every sum that the ledger lacks. If a later cohort cannot finish, the others go on without it."""
        for cohort in self.cohorts:
            try:
                while (purpose := cohort.owed()) is not None:
                    self._sum(cohort, purpose)
            except InputError as error:
                if cohort is self.cohorts[0]:
                    raise
                self.events("failed", members=list(cohort.roster.names), reason=str(error))

    def _sum(self, cohort: Cohort, purpose: Purpose) -> None:
        check_room(self.folder)
        round_ = cohort.begin(purpose)
        aggregator, questions = round_.aggregator, round_.aggregator.questions()
        told = {"sum": purpose.what, "number": purpose.number}
        self.events("masking", **told, roster=cohort.roster.fingerprint, length=aggregator.round_.length)
        for phase in PHASES:
            cohort.enter(phase, round_)
            asked = {name: self._payloads(cohort, purpose, phase, name, data) for name, data in questions.items()}
            self._ask(asked, "train.masked", f"{purpose.what} {phase}", lambda n, a: aggregator.receive(n, _answer(a)))
            questions = aggregator.close()
        cohort.take(round_)
        self.events("summed", **told, members=list(aggregator.survivors))

    def _payloads(self, cohort: Cohort, purpose: Purpose, phase: str, name: str, question: bytes) -> Payloads:
        terms = self.coordinator.agreed.to_json().encode()
        payloads = {"terms": terms, "phase": phase.encode(), "question": question}
        payloads |= cohort.along(purpose, phase, name)
        return payloads | self._landmarks(name) if phase == "advertise" else payloads

    def _landmarks(self, name: str) -> Payloads:
        """The landmarks, for a site that lacks them."""
        if not self.coordinator.settled or name in self.coordinator.ledger.answered("landmarks"):
            return {}
        return {"landmarks": self.coordinator.landmarks()}

    # -------------------------------------------------------------------------------------------------- models

    def _refine(self) -> None:
        """Everyone who is on a roster and lacks the model of the current publication."""
        current = self.coordinator.current()
        assert current is not None
        choice, terms = self.coordinator.choose(), self.coordinator.terms.to_json().encode()
        names = {name for cohort in self.cohorts for name in cohort.roster.names}
        names -= self.coordinator.ledger.confirmed(current.number)
        asked = {
            name: {"terms": terms, "choice": choice, "publication": self.coordinator.deliver(name)}
            | self._landmarks(name)
            for name in sorted(names & set(filter(None, self._online().values())))
        }
        number = current.number
        self._ask(asked, "train.refine", f"refine {number}", lambda name, _: self.coordinator.confirm(name, number))

    def _measure(self) -> None:
        current = self.coordinator.current()
        assert current is not None
        for cohort in self.cohorts:
            if cohort.roster.fingerprint not in summed(self.coordinator.ledger, "metrics", current.number):
                self._sum(cohort, Purpose("metrics", current.number))

    # -------------------------------------------------------------------------------------------------- asking

    def _ask(self, payloads: Mapping[str, Payloads], kind: str, group: str, take: Take) -> None:
        """Ask these sites and take what comes, until all have answered or nothing more will come."""
        waiting = {name: _Asked(name, given, seen=self.seen.get(name, 0.0)) for name, given in payloads.items()}
        end = time.monotonic() + self.policy.deadline
        while waiting and time.monotonic() < end:
            nodes = {name: node for node, name in self._online().items() if name}
            for asked in list(waiting.values()):
                if asked.name in nodes:
                    asked.seen = self.seen[asked.name] = time.monotonic()
                    self._send(asked, nodes[asked.name], kind, group)
            arrived = self._arrived(waiting.values(), take, group)
            for name in [*arrived, *(each.name for each in waiting.values() if _is_gone(each))]:
                waiting.pop(name, None)
            if not arrived:
                time.sleep(PAUSE / 5)
        for name in waiting:
            self.events("late", client=name, phase=group)

    def _online(self) -> dict[int, str | None]:
        self.sites.look()
        return self.sites.online

    def _send(self, asked: _Asked, node: int, kind: str, group: str) -> None:
        if asked.message or time.monotonic() < asked.not_before:
            return
        message = self.instructor.message(asked.payloads, node, asked.name, kind, group)
        (asked.message,) = self.grid.push_messages([message])
        if not asked.message:
            _fail(asked)
            return
        self.events("asked", client=asked.name, phase=group, bytes=sum(map(len, asked.payloads.values())))

    def _arrived(self, waiting: Iterable[_Asked], take: Take, group: str) -> list[str]:
        """The sites whose question is over: answered, refused, or failed too often."""
        over, largest = [], largest_reply(self.coordinator.agreed)
        for asked in waiting:
            if not asked.message:
                continue
            try:
                replies = pulled(self.grid, asked.message, largest)
                if not replies:
                    continue
                if self._taken(asked, replies[0], take, group):
                    over.append(asked.name)
            except InputError as error:
                over.append(asked.name)
                self.coordinator.refuse(asked.name, group, str(error))
                self.events("failed", client=asked.name, phase=group, reason=str(error))
        return over

    def _taken(self, asked: _Asked, reply: Message, take: Take, group: str) -> bool:
        """Whether the question is over with this reply; raises if its answer is refused."""
        settings, payloads = ({}, {}) if reply.has_error() else parts(reply)
        if reply.has_error() or not is_whole(settings, payloads):
            why = reason(reply) if reply.has_error() else "its answer changed on the way"
            self.events("failed", client=asked.name, phase=group, reason=why)
            _fail(asked)
            return asked.attempts >= ATTEMPTS
        if settings.get("name") != asked.name:
            raise InputError(f"the key of {asked.name} came with the name {settings.get('name')!r}")
        for outcome in ("failed", "declined"):
            if outcome in settings:
                self.coordinator.lost_landmarks(asked.name)
                raise InputError(str(settings[outcome]))
        if "landmarks" in asked.payloads:
            self.coordinator.kept_landmarks(asked.name)
        take(asked.name, payloads)
        self.events("answered", client=asked.name, phase=group, bytes=sum(map(len, payloads.values())))
        return True


def _answer(payloads: Payloads) -> bytes:
    if "answer" not in payloads:
        raise InputError("an answer without 'answer' in it")
    return payloads["answer"]


def _fail(asked: _Asked) -> None:
    asked.message, asked.attempts = "", asked.attempts + 1
    asked.not_before = time.monotonic() + AGAIN


def _is_gone(asked: _Asked) -> bool:
    """Whether a site was connected in this run, and has not been for a while."""
    return bool(asked.seen) and time.monotonic() - asked.seen > GONE
