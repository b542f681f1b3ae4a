"""The server's part of a run: ask every site that is connected what the ledger lacks, and take what comes.

There are no rounds to lose. What to ask a site next follows from the ledger alone, so a run that is killed is simply
run again. Replies are pulled one at a time and handed to the coordinator, so memory does not grow with the sites;
a reply may come long after its deadline and is still taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from apfl.errors import InputError
from apfl.federate.contribution import upload_bytes
from apfl.federate.coordinator import Coordinator
from apfl.federate.flower.answers import Answers
from apfl.federate.flower.bundle import DEADLINE
from apfl.federate.flower.events import Events
from apfl.federate.flower.fleet import largest_reply
from apfl.federate.flower.instructor import Instructor
from apfl.federate.flower.presence import Presence
from apfl.federate.flower.questions import PHASES, Ask, Key, Questions
from apfl.federate.flower.wire import Setting, is_whole, parts, pulled, reason
from apfl.federate.intake import Receipt
from apfl.federate.names import check_name
from apfl.federate.numbers.shared import STAGES
from apfl.files import check_room
from apfl.maths.wire import ECHO_BYTES

__all__ = ["Conversation", "Policy"]

PAUSE = 0.5
TABLES = ("table", *STAGES)  # phases in which a site sends a table that settings are chosen by
ON_MAPS = ("statistics", "rejoin", "return", *TABLES, "refine")  # phases in which a site maps its rows


@dataclass(frozen=True)
class Policy:
    """How long to wait for whom."""

    deadline: float = DEADLINE  # seconds for each stage; then it goes on with those who answered
    linger: float = 0.0  # seconds to stay for late sites when all is done
    evaluate: bool = False


class Conversation:
    """One run over one ledger.

    Every question to a site has a state (`questions.State`); the run itself is in a stage, the phase whose answers
    it waits for before it settles the terms, publishes or chooses settings.
    """

    def __init__(self, grid: Grid, coordinator: Coordinator, policy: Policy, events: Events, folder: Path) -> None:
        self.grid, self.coordinator, self.policy, self.events = grid, coordinator, policy, events
        self.folder = folder
        self.sites = Presence(grid, folder)
        self.instructor = Instructor(coordinator, folder, events.run)
        self.questions = Questions()
        self.stage: tuple[str, int] = ("", 0)
        self.stage_began = time.monotonic()
        self.chosen: tuple[int, bytes] = (0, b"")  # publication, the choice of its settings
        self.earlier = coordinator.ledger.answered("contributions")

    def run(self) -> bool:
        """Until nothing is left to do; whether there is a primary and every site that could has its model."""
        done_since: float | None = None
        while True:
            check_room(self.folder)
            self.sites.look()
            self._ask()
            moved = self._take()
            moved |= self._decide()
            if moved or not self._done():
                done_since = None
            else:
                done_since = done_since or time.monotonic()
                if time.monotonic() - done_since >= self.policy.linger:
                    return self.coordinator.current() is not None
            if not moved:
                time.sleep(PAUSE)

    def _answers(self) -> Answers:
        return Answers(self.coordinator, self.chosen[0], self.earlier)

    # Asking

    def _ask(self) -> None:
        busy, answers = self.questions.busy(), self._answers()
        for node, client in self.sites.online.items():
            phase = None if node in busy else self._next(node, client, answers)
            if phase is not None and self.questions.may_ask(_key(client or str(node), phase, answers)):
                self._send(node, client, phase, answers)

    def _next(self, node: int, client: str | None, answers: Answers) -> str | None:
        """The first question that this site owes an answer to; one without a name is asked for its description."""
        if client is None:
            return "describe" if self.questions.is_open((str(node), "describe", 0)) else None
        if client in answers.gone:  # it may come back if whoever runs the server has put its key back
            returns = node in self.sites.vouched and self._owes(client, "return", answers)
            return "return" if returns else None
        evaluates = self.policy.evaluate and not self.coordinator.draft.numeric  # columns have no accuracy
        wanted = (phase for phase in PHASES if phase != "evaluate" or evaluates)
        return next((phase for phase in wanted if self._owes(client, phase, answers)), None)

    def _owes(self, site: str, phase: str, answers: Answers) -> bool:
        """Whether the ledger lacks a site's answer, which may still come."""
        return PHASES[phase].owed(site, answers) and self.questions.is_open(_key(site, phase, answers))

    def _send(self, node: int, client: str | None, phase: str, answers: Answers) -> None:
        payloads, current = self._payloads(client, phase, answers), answers.current or 0
        group = f"{phase} {current}" if current else phase
        message = self.instructor.message(payloads, node, client, PHASES[phase].message, group)
        (message_id,) = self.grid.push_messages([message])
        if not message_id:  # the site has gone this very moment
            return
        ask = Ask(node, client, phase, current if PHASES[phase].numbered else 0)
        self.questions.ask(message_id, ask)
        self.events("asked", client=client, phase=phase, number=ask.number, bytes=sum(map(len, payloads.values())))

    def _payloads(self, client: str | None, phase: str, answers: Answers) -> dict[str, bytes]:
        """What a site is sent with a question. Only the first, for a description, may go to one without a name."""
        if phase == "describe":
            return {"terms": self.coordinator.invitation()}
        assert client is not None
        if phase in ("statistics", "rejoin", "return"):
            check_room(self.folder, self._upload(client))
        payloads = {"terms": answers.terms, **self._of_phase(client, phase, answers)}
        if phase in ON_MAPS and answers.landmarked and client not in answers.has_landmarks:
            payloads["landmarks"] = self.coordinator.landmarks()
        if phase in (*TABLES, "refine") and client not in answers.tabled:
            payloads["publication"] = self.coordinator.deliver(client)
        return payloads

    def _of_phase(self, client: str, phase: str, answers: Answers) -> dict[str, bytes]:
        """What only one question brings."""
        if phase == "pilot":
            return {"pilot": self.coordinator.pilot_question()}
        if phase == "pilot_table":
            return {"primaries": self.coordinator.pilot_primaries(client)}
        if phase == "rejoin":
            return {"digest": (self.coordinator.contribution_of(client) or "").encode()}
        if phase in STAGES and (chosen := self.coordinator.chosen_so_far()):
            return {"choice": chosen}
        return {"choice": self._choice(answers.current or 0)} if phase == "refine" else {}

    def _upload(self, client: str) -> int:
        """Bytes that the server must have room for to keep a site's statistics."""
        terms, described = self.coordinator.terms, self.coordinator.ledger.description_of(client)
        n = terms.width if described is None else described["n"]
        return ECHO_BYTES + upload_bytes(terms, n)

    def _choice(self, number: int) -> bytes:
        if self.chosen[0] != number:
            self.chosen = number, self.coordinator.choose()
            self.events("chosen", number=number)
        return self.chosen[1]

    # Taking

    def _take(self) -> bool:
        """Pull what has arrived, one reply at a time."""
        moved = False
        terms = self.coordinator.agreed
        for message_id in list(self.questions.asked):
            try:
                replies = pulled(self.grid, message_id, largest_reply(terms))
            except InputError as error:
                self._refuse(self.questions.take(message_id), error)
                moved = True
                continue
            for reply in replies:
                # An error's sender is the SuperLink: only the id says whose it is.
                ask = self.questions.take(message_id)
                moved = True
                if reply.has_error():
                    self.questions.fail(ask.key)
                    self._tell("failed", ask, reason=reason(reply))
                else:
                    self._answered(ask, reply)
        return moved

    def _refuse(self, ask: Ask, error: InputError) -> None:
        """A reply that is none: this site is not asked again in this run, and the ledger says why."""
        self.questions.refuse(ask.key)
        receipt = self.coordinator.refuse(ask.client or str(ask.node), ask.phase, str(error))
        self._tell("failed", ask, reason=receipt.reason)

    def _answered(self, ask: Ask, reply: Message) -> None:
        """A site's reply: an answer, or that it failed or declined to give one."""
        try:
            settings, payloads = parts(reply)
            client = self._name(ask, str(settings.get("name", "")))
        except InputError as error:
            self._refuse(ask, error)
            return
        if not is_whole(settings, payloads):
            self.questions.fail(ask.key)  # the site has it still
            self._tell("failed", ask, reason="its answer changed on the way, or in Flower's database on this disk")
            return
        for outcome in ("failed", "declined"):
            if outcome in settings:
                self.questions.refuse(ask.key)
                self.coordinator.lost_landmarks(client)  # if that is why, the next run sends them again
                if outcome == "declined" and ask.phase == "describe":  # then it has no statistics to give either
                    self.questions.refuse((client, "statistics", 0))
                self._tell(outcome, ask, reason=str(settings[outcome]))
                return
        self._handed_over(ask, client, payloads)

    def _name(self, ask: Ask, name: str) -> str:
        """Who answered: the site that the key belongs to, and without keys the one that it says it is."""
        vouched = ask.node in self.sites.vouched
        client = ask.client if vouched else ask.client or check_name("client", name)
        if client is None or (vouched and name != client):
            raise InputError(f"the key of {client} came with the name {name!r}")
        self.sites.learn(ask.node, client)
        self.questions.name(ask, client)
        return client

    def _handed_over(self, ask: Ask, client: str, payloads: dict[str, bytes]) -> None:
        """Give the answer to the coordinator, and note what it makes of it."""
        take = {
            "describe": self._receipt("description", self.coordinator.describe),
            "pilot": self._receipt("statistics", self.coordinator.pilot_statistics),
            "pilot_table": self._receipt("table", self.coordinator.pilot_table),
            "spread": self._receipt("spread", self.coordinator.spread),
            "statistics": self._receipt("statistics", self.coordinator.accept),
            "rejoin": self._rejoined,
            "return": self._receipt("statistics", self.coordinator.accept),
            "table": self._table,
            **dict.fromkeys(STAGES, self._receipt("table", self.coordinator.table)),
            "refine": self._refined,
            "evaluate": self._receipt("metrics", self.coordinator.metrics),
        }[ask.phase]
        if ask.phase in ON_MAPS and self.coordinator.terms.landmarked:
            self.coordinator.kept_landmarks(client)
        receipt = take(ask, client, payloads)
        (self.questions.answer if receipt.ok else self.questions.refuse)(ask.key)
        size, seconds = sum(map(len, payloads.values())), round(time.monotonic() - ask.at, 2)
        why: dict[str, Setting] = {"reason": receipt.reason} if receipt.reason else {}
        self._tell("answered", ask, seconds=seconds, outcome=receipt.outcome, bytes=size, **why)

    @staticmethod
    def _receipt(payload: str, take: Callable[[bytes, str | None], Receipt]) -> Taker:
        return lambda ask, client, payloads: take(payloads.get(payload, b""), client)

    def _rejoined(self, ask: Ask, client: str, payloads: dict[str, bytes]) -> Receipt:
        if "statistics" not in payloads:
            return Receipt("duplicate", client, "stands by what it contributed")
        return self.coordinator.rejoin(payloads["statistics"], client, payloads.get("former"))

    def _table(self, ask: Ask, client: str, payloads: dict[str, bytes]) -> Receipt:
        if self.chosen[0] == ask.number:
            return Receipt("refused", client, f"the settings of publication {ask.number} were chosen already")
        return self.coordinator.table(payloads.get("table", b""), client)

    def _refined(self, ask: Ask, client: str, payloads: dict[str, bytes]) -> Receipt:
        self.coordinator.confirm(client, ask.number)
        if "metrics" in payloads:  # a site that reports need not be asked for it separately
            self.coordinator.metrics(payloads["metrics"], client)
        return Receipt("accepted", client)

    def _tell(self, event: str, ask: Ask, **fields: Setting) -> None:
        self.events(event, client=ask.client or str(ask.node), phase=ask.phase, number=ask.number, **fields)

    # Going on

    def _decide(self) -> bool:
        """Settle, publish or choose, when everyone has answered or the deadline has passed."""
        answers = self._answers()
        phase = _stage(answers)
        stage = phase, answers.current or 0
        if stage != self.stage:
            self.stage, self.stage_began = stage, time.monotonic()
        waiting = self._waiting(answers)
        if waiting and not self._late():
            return False
        decide = {
            "describe": self._settle, "pilot": self._try, "pilot_table": self._prefer, "spread": self._draw,
            "statistics": self._publish, "table": self._choose, "refine": self._publish,
            **dict.fromkeys(STAGES, self._choose_stage),
        }  # fmt: skip
        return decide[phase](answers, waiting)

    def _settle(self, answers: Answers, waiting: set[str]) -> bool:
        if len(answers.described) < self.coordinator.draft.quorum:
            return False
        if self.coordinator.draft.pilots:
            self.coordinator.trial()
            event = "piloting"
        else:
            event = self._outlined()
        described = self._answers().described
        left_out = sorted(answers.described - described)  # their features have another width
        self.events(event, clients=sorted(described), late=sorted(waiting), left_out=left_out)
        return True

    def _outlined(self) -> str:
        """Fix what can be fixed without the landmarks, or all if these need nothing more; the event."""
        if self.coordinator.draft.landmarked:
            self.coordinator.outline()
        if self.coordinator.spreading:
            return "outlined"
        self.coordinator.settle()
        return "settled"

    def _try(self, answers: Answers, waiting: set[str]) -> bool:
        if len(answers.tried) < self.coordinator.draft.quorum:
            return False
        self.coordinator.pilot_primaries()
        self.events("tried", clients=sorted(answers.tried), late=sorted(waiting))
        return True

    def _prefer(self, answers: Answers, waiting: set[str]) -> bool:
        if len(answers.judged) < self.coordinator.draft.quorum:
            return False
        event = self._outlined()
        chosen = self.coordinator.agreed
        self.events("piloted", normalise=chosen.method.normalise, hits=dict(chosen.pilot or ()))
        self.events(event, clients=sorted(answers.judged), late=sorted(waiting))
        return True

    def _draw(self, answers: Answers, waiting: set[str]) -> bool:
        if len(answers.spread) < self.coordinator.draft.quorum:
            return False
        self.coordinator.settle()
        self.events("settled", clients=sorted(answers.spread), late=sorted(waiting))
        return True

    def _choose(self, answers: Answers, waiting: set[str]) -> bool:
        if not answers.tabled:
            return False
        self._choice(answers.current or 0)
        return True

    def _choose_stage(self, answers: Answers, waiting: set[str]) -> bool:
        if not answers.staged:
            return False
        stage = self.coordinator.choose_stage()
        self.events("chosen", number=answers.current, stage=stage, late=sorted(waiting))
        return True

    def _publish(self, answers: Answers, waiting: set[str]) -> bool:
        if not self.coordinator.ready():
            return False
        publication = self.coordinator.publish()
        self.events(
            "published", number=publication.number, members=list(publication.members), late=sorted(waiting),
            n=publication.n_samples, gamma=publication.gamma,
        )  # fmt: skip
        return True

    def _waiting(self, answers: Answers) -> set[str]:
        """Who has yet to answer in this stage."""
        phase, sites = _stage(answers), {client for client in self.sites.online.values() if client}
        waiting = {site for site in sites if self._owes(site, "rejoin", answers)}
        if phase in ("describe", "pilot", "pilot_table", "spread", "statistics") and answers.first:
            sites |= self.sites.admitted
        waiting |= {site for site in sites if self._owes(site, phase, answers)}
        # One without a name may say it with its description; once that has failed, nothing more will come.
        nameless = {str(node) for node, client in self.sites.online.items() if client is None}
        waiting |= {node for node in nameless if self.questions.is_open((node, "describe", 0))}
        if phase == "refine":  # before anything new is published, whoever is sending statistics may finish
            waiting |= self.questions.asked_for("statistics")
        return waiting - answers.gone

    def _late(self) -> bool:
        return time.monotonic() - self.stage_began > self.policy.deadline

    def _done(self) -> bool:
        """Nothing can be asked and nobody is waited for, or the deadline of the last stage has passed."""
        if self._late():
            return True
        answers = self._answers()
        if _stage(answers) != "refine" or self._waiting(answers) or self.questions.asked_for("evaluate"):
            return False
        return not any(self._next(node, client, answers) for node, client in self.sites.online.items())


Taker = Callable[[Ask, str, dict[str, bytes]], Receipt]


def _stage(answers: Answers) -> str:
    """The phase whose answers decide how it goes on."""
    if answers.piloting:
        return "pilot" if answers.piloting == "statistics" else "pilot_table"
    if not answers.settled:
        return "spread" if answers.spreading else "describe"
    if answers.current is None:
        return "statistics"
    return answers.waits_for or "refine"


def _key(site: str, phase: str, answers: Answers) -> Key:
    return site, phase, (answers.current or 0) if PHASES[phase].numbered else 0
