"""Which sites are connected, and by what right they bear their names.

A site with a key is called what its key is registered as. Without keys, on loopback, a site is called what it says, and
that is remembered, so that it need not be asked again after the server was killed.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.serverapp import Grid

from apfl.federate.flower.keys import public_keys
from apfl.files import replacing

__all__ = ["Presence"]

LOOK = 1.0  # seconds between two looks


class Presence:
    """The connected sites, by Flower's number of their node."""

    def __init__(self, grid: Grid, folder: Path) -> None:
        self.grid, self.file, self.keys = grid, folder / "flower" / "nodes.json", folder / "keys"
        self.names = _read_names(self.file)
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
        for node in self.grid.get_nodes():
            if node.name:
                if node.name not in self.admitted:  # it left, or its key was taken away
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

    def everyone(self) -> set[str]:
        """The connected sites: by name, or by number while they have not said one."""
        return {client or str(node) for node, client in self.online.items()}


def _read_names(path: Path) -> dict[int, str]:
    try:
        return {int(node): str(name) for node, name in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
