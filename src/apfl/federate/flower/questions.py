"""Questions to sites: which there are, when a site owes an answer, and where each question stands in a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from apfl.federate.flower.answers import Answers
from apfl.federate.numbers.shared import STAGES

__all__ = ["PHASES", "Ask", "Key", "Phase", "Questions", "State"]

ATTEMPTS = 5  # for a site whose connection breaks while it is asked
PAUSE = 3.0  # seconds before the second attempt, twice as many before each further one: a dead node fails at once

Key = tuple[str, str, int]  # site, phase, publication (0: the question does not depend on it)


@dataclass(frozen=True)
class Phase:
    """One kind of question."""

    name: str
    message: str  # Flower's type of it
    owed: Callable[[str, Answers], bool]  # whether the ledger lacks this site's answer
    numbered: bool = False  # whether each publication asks it anew


def _of_stage(stage: str) -> Phase:
    """The question for a table of one stage of a choice."""
    return Phase(
        stage, "train.table", lambda site, a: a.stage == stage and site in a.members - a.staged, numbered=True
    )  # fmt: skip


# In the order in which a site is asked: it gets the first question that it owes an answer to.
PHASES = {
    phase.name: phase
    for phase in (
        Phase("describe", "query.describe", lambda site, a: a.describing and site not in a.described),
        Phase("pilot", "train.pilot", lambda site, a: a.piloting == "statistics" and site in a.described - a.tried),
        Phase(
            "pilot_table", "train.pilot_table",
            lambda site, a: a.piloting == "tables" and site in a.tried - a.judged,
        ),
        Phase("spread", "train.spread", lambda site, a: a.spreading and site in a.described - a.spread),
        Phase("rejoin", "train.rejoin", lambda site, a: site in a.earlier),
        Phase("return", "train.return", lambda site, a: a.settled and site in a.gone),
        Phase("statistics", "train.statistics", lambda site, a: a.settled and site not in a.contributed),
        Phase("table", "train.table", lambda site, a: a.choosing and site in a.members - a.tabled, numbered=True),
        *map(_of_stage, STAGES),
        Phase(
            "refine", "train.refine",
            lambda site, a: a.current is not None and not a.waits_for and site not in a.confirmed | a.next_members,
            numbered=True,
        ),
        Phase("evaluate", "evaluate.metrics", lambda site, a: site in a.confirmed - a.measured, numbered=True),
    )
}  # fmt: skip


@dataclass
class Ask:
    """A message on its way."""

    node: int
    client: str | None
    phase: str
    number: int
    at: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> Key:
        """The question itself, whoever carries it."""
        return (self.client or str(self.node), self.phase, self.number)


class State(Enum):
    """Where a question stands."""

    WAITING = "waiting"  # to be asked, or to be asked again
    ASKED = "asked"
    ANSWERED = "answered"
    REFUSED = "refused"  # by the site, or its answer was refused
    GIVEN_UP = "given up"  # the connection broke too often


OPEN = (State.WAITING, State.ASKED)  # in every other state a question is over for this run, and stays so


class Questions:
    """Where each question stands in this run, and which messages are on their way."""

    def __init__(self) -> None:
        self.asked: dict[str, Ask] = {}  # by message id
        self._states: dict[Key, State] = {}
        self._attempts: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}

    def state(self, key: Key) -> State:
        """Where a question stands."""
        return self._states.get(key, State.WAITING)

    def is_open(self, key: Key) -> bool:
        """Whether an answer may still come."""
        return self.state(key) in OPEN

    def may_ask(self, key: Key) -> bool:
        """Whether no attempt has failed just now."""
        return self.is_open(key) and time.monotonic() >= self._not_before.get(key, 0.0)

    def ask(self, message: str, ask: Ask) -> None:
        """A question is on its way."""
        self.asked[message] = ask
        self._move(ask.key, State.ASKED)

    def take(self, message: str) -> Ask:
        """The question whose reply has come; what became of it is for the caller to say."""
        return self.asked.pop(message)

    def name(self, ask: Ask, client: str) -> None:
        """The site that was asked has said its name."""
        if ask.client is None:
            self._states.pop(ask.key, None)
            ask.client = client

    def answer(self, key: Key) -> None:
        """The answer was taken."""
        self._move(key, State.ANSWERED)

    def refuse(self, key: Key) -> None:
        """The site does not answer, or its answer is not taken."""
        self._move(key, State.REFUSED)

    def fail(self, key: Key) -> None:
        """The connection broke: worth another attempt after a pause, but not for ever."""
        self._attempts[key] = self._attempts.get(key, 0) + 1
        self._not_before[key] = time.monotonic() + PAUSE * 2 ** (self._attempts[key] - 1)
        self._move(key, State.WAITING if self._attempts[key] < ATTEMPTS else State.GIVEN_UP)

    def busy(self) -> set[int]:
        """The nodes that have a question."""
        return {ask.node for ask in self.asked.values()}

    def asked_for(self, phase: str) -> set[str]:
        """The sites that have a question of this phase."""
        return {ask.client or str(ask.node) for ask in self.asked.values() if ask.phase == phase}

    def _move(self, key: Key, to: State) -> None:
        if self.is_open(key):
            self._states[key] = to
