"""Who is connected now, and when each site was last heard of; read from files, without asking the server.

Flower's database says who is connected. A site counts as connected until two of its signs of life have not come.
What a site answered is in ``events.jsonl``.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from apfl.federate.flower.admission import read_registered
from apfl.federate.flower.presence import read_names
from apfl.files import is_held

__all__ = ["Contact", "contacts"]

MISSED = 2  # signs of life, after which Flower takes a site for gone
NODES = "SELECT node_id, name, status, online_until, heartbeat_interval FROM node WHERE online_until IS NOT NULL"


class Contact(NamedTuple):
    """Whether a site is connected, and when (seconds since 1970) it was last heard of."""

    connected: bool
    heard: float


def contacts(folder: Path, events: Iterable[Mapping[str, Any]] = ()) -> dict[str, Contact]:
    """Name -> contact, of every site that has connected or answered; one without a name is called ``node NUMBER``."""
    home = folder / "flower"
    found: dict[str, Contact] = {}
    for event in events:
        if event["event"] == "answered":
            _note(found, str(event["client"]), Contact(False, event["at"]))
    running = is_held(home / "server.lock") is not False
    registered, names = read_registered(home / "registered.json"), read_names(home / "nodes.json")
    for node_id, name, status, until, interval in _nodes(home / "superlink.db"):
        node = node_id % 2**64  # SQLite's integers have a sign
        if name in registered and registered[name].node not in ("", str(node)):  # the site has another key by now
            continue
        connected = running and status == "online" and until > time.time()
        heard = until - MISSED * interval if status == "online" else until
        _note(found, name or names.get(node, f"node {node}"), Contact(connected, heard))
    return found


def _note(found: dict[str, Contact], name: str, contact: Contact) -> None:
    """Add what was heard of a site to what is known of it."""
    before = found.get(name, contact)
    found[name] = Contact(before.connected or contact.connected, max(before.heard, contact.heard))


def _nodes(database: Path) -> list[tuple[Any, ...]]:
    """What Flower knows of the sites; nothing if it has no such database, or one of another form."""
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(NODES).fetchall()
    except sqlite3.Error:
        return []
