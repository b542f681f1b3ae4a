"""``--on``: where the work of a command is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apfl.cli.options import assignment
from apfl.errors import InputError, optional, unknown

if TYPE_CHECKING:
    from apfl.data.executors import Executor

__all__ = ["OnOption", "SlurmOption", "executor_of"]

OnOption = Annotated[
    str,
    typer.Option(
        "--on", help="Where to work: local (processes of this machine), ray (a Ray cluster) or slurm (jobs of Slurm)."
    ),
]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm",
        help="Option of Slurm jobs, KEY=VALUE: time (minutes), partition, account, mem ... Repeat for more.",
        show_default=False,
    ),
]


def executor_of(
    on: str,
    folder: Path,
    *,
    n_workers: int | None,
    threads: int,
    gpu: bool = False,
    slurm: Sequence[str] | None = None,
) -> Executor:
    """The executor that --on names; ``folder`` is a scratch folder that all machines see. What lacks is said here."""
    from apfl.data.executors import ENGINES

    if on not in ENGINES:
        raise unknown("place to work", on, ENGINES)
    options = dict(assignment(each, "partition=cpu", "--slurm") for each in slurm or ())
    if options and on != "slurm":
        raise InputError(f"--slurm given with --on {on}; it is for --on slurm")
    if on == "ray":
        from apfl.data.executors.ray import Ray

        optional("ray", "ray")
        return Ray(folder.absolute(), n_workers, threads, gpu)
    if on == "slurm":
        from apfl.data.executors.slurm import Slurm

        optional("submitit", "slurm")
        return Slurm(folder.absolute(), n_workers, threads, gpu, options)
    from apfl.data.executors.local import Local

    return Local(n_workers or 1, threads)
