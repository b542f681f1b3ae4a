"""In the terminal: where a federation stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from apfl.report.units import human_bytes

__all__ = ["status_view"]

STATES = {
    "member": "in the sum", "pending": "waits for the next publication", "described": "has described its rows",
    "visitor": "has not contributed", "gone": "left", "expected": "not seen yet", "connected": "not asked yet",
    "away": "has connected before",
}  # fmt: skip


def status_view(status: Mapping[str, Any], expected: Sequence[str] = (), lines: Sequence[str] = ()) -> RenderableType:
    """Who joined, answered and is late; bytes; membership; accuracy where it was reported; what happened last."""
    parts: list[RenderableType] = [_sites(status, expected)]
    parts.append(Text(f"{_publication(status)}   received {human_bytes(status['bytes_up'])}"))
    if status.get("pilot") or status["phase"] == "piloting":
        parts.append(Text(_pilot(status.get("pilot"))))
    if status["terms"]["method"].get("map") == "landmarks":
        parts.append(Text(_landmarks(status["terms"])))
    if status.get("masked"):
        parts.append(Text(_masked(status["masked"])))
    if status.get("privacy"):
        parts.append(Text(_privacy(status["privacy"])))
    if status.get("admitted"):
        admitted = "   ".join(f"{name} {key or '(key not known yet)'}" for name, key in status["admitted"].items())
        parts.append(Text(f"admitted by key: {admitted}"))
    if status["n_refusals"]:
        last = status["refusals"][0]
        parts.append(Text(f"{status['n_refusals']} refused; last: {last['client'] or '?'}, {last['reason']}", "yellow"))
    return Group(*parts, *(Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines))


def _sites(status: Mapping[str, Any], expected: Sequence[str]) -> Table:
    terms = status["terms"]
    title = f"federation {status['federation']}   {status['phase']}   quorum {status['quorum']}"
    if terms["settled"]:
        noun = {"regression": "targets", "multilabel": "labels"}.get(terms.get("target", ""), "classes")
        title += f"   width {terms['method']['d_primary']}   {len(terms['class_names'])} {noun}"
    table = Table(
        "site", "state", "rows", "influence", "sent", "table", "holds", "accuracy", "last heard of", title=title
    )
    contacts = status.get("contacts", {})
    for row in status["clients"]:
        table.add_row(*_row(row, status["current"]), _heard(contacts.get(row["name"]), row["received"] or row["since"]))
    for name in sorted({*expected, *contacts} - {row["name"] for row in status["clients"]}):
        contact = contacts.get(name)
        state = "expected" if contact is None else "connected" if contact["connected"] else "away"
        table.add_row(name, STATES[state], *[""] * 6, _heard(contact))
    return table


def _heard(contact: Mapping[str, Any] | None, received: float | None = None) -> str:
    """When a site was last heard of: by Flower, or in an answer of which the ledger has the time."""
    if contact is not None and contact["connected"]:
        return "connected"
    times = [] if received is None else [received]
    times += [] if contact is None else [contact["heard"]]
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(times))) if times else ""


def _publication(status: Mapping[str, Any]) -> str:
    current = status["current"]
    latest = next((each for each in status["publications"] if each["number"] == current), None)
    if latest is None:
        return "nothing is published yet"
    members = latest["members"]
    return (
        f"publication {current}: {latest['n']:,} rows of {len(members)} sites ({', '.join(members)}), "
        f"gamma {latest['gamma']:.3g}"
    )


def _pilot(chosen: Mapping[str, Any] | None) -> str:
    """What the pilot chose, and what the alternatives scored."""
    if chosen is None:
        return "a pilot is under way: sites try every normalisation on a narrow map"
    hits = ", ".join(f"{how} {n:g}" for how, n in sorted(chosen["hits"].items(), key=lambda each: -each[1]))
    return f"normalisation {chosen['normalise']}; left-out rows right in the pilot, of {chosen['rows']:,}: {hits}"


def _landmarks(terms: Mapping[str, Any]) -> str:
    """How many there are, and where they come from."""
    source = terms["method"].get("landmarks", "federation")
    told = {"federation": "everyone's moments", "free": "nobody's rows"}.get(source)
    if told is None:
        told = f"a file of public features ({terms['public_rows']:,} rows, SHA-256 {terms['public_sha256'][:12]})"
    return f"landmarks from {told}" + (f": {terms['n_landmarks']:,}" if terms["settled"] else ", not drawn yet")


def _masked(known: Mapping[str, Any]) -> str:
    """What is known of all sites together, and what is not of any."""
    told = "masked: the server sees sums only, so no site's rows, influence, table or accuracy"
    if known["accuracy"] is None:
        return told
    return f"{told}; accuracy of {known['reports']} sites together {known['accuracy']:.4f} on {known['n_test']:,} rows"


def _privacy(account: Mapping[str, Any]) -> str:
    """What was released, and what may be."""
    return (
        f"epsilon {account['epsilon']:.4g} of {account['allowed']:g} spent with delta {account['delta']:g}, one row "
        f"the unit; {account['releases']} of {account['planned']} releases, noise {account['noise']}"
    )


def _row(row: Mapping[str, Any], current: int | None) -> list[str]:
    masked = row["form"] == "masked"
    rows = None if masked else row["n"] if row["n"] is not None else row["described"]
    accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.4f} on {row['n_test']}"
    influence = "" if row["influence"] is None else f"{100 * row['influence']:.1f} %"
    return [
        row["name"], STATES[row["state"]], "" if rows is None else f"{rows:,}", influence, human_bytes(row["bytes_up"]),
        "yes" if row["table"] else "late" if row["state"] == "member" and current and not masked else "",
        ", ".join(map(str, row["holds"])), accuracy,
    ]  # fmt: skip
