"""The command line: parsing and printing, nothing else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from apfl.errors import InputError, printable

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error in what was given is one line and exit code 2."""
    from apfl.cli.app import app  # here, so that `apfl.cli` alone needs no typer

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("apfl").setLevel(logging.INFO)
    # Its events are lines of JSON, for programs that log; a command says in words what it has done.
    logging.getLogger("apfl.federate.ledger").setLevel(logging.WARNING)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="apfl")
    except InputError as error:
        Console(emoji=False, stderr=True).print(
            f"error: {printable(error, 10_000)}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise SystemExit(2) from None
