"""MLflow: a run for each record, found again by its tag. Needs the ``mlflow`` extra."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from apfl.errors import InputError, optional
from apfl.report.trackers import Run

STORE = "sqlite:///mlflow.db"
AT_ONCE = 100  # parameters in one request; MLflow's limit
LONGEST = 500  # of a parameter's value; stores differ, this is the least


def send(runs: Sequence[Run], uri: str | None, project: str) -> Iterator[tuple[Run, bool]]:
    """Send what is not there yet to a tracking server or to ``sqlite:///FILE``."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = optional("mlflow", "mlflow")
    try:
        client = mlflow.MlflowClient(tracking_uri=uri or STORE)
        known = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if known is None else known.experiment_id
        for run in runs:
            new = not client.search_runs([experiment], f"tags.apfl = '{run.key}'", max_results=1)
            if new:
                _send_one(client, experiment, run)
            yield run, new
    except mlflow.MlflowException as error:
        raise InputError(f"MLflow at {uri or STORE} refused: {error}; check --uri") from error


def _send_one(client: Any, experiment: str, run: Run) -> None:
    entities = optional("mlflow.entities", "mlflow")
    run_id = client.create_run(experiment, run_name=run.name).info.run_id
    at = int(time.time() * 1000)
    parameters = [entities.Param(key, _text(value)) for key, value in run.parameters.items()]
    metrics = [entities.Metric(key, value, at, len(run.curve)) for key, value in run.metrics.items()]
    for step, point in enumerate(run.curve, 1):
        metrics += [entities.Metric(f"curve.{key}", value, at, step) for key, value in point.items()]
    for batch in _batches(parameters):
        client.log_batch(run_id, params=batch)
    for batch in _batches(metrics):
        client.log_batch(run_id, metrics=batch)
    client.log_text(run_id, run.record, "record.json")
    client.set_tag(run_id, "apfl", run.key)  # last: a run cut short is sent again
    client.set_terminated(run_id)


def _batches(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (values[i : i + AT_ONCE] for i in range(0, len(values), AT_ONCE))


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
