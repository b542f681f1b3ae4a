"""The command line: ``apfl run``, ``bench``, ``rerun``, ``features``, ``predict``, ``export``, ``methods`` ..."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from apfl.cli_bench import bench
from apfl.cli_features import features
from apfl.cli_federate import app as federate_app
from apfl.cli_models import export, methods, predict, verify
from apfl.cli_report import plot, report, table, track
from apfl.cli_rerun import rerun
from apfl.cli_run import run
from apfl.errors import InputError

app = typer.Typer(
    help="Analytic personalised federated learning: one good model for each site, in one round of statistics, "
    "without gradients.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
for command in (run, features, bench, rerun, table, plot, report, track, predict, export, methods, verify):
    app.command()(command)
app.add_typer(federate_app, name="federate")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error in what was given is one line and exit code 2."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("apfl").setLevel(logging.INFO)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="apfl")
    except InputError as error:
        message = " ".join(str(error).split())
        Console(emoji=False, stderr=True).print(
            f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
