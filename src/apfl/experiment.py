"""From a dataset to records: deal the rows out, run a method, measure it, write it down."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.checkpoint import Checkpoint, load, save
from apfl.container import replacing, write
from apfl.errors import InputError
from apfl.federation import Dataset, Federation, Method, Model, Round, Shard
from apfl.measure import Record, client_accuracies, metrics
from apfl.partition import load_partition, split

__all__ = ["Protocol", "federate", "keep_record", "read_records", "run", "save_models", "versions"]


@dataclass(frozen=True)
class Protocol:
    """How rows become a federation: who gets which, and which of them are for testing."""

    partition: str = "dirichlet"
    n_clients: int | None = 10
    alpha: float = 0.1
    minimum: int | None = None
    classes_per_client: int = 2
    test_fraction: float = 0.25
    client_column: str | None = None  # clients (partition given) or domains (partition domains)
    test_column: str | None = None  # true where a row is for testing
    group_column: str | None = None  # rows that must stay together


def federate(dataset: Dataset, protocol: Protocol, seed: int) -> Federation:
    """Deal the rows of ``dataset`` out to clients and split each client's rows; all randomness from ``seed``."""
    rng = np.random.default_rng(seed)
    labels = dataset.labels.numpy()
    parts = load_partition(protocol.partition).partition(
        labels, protocol.n_clients, rng, **_partition_options(dataset, protocol)
    )
    groups = _codes(dataset, protocol.group_column)
    in_test = None if protocol.test_column is None else _flags(dataset, protocol.test_column)
    train: list[Shard] = []
    test: list[Shard] = []
    for rows in parts:
        if in_test is None:
            own_groups = None if groups is None else groups[rows]
            halves = split(rows, rng, test_fraction=protocol.test_fraction, groups=own_groups)
        else:
            halves = rows[~in_test[rows]], rows[in_test[rows]]
        for shards, half in zip((train, test), halves, strict=True):
            own = torch.from_numpy(half)
            shards.append(
                Shard(
                    dataset.features[own],
                    dataset.labels[own],
                    None if groups is None else torch.from_numpy(groups[half]),
                )
            )
    return Federation(train, test, dataset.class_names, _client_names(dataset, protocol, len(parts)))


def run(
    name: str,
    method: Method,
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    seed: int,
    *,
    on_round: Callable[[Round], None] | None = None,
    checkpoint: Path | None = None,
) -> tuple[Record, Sequence[Model]]:
    """Train and measure one method. ``seconds`` counts training alone; the last round is what is measured.

    With ``checkpoint`` a run of many rounds that is stopped leaves that file, and the next one goes on from it.
    """
    last, seconds, curve = _train(name, method, federation, dataset, protocol, seed, on_round, checkpoint)
    uses_alpha = protocol.partition.startswith("dirichlet")
    record = Record(
        method=name,
        seed=seed,
        data=dataset.name,
        data_sha256=dataset.sha256,
        partition=protocol.partition,
        n_clients=len(federation.train),
        alpha=protocol.alpha if uses_alpha else None,
        settings=asdict(method),  # type: ignore[call-overload]
        protocol=asdict(protocol),
        **metrics(last.models, federation.test, federation.n_classes),
        client_names=list(federation.names),
        n_train=[len(shard) for shard in federation.train],
        n_test=[len(shard) for shard in federation.test],
        rounds=last.index,
        bytes_up=last.bytes_up,
        bytes_down=last.bytes_down,
        seconds=seconds,
        device=str(federation.train[0].features.device),
        threads=torch.get_num_threads(),
        versions=versions(),
        chosen=dict(last.chosen),
        provenance=dict(dataset.provenance),
        curve=curve,
    )
    return record, last.models


def _train(
    name: str,
    method: Method,
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    seed: int,
    on_round: Callable[[Round], None] | None,
    checkpoint: Path | None,
) -> tuple[Round, float, list[list[float]]]:
    """The last round, the seconds it took to get there, and the curve."""
    what = [name, seed, dataset.sha256, asdict(protocol), asdict(method)]  # type: ignore[call-overload]
    found = None if checkpoint is None else load(checkpoint, what)
    seconds, curve = (0.0, []) if found is None else (found.seconds, found.curve)
    resume: dict[str, Any] = {} if found is None else {"resume": found.state}
    rounds = method.rounds(federation.train, federation.n_classes, seed, **resume)
    reached: tuple[Round, float, int] | None = None  # a whole round, the time so far, the length of the curve before it
    written = time.monotonic()

    def keep() -> None:
        if checkpoint is not None and reached is not None and reached[0].state is not None:
            save(checkpoint, what, Checkpoint(reached[0].state, reached[1], curve[: reached[2]]))

    try:
        while True:
            start = time.perf_counter()
            current = next(rounds, None)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if current is None:
                break
            seconds += time.perf_counter() - start
            accuracies = [each for each in client_accuracies(current.models, federation.test) if each is not None]
            mean = float(np.mean(accuracies)) if accuracies else 0.0  # metrics() refuses a run without test rows
            curve.append([seconds, float(current.bytes_up + current.bytes_down), mean])
            reached = (current, seconds, len(curve) - 1)
            if on_round is not None:
                on_round(current)
            if time.monotonic() - written > 60:
                keep()
                written = time.monotonic()
    except (KeyboardInterrupt, SystemExit):
        keep()
        raise
    if reached is None:
        raise InputError(f"method {name} yielded no round")
    return reached[0], seconds, curve


def save_models(models: Sequence[Model], folder: Path, class_names: Iterable[str]) -> None:
    """Write ``client-K.safetensors`` for every client; a tensor they all share is written once, beside them.

    The folder is made aside and put in place at the end, so it holds all models of one run or is not there.
    """
    containers = [model.container() for model in models]
    first = containers[0].tensors
    shared = [name for name in first if all(c.tensors.get(name) is first[name] for c in containers)]
    making, former = folder.with_name(f".{folder.name}.making"), folder.with_name(f".{folder.name}.former")
    shutil.rmtree(making, ignore_errors=True)
    try:
        for k, container in enumerate(containers):
            settings = container.settings | {"class_names": list(class_names)}
            only_one = () if len(containers) == 1 else shared
            write(replace(container, settings=settings), making / f"client-{k}.safetensors", shared=only_one)
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        making.rename(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def read_records(path: Path) -> list[Record]:
    """The records of a ``.jsonl``, of one ``.json``, or of a folder, in order; none if there is no such file.

    A folder is searched, with those in it, for ``records.jsonl`` (`apfl run`) and ``cells/*.json`` (`apfl bench`).
    """
    try:
        if path.is_dir():
            files = sorted([*path.rglob("records.jsonl"), *path.rglob("cells/*.json")])
            return [record for file in files for record in read_records(file)]
        if not path.exists():
            return []
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        return [Record.from_json(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(
            f"{path} cannot be read as records ({error}); give a file or folder that apfl wrote"
        ) from error


def keep_record(record: Record, path: Path) -> None:
    """Add a record to the file; one of the same run takes the place of the earlier. The file is never half-written."""
    kept = [other for other in read_records(path) if other.run != record.run]
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{each.to_json()}\n" for each in [*kept, record]))


def versions() -> dict[str, str | None]:
    """The versions a result depends on, and the commit of the source where it is a checkout."""
    packages = {name: version(name) for name in ("apfl", "torch", "numpy", "scipy", "scikit-learn")}
    return {"python": platform.python_version(), **packages, "git": _git_commit()}


def _git_commit() -> str | None:
    here = Path(__file__).parent
    try:
        tracked = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            check=False,
        )
        if tracked.returncode:
            return None  # installed into some other project's checkout: its commit says nothing about us
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return described.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _partition_options(dataset: Dataset, protocol: Protocol) -> Mapping[str, Any]:
    """The keyword arguments of the recipe."""
    if protocol.partition in ("dirichlet", "dirichlet_plain"):
        return {"alpha": protocol.alpha, "minimum": protocol.minimum}
    if protocol.partition == "classes":
        return {"classes_per_client": protocol.classes_per_client}
    if protocol.partition in ("domains", "given"):
        if protocol.client_column is None:
            raise InputError(f"partition '{protocol.partition}' needs a column: name it with --client-column")
        column = dataset.column(protocol.client_column)
        return {"domains" if protocol.partition == "domains" else "column": column}
    return {}


def _client_names(dataset: Dataset, protocol: Protocol, n_clients: int) -> list[str]:
    if protocol.partition == "given" and protocol.client_column is not None:
        return [str(name) for name in np.unique(dataset.column(protocol.client_column))]
    return [str(k) for k in range(n_clients)]


def _flags(dataset: Dataset, name: str) -> np.ndarray:
    column = dataset.column(name)
    if column.dtype.kind == "U" and np.isin(column, ("train", "test")).all():
        return np.asarray(column == "test")
    if not np.isin(column, (0, 1)).all():
        raise InputError(
            f"column '{name}' of {dataset.name} must be true or false, or 'train' or 'test', in every row "
            "to say which are for testing"
        )
    return column.astype(bool)


def _codes(dataset: Dataset, name: str | None) -> np.ndarray | None:
    return None if name is None else np.unique(dataset.column(name), return_inverse=True)[1]
