"""Publications: the primary stream, numbered, with who is in it and who holds it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from apfl.federate.ledger import Ledger
from apfl.federate.messages import seal_publication
from apfl.federate.pool import Pool
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256
from apfl.maths.leaveout import leverage_sketch
from apfl.maths.personalise import solve_primary

__all__ = ["Publication", "confirm", "deliver", "ever_published", "latest", "load", "membership", "publish"]


@dataclass(frozen=True, eq=False)
class Publication:
    """A published primary stream; ``data`` is what clients are sent."""

    number: int
    data: bytes
    members: tuple[str, ...]
    n_samples: int
    gamma: float


def latest(ledger: Ledger) -> dict[str, Any] | None:
    """The row of the current publication; None before the first, and once someone in it has left."""
    if ledger.get("stale") == "1":
        return None
    return ledger.row("SELECT * FROM publications ORDER BY number DESC LIMIT 1")


def ever_published(ledger: Ledger) -> int:
    """The last number given to a publication; 0 before the first."""
    found = ledger.row("SELECT seq FROM sqlite_sequence WHERE name = 'publications'")
    return 0 if found is None else int(found["seq"])


def membership(ledger: Ledger, number: int) -> dict[str, str]:
    """Who is in a publication, with the hash of what they contributed."""
    found = ledger.rows("SELECT client, sha256 FROM members WHERE publication = ? ORDER BY client", number)
    return {row["client"]: row["sha256"] for row in found}


def load(ledger: Ledger, row: dict[str, Any]) -> Publication:
    """A publication with its bytes."""
    members = tuple(membership(ledger, row["number"]))
    return Publication(row["number"], ledger.blobs.read(row["blob"]), members, row["n"], row["gamma"])


def publish(ledger: Ledger, pool: Pool, terms: Terms) -> Publication:
    """The primary of the sum as it is now; the current publication if that has the same members."""
    members, current = pool.members(), latest(ledger)
    if current is not None and membership(ledger, current["number"]) == members:
        return load(ledger, current)
    stats = pool.running().statistics()
    primary = solve_primary(stats, terms.method.gamma)
    leverage = leverage_sketch(primary.factor, terms.method.sketch, terms.seed) if terms.wants_leverage else None
    unit = primary.unit(terms.refinement_width)
    number = ever_published(ledger) + 1
    data = seal_publication(
        terms, number, primary.weights, primary.gamma, unit, stats.class_counts, leverage, list(members.values())
    )
    blob = f"publication-{number}.safetensors"
    ledger.blobs.put(blob, data)
    with ledger.transaction():
        ledger.insert(
            "publications", number=number, blob=blob, sha256=sha256(data), bytes=len(data), gamma=primary.gamma,
            unit=unit, n=stats.n_samples, created=time.time(),
        )  # fmt: skip
        for client, digest in members.items():
            ledger.insert("members", publication=number, client=client, sha256=digest)
        ledger.put("stale", "0")
        ledger.event("published", number=number, members=len(members), n=stats.n_samples, gamma=primary.gamma)
    return Publication(number, data, tuple(members), stats.n_samples, primary.gamma)


def deliver(ledger: Ledger, client: str, number: int) -> None:
    """Note that a client was sent a publication, and may hold it from now on."""
    with ledger.transaction():
        ledger.know(client)
        ledger.db.execute("INSERT OR IGNORE INTO holders VALUES (?, ?, ?, NULL)", (client, number, time.time()))


def confirm(ledger: Ledger, client: str, number: int) -> None:
    """Note that a client has refitted to a publication, and no longer holds an earlier one."""
    with ledger.transaction():
        ledger.db.execute("DELETE FROM holders WHERE client = ? AND publication < ?", (client, number))
        ledger.db.execute(
            "UPDATE holders SET confirmed = ? WHERE client = ? AND publication = ?", (time.time(), client, number)
        )
