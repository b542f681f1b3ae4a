"""The command line: parsing and printing, nothing else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

from apfl.errors import InputError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error in what was given is one line and exit code 2."""
    from apfl.cli.app import app  # here, because it imports every command, and torch with them

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
