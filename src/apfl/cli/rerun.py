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
        Path, typer.Argument(help="A cell of `apfl bench` (.json); or records.jsonl, or a folder, with a choice.")
    ],
    method: Annotated[str | None, typer.Option(help="Of several records: this method.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Of several records: this seed.", show_default=False)] = None,
    clients: Annotated[int | None, typer.Option(help="Of several: so many clients.", show_default=False)] = None,
    alpha: Annotated[float | None, typer.Option(help="Of several: this alpha.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="Another device.", show_default=False)] = None,
    *,
    changes: Mapping[str, Any],
) -> None:
    """Run the cell of one record again, with the same settings, seed and threads, and compare.

    The record says where its data lie and how they were read; options say what is otherwise now.
    Exits with code 0 if every number is the same, 1 if not, with the differences.
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
