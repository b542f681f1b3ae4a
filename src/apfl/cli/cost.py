"""``apfl cost``: bytes, memory and seconds of a federation before there is one."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from apfl.cli.federation import JsonOption, SetOption, method_settings
from apfl.cli.progress import out, spinner
from apfl.experiments.cost import cost as cost_of
from apfl.experiments.operations import Size
from apfl.experiments.rates import measured_rates
from apfl.maths.machine import available
from apfl.methods import load_method
from apfl.methods.apfl import APFL
from apfl.report.units import human_bytes, human_seconds

__all__ = ["cost"]


def cost(
    rows: Annotated[int, typer.Option(help="Training rows of all sites together.", min=1)],
    features: Annotated[int, typer.Option(help="Columns of the features.", min=1)],
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)],
    clients: Annotated[int, typer.Option(help="Number of sites, of equal size.", min=1)] = 10,
    width: Annotated[
        int | None, typer.Option(help="Width of the map. \\[default: that of `apfl`]", show_default=False, min=1)
    ] = None,
    megabits: Annotated[float, typer.Option(help="Megabits a second of a line.", min=1e-6)] = 100.0,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the bytes, memory and seconds of a federation with `apfl`, before there is one.

    Bytes up are the most there can be: integers travel in as few bits as they
    need, about half. Seconds are those of one core, from a short measurement
    of this machine.
    """
    method = load_method("apfl", **method_settings(settings))
    assert isinstance(method, APFL)
    made = cost_of(Size(rows, features, classes, clients, width), method)
    with spinner() as progress:
        progress.add_task("measuring one core of this machine", total=None)
        seconds = made.seconds(measured_rates(made.width), megabits)
    told = {
        "width": made.width, "up": {name: n[0] for name, n in made.traffic.up.items()}, "down": made.traffic.down,
        "bytes_up": made.up, "bytes_down": made.down, "site_memory": made.site_memory,
        "server_memory": made.server_memory, "run_memory": made.run_memory,
        "seconds": {name: round(each, 4) for name, each in seconds.items()},
    }  # fmt: skip
    if as_json:
        out.print(json.dumps(told), soft_wrap=True)
        return
    title = f"{clients} sites, {rows:,} rows, width {made.width}; times of one core"
    table = Table("", "", box=SIMPLE_HEAD, title=title, show_header=False)
    for name, (n,) in made.traffic.up.items():
        table.add_row(f"a site, up: {name}", human_bytes(n))
    for name, n in made.traffic.down.items():
        table.add_row(f"a site, down: {name}", human_bytes(n))
    table.add_row("all sites, up and down", human_bytes(clients * (made.up + made.down)))
    table.add_row("memory of a site", human_bytes(made.site_memory))
    table.add_row("memory of the server", human_bytes(made.server_memory))
    table.add_row("memory of `apfl run`, all sites in one process", human_bytes(made.run_memory))
    for name, each in seconds.items():
        table.add_row(name, human_seconds(each))
    out.print(table)
    free = available(torch.device("cpu"))
    if free is not None and max(made.site_memory, made.server_memory) > free:
        out.print(f"this machine has {human_bytes(free)} free", soft_wrap=True)
