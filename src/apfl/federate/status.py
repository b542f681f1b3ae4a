"""Where a federation stands, as plain values; can be asked while a coordinator works in the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from apfl.federate.ledger import Ledger
from apfl.federate.terms import Terms

__all__ = ["status", "status_of"]

N_RECENT = 20


def status_of(folder: str | Path) -> dict[str, Any]:
    """`status` of a folder that another process may be writing to."""
    ledger = Ledger(folder, writer=False)
    try:
        return status(ledger)
    finally:
        ledger.close()


def status(ledger: Ledger) -> dict[str, Any]:
    """Who joined, answered and is waited for; bytes; publications with their members; refusals; what happened last."""
    ledger.db.execute("BEGIN")  # all that follows is of one moment
    try:
        return _status(ledger)
    finally:
        ledger.db.execute("COMMIT")


def _status(ledger: Ledger) -> dict[str, Any]:
    draft = Terms.from_json(ledger.get("draft") or "{}")
    settled = ledger.get("terms")
    terms = draft if settled is None else Terms.from_json(settled)
    publications = [
        {**row, "members": [m["client"] for m in ledger.rows(MEMBERS, row["number"])]}
        for row in ledger.rows("SELECT number, sha256, bytes, gamma, n, created FROM publications ORDER BY number")
    ]
    current = publications[-1]["number"] if publications and ledger.get("stale") != "1" else None
    clients = [_client(ledger, row, current) for row in ledger.rows(CLIENTS, current)]
    tables = [row["name"] for row in clients if row["table"]]
    return {
        "federation": draft.federation,
        "phase": _phase(terms, clients, current, len(tables)),
        "terms": json.loads(terms.to_json()) | {"digest": terms.digest, "settled": terms.settled},
        "quorum": draft.quorum,
        "clients": clients,
        "publications": publications,
        "current": current,
        "tables": tables,
        "bytes_up": sum(row["bytes_up"] for row in clients),
        "refusals": ledger.rows("SELECT * FROM refusals ORDER BY id DESC LIMIT ?", N_RECENT),
        "n_refusals": (ledger.row("SELECT COUNT(*) AS n FROM refusals") or {})["n"],
        "events": [
            {**row, "detail": json.loads(row["detail"])}
            for row in ledger.rows("SELECT * FROM events ORDER BY id DESC LIMIT ?", N_RECENT)
        ],
    }


MEMBERS = "SELECT client FROM members WHERE publication = ? ORDER BY client"
CLIENTS = """
SELECT k.name, k.since, k.gone, d.n AS described, d.bytes AS description_bytes, c.n, c.sha256, c.form,
  c.bytes AS contribution_bytes, c.folded, c.received, t.bytes AS table_bytes, m.accuracy, m.n_test,
  m.publication AS measured
FROM clients k LEFT JOIN descriptions d ON d.client = k.name LEFT JOIN contributions c ON c.client = k.name
  LEFT JOIN tables t ON t.client = k.name AND t.publication = ? LEFT JOIN metrics m ON m.client = k.name
ORDER BY k.name
"""


def _client(ledger: Ledger, row: dict[str, Any], current: int | None) -> dict[str, Any]:
    held = ledger.rows("SELECT publication FROM holders WHERE client = ? ORDER BY publication", row["name"])
    sizes = [row.pop(name) or 0 for name in ("description_bytes", "contribution_bytes")]
    table = row.pop("table_bytes")
    folded = row.pop("folded")
    if row["n"] is not None:
        state = "member" if folded else "pending"
    else:
        state = "gone" if row["gone"] else "described" if row["described"] else "visitor"
    return {
        **row,
        "state": state,
        "table": table is not None,
        "bytes_up": sum(sizes) + (table or 0),
        "holds": [each["publication"] for each in held],
    }


def _phase(terms: Terms, clients: list[dict[str, Any]], current: int | None, n_tables: int) -> str:
    """What the federation waits for next."""
    if not terms.settled:
        return "describing"
    if current is None:
        return "contributing"
    members = sum(row["state"] == "member" for row in clients)
    return "choosing" if terms.wants_tables and n_tables < members else "published"
