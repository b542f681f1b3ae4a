"""``apfl federate``: a federation between machines, or all of one on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from apfl.deploy import Coordinator, Terms
from apfl.deploy import Site as Rows
from apfl.errors import InputError
from apfl.extras import optional
from apfl.report.federation import evidence_lines, result_table, status_table

__all__ = ["app"]

app = typer.Typer(help="Run a federation between machines, on Flower.", no_args_is_help=True, rich_markup_mode="rich")
out, err = Console(), Console(stderr=True)

FolderArgument = Annotated[Path, typer.Argument(help="The server's folder for this federation.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines instead, for other programs.")]
