"""``apfl bench``: every cell of a plan."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from apfl.cli.executors import OnOption, SlurmOption, executor_of
from apfl.cli.features import extract_aloud
from apfl.cli.options import DeviceOption, MinimumOption, data_changes, names_of
from apfl.cli.progress import Board, end_as_interrupted, err, out, tell_hints
from apfl.data.device import float64_device
from apfl.data.executors import Event, Executor
from apfl.data.federation import Dataset
from apfl.data.load import Source, load_data
from apfl.data.protocol import deal
from apfl.data.registry import is_path
from apfl.errors import InputError
from apfl.experiments import estimate
from apfl.experiments.cells import Cell, cells
from apfl.experiments.metrics import no_test_rows
from apfl.experiments.plan import Plan, read_plan
from apfl.experiments.pool import claim, damaged, execute, inspect, jobs_for
from apfl.experiments.record import Record, read_records
from apfl.experiments.seeds import seeds_of
from apfl.experiments.worker import Job, Setting
from apfl.files import replacing
from apfl.maths.machine import available, n_cores
from apfl.methods import check_predicts
from apfl.report.terminal import results_table
from apfl.report.units import human_bytes

__all__ = ["bench"]


@data_changes("the plan's")
def bench(
    plan: Annotated[
        Path, typer.Argument(help="Plan, a TOML file, or the name of one that comes with apfl, such as own.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder for records and checkpoints. \\[default: runs/PLAN-DATA]", show_default=False
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Run only these methods of the plan, separated by commas. ./mine.py:Mine adds your own.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds to use instead of the plan's: how many, or a list with commas.", show_default=False),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients to use instead of the plan's.", show_default=False, min=1)
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Dirichlet concentration to use instead of the plan's.", show_default=False)
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="Partition to use instead of the plan's, as for `apfl run --partition`.", show_default=False),
    ] = None,
    minimum: MinimumOption = None,
    test_column: Annotated[
        str | None, typer.Option(help="Column that is true for test rows.", show_default=False)
    ] = None,
    client_column: Annotated[
        str | None,
        typer.Option(
            help="Column that names each row's client (its domain, if the plan has domains).", show_default=False
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Limit rounds and fine-tuning epochs of gradient methods, for a quick trial.",
            show_default=False,
            min=1,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Cells to run at a time. \\[default: as many as cores and memory allow]", show_default=False, min=1
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads per cell (recorded: another number may change the last digits).", show_default=False, min=1
        ),
    ] = None,
    device: DeviceOption = "auto",
    on: OnOption = "local",
    slurm: SlurmOption = None,
    *,
    changes: Mapping[str, Any],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show what would run, and stop.")
    ] = False,
) -> None:
    """Run every cell of a plan: each method on each federation with each seed.

    If --data is given, it replaces all that the plan says about its data: give
    its --backbone, columns and other data options too.

    apfl checks the whole plan before anything runs, and writes each finished
    cell to OUT/cells. After an interruption, the same command resumes and
    repeats nothing. If cells fail, apfl lists them and exits with code 1.
    """
    protocol = {
        "n_clients": clients, "alpha": alpha, "minimum": minimum, "client_column": client_column,
        "partition": partition, "test_column": test_column,
    }  # fmt: skip
    given = _changed(plan, changes, methods, seeds, rounds=rounds, threads=threads, protocol=protocol)
    todo, where = cells(given), str(float64_device(device))
    load = partial(load_data, Source(**given.source), device=device)
    dataset = load(extract=extract_aloud)
    identity = dataset.sha256 or dataset.name
    keyed = {cell.key(identity, where): cell for cell in todo}
    _check_federations(todo, dataset)
    tell_hints(dataset, todo[0].protocol)
    folder = folder or Path("runs") / f"{plan.stem}-{Path(dataset.name).stem}"
    inspect(folder, list(keyed))
    left = jobs_for(keyed, folder, identity, where)
    _tell_damaged(damaged(folder, list(keyed)))
    n_workers = jobs if jobs or on != "local" else _fitting(todo, dataset, given.threads, where)
    gpu = where != "cpu"
    executor = executor_of(on, folder / ".jobs", n_workers=n_workers, threads=given.threads, gpu=gpu, slurm=slurm)
    _show(given.title or plan.stem, keyed, left, dataset, n_workers, given.threads)
    if dry_run:
        _tell_costs(left, dataset)
        return
    sha256 = dataset.sha256
    del dataset  # the processes have their own
    paths = [name for name in given.methods if is_path(name)]
    side_by_side = n_workers or 1 if on == "local" else 1  # on one GPU; a cluster gives each its own
    seconds, place = given.checkpoint_seconds, folder.absolute()
    setting = Setting(place, load, given.source, where, given.threads, seconds, side_by_side, sha256, paths)
    with claim(folder, given, list(keyed)):  # what is left may be less by now
        failed = _run(jobs_for(keyed, folder, identity, where), setting, executor)
    _conclude(folder, keyed, failed)


def _changed(plan: Path, changes: Mapping[str, Any], methods: str | None, seeds: str | None, **others: Any) -> Plan:
    """The plan, with what options say in its place."""
    own_data = {"data": changes["data"]} if "data" in changes else None  # with nothing that the plan says of its own
    return read_plan(
        plan, source=own_data, **{name: value for name, value in changes.items() if name != "data"}, **others,
        only=None if methods is None else names_of(methods, read_plan(plan).methods),
        seeds=None if seeds is None else seeds_of(seeds),
    )  # fmt: skip


def _tell_damaged(paths: Sequence[Path]) -> None:
    """Which cells are done again because their files were cut short."""
    if paths:
        shown = f"{paths[0].parent.name}/{paths[0].name}" + " and others" * (len(paths) > 1)
        err.print(f"damaged, perhaps by a power cut, and therefore done again: {shown}", soft_wrap=True)


def _tell_costs(left: Sequence[Job], dataset: Dataset) -> None:
    """What the cells that are left would cost."""
    for line in estimate.told_costs([job.cell for job in left if not job.tuning], dataset):
        err.print(line, soft_wrap=True, highlight=False)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _check_federations(todo: Iterable[Cell], dataset: Dataset) -> None:
    """Deal every federation out once, on paper: what cannot be done is refused before anything is run."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task("checking the federations", total=None)
        for cell in todo:
            check_predicts(cell.name, cell.method, dataset.target)
        drawn = [(cell.protocol, cell.seed) for cell in todo]
        drawn += [(cell.protocol, cell.tuning_seed) for cell in todo if cell.tune]
        for protocol, seed in dict.fromkeys(drawn):
            halves = deal(dataset, protocol, seed)
            if not any(len(test) for _, test in halves):
                raise no_test_rows()
            if not all(len(train) for train, _ in halves):
                raise InputError(f"a client has no training rows with seed {seed} and {protocol}; use another protocol")


def _fitting(todo: Sequence[Cell], dataset: Dataset, threads: int, device: str) -> int:
    """Cells at a time: one on a GPU; on a CPU as many as there are cores and memory for."""
    if device != "cpu":
        return 1
    cores = n_cores()
    free = available(torch.device("cpu"))
    by_memory = cores if free is None else int(0.8 * free / estimate.peak_bytes(todo, dataset))
    return max(1, min(cores // threads, by_memory))


def _show(
    title: str, keyed: Mapping[str, Cell], left: Sequence[Job], dataset: Dataset, n_workers: int | None, threads: int
) -> None:
    """How much there is to do, how many at a time, and the memory of each."""
    done = len(keyed) - sum(not job.tuning for job in left)
    tunings = sum(job.tuning for job in left)
    before = f", {done} done before" if done else ""
    err.print(f"{title}: {_count(len(keyed), 'cell')} on {dataset.name}{before}", soft_wrap=True)
    if not left:
        return
    at_a_time = n_workers or "as many as there is room for"
    memory = human_bytes(estimate.peak_bytes([job.cell for job in left], dataset))
    err.print(
        f"to do: {_count(len(left) - tunings, 'cell')}"
        + (f" and {_count(tunings, 'grid')} to tune" if tunings else "")
        + f", {at_a_time} at a time with {threads} thread{'s' * (threads > 1)} and up to {memory} each",
        soft_wrap=True,
    )  # fmt: skip


def _run(left: Sequence[Job], setting: Setting, executor: Executor) -> dict[str, str]:
    """Run what is left; why those that failed did."""
    if not left:
        return {}
    failed: dict[str, str] = {}
    before = [path for job in left if (path := setting.folder / "failed" / f"{job.key}.txt").exists()]
    if before:
        err.print(f"{len(before)} that failed before are tried again")
    former = end_as_interrupted()
    finished = 0
    with Board(len(left)) as board:
        try:
            for event in execute(left, setting, executor):
                board.show(event)
                if event.kind in ("done", "failed"):
                    _note_failure(setting.folder, event, failed)
                    finished += event.kind == "done" and not event.item.tuning
        except KeyboardInterrupt:
            board.stop()
            err.print(
                f"stopped; {_count(finished, 'cell')} finished now, kept in {setting.folder}. "
                "Run the same command again to resume.", soft_wrap=True,
            )  # fmt: skip
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGTERM, former)
    return failed


def _note_failure(folder: Path, event: Event[Job], failed: dict[str, str]) -> None:
    path = folder / "failed" / f"{event.item.key}.txt"
    if event.kind == "failed":
        failed[event.item.key] = str(event.info)
        with replacing(path) as temporary:
            temporary.write_text(f"{event.info}\n")
    else:
        path.unlink(missing_ok=True)


def _conclude(folder: Path, keyed: Mapping[str, Cell], failed: Mapping[str, str]) -> None:
    """A table for each federation, where to go from here, and what failed."""
    paths = [folder / "cells" / f"{key}.json" for key in keyed]
    records = [record for path in paths for record in read_records(path)]
    groups: dict[str, list[Record]] = {}
    for record in _labelled(records):
        groups.setdefault(str(sorted(record.protocol.items(), key=str)), []).append(record)
    for group in groups.values():
        out.print(results_table(group), markup=True)
    out.print(f"records: {folder / 'cells'}", soft_wrap=True)
    out.print(f"next:    apfl table {folder}    apfl report {folder}", soft_wrap=True)
    for key, why in failed.items():
        last = why.strip().splitlines()[-1]
        err.print(f"failed: {key}: {last}", style="red", highlight=False, soft_wrap=True)
    if failed:
        err.print(
            f"{len(failed)} failed; {folder / 'failed'} says why. Run the same command again to retry.", soft_wrap=True
        )
        raise typer.Exit(1)


def _labelled(records: Sequence[Record]) -> list[Record]:
    """The records with the settings in which those of one method differ behind its name, tuned ones left out."""
    labelled = []
    for record in records:
        peers = [other for other in records if other.method == record.method]
        tuned = {name for other in peers for name in other.tuning.get("axes", {})}
        swept = {
            name: value for name, value in record.settings.items()
            if name not in tuned and any(other.settings[name] != value for other in peers)
        }  # fmt: skip
        label = "\n  ".join([record.method, *(f"{name}={value}" for name, value in swept.items())])
        labelled.append(replace(record, method=label))
    return labelled
