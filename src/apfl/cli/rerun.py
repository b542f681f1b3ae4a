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
from apfl.data.registry import is_path
from apfl.experiments.record import Record
from apfl.experiments.rerun import differences, run_again, select
from apfl.methods import METHODS
from apfl.report.sheet import read

__all__ = ["rerun"]


@data_changes("the record's")
def rerun(
    record: Annotated[
        Path, typer.Argument(help="Record (.json); or records.jsonl or a folder, with options that select one record.")
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="Select the record of this method. ./mine.py:Mine also says where your own is now.", show_default=False
        ),
    ] = None,
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
    name = None if method is None else METHODS.name_of(method)
    one = select(read([record]), record, method=name, seed=seed, n_clients=clients, alpha=alpha)
    source = Source(**{"data": one.data, **one.source, **changes})
    dataset = load_data(source, device=device or "auto", extract=extract_aloud)
    method_file = method if method is not None and is_path(method) else None
    again = run_again(one, dataset, float64_device(device or one.device), method_file)
    differing = differences(one, again)
    what = f"{one.method}, seed {one.seed}: {_said(one)} then"
    if not differing:
        out.print(f"matched: {what} and now, and every other number", soft_wrap=True)
        return
    out.print(f"DIFFERS: {what}, {_said(again)} now", soft_wrap=True)
    for line in differing:
        out.print(f"  {line}", soft_wrap=True)
    raise typer.Exit(1)


def _said(record: Record) -> str:
    first = record.headline
    return f"accuracy {first.said(record.score, 4)}" if first.key == "accuracy" else first.said(record.score, 4)
