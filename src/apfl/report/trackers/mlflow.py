"""MLflow: a run for each record, found again by its tag. Needs the ``mlflow`` extra."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence

from apfl.errors import InputError, optional
from apfl.report.trackers import Run

STORE = "sqlite:///mlflow.db"
AT_ONCE = 100  # parameters in one request; MLflow's limit
LONGEST = 500  # of a parameter's value; stores differ, this is the least


def send(runs: Sequence[Run], uri: str | None, project: str) -> Iterator[tuple[Run, bool]]:
    """Send what is not there yet to a tracking server or to ``sqlite:///FILE``."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = optional("mlflow", "mlflow")
    entities = optional("mlflow.entities", "mlflow")
    try:
        client = mlflow.MlflowClient(tracking_uri=uri or STORE)
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        for run in runs:
            if client.search_runs([experiment], f"tags.apfl = '{run.key}'", max_results=1):
                yield run, False
                continue
            started = client.create_run(experiment, run_name=run.name)
            at = int(time.time() * 1000)
            told = [entities.Param(key, _text(value)) for key, value in run.parameters.items()]
            for i in range(0, len(told), AT_ONCE):
                client.log_batch(started.info.run_id, params=told[i : i + AT_ONCE])
            metrics = [entities.Metric(key, value, at, len(run.curve)) for key, value in run.metrics.items()]
            for step, point in enumerate(run.curve, 1):
                metrics += [entities.Metric(f"curve.{key}", value, at, step) for key, value in point.items()]
            for i in range(0, len(metrics), AT_ONCE):
                client.log_batch(started.info.run_id, metrics=metrics[i : i + AT_ONCE])
            client.log_text(started.info.run_id, run.record, "record.json")
            client.set_tag(started.info.run_id, "apfl", run.key)  # last: a run cut short is sent again
            client.set_terminated(started.info.run_id)
            yield run, True
    except mlflow.MlflowException as error:
        raise InputError(f"MLflow at {uri or STORE} refused: {error}; check --uri") from error


def _text(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST]
