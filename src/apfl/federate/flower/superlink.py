"""Flower's SuperLink, with only the part for sites open to other machines.

The SuperLink serves three interfaces on one port: for sites (fleet), for whoever starts runs and admits sites
(control), and for its own processes (runtime). Flower asks for no credentials on the last two, and a run is code. So
requests from other machines reach the fleet alone; ``apfl federate run`` works on the server itself.

Run as ``python -m apfl.federate.flower.superlink`` with the arguments of ``flower-superlink``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from apfl.federate.flower.orphan import end_with_parent

__all__ = ["FleetOnly"]

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
OPEN = ("/v1/fleet/", "/health")


class FleetOnly:
    """An ASGI application that answers other machines only where sites need it."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or _local(scope) or scope["path"].startswith(OPEN):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only from the server itself\n"})


def _local(scope: Scope) -> bool:
    """Whether the request comes from this machine: from loopback, or from the very address it was sent to."""
    client, server = scope.get("client"), scope.get("server")
    try:
        return client is not None and (
            ipaddress.ip_address(client[0]).is_loopback or (server is not None and client[0] == server[0])
        )
    except ValueError:
        return False


def main() -> None:
    """Start the SuperLink behind the guard."""
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    end_with_parent()
    serve = uvicorn.run

    def guarded(app: App, **options: Any) -> None:
        # Behind a proxy on this machine every request would look local: believe no forwarded header.
        serve(FleetOnly(app), **(options | {"proxy_headers": False}))

    uvicorn.run = guarded
    flower_superlink()


if __name__ == "__main__":
    main()
