"""A run at the server: open the ledger, talk to the sites, close it.

The federation's folder comes from APFL_FEDERATION, which ``apfl federate server`` sets, or from the run's ``folder``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from apfl.errors import InputError
from apfl.federate.coordinator import Coordinator
from apfl.federate.flower.bundle import DEADLINE
from apfl.federate.flower.client_app import SIMULATION
from apfl.federate.flower.conversation import PAUSE, Conversation, Policy
from apfl.federate.flower.events import Events
from apfl.federate.flower.presence import Presence
from apfl.federate.flower.wire import content, parts

__all__ = ["app"]

WAIT = 60.0  # seconds for a run before this one to let go of the ledger

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Everything the ledger lacks is asked for, what comes is taken, and the primary is published."""
    config = context.run_config
    told = os.environ.get("APFL_FEDERATION") or str(config.get("folder") or "")
    if not told:
        raise InputError("no folder given; start the server with apfl federate server, or give --run-config folder=")
    folder = Path(told)
    events = Events(folder, str(context.run_id))
    policy = Policy(
        deadline=float(config.get("deadline") or DEADLINE),
        linger=float(config.get("linger") or 0),
        evaluate=bool(config.get("evaluate")) or SIMULATION in os.environ,
    )
    try:
        with Coordinator(folder, wait=WAIT) as coordinator:
            events("started", deadline=policy.deadline, linger=policy.linger)
            leaver = str(config.get("leave") or "")
            if leaver:
                data = _fetch_back(grid, coordinator, leaver, policy.deadline, Presence(grid, folder))
                take_out = coordinator.forget if config.get("forget") else coordinator.leave
                events("finished", published=True, evidence=take_out(leaver, data).to_json())
                return
            published = Conversation(grid, coordinator, policy, events, folder).run()
            status = coordinator.status()
            events(
                "finished", published=published, number=status["current"], phase=status["phase"],
                members=sorted(row["name"] for row in status["clients"] if row["state"] == "member"),
                quorum=status["quorum"],
            )  # fmt: skip
    except Exception as error:
        events("crashed", reason=f"{type(error).__name__}: {error}")
        raise


def _fetch_back(grid: Grid, coordinator: Coordinator, client: str, deadline: float, sites: Presence) -> bytes:
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
                (asked,) = grid.push_messages([Message(content(payloads), nodes[0], "train.sent")])
        for reply in grid.pull_messages([asked]) if asked else ():
            if reply.has_error():
                asked = None
                continue
            settings, found = parts(reply)
            if "failed" in settings:
                raise InputError(f"{client} could not send again what it sent: {settings['failed']}")
            return found["statistics"]
        time.sleep(PAUSE)
    raise InputError(
        f"{client} did not send again what it sent within {deadline:.0f} s; connect it, or give the file from its "
        "folder with --contribution"
    )
