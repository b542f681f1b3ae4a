"""``apfl rerun``: one record again, and whether it matched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apfl.cli.features import (
    BackboneOption,
    BackboneRevisionOption,
    FeatureColumnOption,
    ImageColumnOption,
    LabelColumnOption,
    OnCorruptChoice,
    PoolingOption,
    RevisionOption,
    SplitsOption,
    load_data,
)
from apfl.cli.options import device_of
from apfl.cli.progress import out
from apfl.experiments.rerun import differences, run_again, select
from apfl.report.sheet import read

__all__ = ["rerun"]


def rerun(
    record: Annotated[
        Path, typer.Argument(help="Record (.json); or records.jsonl or a folder, with options that select one record.")
    ],
    data: Annotated[
        str | None, typer.Option("--data", help="Path of the same data, if they have moved.", show_default=False)
    ] = None,
    method: Annotated[str | None, typer.Option(help="Select the record of this method.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Select the record with this seed.", show_default=False)] = None,
    clients: Annotated[
        int | None, typer.Option(help="Select the record with this number of clients.", show_default=False)
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Select the record with this alpha.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="Device. \\[default: the record's]", show_default=False)] = None,
    backbone: BackboneOption = None,
    pooling: PoolingOption = None,
    revision: RevisionOption = None,
    backbone_revision: BackboneRevisionOption = None,
    splits: SplitsOption = None,
    image_column: ImageColumnOption = None,
    label_column: LabelColumnOption = None,
    feature_column: FeatureColumnOption = None,
    on_corrupt: OnCorruptChoice = None,
) -> None:
    """Run one record again with the same settings, seed and threads, and compare.

    The record names its data and how they were read; options replace what has
    changed since. Exits with code 0 if every number is the same. If not, lists
    the differences and exits with code 1.
    """
    one = select(read([record]), record, method=method, seed=seed, n_clients=clients, alpha=alpha)
    given = {
        "data": data, "backbone": backbone, "pooling": pooling, "revision": revision, "splits": splits,
        "backbone_revision": backbone_revision, "image_column": image_column, "label_column": label_column,
        "feature_column": feature_column, "on_corrupt": on_corrupt,
    }  # fmt: skip
    source = {"data": one.data, "backbone": None, **one.source}
    source |= {name: value for name, value in given.items() if value is not None}
    dataset = load_data(**source, device=device or "auto")
    again = run_again(one, dataset, device_of(device or one.device))
    found = differences(one, again)
    what = f"{one.method}, seed {one.seed}: accuracy {100 * one.accuracy_client_mean:.4f} % then"
    if not found:
        out.print(f"matched: {what} and now, and every other number", soft_wrap=True)
        return
    out.print(f"DIFFERS: {what}, {100 * again.accuracy_client_mean:.4f} % now", soft_wrap=True)
    for line in found:
        out.print(f"  {line}", soft_wrap=True)
    raise typer.Exit(1)
