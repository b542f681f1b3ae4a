"""``apfl export``, ``methods`` and ``verify``: what can be done with a model, and what there is."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from apfl.cli.options import (
    AlphaOption,
    ClientColumnOption,
    ClientsOption,
    DataOption,
    MinimumOption,
    PartitionOption,
)
from apfl.cli.predict import whose
from apfl.cli.progress import err, out, spinner
from apfl.data import load_dataset
from apfl.data.protocol import protocol_of
from apfl.errors import InputError, unknown
from apfl.experiments.run import Protocol, federate
from apfl.experiments.verify import verify as verify_theorems
from apfl.methods import METHODS, Method, method_class, method_names
from apfl.methods._settings import settings_of
from apfl.models.file import about, model_of, read, write

__all__ = ["export", "methods", "verify"]


class Format(StrEnum):
    """Of an exported model."""

    safetensors = "safetensors"
    onnx = "onnx"


def export(
    model: Annotated[Path, typer.Argument(help="Model of one client, in a folder written by `apfl run`.")],
    target: Annotated[Path, typer.Argument(help="File to write.")],
    form: Annotated[
        Format | None,
        typer.Option(
            "--format", help="Format of the file. \\[default: by its ending, else safetensors]", show_default=False
        ),
    ] = None,
) -> None:
    """Write one self-contained file of a model that refers to a shared primary stream; or an ONNX file.

    An ONNX file runs without Python: float32 features in; class, scores and probabilities out. Needs the extra onnx.
    """
    container = read(model)
    if form is Format.onnx or (form is None and target.suffix.lower() == ".onnx"):
        model_of(container).to_onnx(target)
    else:
        write(container, target)
    err.print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB){whose(about(container))}", soft_wrap=True)


def methods(
    name: Annotated[str | None, typer.Argument(help="Show only this method.", show_default=False)] = None,
) -> None:
    """List the methods with their settings and defaults; of one method, what each setting means and may be."""
    if name is not None:
        out.print(_one_method(name))
        return
    table = Table("method", "what it is", "settings and defaults")
    for each in method_names():
        cls = method_class(each)
        settings = "\n".join(f"{field.name} = {field.default}" for field in settings_of(cls))
        table.add_row(each, _first_line(cls), settings, end_section=True)
    out.print(table)
    out.print("apfl methods NAME shows what each setting means and which values it takes", style="dim")


def _one_method(name: str) -> Table:
    cls = method_class(name)
    table = Table(box=SIMPLE_HEAD, title=f"{METHODS.name_of(name)}: {_first_line(cls)}", title_justify="left")
    for head in ("setting", "default", "allowed", "what it is"):
        table.add_column(head, no_wrap=head == "setting")
    for each in settings_of(cls):
        table.add_row(*map(escape, (each.name, each.default, each.allowed, each.meaning)))
    return table


def _first_line(cls: type[Method]) -> str:
    return escape((cls.__doc__ or "").splitlines()[0])


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
    map: Annotated[str, typer.Option(help="Kind of map: landmarks or random.")] = "landmarks",
    bits: Annotated[
        int | None,
        typer.Option(
            help="Bits of an entry of the statistics; 0: float64. \\[default: 16 with landmarks, else 0]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check the theorems on your own data and print how far from exact they are.

    With landmarks the theorems are checked in float64 first, then with integers,
    to the bound that rounding has; a line says whether choices moved. Exits with
    code 1 if a theorem does not hold.
    """
    if map not in ("landmarks", "random"):
        raise unknown("map", map, ("landmarks", "random"))
    if bits and not 8 <= bits <= 32:
        raise InputError(f"bits {bits} given; it must be 0 or from 8 to 32")
    if not (gamma > 0 and beta > 0):
        raise InputError(f"gamma {gamma} and beta {beta} given; both must be greater than 0")
    dataset = load_dataset(data, target="classification")
    federation = federate(dataset, protocol_of(clients, alpha, partition, client_column, minimum=minimum), seed)
    table = Table(
        "statement", "relative difference", "allowed", "holds", title=f"{dataset.name}, {len(federation.train)} clients"
    )
    all_hold = True
    with spinner() as progress:
        progress.add_task("checking the theorems", total=None)
        for check in verify_theorems(
            federation.train, federation.n_classes, width=width, gamma=gamma, beta=beta, seed=seed, map=map, bits=bits
        ):
            allowed = "any" if math.isinf(check.tolerance) else f"{check.tolerance:.0e}"
            table.add_row(check.statement, f"{check.difference:.1e}", allowed, "yes" if check.holds else "NO")
            all_hold &= check.holds
    out.print(table)
    if not all_hold:
        raise typer.Exit(1)
