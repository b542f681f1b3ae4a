"""Flower's SuperNode, for apfl's app alone.

Flower's servers send the code that sites run. Here the bundle holds none (`bundle`), and any other than the one this
installation would make itself is turned away: a site runs only what it installed.

Run as ``python -m apfl.federate.flower.supernode`` with the arguments of ``flower-supernode``.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apfl.federate.flower.asgi import App
from apfl.federate.flower.bundle import app_hash, remove_broken_app
from apfl.federate.flower.executor import keep_executor
from apfl.federate.flower.orphan import end_with_parent
from apfl.federate.flower.peers import protocol
from apfl.federate.flower.superlink import FleetOnly
from apfl.federate.flower.telling import tame_logs, tell

__all__ = ["main"]


def main() -> None:
    """Start the SuperNode behind the guard."""
    import flwr.supernode.start_client_internal as node
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode.cli.flower_supernode import flower_supernode

    tame_logs()
    end_with_parent()
    keep_executor(node, tell)
    own, connect = app_hash(), node.http_request_response

    @contextmanager
    def guarded(*arguments: Any, **options: Any) -> Iterator[Any]:
        with connect(*arguments, **options) as (node_id, receive, send, get_run, get_fab, *rest):

            def own_app_only(fab_hash: str, run_id: int) -> Any:
                fab = get_fab(fab_hash, run_id)
                if {fab_hash, fab.hash_str, hashlib.sha256(fab.content).hexdigest()} != {own}:
                    logging.getLogger("flwr").error(
                        "refused run %s: the server sent app %s, which is not the one of the apfl installed here (%s); "
                        "server and sites need the same version of apfl",
                        run_id, fab_hash[:8], own[:8],
                    )  # fmt: skip
                    raise RunNotRunningException
                remove_broken_app(Path(os.environ.get("FLWR_HOME", "")))
                return fab

            yield node_id, receive, send, get_run, own_app_only, *rest

    node.http_request_response = guarded
    _keep_to_own_user()
    flower_supernode()


def _keep_to_own_user() -> None:
    """The interface to the site's own processes answers no other user of this machine."""
    import uvicorn

    config = uvicorn.Config

    def guarded(app: App, **options: Any) -> uvicorn.Config:
        return config(FleetOnly(app), **(options | {"http": protocol()}))

    uvicorn.Config = guarded


if __name__ == "__main__":
    main()
