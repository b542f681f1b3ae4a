"""The command line: ``apfl run``, ``bench``, ``rerun``, ``features``, ``predict``, ``export``, ``methods`` ..."""

from __future__ import annotations

import csv
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from apfl.cli_bench import bench, rerun
from apfl.cli_features import (
    BackboneOption,
    BackboneRevisionOption,
    FeatureColumnOption,
    ImageColumnOption,
    LabelColumnOption,
    OnCorruptOption,
    PoolingOption,
    RevisionOption,
    SplitsOption,
    features,
    load_data,
)
from apfl.cli_federate import app as federate_app
from apfl.cli_options import device_of, seeds_of
from apfl.cli_report import plot, report, table, track
from apfl.container import read, replacing, write
from apfl.data import load_dataset
from apfl.data.features import array_names, load_unlabelled
from apfl.errors import InputError
from apfl.experiment import Protocol, federate, keep_record, read_records, save_models
from apfl.experiment import run as run_method
from apfl.federation import Dataset, Federation, Method, load_model
from apfl.measure import Record
from apfl.methods import load_method, method_class, method_names
from apfl.report.terminal import results_table
from apfl.tuning import tune_once
from apfl.verify import verify as verify_theorems

app = typer.Typer(
    help="Analytic personalised federated learning: one good model for each site, in one round, without gradients.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
out, err = Console(), Console(stderr=True)

DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="'digits' (embedded); a file of features (.npz, .npy, .csv, .parquet); or images, with --backbone: "
        "'cifar100', 'imagenet-r', owner/name on the Hub, a folder of images or of a saved dataset, an .npz.",
    ),
]
ClientsOption = Annotated[
    int | None,
    typer.Option("--clients", help="Number of clients (10 unless a client column says).", show_default=False),
]
AlphaOption = Annotated[float, typer.Option("--alpha", help="Dirichlet concentration; smaller is more heterogeneous.")]
PartitionOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="dirichlet (PFLlib's; default), dirichlet_plain, classes, domains, iid, or given (with --client-column).",
        show_default=False,
    ),
]
ClientColumnOption = Annotated[
    str | None,
    typer.Option(help="Column that names each row's client (or domain, with --partition domains)."),
]
TestColumnOption = Annotated[str | None, typer.Option(help="Column that is true for test rows.")]
GroupColumnOption = Annotated[
    str | None, typer.Option(help="Column whose equal entries (one patient's rows, say) are split together.")
]


@app.command()
def run(
    data: DataOption = "digits",
    clients: ClientsOption = None,
    alpha: AlphaOption = Protocol.alpha,
    partition: PartitionOption = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated; see `apfl methods`.")
    ] = "local_ridge,afl,central,apfl_paper,apfl",
    seeds: Annotated[str, typer.Option(help="Comma-separated; each draws its own partition and maps.")] = "0,1,2",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="METHOD.KEY=VALUE, for example apfl.balance=0.3. Repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto (a GPU if there is one).")] = "auto",
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for records and models. \\[default: runs/DATA-TIME]", show_default=False),
    ] = None,
    save: Annotated[bool, typer.Option("--save-models/--no-save-models", help="Write every client's model.")] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose settings on a fifth of the training rows of the first seed.")
    ] = False,
    client_column: ClientColumnOption = None,
    test_column: TestColumnOption = None,
    group_column: GroupColumnOption = None,
    test_fraction: Annotated[float, typer.Option(help="Share of each client's rows kept for testing.")] = 0.25,
    minimum: Annotated[
        int | None, typer.Option(help="Fewest rows a client may get from a Dirichlet draw.", show_default=False, min=1)
    ] = None,
    classes_per_client: Annotated[int, typer.Option(help="With --partition classes.")] = 2,
    backbone: BackboneOption = None,
    pooling: PoolingOption = None,
    revision: RevisionOption = None,
    backbone_revision: BackboneRevisionOption = None,
    splits: SplitsOption = None,
    image_column: ImageColumnOption = None,
    label_column: LabelColumnOption = None,
    feature_column: FeatureColumnOption = None,
    on_corrupt: OnCorruptOption = "refuse",
) -> None:
    """Run methods on one federation and print a table. No arguments are needed.

    Writes OUT/records.jsonl, one line for each method and seed, and OUT/models/METHOD/seed-S/client-K.safetensors.
    Every finished method is on disk before the next begins.
    """
    protocol = _protocol(
        clients, alpha, partition, client_column, test_column, group_column, test_fraction, minimum, classes_per_client
    )
    chosen = _methods(methods, settings or [])
    seed_list = seeds_of(seeds)
    where = device_of(device)
    dataset = load_data(
        data, backbone, pooling=pooling, revision=revision, backbone_revision=backbone_revision, splits=splits,
        image_column=image_column, label_column=label_column, feature_column=feature_column,
        on_corrupt=on_corrupt, device=device,
    )  # fmt: skip
    # Everything that can be refused is refused before anything is run or written.
    federations = {seed: federate(dataset, protocol, seed) for seed in seed_list}
    folder = folder or Path("runs") / f"{Path(dataset.name).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if not any(len(shard) for federation in federations.values() for shard in federation.test):
        raise InputError("no client has test rows, so there would be nothing to measure; keep some back for testing")
    if tune:
        _check_folder(folder, dataset, protocol, {}, seed_list)
        chosen = _tuned(chosen, federations[seed_list[0]].to(where), dataset, protocol, seed_list[0], folder)
    _check_folder(folder, dataset, protocol, chosen, seed_list)

    records: list[Record] = []
    try:
        for seed, federation in federations.items():
            for record in _run_seed(federation.to(where), dataset, protocol, chosen, seed, folder, save):
                records.append(record)
    except KeyboardInterrupt:
        err.print(f"stopped; kept {len(records)} finished records in {folder / 'records.jsonl'}", soft_wrap=True)
        raise typer.Exit(130) from None
    except InputError:
        with suppress(OSError):  # not a trace if nothing was finished
            folder.rmdir()
        raise
    out.print(results_table(records))
    for record in records:
        if record.chosen and record.seed == seed_list[0]:
            plain = {key: value for key, value in record.chosen.items() if isinstance(value, int | float | str)}
            what = ", ".join(f"{key} = {_short(value)}" for key, value in plain.items())
            out.print(f"{record.method} chose {what}", style="dim")
    out.print(
        f"records: {folder / 'records.jsonl'}" + (f"   models: {folder / 'models'}" if save else ""), soft_wrap=True
    )


app.command()(features)
for command in (bench, rerun, table, plot, report, track):
    app.command()(command)
app.add_typer(federate_app, name="federate")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A client's model, as written by `apfl run` or `apfl export`.")],
    file: Annotated[str, typer.Argument(help="An .npz with 'features' (labels optional), or 'digits'.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="CSV to write; otherwise it is printed.", show_default=False)
    ] = None,
) -> None:
    """Predict with one client's model, offline. With labels in FILE the accuracy is printed too."""
    loaded = load_model(model)
    labels: Sequence[str] | None = None
    if file.endswith(".npz") and "labels" not in array_names(Path(file)):
        features = load_unlabelled(file)
    else:
        dataset = load_dataset(file)
        features, labels = dataset.features, [dataset.class_names[i] for i in dataset.labels.tolist()]
    scores = loaded.scores(features)
    best = scores.max(1)
    names = loaded.class_names or [str(i) for i in range(scores.shape[1])]
    predicted = [names[i] for i in best.indices.tolist()]
    lines = [["row", "predicted", "score"]]
    lines += [
        [str(i), name, f"{score:.6g}"]
        for i, (name, score) in enumerate(zip(predicted, best.values.tolist(), strict=True))
    ]
    if target is None:
        csv.writer(sys.stdout).writerows(lines)
    else:
        with replacing(target) as temporary, temporary.open("w", newline="") as stream:
            csv.writer(stream).writerows(lines)
        err.print(f"{len(predicted)} predictions in {target}")
    if labels is not None:
        hits = sum(a == b for a, b in zip(predicted, labels, strict=True))
        err.print(f"accuracy {hits / len(labels):.4f} on {len(labels)} labelled rows")


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A client's model in a folder written by `apfl run`.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
) -> None:
    """Make one self-contained file of a model that refers to a shared primary stream."""
    write(read(model), target)
    err.print(f"wrote {target} ({target.stat().st_size / 1e6:.1f} MB)")


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show the settings of this method alone.", show_default=False)
    ] = None,
) -> None:
    """List the methods, with their settings and defaults."""
    table = Table("method", "what it is", "settings and defaults")
    for each in method_names() if name is None else [name]:
        cls = method_class(each)
        settings = "\n".join(f"{field.name} = {field.default}" for field in fields(cls))
        table.add_row(each, (cls.__doc__ or "").splitlines()[0], settings, end_section=True)
    out.print(table)


@app.command()
def verify(
    data: DataOption = "digits",
    clients: ClientsOption = None,
    alpha: AlphaOption = Protocol.alpha,
    partition: PartitionOption = None,
    seed: Annotated[int, typer.Option(help="Of the partition and of the maps.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="d of both streams.", min=1)] = 256,
    gamma: Annotated[float, typer.Option(help="Ridge of the primary stream.")] = 1.0,
    beta: Annotated[float, typer.Option(help="Ridge of the refinement stream.")] = 1.0,
    client_column: ClientColumnOption = None,
) -> None:
    """Check the theorems on your own data and print how far from exact they are.

    Exits with code 1 if one does not hold.
    """
    if not (gamma > 0 and beta > 0):
        raise InputError(f"gamma {gamma} and beta {beta} given; both must be greater than 0")
    dataset = load_dataset(data)
    federation = federate(dataset, _protocol(clients, alpha, partition, client_column), seed)
    table = Table(
        "statement", "relative difference", "allowed", "holds", title=f"{dataset.name}, {len(federation.train)} clients"
    )
    all_hold = True
    with _progress() as progress:
        progress.add_task("checking the theorems", total=None)
        for check in verify_theorems(
            federation.train, federation.n_classes, width=width, gamma=gamma, beta=beta, seed=seed
        ):
            table.add_row(
                check.statement, f"{check.difference:.1e}", f"{check.tolerance:.0e}", "yes" if check.holds else "NO"
            )
            all_hold &= check.holds
    out.print(table)
    if not all_hold:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error in what was given is one line and exit code 2."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("apfl").setLevel(logging.INFO)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="apfl")
    except InputError as error:
        message = " ".join(str(error).split())
        err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None


def _run_seed(
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    chosen: dict[str, Method],
    seed: int,
    folder: Path,
    save: bool,
) -> Iterator[Record]:
    """Run every method on one federation; a record is yielded when it and its models are on disk."""
    with _progress() as progress:
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
            keep_record(record, folder / "records.jsonl")
            checkpoint.unlink(missing_ok=True)
            yield record
            progress.remove_task(task)


def _tuned(
    methods: dict[str, Method], federation: Federation, dataset: Dataset, protocol: Protocol, seed: int, folder: Path
) -> dict[str, Method]:
    """The methods with the settings that tuning chose, kept in OUT/tuning.jsonl."""
    run, tuned = [dataset.sha256, _as_json(protocol)], {}
    with _progress() as progress:
        for name, method in methods.items():
            task = progress.add_task(f"tuning {name}", total=None)
            path = folder / "tuning.jsonl"
            tuned[name] = tune_once(path, name, method, federation.train, federation.n_classes, seed, run).method
            progress.remove_task(task)
    return tuned


def _progress() -> Progress:
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True)


def _protocol(
    clients: int | None,
    alpha: float,
    partition: str | None,
    client_column: str | None,
    test_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = Protocol.test_fraction,
    minimum: int | None = None,
    classes_per_client: int = Protocol.classes_per_client,
) -> Protocol:
    if partition is None:
        partition = Protocol.partition if client_column is None else "given"
    if clients is None and partition != "given":
        clients = Protocol.n_clients
    return Protocol(
        partition, clients, alpha, minimum, classes_per_client, test_fraction, client_column, test_column, group_column
    )


def _methods(names: str, assignments: Sequence[str]) -> dict[str, Method]:
    """The methods asked for, with the settings of --set."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise InputError(f"no methods given (have: {', '.join(method_names())})")
    settings: dict[str, dict[str, Any]] = {name: {} for name in wanted if method_class(name)}
    for assignment in assignments:
        method, dot, rest = assignment.partition(".")
        key, equals, value = rest.partition("=")
        if not (dot and equals and key):
            raise InputError(f"--set {assignment!r} given; expected METHOD.KEY=VALUE, for example apfl.balance=0.3")
        if method not in settings:
            method_class(method)
            raise InputError(f"--set {assignment!r} is for {method}, which is not run; add it to --methods")
        settings[method][key] = value
    return {name: load_method(name, **settings[name]) for name in wanted}


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


if __name__ == "__main__":
    main()
