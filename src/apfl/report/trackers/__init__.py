"""Records to experiment trackers: parameters, metrics, curves and the record itself. Off unless asked for."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfl.errors import unknown
from apfl.experiments.record import Record

__all__ = ["TRACKERS", "Run", "send"]

TRACKERS = ("mlflow", "wandb")
RUN = ("method", "seed", "data", "data_sha256", "device", "partition", "n_clients", "alpha")
SCALARS = (
    "accuracy_client_mean", "accuracy_client_std", "accuracy_sample_mean", "accuracy_worst_decile",
    "balanced_accuracy_client_mean", "auroc_client_mean", "rounds", "bytes_up", "bytes_down", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One record as trackers think of it."""

    key: str  # the same for the same run and result, so that nothing is sent twice
    name: str
    parameters: dict[str, Any]
    metrics: dict[str, float]
    curve: list[dict[str, float]]  # after each round
    record: str  # JSON, the artefact

    @staticmethod
    def of(record: Record) -> Run:
        """What a tracker is told about a record."""
        return Run(
            hashlib.sha256(json.dumps([record.run, list(record.client_scores)]).encode()).hexdigest()[:32],
            f"{record.method}-seed{record.seed}",
            _parameters(record),
            {name: float(value) for name in SCALARS if (value := getattr(record, name)) is not None}
            | {name: value for name, value in record.measures.items() if value is not None},
            [{"seconds": s, "bytes": b, record.headline.metric: a} for s, b, a in record.curve],
            record.to_json(),
        )


def _parameters(record: Record) -> dict[str, Any]:
    """What was run, one level deep: ``settings.gamma``."""
    groups = {"settings": record.settings, "protocol": record.protocol, "versions": record.versions}
    groups["chosen"] = {k: v for k, v in record.chosen.items() if isinstance(v, bool | int | float | str)}
    parameters = {name: getattr(record, name) for name in RUN}
    parameters |= {f"{group}.{key}": value for group, values in groups.items() for key, value in values.items()}
    return {key: value for key, value in parameters.items() if value is not None}


def send(records: Iterable[Record], to: str, uri: str | None, project: str) -> Iterator[tuple[Run, bool]]:
    """Send each record; yields it and whether it was new there. ``uri`` is a store or, for wandb, a folder."""
    if to not in TRACKERS:
        raise unknown("tracker", to, TRACKERS)
    tracker = importlib.import_module(f"apfl.report.trackers.{to}")
    return iter(tracker.send([Run.of(record) for record in records], uri, project))


def folder_of(uri: str | None, default: str) -> Path:
    """A folder given as a path or as file://."""
    return Path((uri or default).removeprefix("file://"))
