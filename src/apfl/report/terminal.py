"""In the terminal: records as one table, and where a federation stands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from apfl.experiments.record import Record

__all__ = ["human_bytes", "results_table", "status_view"]


def results_table(records: Sequence[Record]) -> Table:
    """One line for each method: means over seeds, spread over clients and over seeds."""
    table = Table(
        title=_title(records),
        caption="acc.: mean over clients of the final model's accuracy on the client's own test rows, in %; "
        "worst: mean of the worst tenth of the clients; up, down: bytes of all clients together",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for heading in ("acc.", "±clients", "±seeds", "worst", "rounds", "up", "down", "sec."):
        table.add_column(heading, justify="right", no_wrap=True)
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record.method, []).append(record)
    means = {method: np.mean([r.accuracy_client_mean for r in own]) for method, own in by_method.items()}
    for method, own in by_method.items():
        name, accuracy, *others = _line(method, own)
        best = means[method] == max(means.values())
        table.add_row(*([f"[bold]{name}[/bold]", f"[bold]{accuracy}[/bold]"] if best else [name, accuracy]), *others)
    return table


def _title(records: Sequence[Record]) -> str:
    first, seeds = records[0], sorted({record.seed for record in records})
    alpha = "" if first.alpha is None else f", alpha {first.alpha:g}"
    return f"{first.data}: {first.n_clients} clients, {first.partition}{alpha}, seeds {', '.join(map(str, seeds))}"


def _line(method: str, records: Sequence[Record]) -> list[str]:
    per_seed = [record.accuracy_client_mean for record in records]
    return [
        method,
        _percent(per_seed),
        _percent([record.accuracy_client_std for record in records]),
        f"{100 * np.std(per_seed, ddof=1):.1f}" if len(records) > 1 else "–",
        _percent([record.accuracy_worst_decile for record in records]),
        str(records[-1].rounds),
        human_bytes(np.mean([record.bytes_up for record in records])),
        human_bytes(np.mean([record.bytes_down for record in records])),
        f"{np.mean([record.seconds for record in records]):.2f}",
    ]


def _percent(fractions: Sequence[float]) -> str:
    return f"{100 * np.mean(fractions):.1f}"


def human_bytes(n: float | np.floating[Any]) -> str:
    """A number of bytes in decimal units.

    >>> human_bytes(4_200_000)
    '4.2 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


STATES = {
    "member": "in the sum", "pending": "waits for the next publication", "described": "has described its rows",
    "visitor": "has not contributed", "gone": "left", "expected": "not seen yet",
}  # fmt: skip


def status_view(status: Mapping[str, Any], expected: Sequence[str] = (), lines: Sequence[str] = ()) -> RenderableType:
    """Who joined, answered and is late; bytes; membership; accuracy where it was reported; what happened last."""
    parts: list[RenderableType] = [_sites(status, expected)]
    parts.append(Text(f"{_publication(status)}   received {human_bytes(status['bytes_up'])}"))
    if status["n_refusals"]:
        last = status["refusals"][0]
        parts.append(Text(f"{status['n_refusals']} refused; last: {last['client'] or '?'}, {last['reason']}", "yellow"))
    return Group(*parts, *(Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines))


def _sites(status: Mapping[str, Any], expected: Sequence[str]) -> Table:
    terms = status["terms"]
    title = f"federation {status['federation']}   {status['phase']}   quorum {status['quorum']}"
    if terms["settled"]:
        title += f"   width {terms['method']['d_primary']}   {len(terms['class_names'])} classes"
    table = Table("site", "state", "rows", "sent", "table", "holds", "accuracy", "last heard of", title=title)
    for row in status["clients"]:
        table.add_row(*_row(row, status["current"]))
    for name in sorted(set(expected) - {row["name"] for row in status["clients"]}):
        table.add_row(name, STATES["expected"], "", "", "", "", "", "")
    return table


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


def _row(row: Mapping[str, Any], current: int | None) -> list[str]:
    rows = row["n"] if row["n"] is not None else row["described"]
    accuracy = "" if row["accuracy"] is None else f"{row['accuracy']:.4f} on {row['n_test']}"
    heard = row["received"] or row["since"]
    return [
        row["name"], STATES[row["state"]], "" if rows is None else f"{rows:,}", human_bytes(row["bytes_up"]),
        "yes" if row["table"] else "late" if row["state"] == "member" and current else "",
        ", ".join(map(str, row["holds"])), accuracy, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(heard)),
    ]  # fmt: skip
