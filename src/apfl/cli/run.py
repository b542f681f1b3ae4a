"""``apfl run``: methods on one federation, a table, and every client's model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.features import extract_aloud
from apfl.cli.options import (
    AlphaOption,
    ClientColumnOption,
    ClientsOption,
    DeviceOption,
    GroupColumnOption,
    MinimumOption,
    PartitionOption,
    TestColumnOption,
    assignment,
    data_options,
    names_of,
)
from apfl.cli.progress import ended, err, line, out, spinner, tell_hints
from apfl.data.device import float64_device
from apfl.data.load import Source, load_data
from apfl.data.protocol import Protocol, protocol_of
from apfl.data.tables import listed
from apfl.errors import InputError
from apfl.experiments.record import Record
from apfl.experiments.seeds import seeds_of
from apfl.experiments.study import DEFAULT_METHODS, Study, chosen_methods, execute, going_alone, leave_no_empty, tuned
from apfl.maths.machine import threads
from apfl.methods import METHODS, Method, method_class, method_names
from apfl.models.file import model_file
from apfl.report.caveats import too_wide
from apfl.report.gains import compared_with_alone, gains_in_words, gains_table
from apfl.report.terminal import results_table

__all__ = ["run"]


@data_options()
def run(
    clients: ClientsOption = None,
    alpha: AlphaOption = Protocol.alpha,
    partition: PartitionOption = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods to run, separated by commas; see `apfl methods`. Your own: ./mine.py:Mine."),
    ] = ",".join(DEFAULT_METHODS),
    seeds: Annotated[
        str, typer.Option(help="Seeds: how many, or a list (0,1,2 or 7,); each draws its own partition and maps.")
    ] = "3",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: METHOD.KEY=VALUE, for example apfl.balance=0.3. Repeatable."),
    ] = None,
    device: DeviceOption = "auto",
    n_threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            help="Threads of torch and BLAS (recorded: another number may change the last digits). On a busy machine, "
            "1 is often fastest. \\[default: one for each core]",
            show_default=False,
            min=1,
            metavar="N",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for records and models. \\[default: runs/DATA-TIME]", show_default=False),
    ] = None,
    save: Annotated[bool, typer.Option("--save-models/--no-save-models", help="Write every client's model.")] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Tune settings on a held-out fifth of the training rows of the first seed.")
    ] = False,
    client_column: ClientColumnOption = None,
    test_column: TestColumnOption = None,
    group_column: GroupColumnOption = None,
    test_fraction: Annotated[
        float, typer.Option(help="Share of each client's rows for testing; 0 trains on all rows, for deployment.")
    ] = Protocol.test_fraction,
    minimum: MinimumOption = None,
    classes_per_client: Annotated[
        int, typer.Option(help="Classes per client, for --partition classes.")
    ] = Protocol.classes_per_client,
    *,
    source: Source,
) -> None:
    """Run methods on one federation and print a table. No arguments are needed.

    Writes OUT/records.jsonl, one line for each method and seed, and
    OUT/models/METHOD/seed-S/client-K-NAME.safetensors. Each finished method is
    on disk before the next one begins.
    """
    protocol = protocol_of(
        clients, alpha, partition, client_column, test_column, group_column, test_fraction, minimum, classes_per_client
    )
    chosen = _methods(methods, settings or [])
    seed_list, where = seeds_of(seeds), float64_device(device)
    dataset = load_data(source, device=device, extract=extract_aloud)
    folder = folder or Path("runs") / f"{Path(dataset.name).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    study = Study(dataset, protocol, chosen, seed_list, folder, where, save, source.changed())
    names = study.federations[seed_list[0]].names  # dealt out, or refused, before anything is said or written
    tell_hints(dataset, protocol)
    if dataset.target != "classification" and source.target is None:
        err.print(_detected(dataset.target, dataset.class_names), soft_wrap=True, highlight=False)
    records: list[Record] = []
    try:
        with threads(n_threads), _Steps() as steps:
            if tune:
                study = tuned(study, steps.show, lambda name: line(f"tuned {name}"))
            for record in execute(study, steps.show):
                records.append(record)
                ended(len(records), len(seed_list) * len(chosen), record)
    except KeyboardInterrupt:
        leave_no_empty(folder)
        err.print(_stopped(folder, len(records)), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    except InputError:
        leave_no_empty(folder)
        raise
    if records:
        _print_results(study, records)
        out.print(f"records: {folder / 'records.jsonl'}", end="   " if save else "\n", soft_wrap=True)
    else:
        out.print("trained on all rows: there are no test rows, so there is no table and no record", soft_wrap=True)
    if save:
        out.print(f"models: {folder / 'models'}", soft_wrap=True)
        _print_clients(names)


def _detected(target: str, names: Sequence[str]) -> str:
    """What the columns to predict were taken for."""
    why = {"regression": "numbers that are not whole, or several columns", "multilabel": "several columns of 0 and 1"}
    return f"target: {target} ({listed(list(names))}: {why[target]}); --target says otherwise"


def _print_results(study: Study, records: Sequence[Record]) -> None:
    """The table, what the methods chose with the first seed, and what the table does not say by itself."""
    out.print(results_table(records), markup=True)
    _print_choices([record for record in records if record.chosen and record.seed == study.seeds[0]])
    if study.protocol.partition == "given":
        _print_gains(study, records)
    if told := too_wide(records):
        out.print(told, style="dim", soft_wrap=True, highlight=False)


def _print_gains(study: Study, records: Sequence[Record]) -> None:
    """Who gains and who loses against going alone, if the clients are given and not dealt out."""
    ours = compared_with_alone(records)
    if ours:
        with _Steps() as steps:
            alone = list(going_alone(study, steps.show))
        out.print(gains_table(ours, alone))
        out.print(gains_in_words(ours, alone), soft_wrap=True, highlight=False)


def _print_clients(names: Sequence[str]) -> None:
    """The files of clients that have names."""
    files = [model_file(k, name) for k, name in enumerate(names) if name != str(k)]
    if files:
        out.print(f"in METHOD/seed-S: {listed(files)}", soft_wrap=True, highlight=False)


class _Steps:
    """What is being done, on a terminal: each thing with its own clock."""

    def __init__(self) -> None:
        self.progress, self.what = spinner(), ""

    def __enter__(self) -> _Steps:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, what: str, detail: str) -> None:
        if what != self.what:
            for task in self.progress.task_ids:
                self.progress.remove_task(task)
            self.progress.add_task(what, total=None)
            self.what = what
        self.progress.update(self.progress.task_ids[0], description=f"{what}  {detail}")


def _print_choices(records: Sequence[Record]) -> None:
    """What each method settled by itself, a line each."""
    for record in records:
        plain = {key: value for key, value in record.chosen.items() if isinstance(value, int | float | str)}
        what = ", ".join(f"{key} = {_short(value)}" for key, value in plain.items())
        out.print(f"{record.method} chose {what}", style="dim")


def _stopped(folder: Path, n_records: int) -> str:
    """What an interrupted run leaves, and what becomes of it."""
    kept = [f"{n_records} finished record{'s' * (n_records > 1)} in {folder / 'records.jsonl'}"] if n_records else []
    unfinished = sorted((folder / "checkpoints").glob("*.safetensors"))
    kept += [f"how far {path.stem} had got in {path.parent}" for path in unfinished]
    if (folder / "tuning.jsonl").exists():
        kept.append(f"what was tuned in {folder / 'tuning.jsonl'}")
    if not kept:
        return "stopped; nothing was finished yet, nothing is kept"
    # Without --out the folder's name has the time in it: the same command alone would begin anew.
    return f"stopped; kept {' and '.join(kept)}; run the same command with --out {folder} to resume"


def _methods(names: str, assignments: Sequence[str]) -> dict[str, Method]:
    """The methods asked for, with the settings of --set."""
    wanted, settings = names_of(names, method_names()), dict[str, dict[str, str]]()
    running = [name for name, given in METHODS.by_name(wanted).items() if method_class(given)]
    for text in assignments:
        full_key, value = assignment(text, "apfl.balance=0.3")
        method, _, key = full_key.partition(".")
        if method not in running:
            method_class(method)
            raise InputError(f"--set {text!r} is for {method}, which is not run; add it to --methods")
        settings.setdefault(method, {})[key] = value
    return chosen_methods(wanted, settings)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
