"""``apfl rerun``: one record again, and whether it matched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.features import extract_aloud
from apfl.cli.options import data_changes
from apfl.cli.progress import out
from apfl.data.device import float64_device
from apfl.data.load import Source, load_data
from apfl.experiments.rerun import differences, run_again, select
from apfl.report.sheet import read

__all__ = ["rerun"]


@data_changes("the record's")
def rerun(
    record: Annotated[
        Path, typer.Argument(help="Record (.json); or records.jsonl or a folder, with options that select one record.")
    ],
    method: Annotated[str | None, typer.Option(help="Select the record of this method.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Select the record with this seed.", show_default=False)] = None,
    clients: Annotated[
        int | None, typer.Option(help="Select the record with this number of clients.", show_default=False)
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Select the record with this alpha.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="Device. \\[default: the record's]", show_default=False)] = None,
    *,
    changes: Mapping[str, Any],
) -> None:
    """Run one record again with the same settings, seed and threads, and compare.

    The record names its data and how they were read; options replace what has
    changed since. Exits with code 0 if every number is the same. If not, lists
    the differences and exits with code 1.
    """
    one = select(read([record]), record, method=method, seed=seed, n_clients=clients, alpha=alpha)
    source = Source(**{"data": one.data, **one.source, **changes})
    dataset = load_data(source, device=device or "auto", extract=extract_aloud)
    again = run_again(one, dataset, float64_device(device or one.device))
    found = differences(one, again)
    what = f"{one.method}, seed {one.seed}: accuracy {100 * one.accuracy_client_mean:.4f} % then"
    if not found:
        out.print(f"matched: {what} and now, and every other number", soft_wrap=True)
        return
    out.print(f"DIFFERS: {what}, {100 * again.accuracy_client_mean:.4f} % now", soft_wrap=True)
    for line in found:
        out.print(f"  {line}", soft_wrap=True)
    raise typer.Exit(1)
