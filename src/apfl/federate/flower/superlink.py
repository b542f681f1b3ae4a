"""Flower's SuperLink, with only the part for sites open to others than its own user.

The SuperLink serves three interfaces on one port: for sites (fleet), for whoever starts runs and admits sites
(control), and for its own processes (runtime). Flower asks for no credentials on the last two, and a run is code. So
requests from other machines, and of other users of this one, reach the fleet alone (`peers`); and without keys on
loopback, where only the server's own user is meant to take part, not even that.

Run as ``python -m apfl.federate.flower.superlink`` with the arguments of ``flower-superlink``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from apfl.errors import InputError
from apfl.federate.flower.admission import Admitted
from apfl.federate.flower.asgi import FLEET, App, Receive, Scope, Send
from apfl.federate.flower.events import Events
from apfl.federate.flower.executor import keep_executor
from apfl.federate.flower.fleet import BoundedBodies, Replies, registered
from apfl.federate.flower.orphan import end_with_parent
from apfl.federate.flower.peers import OWN, protocol
from apfl.federate.flower.processes import is_loopback
from apfl.federate.flower.telling import tame_logs, tell

__all__ = ["FleetOnly", "Patient", "paths_for_others"]

HEALTH = "/health"
OPEN = (FLEET, HEALTH)


class FleetOnly:
    """An ASGI application that answers others than its own user only where sites need it."""

    def __init__(self, app: App, open_paths: tuple[str, ...] = OPEN) -> None:
        self.app, self.open_paths = app, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = scope.get("state", {}).get(OWN, False)
        if scope["type"] == "lifespan" or own or scope["path"].startswith(self.open_paths):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only for the user that runs this process\n"})


class Patient:
    """An ASGI application that tells sites to try again if the server cannot serve them now, because its disk is full.

    Flower's sites repeat a request that is answered 503. At 500 they drop an answer that was to be sent, and their
    sign of life stops for good: the server would never ask them again.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Any) -> None:
            failed = message["type"] == "http.response.start" and message["status"] == 500
            await send(message | {"status": 503} if failed else message)

        await self.app(scope, receive, patient if scope.get("path", "").startswith(FLEET) else send)


def main() -> None:
    """Start the SuperLink behind the guard."""
    import uvicorn
    from flwr.superlink.servicer.fleet import fleet_handlers

    link = import_module("flwr.superlink.cli.flower_superlink")  # Flower has a function of this name, too
    tame_logs()
    end_with_parent()
    keep_executor(link, _tell_restart)
    serve = uvicorn.run
    fleet_handlers.push_messages = Replies(fleet_handlers.push_messages)

    def guarded(app: Any, **options: Any) -> None:
        inner: App = BoundedBodies(app, registered(app.state.linkstate_factory.state))
        folder = os.environ.get("APFL_FEDERATION", "")
        if folder and "--enable-supernode-auth" in sys.argv:
            inner = Admitted(inner, Path(folder) / "keys")  # outside: Flower never takes a key back
        # Behind a proxy on this machine every request would look local: believe no forwarded header.
        door = FleetOnly(Patient(inner), paths_for_others(sys.argv))
        serve(door, **(options | {"proxy_headers": False, "http": protocol()}))

    uvicorn.run = guarded
    link.flower_superlink()


def paths_for_others(words: Sequence[str]) -> tuple[str, ...]:
    """What a SuperLink with these arguments serves to others than its own user.

    >>> paths_for_others(["--host", "127.0.0.1", "--insecure"])
    ('/health',)
    """
    host = words[words.index("--host") + 1] if "--host" in words else ""
    return (HEALTH,) if "--insecure" in words and is_loopback(host) else OPEN


def _tell_restart(text: str) -> None:
    """Say it in the log, and in the events that `apfl federate status` reads."""
    tell(text)
    folder = os.environ.get("APFL_FEDERATION")
    if folder:
        with suppress(InputError):  # a full disk: the log has said it
            Events(Path(folder), "")("restarted", reason=text)


if __name__ == "__main__":
    main()
