"""Which sites are connected, and by what right they bear their names.

A site with a key is called what its key is registered as. Without keys, on loopback, a site is called what it says, and
that is remembered, so that it need not be asked again after the server was killed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apfl.federate.flower.admission import read_registered
from apfl.federate.flower.keys import public_keys
from apfl.files import replacing

if TYPE_CHECKING:
    from flwr.serverapp import Grid

__all__ = ["Presence", "read_names"]

LOOK = 1.0  # seconds between two looks


class Presence:
    """The connected sites, by Flower's number of their node."""

    def __init__(self, grid: Grid, folder: Path) -> None:
        self.grid, self.file, self.keys = grid, folder / "flower" / "nodes.json", folder / "keys"
        self.registered = folder / "flower" / "registered.json"
        self.names = read_names(self.file)
        self.vouched: set[int] = set()  # nodes whose key says who they are
        self.admitted: frozenset[str] = frozenset()  # sites with a key here, connected or not
        self.online: dict[int, str | None] = {}
        self._looked = -LOOK

    def look(self) -> None:
        """See who is connected now."""
        if time.monotonic() - self._looked < LOOK:
            self.online = {node: self.names.get(node) for node in self.online}
            return
        self._looked, self.online = time.monotonic(), {}
        self.admitted = frozenset(public_keys(self.keys))
        registered = read_registered(self.registered)
        for node in self.grid.get_nodes():
            if node.name:
                if node.name not in self.admitted:  # it left, or its key was taken away
                    continue
                site = registered.get(node.name)
                if site is not None and site.node not in ("", str(node.node_id)):  # it has another key by now
                    continue
                self.vouched.add(node.node_id)
                self.names[node.node_id] = node.name
            self.online[node.node_id] = self.names.get(node.node_id)

    def learn(self, node: int, name: str) -> None:
        """Remember what a site called itself."""
        if node not in self.names:
            self.names[node] = name
            with replacing(self.file) as temporary:
                temporary.write_text(json.dumps(self.names))


def read_names(path: Path) -> dict[int, str]:
    """Number of the node -> what the site there called itself."""
    try:
        return {int(node): str(name) for node, name in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
