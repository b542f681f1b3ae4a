"""Start a run at the server, and look on from outside: through its events, without asking it anything."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apfl.errors import InputError, printable
from apfl.federate.flower.bundle import remove_broken_app
from apfl.federate.flower.events import Events
from apfl.federate.flower.processes import CONNECTION, Server
from apfl.files import check_room, is_held

__all__ = ["follow", "start_run"]

START = 90.0  # seconds from being accepted until the run says that it started


def start_run(server: Server, **config: str | float | bool) -> str:
    """Submit a run with these settings; its number."""
    if not server.answers():
        raise InputError(f"no server answers at {server.address}; start it: apfl federate server {server.folder}")
    check_room(server.folder)
    remove_broken_app(server.home)
    words = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
    done = server.flwr("run", str(server.home / "app"), CONNECTION, "--run-config", words)
    match = re.search(r"started run (\d+)", done.stdout + done.stderr)
    if done.returncode or not match:
        raise InputError(f"the server did not start a run: {printable((done.stdout + done.stderr).strip()[-400:])}")
    return match.group(1)


def follow(folder: Path, run_id: str, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Pass on the events of a run until its last one, which is returned; raise if the run died."""
    position, began, started = 0, time.monotonic(), False
    while True:
        # Before reading: what a run wrote at its end is read after it was seen to have ended.
        ended = is_held(folder / "lock") is False
        for position, event in Events.read(folder / "events.jsonl", position):  # noqa: B007, B020
            if event["run"] != run_id:
                continue
            started = True
            tell(event)
            if event["event"] == "finished":
                return event
            if event["event"] == "crashed":
                raise InputError(f"the run stopped: {event['reason']}")
        if started and ended:
            check_room(folder)  # a full disk ends a run without its last word
            raise InputError(
                f"run {run_id} was killed; run again: nothing that has arrived is asked for again "
                f"(apfl federate run {folder})"
            )
        if not started and time.monotonic() - began > START:
            raise InputError(f"run {run_id} has not begun; see {folder / 'flower' / 'superlink.log'}")
        time.sleep(0.2)
