"""A run at the server: open the ledger, talk to the sites, close it.

The federation's folder comes from APFL_FEDERATION, which ``apfl federate server`` sets, or from the run's ``folder``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from apfl.errors import InputError, printable
from apfl.federate.coordinator import Coordinator
from apfl.federate.flower.bundle import DEADLINE
from apfl.federate.flower.client_app import SIMULATION
from apfl.federate.flower.conversation import PAUSE, Conversation, Policy
from apfl.federate.flower.events import Events
from apfl.federate.flower.fleet import largest_reply
from apfl.federate.flower.instructor import Instructor
from apfl.federate.flower.masked import MaskedConversation
from apfl.federate.flower.presence import Presence
from apfl.federate.flower.telling import tame_logs
from apfl.federate.flower.wire import parts, pulled
from apfl.files import check_room

__all__ = ["app"]

WAIT = 60.0  # seconds for a run before this one to let go of the ledger

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Everything the ledger lacks is asked for, what comes is taken, and the primary is published."""
    config = context.run_config
    place = os.environ.get("APFL_FEDERATION") or str(config.get("folder") or "")
    if not place:
        raise InputError("no folder given; start the server with apfl federate server, or give --run-config folder=")
    folder = Path(place)
    events = Events(folder, str(context.run_id))
    policy = Policy(
        deadline=float(config.get("deadline") or DEADLINE),
        linger=float(config.get("linger") or 0),
        evaluate=bool(config.get("evaluate")) or SIMULATION in os.environ,
    )
    if SIMULATION not in os.environ:  # there the process, and its log, are the user's own
        tame_logs()
    try:
        with Coordinator(folder, wait=WAIT) as coordinator:
            events("started", deadline=policy.deadline, linger=policy.linger)
            if coordinator.draft.masked:
                _run_masked(grid, coordinator, policy, events, folder)
                return
            leaver = str(config.get("leave") or "")
            if leaver:
                instructor = Instructor(coordinator, folder, events.run)
                data = _fetch_back(grid, coordinator, leaver, policy.deadline, Presence(grid, folder), instructor)
                take_out = coordinator.forget if config.get("forget") else coordinator.leave
                events("finished", published=True, evidence=take_out(leaver, data).to_json())
                return
            published = Conversation(grid, coordinator, policy, events, folder).run()
            _note_influence(coordinator, events)
            status = coordinator.status()
            events(
                "finished", published=published, number=status["current"], phase=status["phase"],
                members=sorted(row["name"] for row in status["clients"] if row["state"] == "member"),
                quorum=status["quorum"],
            )  # fmt: skip
    except Exception as error:
        events("crashed", reason=_reason(error, folder))
        raise


def _run_masked(grid: Grid, coordinator: Coordinator, policy: Policy, events: Events, folder: Path) -> None:
    """A run in which the server sees sums only."""
    conversation = MaskedConversation(grid, coordinator, policy, events, folder)
    published = conversation.run()
    current = coordinator.current()
    members = sorted(current.members) if current else []
    events(
        "finished", published=published, number=current and current.number, members=members,
        quorum=coordinator.draft.smallest_sum,
    )  # fmt: skip


def _note_influence(coordinator: Coordinator, events: Events) -> None:
    """For the status. What was published stands without it, so nothing about it ends a run."""
    try:
        coordinator.influence()
    except (InputError, ArithmeticError) as error:
        events("influence", reason=f"not known: {error}")


def _reason(error: Exception, folder: Path) -> str:
    """Why a run ended, in a sentence: if Flower's server fails because the disk is full, the disk."""
    if isinstance(error, InputError):
        return str(error)
    try:
        check_room(folder)
    except InputError as full:
        return str(full)
    return f"{type(error).__name__}: {error}"


def _fetch_back(
    grid: Grid, coordinator: Coordinator, client: str, deadline: float, sites: Presence, instructor: Instructor
) -> bytes:
    """What a site sent, from the site itself: where only sums are kept, leaving needs those bytes once more."""
    digest = coordinator.contribution_of(client)
    if digest is None:
        return b""
    payloads = {"terms": coordinator.terms.to_json().encode(), "digest": digest.encode()}
    asked, end = None, time.monotonic() + deadline
    while time.monotonic() < end:
        if asked is None:
            sites.look()
            nodes = [node for node, name in sites.online.items() if name == client]
            if nodes:
                (asked,) = grid.push_messages([instructor.message(payloads, nodes[0], client, "train.sent")])
        for reply in pulled(grid, asked, largest_reply(coordinator.terms)) if asked else ():
            if reply.has_error():
                asked = None
                continue
            settings, answer = parts(reply)
            if "failed" in settings:
                raise InputError(f"{client} could not send again what it sent: {printable(settings['failed'])}")
            return answer.get("statistics", b"")  # then its hash is not the one in the ledger
        time.sleep(PAUSE)
    raise InputError(
        f"{client} did not send again what it sent within {deadline:.0f} s; connect it, or give the file from its "
        "folder with --contribution"
    )
