"""The server's part of a run: ask every site that is connected what the ledger lacks, and take what comes.

There are no rounds to lose. What to ask a site next follows from the ledger alone, so a run that is killed is simply
run again. Replies are pulled one at a time and handed to the coordinator, so memory does not grow with the sites;
a reply may come long after its deadline and is still taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from apfl.errors import InputError
from apfl.federate import Coordinator, Receipt
from apfl.federate.flower.answers import Answers
from apfl.federate.flower.events import Events
from apfl.federate.flower.presence import Presence
from apfl.federate.flower.questions import TYPES, Ask, Closed
from apfl.federate.flower.wire import Setting, content, parts, reason

__all__ = ["Conversation", "Policy"]

PAUSE = 0.5


@dataclass(frozen=True)
class Policy:
    """How long to wait for whom."""

    deadline: float = 600.0  # seconds for each stage; then it goes on with those who answered
    linger: float = 0.0  # seconds to stay for late sites when all is done
    evaluate: bool = False
    predict: bool = False


class Conversation:
    """One run over one ledger."""

    def __init__(self, grid: Grid, coordinator: Coordinator, policy: Policy, events: Events, folder: Path) -> None:
        self.grid, self.coordinator, self.policy, self.events = grid, coordinator, policy, events
        self.sites = Presence(grid, folder)
        self.asked: dict[str, Ask] = {}  # by message id
        self.closed = Closed()
        self.stage: tuple[str, int] = ("", 0)
        self.stage_began = time.monotonic()
        self.chosen: tuple[int, bytes] | None = None

    def run(self) -> bool:
        """Until nothing is left to do; whether there is a primary and every site that could has its model."""
        done_since: float | None = None
        while True:
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

    # Asking

    def _ask(self) -> None:
        busy = {ask.node for ask in self.asked.values()}
        state = Answers(self.coordinator)
        for node, client in self.sites.online.items():
            phase = None if node in busy else self._next(node, client, state)
            if phase is not None:
                self._send(node, client, phase, state)

    def _next(self, node: int, client: str | None, state: Answers) -> str | None:
        """What the ledger lacks from this site."""
        if client is None:
            return self._unless_closed("describe", str(node), 0)
        if client in state.gone:
            return None
        if not state.settled:
            return None if client in state.described else self._unless_closed("describe", client, 0)
        if client not in state.contributed and (ask := self._unless_closed("statistics", client, 0)):
            return ask
        number = state.current
        if number is None:
            return None
        if self._choosing(state) and client in state.members and client not in state.tabled:
            return self._unless_closed("table", client, number)
        if not self._choosing(state) and client not in state.confirmed and client not in state.next_members:
            return self._unless_closed("refine", client, number)
        if client in state.confirmed:
            wanted = [("evaluate", self.policy.evaluate and client not in state.measured)]
            for phase, asked_for in [*wanted, ("predict", self.policy.predict)]:
                if asked_for and (ask := self._unless_closed(phase, client, number)):
                    return ask
        return None

    def _unless_closed(self, phase: str, who: str, number: int) -> str | None:
        return None if (who, phase, number) in self.closed else phase

    def _choosing(self, state: Answers) -> bool:
        """Whether tables are still collected for the current publication: not once anyone has refined by a choice."""
        return state.wants_tables and not state.confirmed and (self.chosen or (0, b""))[0] != state.current

    def _send(self, node: int, client: str | None, phase: str, state: Answers) -> None:
        payloads = {"terms": self.coordinator.invitation() if phase == "describe" else state.terms}
        number = state.current or 0
        if phase == "refine":
            payloads["choice"] = self._choice(number)
        if phase == "table" or (phase == "refine" and client not in state.tabled):
            assert client is not None
            payloads["publication"] = self.coordinator.deliver(client)
        message = Message(content(payloads), node, TYPES[phase], group_id=f"{phase} {number}" if number else phase)
        (message_id,) = self.grid.push_messages([message])
        if not message_id:  # the site has gone this very moment
            return
        number = number if phase in ("table", "refine", "evaluate", "predict") else 0
        self.asked[message_id] = Ask(node, client, phase, number)
        self.events("asked", client=client, phase=phase, number=number, bytes=sum(map(len, payloads.values())))

    def _choice(self, number: int) -> bytes:
        if self.chosen is None or self.chosen[0] != number:
            self.chosen = number, self.coordinator.choose()
            self.events("chosen", number=number)
        return self.chosen[1]

    # Taking

    def _take(self) -> bool:
        """Pull what has arrived, one reply at a time."""
        moved = False
        for message_id in list(self.asked):
            for reply in self.grid.pull_messages([message_id]):
                ask = self.asked.pop(message_id)  # an error's sender is the SuperLink: only the id says whose it is
                moved = True
                if reply.has_error():
                    self._failed(ask, reason(reply), again=True)
                else:
                    self._answered(ask, reply)
        return moved

    def _answered(self, ask: Ask, reply: Message) -> None:
        try:
            settings, payloads = parts(reply)
        except InputError as error:
            self._failed(ask, str(error), again=False)
            return
        name = str(settings.get("name", ""))
        client = ask.client if ask.node in self.sites.vouched else ask.client or name
        if client is None or (ask.node in self.sites.vouched and name != client):
            self._failed(ask, f"the key of {client} came with the name {name!r}", again=False)
            return
        self.sites.learn(ask.node, client)
        ask.client = client
        if "failed" in settings or "declined" in settings:
            why = str(settings.get("failed") or settings.get("declined"))
            self._failed(ask, why, again=False, declined="declined" in settings)
            return
        receipt = self._handed_over(ask, client, payloads)
        size = sum(map(len, payloads.values()))
        outcome = "accepted" if receipt is None else receipt.outcome
        told: dict[str, Setting] = {"phase": ask.phase, "number": ask.number, "outcome": outcome, "bytes": size}
        if receipt is not None and receipt.reason:
            told["reason"] = receipt.reason
        self.events("answered", client=client, seconds=round(time.monotonic() - ask.at, 2), **told)
        if receipt is not None and not receipt.ok:
            self.closed.close(ask.key, receipt.reason)

    def _handed_over(self, ask: Ask, client: str, payloads: dict[str, bytes]) -> Receipt | None:
        takers: dict[str, tuple[str, Callable[[bytes, str | None], Receipt]]] = {
            "describe": ("description", self.coordinator.describe),
            "statistics": ("statistics", self.coordinator.accept),
            "table": ("table", self.coordinator.table),
            "evaluate": ("metrics", self.coordinator.metrics),
        }
        if ask.phase in takers:
            name, take = takers[ask.phase]
            if ask.phase == "table" and (self.chosen or (0, b""))[0] == ask.number:
                return Receipt("refused", client, f"the settings of publication {ask.number} were chosen already")
            receipt = take(payloads.get(name, b""), client)
            if ask.phase in ("describe", "evaluate"):
                self.closed.close(ask.key, "answered")
            return receipt
        if ask.phase == "refine":
            self.coordinator.confirm(client, ask.number)
            if "metrics" in payloads:  # a site that reports need not be asked for it separately
                self.coordinator.metrics(payloads["metrics"], client)
        else:
            self.closed.close(ask.key, "answered")
        return None

    def _failed(self, ask: Ask, why: str, *, again: bool, declined: bool = False) -> None:
        if again:
            self.closed.broken(ask.key, why)
        else:
            self.closed.close(ask.key, why)
        if ask.client is not None and declined and ask.phase == "describe":
            self.closed.close((ask.client, "statistics", 0), why)
        event = "declined" if declined else "failed"
        self.events(event, client=ask.client, phase=ask.phase, number=ask.number, reason=why)

    # Going on

    def _decide(self) -> bool:
        """Settle, publish or choose, when everyone has answered or the deadline has passed."""
        state = Answers(self.coordinator)
        stage = ("describe", 0) if not state.settled else ("statistics", 0) if state.current is None else (
            ("table", state.current) if self._choosing(state) else ("refine", state.current)
        )  # fmt: skip
        if stage != self.stage:
            self.stage, self.stage_began = stage, time.monotonic()
        phase, number = stage
        waiting = self._waiting(phase, number, state)
        late = time.monotonic() - self.stage_began > self.policy.deadline
        if waiting and not late:
            return False
        if phase == "describe":
            if len(state.described) < self.coordinator.draft.quorum:
                return False
            self.coordinator.settle()
            self.events("settled", clients=sorted(state.described), late=sorted(waiting))
            return True
        if phase == "table":
            if not state.tabled:
                return False
            self._choice(number)
            return True
        if self.coordinator.ready():
            publication = self.coordinator.publish()
            self.events(
                "published", number=publication.number, members=list(publication.members), late=sorted(waiting),
                n=publication.n_samples, gamma=publication.gamma,
            )  # fmt: skip
            return True
        return False

    def _waiting(self, phase: str, number: int, state: Answers) -> Collection[str]:
        """Who has yet to answer in this stage."""
        there = self.sites.everyone()
        answered = {
            "describe": state.described, "statistics": state.contributed, "table": state.tabled,
            "refine": state.confirmed,
        }[phase]  # fmt: skip
        wanted = there | (self.sites.admitted if phase in ("describe", "statistics") else frozenset())
        if phase == "table":
            wanted = there & state.members
        if phase == "refine":
            wanted = there - state.next_members
        key = number if phase in ("table", "refine") else 0
        out = {who for who in wanted if who not in answered and (who, phase, key) not in self.closed}
        if phase == "refine":  # before anything new is published, whoever is sending statistics may finish
            out |= {ask.client or str(ask.node) for ask in self.asked.values() if ask.phase == "statistics"}
        return out - state.gone

    def _done(self) -> bool:
        """Nothing can be asked and nobody is waited for, or the deadline of the last stage has passed."""
        state = Answers(self.coordinator)
        late = time.monotonic() - self.stage_began > self.policy.deadline
        waiting = self._waiting(*self.stage, state)
        if late:
            return True
        if waiting or (self.stage[0] != "refine"):
            return False
        return not any(ask.phase in ("evaluate", "predict") for ask in self.asked.values()) and not any(
            self._next(node, client, state) for node, client in self.sites.online.items()
        )
