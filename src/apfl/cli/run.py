"""``apfl run``: methods on one federation, a table, and every client's model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
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
    MinimumOption,
    PartitionOption,
    assignment,
    data_options,
    names_of,
    protocol_of,
    seeds_of,
)
from apfl.cli.progress import ended, err, line, out, spinner
from apfl.data.device import float64_device
from apfl.data.federation import Dataset, Federation
from apfl.data.load import Source, load_data
from apfl.errors import InputError
from apfl.experiments.record import Record, keep_record, read_records
from apfl.experiments.run import Protocol, federate, save_models
from apfl.experiments.run import run as run_method
from apfl.experiments.tuning import tune_once
from apfl.files import replacing
from apfl.methods import METHODS, Method, load_method, method_class, method_names
from apfl.report.terminal import results_table

__all__ = ["run"]

TestColumnOption = Annotated[str | None, typer.Option(help="Column that is true for test rows.")]
GroupColumnOption = Annotated[
    str | None, typer.Option(help="Column of groups; rows of one group (a patient, say) stay on one side of the split.")
]


@data_options()
def run(
    clients: ClientsOption = None,
    alpha: AlphaOption = Protocol.alpha,
    partition: PartitionOption = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods to run, separated by commas; see `apfl methods`. Your own: ./mine.py:Mine."),
    ] = "local_ridge,afl,central,apfl_paper,apfl",
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; each draws its own partition and maps.")
    ] = "0,1,2",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting: METHOD.KEY=VALUE, for example apfl.balance=0.3. Repeatable."),
    ] = None,
    device: DeviceOption = "auto",
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
        float, typer.Option(help="Share of each client's rows for testing.")
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
    OUT/models/METHOD/seed-S/client-K.safetensors. Each finished method is on
    disk before the next one begins.
    """
    protocol = protocol_of(
        clients, alpha, partition, client_column, test_column, group_column, test_fraction, minimum, classes_per_client
    )
    chosen = _methods(methods, settings or [])
    seed_list = seeds_of(seeds)
    where = float64_device(device)
    dataset = load_data(source, device=device, extract=extract_aloud)
    # Everything that can be refused is refused before anything is run or written.
    federations = {seed: federate(dataset, protocol, seed) for seed in seed_list}
    folder = folder or Path("runs") / f"{Path(dataset.name).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    _check_test_rows(federations.values())
    records: list[Record] = []
    try:
        if tune:
            _check_folder(folder, dataset, protocol, {}, seed_list)
            chosen = _tuned(chosen, federations[seed_list[0]].to(where), dataset, protocol, seed_list[0], folder)
        _check_folder(folder, dataset, protocol, chosen, seed_list)
        for seed, federation in federations.items():
            for record in _run_seed(
                federation.to(where), dataset, protocol, chosen, seed, folder, save, source.changed()
            ):
                records.append(record)
                ended(len(records), len(federations) * len(chosen), record)
    except KeyboardInterrupt:
        _leave_no_empty(folder)
        err.print(_stopped(folder, len(records)), soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    except InputError:
        _leave_no_empty(folder)
        raise
    out.print(results_table(records), markup=True)
    _print_choices([record for record in records if record.chosen and record.seed == seed_list[0]])
    out.print(
        f"records: {folder / 'records.jsonl'}" + (f"   models: {folder / 'models'}" if save else ""), soft_wrap=True
    )


def _check_test_rows(federations: Iterable[Federation]) -> None:
    if not any(len(shard) for federation in federations for shard in federation.test):
        raise InputError("no client has test rows, so there would be nothing to measure; keep some back for testing")


def _print_choices(records: Sequence[Record]) -> None:
    """What each method settled by itself, a line each."""
    for record in records:
        plain = {key: value for key, value in record.chosen.items() if isinstance(value, int | float | str)}
        what = ", ".join(f"{key} = {_short(value)}" for key, value in plain.items())
        out.print(f"{record.method} chose {what}", style="dim")


def _run_seed(
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    chosen: dict[str, Method],
    seed: int,
    folder: Path,
    save: bool,
    source: Mapping[str, Any],
) -> Iterator[Record]:
    """Run every method on one federation; a record is yielded when it and its models are on disk."""
    with spinner() as progress:
        for name, method in chosen.items():
            task = progress.add_task(f"seed {seed}  {name}", total=None)
            checkpoint = folder / "checkpoints" / f"{name}-seed-{seed}.safetensors"
            record, models = run_method(
                name, method, federation, dataset, protocol, seed,
                on_round=lambda r, task=task, name=name: progress.update(  # type: ignore[misc]
                    task, description=f"seed {seed}  {name}  round {r.index}"
                ),
                checkpoint=checkpoint,
            )  # fmt: skip
            if save:
                progress.update(task, description=f"seed {seed}  {name}  writing models")
                save_models(models, folder / "models" / name / f"seed-{seed}", dataset.class_names)
            record = replace(record, source=dict(source))  # where `apfl rerun` finds the same data
            keep_record(record, folder / "records.jsonl")
            checkpoint.unlink(missing_ok=True)
            yield record
            progress.remove_task(task)


def _tuned(
    methods: dict[str, Method], federation: Federation, dataset: Dataset, protocol: Protocol, seed: int, folder: Path
) -> dict[str, Method]:
    """The methods with the settings that tuning chose, kept in OUT/tuning.jsonl."""
    run, tuned = [dataset.sha256, _as_json(protocol)], {}
    with spinner() as progress:
        for name, method in methods.items():
            task = progress.add_task(f"tuning {name}", total=None)
            path = folder / "tuning.jsonl"
            found = tune_once(
                path, name, method, federation.train, federation.n_classes, seed, run,
                on_round=lambda share, task=task, name=name: progress.update(  # type: ignore[misc]
                    task, description=f"tuning {name}  {share:.0%}"
                ),
                checkpoint=folder / "checkpoints" / f"tuning-{name}.safetensors",
            )  # fmt: skip
            tuned[name] = found.method
            progress.remove_task(task)
            if found.results:  # it has something to tune
                line(f"tuned {name}")
    return tuned


def _leave_no_empty(folder: Path) -> None:
    with suppress(OSError):  # there is something in it, or it was never made
        folder.rmdir()


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
    wanted = METHODS.by_name(names_of(names, method_names()))
    settings: dict[str, dict[str, Any]] = {name: {} for name, given in wanted.items() if method_class(given)}
    for text in assignments:
        full_key, value = assignment(text, "apfl.balance=0.3")
        method, _, key = full_key.partition(".")
        if method not in settings:
            method_class(method)
            raise InputError(f"--set {text!r} is for {method}, which is not run; add it to --methods")
        settings[method][key] = value
    return {name: load_method(given, **settings[name]) for name, given in wanted.items()}


def _check_folder(
    folder: Path, dataset: Dataset, protocol: Protocol, chosen: dict[str, Method], seeds: Sequence[int]
) -> None:
    """Refuse a folder that cannot be written or that holds records of something else."""
    for record in read_records(folder / "records.jsonl"):
        planned = chosen.get(record.method) if record.seed in seeds else None
        same_data = record.data_sha256 == dataset.sha256 and dict(record.protocol) == _as_json(protocol)
        if not same_data or (planned is not None and dict(record.settings) != _as_json(planned)):
            raise InputError(
                f"{folder} holds records of another run ({record.method}, seed {record.seed}, {record.data}); "
                "choose another --out, or remove it first"
            )
    probe = folder / f".write-test-{time.time_ns()}"
    with replacing(probe) as temporary:
        temporary.touch()
    probe.unlink()


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _as_json(settings: Any) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}
