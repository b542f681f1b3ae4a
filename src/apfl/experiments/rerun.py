"""One record run again: the same settings, seed and threads; every number compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from apfl.data.federation import Dataset
from apfl.data.protocol import Protocol, federate
from apfl.errors import InputError
from apfl.experiments.record import Files, Record, as_read, hashes
from apfl.experiments.run import run
from apfl.maths.machine import threads
from apfl.methods import load_method, method_names

__all__ = ["differences", "run_again", "select"]

# What may differ between two runs of one cell: the clock, the place, and what was noted around it.
CIRCUMSTANCES = ("seconds", "versions", "source", "tuning", "provenance", "data", "device", "threads", "files")
SHOWN = 8


def select(records: Sequence[Record], path: Path, **wanted: Any) -> Record:
    """The one record that has what is wanted."""
    asked = {name: value for name, value in wanted.items() if value is not None}
    matching = [record for record in records if all(getattr(record, name) == value for name, value in asked.items())]
    if len(matching) == 1:
        return matching[0]
    names = sorted({f"{record.method} seed {record.seed}" for record in matching or records})
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    raise InputError(
        f"{len(matching)} of the {len(records)} records in {path} fit; choose one with --method, --seed, --clients and "
        f"--alpha, or give a cell's own file (have: {shown})"
    )


def run_again(record: Record, dataset: Dataset, device: torch.device, method_file: str | None = None) -> Record:
    """The record that the same cell gives now; ``method_file`` is where a method of the user's own is by now."""
    if record.data_sha256 != dataset.sha256:
        raise InputError(
            f"{dataset.name} is not what the record is of (its SHA-256 differs, or the columns taken): give that "
            "with --data"
        )
    try:
        given = Protocol(**record.protocol)
    except TypeError as error:
        raise InputError(f"the record's protocol is not one that this version knows ({error})") from error
    name = record.method.removesuffix("_oracle")  # its settings are in the record: nothing to look for
    protocol = replace(given, partition=_located("partition", given.partition, record.files))
    method = load_method(method_file or _located("method", name, record.files), **record.settings)
    with threads(record.threads):
        federation = federate(dataset, protocol, record.seed).to(device)
        again = run(name, method, federation, dataset, protocol, record.seed)[0]
        return replace(again, method=record.method, protocol=asdict(given))


def _located(kind: str, name: str, files: Files) -> str:
    """The path of what a record calls ``name``; the name itself if it is installed."""
    how = "give its file with --method ./FILE.py:NAME" if kind == "method" else "put the file back"
    if kind in files:
        path = files[kind]["path"]
        if not Path(f"{path.rpartition('.py')[0]}.py").is_file():
            raise InputError(f"the record's {kind} was in {path}, which is not there; {how}")
        return path
    if kind == "method" and name not in method_names():
        raise InputError(f"the record does not say in which file its method {name} is; {how}")
    return name


def differences(before: Record, after: Record) -> list[str]:
    """What is not the same, the accuracy first; none if every number is."""
    old, new = _comparable(before), _comparable(after)
    lines = [f"{name}: {_short(old[name])} then, {_short(new[name])} now" for name in old if old[name] != new[name]]
    if lines:
        lines += [
            f"{name} {before.versions.get(name)} then, {value} now"
            for name, value in after.versions.items()
            if before.versions.get(name) != value
        ]
        lines += _changed_files(before.files, after.files)
        if before.device != after.device or before.threads != after.threads:
            lines.append(f"{before.device}, {before.threads} threads then; {after.device}, {after.threads} threads now")
    return lines


def _changed_files(before: Files, after: Files) -> list[str]:
    old, new = hashes(before), hashes(after)
    return [
        f"{before[kind]['path']} has changed: SHA-256 {old[kind][:12]} then, {new[kind][:12]} now"
        for kind in old
        if kind in new and new[kind] != old[kind]
    ]


def _comparable(record: Record) -> dict[str, Any]:
    """The record without its circumstances; a curve without its clock."""
    results = {name: value for name, value in asdict(record).items() if name not in CIRCUMSTANCES}
    results["curve"] = [list(point[1:]) for point in results["curve"]]
    comparable: dict[str, Any] = as_read(results)
    return comparable


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
