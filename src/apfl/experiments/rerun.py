"""One record run again: the same settings, seed and threads; every number compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from apfl.data.federation import Dataset
from apfl.data.protocol import Protocol, federate
from apfl.errors import InputError
from apfl.experiments.record import Record
from apfl.experiments.run import run
from apfl.methods import load_method

__all__ = ["differences", "run_again", "select"]

# What may differ between two runs of one cell: the clock, the place, and what was noted around it.
CIRCUMSTANCES = ("seconds", "versions", "source", "tuning", "provenance", "data", "device", "threads")
SHOWN = 8


def select(records: Sequence[Record], path: Path, **wanted: Any) -> Record:
    """The one record that has what is wanted."""
    asked = {name: value for name, value in wanted.items() if value is not None}
    found = [record for record in records if all(getattr(record, name) == value for name, value in asked.items())]
    if len(found) == 1:
        return found[0]
    names = sorted({f"{record.method} seed {record.seed}" for record in found or records})
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    raise InputError(
        f"{len(found)} of the {len(records)} records in {path} fit; choose one with --method, --seed, --clients and "
        f"--alpha, or give a cell's own file (have: {shown})"
    )


def run_again(record: Record, dataset: Dataset, device: torch.device) -> Record:
    """The record that the same cell gives now."""
    if record.data_sha256 != dataset.sha256:
        raise InputError(
            f"{dataset.name} is not what the record is of (its SHA-256 differs, or the columns taken): give that "
            "with --data"
        )
    try:
        protocol = Protocol(**record.protocol)
    except TypeError as error:
        raise InputError(f"the record's protocol is not one that this version knows ({error})") from error
    name = record.method.removesuffix("_oracle")  # its settings are in the record: nothing to look for
    method = load_method(name, **record.settings)
    threads = record.threads or torch.get_num_threads()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):
            federation = federate(dataset, protocol, record.seed).to(device)
            again = run(name, method, federation, dataset, protocol, record.seed)[0]
            return replace(again, method=record.method)
    finally:
        torch.set_num_threads(before)


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
        if before.device != after.device or before.threads != after.threads:
            lines.append(f"{before.device}, {before.threads} threads then; {after.device}, {after.threads} threads now")
    return lines


def _comparable(record: Record) -> dict[str, Any]:
    """The record without its circumstances; a curve without its clock."""
    held = {name: value for name, value in asdict(record).items() if name not in CIRCUMSTANCES}
    held["curve"] = [list(point[1:]) for point in held["curve"]]
    return {name: _plain(value) for name, value in held.items()}


def _plain(value: Any) -> Any:
    """As it is after a trip through JSON."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
