"""A run at the server: open the ledger, talk to the sites, close it.

The federation's folder comes from APFL_FEDERATION, which ``apfl federate server`` sets, or from the run's ``folder``.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from apfl.deploy import Coordinator
from apfl.errors import InputError
from apfl.flower.client_app import SIMULATION
from apfl.flower.conversation import Conversation, Policy, fetch_back
from apfl.flower.events import Events

__all__ = ["app"]

DEADLINE = 600.0
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
        deadline=float(config.get("deadline") or 0) or DEADLINE,
        linger=float(config.get("linger") or 0),
        evaluate=bool(config.get("evaluate")) or SIMULATION in os.environ,
        predict=bool(config.get("predict")),
    )
    try:
        with Coordinator(folder, wait=WAIT) as coordinator:
            events("started", deadline=policy.deadline, linger=policy.linger)
            leaver = str(config.get("leave") or "")
            if leaver:
                data = fetch_back(grid, coordinator, leaver, policy.deadline)
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
