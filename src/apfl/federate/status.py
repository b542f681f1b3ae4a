"""Where a federation stands and what it has come to; can be asked while a coordinator works in the folder.

It is read from the ledger without torch, which takes seconds to import. So the terms are read from their JSON here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from apfl.errors import InputError, printable
from apfl.federate.ledger import Ledger, Row
from apfl.federate.private.account import releases, told
from apfl.federate.wire import sha256

__all__ = ["nothing_published", "status", "status_of", "summary"]

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
    draft = _terms(ledger.get("draft"))
    terms = _terms(next(filter(None, map(ledger.get, ("terms", "outline", "trial", "draft"))), None))
    publications = [
        {key: row[key] for key in SHOWN} | {"members": list(ledger.members(row["number"]))}
        for row in ledger.publications()
    ]
    latest = ledger.current()
    current = None if latest is None else latest["number"]
    influence = ledger.influence(latest)
    beside = Counter(ledger.spread_bytes()) + Counter(ledger.pilot_bytes()) + Counter(ledger.stage_bytes(current))
    clients = [_client(ledger, row, influence, beside.get(row["name"], 0)) for row in ledger.overview(current)]
    stage = _stage(ledger, terms, current)
    if stage is not None:
        for row in clients:
            row["table"] = row["name"] in stage[1]
    refusals, n_refusals = ledger.refusals(N_RECENT)
    tables = [row["name"] for row in clients if row["table"]]
    return {
        "federation": draft["federation"],
        "phase": _phase(terms, clients, current, len(tables), stage is not None and bool(stage[0])),
        "terms": terms,
        "quorum": draft["quorum"],
        "clients": clients,
        "publications": publications,
        "current": current,
        "tables": tables,
        "bytes_up": sum(row["bytes_up"] for row in clients),
        "refusals": [row | {"reason": printable(row["reason"], 1000)} for row in refusals],
        "n_refusals": n_refusals,
        "pilot": json.loads(ledger.get("pilot") or "null"),
        "masked": _masked(ledger, terms, current),
        "privacy": _privacy(ledger, terms),
        "events": ledger.events(N_RECENT),
    }


def _masked(ledger: Ledger, terms: dict[str, Any], current: int | None) -> dict[str, Any] | None:
    """Under masks, what is known of all sites together; None without."""
    if not terms.get("masked"):
        return None
    kept = json.loads(ledger.get("sums of metrics") or "{}")
    sums = list(kept.get("sums", {}).values()) if kept.get("publication") == current else []
    right, n_test, reports = (sum(each[i] for each in sums) for i in range(3))
    return {"accuracy": right / n_test if n_test else None, "n_test": n_test, "reports": reports}


def _privacy(ledger: Ledger, terms: dict[str, Any]) -> dict[str, Any] | None:
    """Under epsilon, the account; None without."""
    method = terms["method"]
    if method.get("epsilon", "none") == "none":
        return None
    return told(releases(ledger), method, terms["releases"])


def _terms(text: str | None) -> dict[str, Any]:
    """The terms as the ledger has them, with their digest and whether they are settled."""
    try:
        terms: dict[str, Any] = json.loads(text or "")
    except ValueError as error:
        raise InputError("the ledger's terms are no JSON; restore the folder from a backup") from error
    return terms | {"digest": sha256((text or "").encode()), "settled": terms.get("fingerprints") is not None}


def _stage(ledger: Ledger, terms: dict[str, Any], current: int | None) -> tuple[str, frozenset[str]] | None:
    """With columns as targets, the stage of the choice that waits for tables, and whose are here; None with classes.

    Once all is chosen the stage is empty, and the tables are those of the last one.
    """
    target = terms.get("target", "classification")
    if target == "classification":
        return None
    if current is None:
        return "", frozenset()
    last = "thresholds" if target == "multilabel" else "errors"
    if ledger.chosen_in(current, last) is not None:
        return "", ledger.staged(current, last)
    open_yet = [each for each in ("likelihoods", "errors") if ledger.chosen_in(current, each) is None]
    stage = next((each for each in open_yet if ledger.staged(current, each)), open_yet[0] if open_yet else last)
    return stage, ledger.staged(current, stage)


def _wants_tables(terms: dict[str, Any]) -> bool:
    """`Terms.wants_tables`."""
    method = terms["method"]
    chosen = (method[name] for name in ("beta", "balance", "tau"))
    alone = method["scope"] == "client" or method.get("epsilon", "none") != "none"
    return "auto" in (*chosen, method.get("weight")) and not alone


def _client(ledger: Ledger, row: Row, influence: dict[str, float], moments: int) -> dict[str, Any]:
    sizes = [moments, *(row.pop(name) or 0 for name in ("description_bytes", "contribution_bytes"))]
    table = row.pop("table_bytes")
    folded = row.pop("folded")
    if row["n"] is not None:
        state = "member" if folded else "pending"
    else:
        state = "gone" if row["gone"] else "described" if row["described"] else "visitor"
    return {
        **row,
        "state": state,
        "influence": influence.get(row["sha256"]),
        "table": table is not None,
        "bytes_up": sum(sizes) + (table or 0),
        "holds": ledger.held_by(row["name"]),
    }


def _phase(
    terms: dict[str, Any], clients: list[dict[str, Any]], current: int | None, n_tables: int, choosing: bool
) -> str:
    """What the federation waits for next."""
    if not terms["settled"]:
        first = "counting" if terms.get("masked") else "describing"
        if terms.get("most_rows") is None:
            return first
        return "piloting" if terms["method"]["normalise"] == "auto" else "spreading"
    if current is None:
        return "contributing"
    if choosing:
        return "choosing"
    if terms.get("masked") or terms.get("target", "classification") != "classification":
        return "published"
    members = sum(row["state"] == "member" for row in clients)
    return "choosing" if _wants_tables(terms) and n_tables < members else "published"


def summary(folder: str | Path) -> dict[str, Any]:
    """Members, rows, settings and reported accuracies of the current publication."""
    state = status_of(folder)
    current = next((row for row in state["publications"] if row["number"] == state["current"]), None)
    if current is None:
        raise InputError(nothing_published(state, folder))
    reported = {row["name"]: row["accuracy"] for row in state["clients"] if row["measured"] == current["number"]}
    values = {
        "federation": state["federation"], "publication": current["number"], "members": current["members"],
        "rows": current["n"], "gamma": current["gamma"], "width": state["terms"]["method"]["d_primary"],
        "classes": state["terms"]["class_names"], "sha256": current["sha256"],
    }  # fmt: skip
    if state["terms"].get("target", "classification") != "classification":
        values["targets"] = values.pop("classes")
    if state["privacy"]:
        values |= {"epsilon_spent": state["privacy"]["epsilon"], "delta": state["privacy"]["delta"]}
    if reported:
        values["accuracy"] = [f"{name} {value:.4f}" for name, value in sorted(reported.items())]
        values["accuracy_client_mean"] = sum(reported.values()) / len(reported)
    return values


def nothing_published(state: dict[str, Any], folder: str | Path) -> str:
    """That there is no primary yet, and what to do."""
    return f"nothing is published yet ({state['phase']}); first: apfl federate run {folder}"
