"""The command line: ``apfl run``, ``bench``, ``rerun``, ``features``, ``predict``, ``export``, ``methods`` ..."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated, ClassVar

import click
import typer

from apfl.cli.lazy import Homes, LazyGroup

__all__ = ["app"]


class Federate(LazyGroup):
    """``apfl federate``, in the order in which a federation uses its commands."""

    homes: ClassVar[Homes] = {
        "keys": "apfl.cli.keys", "roster": "apfl.cli.keys", "server": "apfl.cli.federate", "join": "apfl.cli.site",
        "run": "apfl.cli.federate",
        "status": "apfl.cli.federate", "leave": "apfl.cli.leave", "forget": "apfl.cli.leave",
        "result": "apfl.cli.federate", "simulate": "apfl.cli.site",
    }  # fmt: skip


class Stats(LazyGroup):
    """``apfl stats SHARD...`` is ``apfl stats sum SHARD...``."""

    homes: ClassVar[Homes] = {"sum": "apfl.cli.stats", "add": "apfl.cli.stats"}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, with the command that is meant if none is named."""
        named = args and (args[0] in self.homes or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named or not args else ["sum", *args])


class Encodings(LazyGroup):
    """``apfl encoding``, in the order of use."""

    homes: ClassVar[Homes] = {"describe": "apfl.cli.encoding", "settle": "apfl.cli.encoding"}


class Commands(LazyGroup):
    """``apfl``: experiments, their results, models, federations, this machine."""

    homes: ClassVar[Homes] = {
        "run": "apfl.cli.run", "features": "apfl.cli.features", "bench": "apfl.cli.bench", "rerun": "apfl.cli.rerun",
        "table": "apfl.cli.report", "plot": "apfl.cli.report", "report": "apfl.cli.report", "track": "apfl.cli.report",
        "predict": "apfl.cli.predict", "export": "apfl.cli.models", "methods": "apfl.cli.models",
        "verify": "apfl.cli.models", "doctor": "apfl.cli.doctor", "cost": "apfl.cli.cost",
        "stats": typer.Typer(
            cls=Stats, no_args_is_help=True, rich_markup_mode="rich",
            help="Make the statistics of a site of any size, shard by shard.",
        ),
        "encoding": typer.Typer(
            cls=Encodings, no_args_is_help=True, rich_markup_mode="rich",
            help="Agree on numbers for words, dates and gaps of tables, from sums alone.",
        ),
        "federate": typer.Typer(
            cls=Federate, no_args_is_help=True, rich_markup_mode="rich",
            help="Run a federation between machines, on Flower; or simulate one on this machine.",
        ),
    }  # fmt: skip


app = typer.Typer(
    cls=Commands,
    help="Analytic personalised federated learning: one good model for each site, in one round of statistics, "
    "without gradients.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"apfl {version_of('apfl')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass
