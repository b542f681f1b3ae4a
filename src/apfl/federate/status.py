"""Where a federation stands and what it has come to; can be asked while a coordinator works in the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from apfl.errors import InputError
from apfl.federate.ledger import Ledger, Row
from apfl.federate.messages import open_publication
from apfl.federate.terms import Terms
from apfl.models.dual_stream import DualStream

__all__ = ["primary_model", "status", "status_of", "summary"]

N_RECENT = 20
SHOWN = ("number", "sha256", "bytes", "gamma", "n", "created")  # of a publication


def status_of(folder: str | Path) -> dict[str, Any]:
    """`status` of a folder that another process may be writing to."""
    ledger = Ledger(folder, writer=False)
    try:
        return status(ledger)
    finally:
        ledger.close()


def status(ledger: Ledger) -> dict[str, Any]:
    """Who joined, answered and is waited for; bytes; publications with their members; refusals; what happened last."""
    with ledger.snapshot():
        return _status(ledger)


def _status(ledger: Ledger) -> dict[str, Any]:
    draft = Terms.from_json(ledger.get("draft") or "{}")
    settled = ledger.get("terms")
    terms = draft if settled is None else Terms.from_json(settled)
    publications = [
        {key: row[key] for key in SHOWN} | {"members": list(ledger.members(row["number"]))}
        for row in ledger.publications()
    ]
    latest = ledger.current()
    current = None if latest is None else latest["number"]
    clients = [_client(ledger, row) for row in ledger.overview(current)]
    refusals, n_refusals = ledger.refusals(N_RECENT)
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
        "refusals": refusals,
        "n_refusals": n_refusals,
        "events": ledger.events(N_RECENT),
    }


def _client(ledger: Ledger, row: Row) -> dict[str, Any]:
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
        "holds": ledger.held_by(row["name"]),
    }


def _phase(terms: Terms, clients: list[dict[str, Any]], current: int | None, n_tables: int) -> str:
    """What the federation waits for next."""
    if not terms.settled:
        return "describing"
    if current is None:
        return "contributing"
    members = sum(row["state"] == "member" for row in clients)
    return "choosing" if terms.wants_tables and n_tables < members else "published"


def summary(folder: str | Path) -> dict[str, Any]:
    """Members, rows, settings and reported accuracies of the current publication."""
    state = status_of(folder)
    current = next((row for row in state["publications"] if row["number"] == state["current"]), None)
    if current is None:
        raise InputError(_nothing(state, folder))
    reported = {row["name"]: row["accuracy"] for row in state["clients"] if row["measured"] == current["number"]}
    values = {
        "federation": state["federation"], "publication": current["number"], "members": current["members"],
        "rows": current["n"], "gamma": current["gamma"], "width": state["terms"]["method"]["d_primary"],
        "classes": state["terms"]["class_names"], "sha256": current["sha256"],
    }  # fmt: skip
    if reported:
        values["accuracy"] = [f"{name} {value:.4f}" for name, value in sorted(reported.items())]
        values["accuracy_client_mean"] = sum(reported.values()) / len(reported)
    return values


def primary_model(folder: str | Path, path: str | Path) -> DualStream:
    """The current primary as a model, written to ``path``: what a new site has before it refines."""
    ledger = Ledger(folder, writer=False)
    try:
        row = ledger.current()
        if row is None:
            raise InputError(_nothing(status(ledger), folder))
        terms = Terms.from_json(ledger.get("terms") or "")
        published = open_publication(ledger.blobs.read(row["blob"]), terms)
    finally:
        ledger.close()
    model = DualStream(
        terms.maps(torch.zeros(1, 1))[0], published.weights, normaliser=terms.normaliser(),
        class_names=terms.class_names,
    )  # fmt: skip
    model.save(path)
    return model


def _nothing(state: dict[str, Any], folder: str | Path) -> str:
    return f"nothing is published yet ({state['phase']}); first: apfl federate run {folder}"
