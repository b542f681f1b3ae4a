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
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from apfl import __version__ as apfl_version
from apfl.cli import progress as cli_progress
from apfl.cli.app import app
from apfl.experiments import study
from apfl.models.file import read
from tests.commands import here as apfl

QUICK = ["--seeds", "0", "--methods", "local_ridge,apfl", "--set", "apfl.d_primary=64", "--set", "apfl.d_refinement=64"]


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


def commands(group, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_teaches_every_argument_and_option(path, capsys, monkeypatch):
    command = COMMANDS[path]
    monkeypatch.setenv("COLUMNS", "300")
    assert apfl(*path, "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert command.help
    for parameter in command.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            assert parameter.help, f"{parameter.name} has no help"
            words = " ".join(parameter.help.replace("\\[", "[").split()[:4])
            assert words in shown, f"the help of {parameter.name} is not shown"


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
    assert len(list((folder / "models" / "apfl" / "seed-2").glob("points-*.safetensors"))) == 1


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
    assert "points" in read(tmp_path / "alone.safetensors").tensors


def test_rows_that_cannot_be_scored_have_no_class(features, tmp_path, capsys):
    out = tmp_path / "r"
    by_row = ("--set", "apfl.normalise=row")  # in "columns" a row of zeros is a row like any other
    assert apfl("run", "--data", features, *QUICK, *by_row, "--clients", "3", "--alpha", "10", "--out", out) == 0
    with np.load(features) as file:
        rows, labels = file["features"].astype(np.float32), np.array(["ant", "bee", "cat"])[file["labels"]]
    rows[[2, 5]] = 0
    rows[7] *= 1e30
    np.savez(tmp_path / "black.npz", features=rows, labels=labels)
    np.savez(tmp_path / "bare.npz", features=rows)
    for method in ("apfl", "local_ridge"):
        model = out / "models" / method / "seed-0" / "client-1.safetensors"
        capsys.readouterr()
        assert apfl("predict", model, tmp_path / "black.npz", "--out", tmp_path / "a.csv") == 0
        said = capsys.readouterr().err
        assert "2 of 120 rows have no decision: rows 2, 5 (every feature is zero); these are left empty" in said
        lines = (tmp_path / "a.csv").read_text().splitlines()
        assert (lines[3], lines[6]) == ("2,,", "5,,")
        read_back = list(csv.DictReader(lines))
        decided = [row for i, row in enumerate(read_back) if i not in (2, 5)]
        assert {row["predicted"] for row in decided} <= {"ant", "bee", "cat"}
        assert all(np.isfinite(float(row["score"])) for row in decided)
        hits = sum(row["predicted"] == label for row, label in zip(read_back, labels, strict=True))
        assert f"accuracy {hits / 120:.4f} on 120 labelled rows" in said
        assert apfl("predict", model, tmp_path / "bare.npz") == 0
        printed = capsys.readouterr()
        assert printed.out.splitlines() == lines
        assert "nan" not in printed.out


def test_missing_clients_and_groups_are_refused_with_their_rows(features, tmp_path, capsys):
    site = np.array(["x", "y", "z"])[np.arange(120) % 3]
    site[[4, 9]] = ""
    patient, held = np.arange(120) / 6, (np.arange(120) % 4 == 0).astype(float)
    patient[7] = held[8] = np.nan
    path = damaged(features, site=site, patient=patient, held_out=held)
    dealt = "--clients 3 --alpha 10"
    for options, rows in {
        "--client-column site": "rows 4, 9,",
        "--client-column site --partition domains --clients 6": "rows 4, 9,",
        f"--group-column patient {dealt}": "row 7,",
        f"--test-column held_out {dealt}": "row 8,",
    }.items():
        assert apfl("run", "--data", path, *QUICK, *options.split(), "--out", tmp_path / "r") == 2
        said = capsys.readouterr().err.strip()
        assert f"missing ({rows}" in said
        assert "\n" not in said
        assert not (tmp_path / "r").exists()
    assert apfl("run", "--data", path, *QUICK, *dealt.split(), "--out", tmp_path / "r") == 0


@pytest.mark.parametrize("name", ["m[/2]", "q[red]x", "a:smile:b"])
def test_paths_are_printed_as_they_are(name, features, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert apfl("run", "--data", features, "--clients", "3", *QUICK, "--out", name) == 0
    assert f"records: {name}/records.jsonl   models: {name}/models" in capsys.readouterr().out
    model = f"{name}/models/apfl/seed-0/client-0.safetensors"
    assert apfl("predict", model, features, "--out", f"{name}.csv") == 0
    assert f"120 predictions in {name}.csv" in capsys.readouterr().err
    assert apfl("export", model, f"{name}.safetensors") == 0
    assert f"wrote {name}.safetensors" in capsys.readouterr().err
    assert apfl("features", features, "--backbone", "identity", "--out", f"{name}.npz") == 0
    assert f"120 samples: {name}.npz (120 extracted now)" in capsys.readouterr().out
    assert apfl("table", name, "--format", "csv", "--out", f"{name}.txt") == 0
    assert f"wrote {name}.txt" in capsys.readouterr().err


def test_methods_and_verify(capsys):
    assert apfl("methods") == 0
    listed = capsys.readouterr().out
    assert "local_ridge" in listed
    assert "d_primary = 1024" in listed
    assert apfl("verify", "--width", "64") == 0
    assert "Theorem 3" in capsys.readouterr().out


def test_verify_notices_when_a_theorem_fails(monkeypatch, capsys):
    import apfl.experiments.verify as room

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
        ({"features": np.full((120, 8), np.nan)}, "too large for float32; the first is row 0"),
        ({"features": np.zeros((120, 2, 4))}, "shape (n, l)"),
        ({"features": np.zeros((119, 8))}, "119 features but 120 labels"),
        ({"features": None}, "no array 'features'"),
        ({"labels": np.full(120, 3)}, "allowed are 0 to 2"),
        ({"labels": np.full(120, 0.5)}, "expected integers or strings"),
        ({"labels": np.full(120, "owl")}, "label 'owl'"),
        ({"scale": np.ones(7)}, "'scale' has shape (7,)"),
        ({"site": np.array([object()] * 120)}, "Python objects"),
        ({"labels": np.array(["ant", ""] * 60)}, "60 of 120 labels of"),
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
        (["--methods", ""], "--methods '' given; name at least one"),
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
        (["--seeds", "9223372036854775808"], "from 0 to 9223372036854775807"),
        (["--methods", " ,"], "--methods ' ,' given; name at least one, with commas (have: afl, "),
        (["--device", "tpu"], "allowed are auto"),
        (["--data", "nowhere.npz"], "no file nowhere.npz"),
        (["--data", "imagenet"], "give 'digits'"),
        (["--partition", "given"], "--client-column"),
        (["--client-column", "site"], "no column in digits 'site'"),
        (["--partition", "dirichlett"], "did you mean 'dirichlet'"),
        (["--clients", "0"], "allowed are 1 to 1797"),
        (["--clients", "300", "--alpha", "0.01"], "larger --alpha, fewer --clients or a smaller --minimum"),
        (["--test-fraction", "1"], "less than 1"),
        (["--test-fraction", "0", "--no-save-models"], "nothing would be left"),
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
    assert f"kept {len(finished)} finished record" in said
    assert not list(out.rglob("*.tmp"))
    assert not list(out.rglob(".*making"))


def test_a_record_is_run_again_from_the_data_it_names(features, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    features.rename(tmp_path / "sub" / "mine.npz")
    assert apfl("run", "--data", "sub/mine.npz", *QUICK, "--clients", "3", "--alpha", "10", "--out", "r") == 0
    assert [record["source"] for record in records(Path("r"))] == [{"data": "sub/mine.npz"}] * 2
    assert apfl("rerun", "r", "--method", "apfl") == 0
    assert "matched" in capsys.readouterr().out
    Path("sub/mine.npz").rename("moved.npz")
    assert apfl("rerun", "r", "--method", "apfl", "--data", "moved.npz") == 0


def test_a_record_of_a_table_is_run_again_with_its_columns(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    rng = np.random.default_rng(0)
    rows = [f"{'oak' if x[0] > 0 else 'elm'},{','.join(map(str, x))}" for x in rng.standard_normal((60, 3))]
    (tmp_path / "t.csv").write_text("\n".join(["species,f0,f1,f2", *rows]))
    given = ["--data", tmp_path / "t.csv", "--label-column", "species", "--partition", "iid", "--clients", "3"]
    assert apfl("run", *given, *QUICK[:2], "--methods", "local_ridge", "--out", tmp_path / "r") == 0
    assert apfl("rerun", tmp_path / "r") == 0
    assert "matched" in capsys.readouterr().out


@pytest.mark.parametrize("start", [["-m", "apfl"], ["-m", "apfl.cli"]])
def test_the_version_is_printed(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"apfl {apfl_version}\n"


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_log_has_a_line_for_each_record_and_no_empty_ones(tmp_path, capsys):
    assert apfl("run", *QUICK, "--no-save-models", "--out", tmp_path / "r") == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("1/2 local_ridge, seed 0: ")
    assert second.startswith("2/2 apfl, seed 0: ")
    assert second.endswith(" %")


def test_an_interrupted_run_says_what_it_leaves_and_goes_on_from_it(tmp_path, monkeypatch, capsys):
    out = tmp_path / "r"
    command = ["run", "--methods", "local_ridge,fedavg", "--seeds", "0", "--set", "fedavg.n_rounds=3", "--out", out]
    once = study.run

    def stopped(name, *given, **options):
        options |= {"on_round": interrupt} if name == "fedavg" else {}
        return once(name, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(study, "run", stopped)
        assert apfl(*command) == 130
    said = capsys.readouterr().err
    assert f"kept 1 finished record in {out / 'records.jsonl'} and how far fedavg-seed-0 had got in" in said
    assert f"run the same command with --out {out} to resume" in said
    (left,) = (out / "checkpoints").iterdir()
    assert apfl(*command) == 0
    assert not left.exists()
    assert len(records(out)[1]["curve"]) == 3


def test_nothing_is_left_of_a_run_that_had_nothing_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "run", interrupt)
    assert apfl("run", *QUICK, "--out", tmp_path / "r") == 130
    monkeypatch.setattr(study, "tune_once", interrupt)
    assert apfl("run", *QUICK, "--tune", "--out", tmp_path / "r") == 130
    assert capsys.readouterr().err.splitlines() == ["stopped; nothing was finished yet, nothing is kept"] * 2
    assert not (tmp_path / "r").exists()


def test_what_was_tuned_before_an_interruption_is_kept(tmp_path, monkeypatch, capsys):
    out = tmp_path / "r"
    monkeypatch.setattr(study, "run", interrupt)
    quick = ["--seeds", "0", "--methods", "local_head", "--set", "local_head.n_rounds=1"]
    assert apfl("run", *quick, "--tune", "--out", out) == 130
    tuned, stopped = capsys.readouterr().err.splitlines()
    assert tuned == "tuned local_head"
    assert f"kept what was tuned in {out / 'tuning.jsonl'};" in stopped


def test_an_extraction_speaks_once_a_minute_and_at_the_end(monkeypatch, capsys):
    clock = iter([0, 0, 30, 61, 62, 130])
    monkeypatch.setattr(cli_progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with cli_progress.Counter("photos", 1000) as counter:
        for done in (100, 300, 710, 800, 1000):
            counter.show(done, 1000)
    assert capsys.readouterr().err.splitlines() == ["photos: 710/1000, 10.0/s", "photos: 1000/1000, 6.9/s"]
