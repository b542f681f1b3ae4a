"""``apfl predict``, ``export``, ``methods`` and ``verify``: what can be done with a model, and what there is."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from apfl.cli.options import (
    AlphaOption,
    ClientColumnOption,
    ClientsOption,
    DataOption,
    MinimumOption,
    PartitionOption,
    protocol_of,
)
from apfl.cli.progress import err, out, spinner
from apfl.data import load_dataset
from apfl.data.sources.features import array_names, load_unlabelled
from apfl.errors import InputError
from apfl.experiments.run import Protocol, federate
from apfl.experiments.verify import verify as verify_theorems
from apfl.files import replacing
from apfl.methods import method_class, method_names
from apfl.models.file import load_model, read, write
from apfl.models.undecided import in_words, undecided

__all__ = ["export", "methods", "predict", "verify"]


def predict(
    model: Annotated[Path, typer.Argument(help="Model of one client, as written by `apfl run` or `apfl export`.")],
    file: Annotated[
        str, typer.Argument(help="Rows to predict: an .npz with 'features' (labels optional), or 'digits'.")
    ],
    target: Annotated[
        Path | None, typer.Option("--out", help="CSV file to write. \\[default: standard output]", show_default=False)
    ] = None,
) -> None:
    """Predict with one client's model, offline. If FILE has labels, print the accuracy too.

    A row that cannot be scored, such as a row of zeros, has no class and no score in the CSV. Standard error lists it.
    """
    loaded = load_model(model)
    labels: Sequence[str] | None = None
    if file.endswith(".npz") and "labels" not in array_names(Path(file)):
        features = load_unlabelled(file)
    else:
        dataset = load_dataset(file)
        features, labels = dataset.features, [dataset.class_names[i] for i in dataset.labels.tolist()]
    scores = loaded.scores(features)
    best = scores.max(1)
    reasons = undecided(loaded, features, scores)
    names = loaded.class_names or [str(i) for i in range(scores.shape[1])]
    predicted = ["" if reason else names[i] for i, reason in zip(best.indices.tolist(), reasons.tolist(), strict=True)]
    lines = [["row", "predicted", "score"]]
    lines += [
        [str(i), name, f"{score:.6g}" if name else ""]
        for i, (name, score) in enumerate(zip(predicted, best.values.tolist(), strict=True))
    ]
    if target is None:
        csv.writer(sys.stdout).writerows(lines)
    else:
        with replacing(target) as temporary, temporary.open("w", newline="") as stream:
            csv.writer(stream).writerows(lines)
        err.print(f"{len(predicted)} predictions in {target}", soft_wrap=True)
    if bool(reasons.any()):
        err.print(f"{in_words(reasons)}; these are left empty", soft_wrap=True, highlight=False)
    if labels is not None:
        hits = sum(a == b for a, b in zip(predicted, labels, strict=True))
        err.print(f"accuracy {hits / len(labels):.4f} on {len(labels)} labelled rows")


def export(
    model: Annotated[Path, typer.Argument(help="Model of one client, in a folder written by `apfl run`.")],
    target: Annotated[Path, typer.Argument(help="File to write.")],
) -> None:
    """Write one self-contained file of a model that refers to a shared primary stream."""
    write(read(model), target)
    err.print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show only this method.", show_default=False)] = None,
) -> None:
    """List the methods, with their settings and defaults."""
    table = Table("method", "what it is", "settings and defaults")
    for each in method_names() if name is None else [name]:
        cls = method_class(each)
        settings = "\n".join(f"{field.name} = {field.default}" for field in fields(cls))
        table.add_row(each, (cls.__doc__ or "").splitlines()[0], settings, end_section=True)
    out.print(table)


def verify(
    data: DataOption = "digits",
    clients: ClientsOption = None,
    alpha: AlphaOption = Protocol.alpha,
    partition: PartitionOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition and the maps.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="Width d of both streams.", min=1)] = 256,
    gamma: Annotated[float, typer.Option(help="Ridge of the primary stream.")] = 1.0,
    beta: Annotated[float, typer.Option(help="Ridge of the refinement stream.")] = 1.0,
    client_column: ClientColumnOption = None,
    minimum: MinimumOption = None,
) -> None:
    """Check the theorems on your own data and print how far from exact they are.

    Exits with code 1 if a theorem does not hold.
    """
    if not (gamma > 0 and beta > 0):
        raise InputError(f"gamma {gamma} and beta {beta} given; both must be greater than 0")
    dataset = load_dataset(data)
    federation = federate(dataset, protocol_of(clients, alpha, partition, client_column, minimum=minimum), seed)
    table = Table(
        "statement", "relative difference", "allowed", "holds", title=f"{dataset.name}, {len(federation.train)} clients"
    )
    all_hold = True
    with spinner() as progress:
        progress.add_task("checking the theorems", total=None)
        for check in verify_theorems(
            federation.train, federation.n_classes, width=width, gamma=gamma, beta=beta, seed=seed
        ):
            table.add_row(
                check.statement, f"{check.difference:.1e}", f"{check.tolerance:.0e}", "yes" if check.holds else "NO"
            )
            all_hold &= check.holds
    out.print(table)
    if not all_hold:
        raise typer.Exit(1)
