"""Records as one table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from apfl.experiments.metrics import Record

__all__ = ["human_bytes", "results_table"]


def results_table(records: Sequence[Record]) -> Table:
    """One line for each method: means over seeds, spread over clients and over seeds."""
    first = records[0]
    seeds = sorted({record.seed for record in records})
    alpha = "" if first.alpha is None else f", alpha {first.alpha:g}"
    table = Table(
        title=f"{first.data}: {first.n_clients} clients, {first.partition}{alpha}, seeds {', '.join(map(str, seeds))}",
        caption="acc.: mean over clients of the final model's accuracy on the client's own test rows, in %; "
        "worst: mean of the worst tenth of the clients; up, down: bytes of all clients together",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for heading in ("acc.", "±clients", "±seeds", "worst", "rounds", "up", "down", "sec."):
        table.add_column(heading, justify="right", no_wrap=True)
    methods = list(dict.fromkeys(record.method for record in records))
    means = {m: np.mean([r.accuracy_client_mean for r in records if r.method == m]) for m in methods}
    for method in methods:
        own = [record for record in records if record.method == method]
        per_seed = [record.accuracy_client_mean for record in own]
        best = means[method] == max(means.values())
        table.add_row(
            f"[bold]{method}[/bold]" if best else method,
            f"[bold]{_percent(per_seed)}[/bold]" if best else _percent(per_seed),
            _percent([record.accuracy_client_std for record in own]),
            f"{100 * np.std(per_seed, ddof=1):.1f}" if len(own) > 1 else "–",
            _percent([record.accuracy_worst_decile for record in own]),
            str(own[-1].rounds),
            human_bytes(np.mean([record.bytes_up for record in own])),
            human_bytes(np.mean([record.bytes_down for record in own])),
            f"{np.mean([record.seconds for record in own]):.2f}",
        )
    return table


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
