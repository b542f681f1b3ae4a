"""The command line: ``apfl run``, ``bench``, ``rerun``, ``features``, ``predict``, ``export``, ``methods`` ..."""

from __future__ import annotations

import typer

from apfl.cli.bench import bench
from apfl.cli.features import features
from apfl.cli.federate import app as federate_app
from apfl.cli.models import export, methods, predict, verify
from apfl.cli.report import plot, report, table, track
from apfl.cli.rerun import rerun
from apfl.cli.run import run

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
