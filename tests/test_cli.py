"""The command line, from its options to the files it leaves."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from apfl.cli import main
from apfl.container import read

QUICK = ["--seeds", "0", "--methods", "local_ridge,apfl", "--set", "apfl.d_primary=64", "--set", "apfl.d_refinement=64"]


def apfl(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.fixture
def features(tmp_path) -> Path:
    """A small file with everything optional in it."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=120)
    path = tmp_path / "features.npz"
    stored = np.clip(100 * rng.random((120, 8)) + 100 * np.eye(3, 8)[labels], 0, 255).astype(np.uint8)
    np.savez(
        path, features=stored, scale=np.full(8, 0.01, np.float32), labels=labels, class_names=["ant", "bee", "cat"],
        site=np.array(["x", "y", "z"])[np.arange(120) % 3], held_out=np.arange(120) % 4 == 0,
        patient=np.arange(120) // 6,
    )  # fmt: skip
    return path


def test_run_needs_no_arguments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert apfl("run") == 0
    (folder,) = (tmp_path / "runs").iterdir()
    found = records(folder)
    assert {(r["method"], r["seed"]) for r in found} == {
        (m, s) for m in ("local_ridge", "afl", "central", "apfl_paper", "apfl") for s in (0, 1, 2)
    }
    promised = [
        "method",
        "seed",
        "data",
        "n_clients",
        "alpha",
        "settings",
        "accuracy_client_mean",
        "accuracy_client_std",
        "accuracy_sample_mean",
        "accuracy_worst_decile",
        "client_accuracies",
        "rounds",
        "bytes_up",
        "bytes_down",
        "seconds",
        "versions",
    ]
    assert all(key in record for record in found for key in promised)
    mean = {
        m: np.mean([r["accuracy_client_mean"] for r in found if r["method"] == m]) for m in ("afl", "central", "apfl")
    }
    assert mean["apfl"] > mean["central"] > mean["afl"]  # personalisation shows in the demo
    assert "apfl" in capsys.readouterr().out
    assert len(list((folder / "models" / "apfl" / "seed-2").glob("client-*.safetensors"))) == 10
    assert len(list((folder / "models" / "apfl" / "seed-2").glob("primary-*.safetensors"))) == 1


def test_the_same_command_gives_the_same_records_once(tmp_path):
    assert apfl("run", *QUICK, "--out", tmp_path / "r") == 0
    first = records(tmp_path / "r")
    assert apfl("run", *QUICK, "--out", tmp_path / "r") == 0
    again = records(tmp_path / "r")
    assert [r["client_accuracies"] for r in again] == [r["client_accuracies"] for r in first]
    assert len(again) == 2
    assert apfl("run", *QUICK[:4], "--methods", "afl", "--out", tmp_path / "r") == 0  # another method joins
    assert len(records(tmp_path / "r")) == 3


def test_a_folder_of_another_run_is_not_mixed_up(tmp_path, capsys):
    assert apfl("run", *QUICK, "--out", tmp_path / "r") == 0
    before = (tmp_path / "r" / "records.jsonl").read_bytes()
    assert apfl("run", *QUICK, "--alpha", "0.5", "--out", tmp_path / "r") == 2
    assert apfl("run", *QUICK, "--set", "apfl.beta=3", "--out", tmp_path / "r") == 2
    assert "another run" in capsys.readouterr().err
    assert (tmp_path / "r" / "records.jsonl").read_bytes() == before


def test_columns_name_clients_tests_and_groups(features, tmp_path):
    out = tmp_path / "r"
    columns = ["--client-column", "site", "--test-column", "held_out"]
    assert apfl("run", "--data", features, *QUICK, *columns, "--out", out) == 0
    record = records(out)[1]
    assert (record["n_clients"], record["client_names"], record["alpha"]) == (3, ["x", "y", "z"], None)
    assert (sum(record["n_train"]), sum(record["n_test"])) == (90, 30)
    by_domain = ["--partition", "domains", "--client-column", "site", "--clients", "6", "--group-column", "patient"]
    assert apfl("run", "--data", features, *QUICK, *by_domain, "--out", tmp_path / "d") == 0
    assert records(tmp_path / "d")[0]["n_clients"] == 6


def test_predict_and_export(features, tmp_path, capsys):
    out = tmp_path / "r"
    assert apfl("run", "--data", features, *QUICK, "--clients", "3", "--alpha", "10", "--out", out) == 0
    model = out / "models" / "apfl" / "seed-0" / "client-1.safetensors"
    assert apfl("export", model, tmp_path / "alone.safetensors") == 0
    assert apfl("predict", model, features, "--out", tmp_path / "a.csv") == 0
    assert "accuracy" in capsys.readouterr().err
    bare = tmp_path / "bare.npz"
    with np.load(features) as file:
        np.savez(bare, features=file["features"], scale=file["scale"])
    assert apfl("predict", tmp_path / "alone.safetensors", bare, "--out", tmp_path / "b.csv") == 0
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert len(rows) == 120
    assert {row["predicted"] for row in rows} <= {"ant", "bee", "cat"}
    assert "primary" in read(tmp_path / "alone.safetensors").tensors


def test_methods_and_verify(capsys):
    assert apfl("methods") == 0
    listed = capsys.readouterr().out
    assert "local_ridge" in listed
    assert "d_primary = 1024" in listed
    assert apfl("verify", "--width", "64") == 0
    assert "Theorem 3" in capsys.readouterr().out


def test_verify_notices_when_a_theorem_fails(monkeypatch, capsys):
    import apfl.verify as room

    monkeypatch.setattr(room, "fold", lambda uploads, gamma: uploads[0].primary)  # a server that hears one client
    assert apfl("verify", "--width", "32") == 1
    assert "NO" in capsys.readouterr().out


def damaged(path: Path, **changes) -> Path:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | changes
    path = path.with_name("damaged.npz")
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.full((120, 8), np.nan)}, "NaN or infinity, the first is row 0"),
        ({"features": np.zeros((120, 2, 4))}, "shape (n, l)"),
        ({"features": np.zeros((119, 8))}, "119 features but 120 labels"),
        ({"features": None}, "no array 'features'"),
        ({"labels": np.full(120, 3)}, "allowed are 0 to 2"),
        ({"labels": np.zeros(120)}, "expected integers or strings"),
        ({"labels": np.full(120, "owl")}, "label 'owl'"),
        ({"scale": np.ones(7)}, "'scale' has shape (7,)"),
        ({"site": np.array([object()] * 120)}, "Python objects"),
    ],
)
def test_bad_data_is_one_line_and_leaves_nothing(features, tmp_path, capsys, changes, message):
    path = damaged(features, **changes)
    assert apfl("run", "--data", path, *QUICK, "--out", tmp_path / "r") == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "apfll"], "did you mean 'apfl'"),
        (["--methods", ""], "no methods given"),
        (["--set", "apfl.balanse=1"], "did you mean 'balance'"),
        (["--set", "apfl.beta=-1"], "greater than 0"),
        (["--set", "apfl.beta=inf"], "finite"),
        (["--methods", "apfl,oll", "--set", "oll.gamma=inf"], "finite"),
        (["--methods", "apfl,fedprox", "--set", "fedprox.lr=nan"], "fedprox.lr"),
        (["--set", "apfl.d_primary=100000000"], "less than or equal"),
        (["--set", "beta=1"], "METHOD.KEY=VALUE"),
        (["--set", "afl.normalise=row"], "which is not run"),
        (["--set", "apfl.activation_primary=rellu"], "'relu'"),
        (["--seeds", "one"], "whole numbers with commas"),
        (["--seeds", "0,0"], "differ from each other"),
        (["--device", "tpu"], "allowed are auto"),
        (["--data", "nowhere.npz"], "no file nowhere.npz"),
        (["--data", "imagenet"], "give 'digits'"),
        (["--partition", "given"], "--client-column"),
        (["--client-column", "site"], "no column in digits 'site'"),
        (["--partition", "dirichlett"], "did you mean 'dirichlet'"),
        (["--clients", "0"], "allowed are 1 to 1797"),
        (["--clients", "300", "--alpha", "0.01"], "larger --alpha, fewer --clients or a smaller --minimum"),
        (["--test-fraction", "1"], "less than 1"),
        (["--test-fraction", "0"], "nothing to measure"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert apfl("run", *QUICK, *options, "--out", tmp_path / "r") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "r").exists()


def test_corrupt_files_and_folders_are_refused(features, tmp_path, capsys):
    broken = tmp_path / "broken.npz"
    broken.write_bytes(features.read_bytes()[:-200])
    assert apfl("run", "--data", broken, *QUICK, "--out", tmp_path / "r") == 2
    assert apfl("predict", broken, features) == 2
    assert apfl("predict", tmp_path / "none.safetensors", features) == 2
    (tmp_path / "file").write_text("in the way")
    assert apfl("run", *QUICK, "--out", tmp_path / "file" / "r") == 2
    assert "cannot write" in capsys.readouterr().err
    strange = tmp_path / "s"
    strange.mkdir()
    (strange / "records.jsonl").write_text("not a record\n")
    assert apfl("run", *QUICK, "--out", strange) == 2
    assert (strange / "records.jsonl").read_text() == "not a record\n"


def test_interrupting_loses_nothing_that_was_finished(tmp_path):
    """A real process, a real Ctrl-C."""
    out = tmp_path / "r"
    many = ",".join(str(seed) for seed in range(200))
    command = [sys.executable, "-c", "from apfl.cli import main; main()", "run", "--seeds", many, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 240  # a busy machine takes a minute to import
    while not (out / "records.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130, said
    finished = records(out)
    assert 0 < len(finished) < 800
    assert f"kept {len(finished)} finished records" in said
    assert not list(out.rglob("*.tmp"))
    assert not list(out.rglob(".*making"))
