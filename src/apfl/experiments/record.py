"""The record of a run: what was run, and what came out. One line of JSON each; files of them are never half-written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from apfl.data.partition import load_partition
from apfl.data.protocol import Protocol
from apfl.data.registry import file_of
from apfl.data.targets import Target
from apfl.errors import InputError
from apfl.experiments.headline import HEADLINES, Headline
from apfl.files import replacing
from apfl.methods import Method

__all__ = ["Files", "Record", "as_read", "hashes", "keep_record", "read_records", "user_files", "with_hashes"]

Files = Mapping[str, Mapping[str, str]]  # by "method" and "partition": the absolute path, and the SHA-256 of the file


@dataclass(frozen=True)
class Record:
    """One method on one federation with one seed: enough to read the result and to run it again.

    >>> import apfl
    >>> (record,) = apfl.run("digits", "afl", clients=5, seeds=1).records
    >>> record.method, record.n_clients, Record.from_json(record.to_json()) == record
    ('afl', 5, True)
    """

    method: str
    seed: int
    data: str
    data_sha256: str | None
    partition: str
    n_clients: int
    alpha: float | None
    settings: Mapping[str, Any]  # every setting of the method, defaults included
    protocol: Mapping[str, Any]  # how rows were dealt out and split
    accuracy_client_mean: float | None  # accuracies are of classes; numbers and several labels have ``measures``
    accuracy_client_std: float | None  # over clients
    accuracy_sample_mean: float | None
    accuracy_worst_decile: float | None
    balanced_accuracy_client_mean: float | None
    auroc_client_mean: float | None
    recall_per_class: Sequence[float | None]
    client_accuracies: Sequence[float | None]
    n_clients_without_test: int
    client_names: Sequence[str]
    n_train: Sequence[int]  # rows of each client
    n_test: Sequence[int]
    rounds: int  # server -> client -> server exchanges
    bytes_up: int  # over all clients
    bytes_down: int
    seconds: float  # training alone, from features in memory to models in memory
    device: str
    versions: Mapping[str, str | None]
    class_names: Sequence[str] = ()
    class_counts: Sequence[Sequence[int]] = ()  # training rows of the measured clients, (clients, classes)
    primary_accuracies: Sequence[float | None] = ()  # of the shared stream alone, where a model has another one too
    chosen: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)  # data, splits and backbone that features came from
    curve: Sequence[
        Sequence[float]
    ] = ()  # after each round: seconds, bytes both ways, the headline's mean over clients
    threads: int | None = None  # of torch and BLAS; another number may round differently
    source: Mapping[str, Any] = field(default_factory=dict)  # what --data and its options were
    tuning: Mapping[str, Any] = field(default_factory=dict)  # how the settings were chosen, where they were: the grid
    first_client_scores: float | None = None  # with reshuffle: the norm of its scores, the same while its model is
    files: Files = field(default_factory=dict)  # the user's own, of a method or a partition that was given by path
    target: Target = "classification"
    measures: Mapping[str, float | None] = field(default_factory=dict)  # of numbers or several labels: rmse_client_mean
    client_measures: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of each client: rmse, r2, ...

    def __repr__(self) -> str:
        score = self.headline.said(self.score)
        return f"Record({self.method} on {self.data}, {self.n_clients} clients, seed {self.seed}: {score})"

    @property
    def headline(self) -> Headline:
        """What its target is judged by first."""
        return HEADLINES[self.target]

    @property
    def score(self) -> float:
        """The headline's mean over clients; NaN if no client has one."""
        known = self.accuracy_client_mean if self.target == "classification" else self.measures[self.headline.metric]
        return math.nan if known is None else known

    @property
    def client_scores(self) -> Sequence[float | None]:
        """The headline of each client."""
        return self.client_accuracies if self.target == "classification" else self.client_measures[self.headline.key]

    def to_json(self) -> str:
        """One line of ``records.jsonl``."""
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Record:
        """The record of one line."""
        try:
            return _typed().validate_python(asdict(Record(**json.loads(line))))
        except (ValueError, TypeError) as error:  # ValueError: JSON's and pydantic's
            raise InputError(f"not a record: {error}") from error

    @property
    def run(self) -> tuple[Any, ...]:
        """What was run, without what came out: equal for two records of the same cell."""
        setting = (self.data, self.data_sha256, self.partition, self.n_clients, self.alpha)
        what = with_hashes([self.settings, self.protocol], self.files)
        return (*setting, json.dumps(what, sort_keys=True), self.method, self.seed)


def as_read(value: Any) -> Any:
    """A value as it reads back from JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def user_files(method: Method, protocol: Protocol) -> Files:
    """The files that were loaded for this method and this partition; none if both are installed."""
    files = {"method": file_of(type(method)), "partition": file_of(load_partition(protocol.partition))}
    return {kind: file for kind, file in files.items() if file}


def hashes(files: Files) -> dict[str, str]:
    """What decides the result, wherever the files are."""
    return {kind: file["sha256"] for kind, file in files.items()}


def with_hashes(what: list[Any], files: Files) -> list[Any]:
    """What identifies a run, with the hashes of the user's own files, if it has any."""
    return [*what, hashes(files)] if files else what


@cache
def _typed() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def read_records(path: Path) -> list[Record]:
    """The records of a ``.jsonl``, of one ``.json``, or of a folder, in order; none if there is no such file.

    A folder is searched, with those in it, for ``records.jsonl`` (`apfl run`) and ``cells/*.json`` (`apfl bench`);
    it may be such a ``cells`` itself.
    """
    if path.is_dir():
        files = {*path.rglob("records.jsonl"), *path.rglob("cells/*.json")}
        files |= set(path.glob("*.json")) if path.resolve().name == "cells" else set()
        return [record for file in sorted(files) for record in read_records(file)]
    try:
        if not path.exists():
            return []
        if path.suffix == ".json":
            return [Record.from_json(path.read_text())]
        return [Record.from_json(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError, InputError) as error:
        raise InputError(
            f"{path} cannot be read as records ({error}); give what apfl wrote. "
            "A cell that was cut short is run again by the `apfl bench` that wrote it"
        ) from error


def keep_record(record: Record, path: Path) -> None:
    """Add a record to the file; one of the same run takes the place of the earlier. The file is never half-written."""
    kept = [other for other in read_records(path) if other.run != record.run]
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{each.to_json()}\n" for each in [*kept, record]))
