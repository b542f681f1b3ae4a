"""Where a federation stands, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from apfl.report.terminal import human_bytes

__all__ = ["status_view"]

STATES = {
    "member": "in the sum", "pending": "waits for the next publication", "described": "has described its rows",
    "visitor": "has not contributed", "gone": "left", "expected": "not seen yet",
}  # fmt: skip


def status_view(status: Mapping[str, Any], expected: Sequence[str] = (), lines: Sequence[str] = ()) -> RenderableType:
    """Who joined, answered and is late; bytes; membership; accuracy where it was reported; what happened last."""
    current = status["current"]
    latest = next((each for each in status["publications"] if each["number"] == current), None)
    terms = status["terms"]
    head = f"federation {status['federation']}   {status['phase']}   quorum {status['quorum']}"
    if terms["settled"]:
        head += f"   width {terms['method']['d_primary']}   {len(terms['class_names'])} classes"
    table = Table("site", "state", "rows", "sent", "table", "holds", "accuracy", "last heard of", title=head)
    for row in status["clients"]:
        table.add_row(*_row(row, current))
    known = {row["name"] for row in status["clients"]}
    for name in sorted(set(expected) - known):
        table.add_row(name, STATES["expected"], "", "", "", "", "", "")
    if latest is None:
        told = "nothing is published yet"
    else:
        members = ", ".join(latest["members"])
        told = f"publication {current}: {latest['n']:,} rows of {len(latest['members'])} sites ({members}), "
        told += f"gamma {latest['gamma']:.3g}"
    parts: list[RenderableType] = [table, Text(f"{told}   received {human_bytes(status['bytes_up'])}")]
    if status["n_refusals"]:
        last = status["refusals"][0]
        parts.append(Text(f"{status['n_refusals']} refused; last: {last['client'] or '?'}, {last['reason']}", "yellow"))
    return Group(*parts, *(Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines))


def _row(row: Mapping[str, Any], current: int | None) -> list[str]:
    rows = row["n"] if row["n"] is not None else row["described"]
    accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.4f} on {row['n_test']}"
    heard = row["received"] or row["since"]
    return [
        row["name"], STATES[row["state"]], "" if rows is None else f"{rows:,}", human_bytes(row["bytes_up"]),
        "yes" if row["table"] else "late" if row["state"] == "member" and current else "",
        ", ".join(map(str, row["holds"])), accuracy, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(heard)),
    ]  # fmt: skip
