"""Plans run by real processes: killed, stopped, repeated, failed, and run again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from apfl.experiments.plan import read_plan
from apfl.experiments.pool import claim
from apfl.experiments.record import read_records
from apfl.models.file import read
from tests.commands import here
from tests.experiments.plan_toys import SMALL

ROOT = Path(__file__).parents[2]
PLAN = f"""
title = "a small plan"{SMALL}
[methods.apfl_paper]
d_primary = 32
d_refinement = 32
balance = [0.0, 0.5]

[methods.fedavg_ft]
n_rounds = 60
tune = {{finetune_epochs = [0, 3]}}
"""
N_CELLS = 8


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", "from apfl.cli import main; main()", *map(str, arguments)]


def apfl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


def results(folder: Path) -> dict[str, dict]:
    """Every record by its key, without the clock, and without the commit: somebody may commit while the tests run."""
    found = {}
    for path in sorted((folder / "cells").iterdir()):
        assert path.suffix == ".json", f"{path} should not be there"
        record = json.loads(path.read_text())
        record.pop("seconds")
        record["versions"].pop("git")
        record["curve"] = [point[1:] for point in record["curve"]]
        found[path.stem] = record
    return found


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture(scope="module")
def undisturbed(plan, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "out"
    done = apfl("bench", plan, "--out", out, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert f"{N_CELLS} cells" in done.stderr
    assert "1 grid to tune" in done.stderr
    assert f"apfl table {out}" in done.stdout
    assert len(results(out)) == N_CELLS
    return out


def test_a_second_call_finds_everything_done(plan, undisturbed, capsys):
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*.json*")}
    assert here("bench", plan, "--out", undisturbed) == 0
    assert f"{N_CELLS} done before" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*.json*")} == before


def test_the_same_plan_gives_the_same_numbers(plan, undisturbed, tmp_path):
    """Other processes, another order, one at a time."""
    assert here("bench", plan, "--out", tmp_path / "again", "--jobs", "1") == 0
    assert results(tmp_path / "again") == results(undisturbed)
    assert (tmp_path / "again" / "plan.toml").read_text() == (undisturbed / "plan.toml").read_text()


def test_records_say_what_was_run(undisturbed):
    tuned = [record for record in read_records(undisturbed) if record.method == "fedavg_ft"]
    assert len(tuned) == 2
    for record in tuned:
        assert record.threads == 1
        assert record.source == {"data": "digits"}
        tried = record.tuning["results"]
        assert [each["finetune_epochs"] for each in tried] == [0, 3]
        best = max(tried, key=lambda each: each["accuracy_client_mean"])
        assert record.settings["finetune_epochs"] == best["finetune_epochs"]


def test_what_was_cut_short_is_done_again(plan, undisturbed, tmp_path, capsys):
    """As a power cut may leave it: a file without its contents, or with a part of them."""
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    afl, paper, *_ = sorted((out / "cells").glob("a*.json"))
    (tuning,) = (out / "tuning").iterdir()
    afl.write_bytes(b"")
    paper.write_bytes(paper.read_bytes()[:100])
    tuning.write_bytes(b"")
    next((out / "cells").glob("fedavg_ft*-seed1-*")).unlink()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert here("table", out) == 2
    assert f"{afl} cannot be read as records" in capsys.readouterr().err
    assert here("bench", plan, "--out", out, "--dry-run") == 0
    said = capsys.readouterr().err
    assert f"done again: cells/{afl.name} and others" in said
    assert "to do: 3 cells and 1 grid to tune" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert here("bench", plan, "--out", out, "--jobs", "1") == 0
    assert results(out) == results(undisturbed)
    assert tuning.read_bytes() == next((undisturbed / "tuning").iterdir()).read_bytes()


def test_a_record_of_another_version_is_not_replaced(tmp_path, capsys):
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text("seeds = [0]\n[methods.afl]\n")
    assert here("bench", plan, "--out", out, "--jobs", "1") == 0
    (cell,) = (out / "cells").iterdir()
    cell.write_text(json.dumps(json.loads(cell.read_text()) | {"new_in_version_9": 1}))
    before = cell.read_bytes()
    assert here("bench", plan, "--out", out) == 2
    assert "new_in_version_9" in capsys.readouterr().err
    assert cell.read_bytes() == before


def killed(arguments: list[str], out: Path, n_changes: int, where: str = "*/*.*") -> bool:
    """A real SIGKILL when so many changes were seen in the files ``where``; whether it was still running then.

    The parent alone is killed: its processes have to notice by themselves, and are gone when this returns.
    """
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seen, changes, deadline = _files(out, where), 0, time.monotonic() + 180
    while changes < n_changes and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
        now = _files(out, where)
        changes, seen = changes + (now != seen), now
    running = process.poll() is None
    process.kill()
    process.communicate(timeout=120)  # they have its end of the pipe too: this returns when the last of them is gone
    return running


def _files(out: Path, where: str) -> dict[Path, int]:
    found = {}
    for path in out.glob(where):
        with suppress(FileNotFoundError):  # a temporary file that is in place by now
            found[path] = path.stat().st_mtime_ns
    return found


def with_clock(folder: Path, key: str) -> list:
    return json.loads((folder / "cells" / f"{key}.json").read_text())["curve"]


@pytest.mark.parametrize(
    "where", ["checkpoints/fedavg_ft-4-dirichlet-1-seed0-*", "checkpoints/fedavg_ft-4-dirichlet-1-??????????.*"]
)
def test_a_kill_changes_nothing(where, plan, undisturbed, tmp_path):
    """In a gradient cell, or in a grid; then the undisturbed run's records, each cell once."""
    out = tmp_path / "out"
    arguments = ["bench", str(plan), "--out", str(out), "--jobs", "1"]
    assert killed(arguments, out, n_changes=3, where=where)  # a checkpoint is written after each of 60 rounds
    (stands,) = out.glob(where)
    kept = read(stands)
    done = apfl(*arguments)
    assert done.returncode == 0, done.stderr
    assert results(out) == results(undisturbed)
    if "seed" in where:  # the rounds before the kill have the times they had then: they were not run again
        assert kept.settings["curve"]
        assert with_clock(out, stands.stem)[: len(kept.settings["curve"])] == kept.settings["curve"]
    else:
        assert kept.tensors["progress"][0] > 0
    assert not list((out / "checkpoints").iterdir())


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(plan, tmp_path):
    longer = tmp_path / "longer.toml"  # far more rounds than changes are waited for, though one change may be several
    longer.write_text(plan.read_text().replace("n_rounds = 60", "n_rounds = 300"))
    arguments = ["bench", str(longer), "--seeds", "0,1,2,3,4,5", "--jobs", "2", "--out"]
    assert apfl(*arguments, tmp_path / "undisturbed").returncode == 0
    out, moments, sizes = tmp_path / "out", random.Random(0), []
    for _ in range(10):
        assert killed([*arguments, str(out)], out, moments.randint(0, 40)), "it was done before it was killed"
        sizes.append(len(list(out.glob("cells/*.json"))))
    assert len(set(sizes)) > 2, f"the kills should fall between cells: {sizes}"
    done = apfl(*arguments, out)
    assert done.returncode == 0, done.stderr
    assert results(out) == results(tmp_path / "undisturbed")
    assert len(results(out)) == 24
    tunings = [{path.name for path in (tmp_path / name / "tuning").glob("*.jsonl")} for name in ("out", "undisturbed")]
    assert tunings[0] == tunings[1]


def test_ctrl_c_says_how_to_go_on(plan, tmp_path):
    out, endless = tmp_path / "out", tmp_path / "endless.toml"  # it cannot be done before it is stopped
    endless.write_text(plan.read_text().replace("n_rounds = 60", "n_rounds = 1_000_000"))
    process = subprocess.Popen(
        command("bench", endless, "--out", out, "--jobs", "1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not list(out.glob("cells/*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Run the same command again to resume" in said
    assert "Traceback" not in said
    assert 0 < len(results(out)) < N_CELLS
    assert not list(out.rglob("*.tmp"))


def test_failed_cells_are_listed_and_the_rest_is_run(tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text("seeds = [0]\n[protocol]\nn_clients = 4\n[methods.afl]\n[methods.fedavg]\nn_rounds = 2\nlr = 1e39\n")
    out = tmp_path / "out"
    assert here("bench", bad, "--out", out, "--jobs", "1") == 1
    said = capsys.readouterr().err
    assert "failed: fedavg-4-dirichlet-0.1-seed0" in said
    assert "smaller lr" in said
    assert [record.method for record in read_records(out)] == ["afl"]
    (why,) = (out / "failed").iterdir()
    assert "diverged" in why.read_text()
    assert here("bench", bad, "--out", out, "--jobs", "1") == 1
    assert "1 that failed before are tried again" in capsys.readouterr().err


def test_what_a_kill_left_half_written_is_cleared(plan, tmp_path):
    left = [tmp_path / "checkpoints" / ".tmpUeIo9U", tmp_path / "cells" / ".afl-4.json.123.tmp"]  # safetensors', ours
    kept = tmp_path / "checkpoints" / "fedavg_ft-4.safetensors"
    for path in (*left, kept):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    with claim(tmp_path, read_plan(plan), []):
        assert not any(path.exists() for path in left)
        assert kept.exists()


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_cell_with_it(plan, tmp_path):
    """As the kernel does when memory runs out."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("bench", plan, "--out", out, "--jobs", "1"), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("checkpoints/*-seed*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs /proc")
    workers = [int(pid) for pid in children.read_text().split() if b"spawn_main" in _command_line(pid)]
    os.kill(workers[0], signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "ended by signal 9" in said
    assert len(results(out)) == N_CELLS - 1


def _command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_record_is_run_again_and_compared(undisturbed, tmp_path, capsys):
    for name in ("apfl_paper", "fedavg_ft"):
        path = next((undisturbed / "cells").glob(f"{name}-*.json"))
        assert here("rerun", path) == 0
        assert "matched" in capsys.readouterr().out
    record = json.loads(path.read_text())
    record["client_accuracies"][1] -= 1e-9
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    assert here("rerun", other) == 1
    said = capsys.readouterr().out
    assert "DIFFERS" in said
    assert "client_accuracies" in said
    assert here("rerun", undisturbed) == 2
    assert "choose one with --method" in capsys.readouterr().err
    assert here("rerun", undisturbed, "--method", "afl", "--seed", "1") == 0
    assert here("rerun", undisturbed / "cells", "--method", "afl", "--seed", "1") == 0
    assert here("rerun", tmp_path / "nope.json") == 2
    assert f"there is no {tmp_path / 'nope.json'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert here("rerun", tmp_path / "empty") == 2
    assert "no records given" in capsys.readouterr().err
    record["data_sha256"] = "another"
    other.write_text(json.dumps(record))
    assert here("rerun", other) == 2
    assert "is not what the record is of" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_folder_that_is_taken_or_of_another_plan_is_refused(plan, undisturbed, tmp_path, capsys, options):
    with claim(undisturbed, read_plan(plan), [path.stem for path in (undisturbed / "cells").iterdir()]):
        before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
        assert here("bench", plan, "--out", undisturbed, *options) == 2
    assert "is in use by another process of apfl" in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    assert here("bench", plan, "--out", tmp_path / "file" / "out", *options) == 2
    assert "cannot write" in capsys.readouterr().err
    assert here("bench", plan, "--out", undisturbed, "--rounds", "2", *options) == 2
    assert "holds 2 finished cells not asked for now (fedavg_ft" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


@pytest.mark.parametrize(
    ("command", "options"),
    [("bench", ()), ("table", ()), ("report", ("--out", "page.html")), ("plot", ("--figure", "bars"))],
)
@pytest.mark.parametrize("methods", ["", " ,"])
def test_no_method_at_all_is_one_line(command, options, methods, plan, undisturbed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert here(command, plan if command == "bench" else undisturbed, "--methods", methods, *options) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"--methods {methods!r} given; name at least one, with commas (have: afl, apfl_paper, fedavg_ft)" in said
    assert not list(tmp_path.iterdir())


def test_a_part_of_the_seeds_is_a_part_of_the_plan(plan, undisturbed, tmp_path, capsys):
    """Also where a method is tuned: on the plan's first seed, whichever are run. The plan as run says so itself."""
    out = tmp_path / "out"
    assert here("bench", plan, "--seeds", "1,", "--methods", "fedavg_ft", "--out", out, "--jobs", "1") == 0
    whole = results(undisturbed)
    assert results(out) == {key: each for key, each in whole.items() if each["seed"] == 1 and key.startswith("fedavg")}
    assert here("bench", out / "plan.toml", "--out", out) == 0
    capsys.readouterr()
    assert here("bench", plan, "--out", out, "--dry-run") == 0
    assert "to do: 7 cells, " in capsys.readouterr().err


def test_a_dry_run_says_what_is_known(plan, tmp_path, capsys):
    """Cells, grids, processes and memory; no time, which would be a guess."""
    assert here("bench", plan, "--out", tmp_path / "out", "--jobs", "2", "--dry-run") == 0
    last = capsys.readouterr().err.splitlines()[-1]
    known = r"to do: 8 cells and 1 grid to tune, 2 at a time with 1 thread and up to \d+\.\d MB each"
    assert re.fullmatch(known, last)


def test_a_dry_run_says_what_apfl_costs(tmp_path, capsys):
    plan = tmp_path / "apfl.toml"
    plan.write_text("seeds = [0, 1]\n[protocol]\nn_clients = [4, 8]\n[methods.apfl]\nd_primary = 64\n[methods.afl]\n")
    assert here("bench", plan, "--out", tmp_path / "out", "--dry-run") == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("apfl with")]
    known = (
        r"apfl with {} clients, width 64: about [\d.]+ s on one core; a client sends [\d.]+ MB at most and receives .*"
    )
    assert len(told) == 2  # one for each federation, whatever the seeds
    assert all(re.fullmatch(known.format(n), line) for n, line in zip((4, 8), told, strict=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_cells_share_a_gpu(plan: Path, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    for device in ("cpu", "cuda"):
        ran = apfl("bench", plan, "--device", device, "--jobs", "3", "--out", tmp_path / device)
        assert ran.returncode == 0, ran.stderr
    on_cpu, on_gpu = (
        {(r["method"], r["seed"], r["settings"].get("balance")): r["accuracy_client_mean"] for r in found.values()}
        for found in (results(tmp_path / "cpu"), results(tmp_path / "cuda"))
    )
    assert on_gpu == pytest.approx(on_cpu, abs=0.01)  # a near tie or two may fall the other way
