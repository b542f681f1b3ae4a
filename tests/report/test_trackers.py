"""Records in real stores of MLflow and W&B, read back through their own clients."""

from __future__ import annotations

import json
import sys

import pytest

from apfl.errors import InputError
from apfl.report import trackers
from apfl.report.trackers import Run, send
from tests.report.records import a_study, record


def test_what_is_told():
    told = Run.of(record("apfl", seed=3))
    assert told.parameters["settings.lr"] == 0.1
    assert told.parameters["chosen.beta"] == 10.0
    assert "auroc_client_mean" not in told.metrics  # there is none
    assert told.key != Run.of(record("apfl", seed=4)).key
    assert json.loads(told.record)["seed"] == 3


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_a_missing_library_says_what_to_install(monkeypatch, tmp_path, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)  # so that importing it fails, whether it is installed or not
    with pytest.raises(InputError, match=rf"{tracker} cannot be imported.*pip install 'apfl\[{tracker}\]'"):
        next(send([record()], tracker, str(tmp_path), "p"))


def test_an_unknown_tracker_is_refused_with_those_there_are():
    with pytest.raises(InputError, match="no tracker 'wandbb'; did you mean 'wandb'"):
        send([record()], "wandbb", None, "p")


@pytest.mark.filterwarnings("ignore")  # of the library's own, on import
def test_mlflow_in_sqlite(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow: pip install 'apfl[mlflow]'")
    monkeypatch.chdir(tmp_path)  # where MLflow puts artefacts
    uri = f"sqlite:///{tmp_path}/store.db"
    study = a_study()[:4]
    assert [new for _, new in send(study, "mlflow", uri, "toy")] == [True] * 4
    assert [new for _, new in send([*study, record("ditto")], "mlflow", uri, "toy")] == [False] * 4 + [True]

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert len(runs) == 5
    (run,) = [run for run in runs if run.data.params["method"] == "fedavg"]
    assert run.info.status == "FINISHED"
    assert run.data.params["settings.lr"] == "0.1"
    assert run.data.metrics["accuracy_client_mean"] == study[3].accuracy_client_mean
    curve = client.get_metric_history(run.info.run_id, "curve.accuracy_client_mean")
    assert [(m.step, m.value) for m in sorted(curve, key=lambda m: m.step)] == [
        (t, point[2]) for t, point in enumerate(study[3].curve, 1)
    ]
    path = client.download_artifacts(run.info.run_id, "record.json", str(tmp_path))
    with open(path) as file:
        assert json.load(file)["method"] == "fedavg"


@pytest.mark.filterwarnings("ignore")
def test_mlflow_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs mlflow: pip install 'apfl[mlflow]'")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match="check --uri"):
        next(send([record()], "mlflow", "http://127.0.0.1:9", "toy"))


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'apfl[wandb]'")
    study = a_study()[:4]
    assert [new for _, new in send(study, "wandb", str(tmp_path), "toy")] == [True] * 4
    assert [new for _, new in send(study, "wandb", str(tmp_path), "toy")] == [False] * 4
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 4
    key = Run.of(study[3]).key
    (log,) = [path for path in files if key in path.name]
    raw = log.read_bytes()
    for told in (b"curve/accuracy_client_mean", b"settings.lr", b"balanced_accuracy_client_mean", b"record.json"):
        assert told in raw
