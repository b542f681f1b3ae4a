"""What plans say, before anything runs: cells, settings, seeds, data, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from apfl.data.load import Source, load_data
from apfl.errors import InputError
from apfl.experiments.cells import cells
from apfl.experiments.plan import read_plan
from apfl.experiments.record import read_records
from apfl.experiments.seeds import seeds_of
from apfl.experiments.tuning import own_axes
from apfl.methods import load_method
from tests.commands import here

ROOT = Path(__file__).parents[2]
OWN = ROOT / "experiments" / "own.toml"


def small(path: Path, n_rows: int, n_classes: int) -> Path:
    rng = np.random.default_rng(0)
    labels = rng.integers(n_classes, size=n_rows)
    features = rng.random((n_rows, 6), dtype=np.float32) + np.eye(6, dtype=np.float32)[labels]
    np.savez(path, features=features, labels=labels, ward=np.array(["a", "b", "c"])[np.arange(n_rows) % 3])
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sedes = [0]\n[methods.afl]", "no key in plan 'sedes'; did you mean 'seeds'? (have: "),
        ("seeds = 'all'\n[methods.afl]", "plan: seeds = 'all' given; allowed: a list of whole numbers from 0 to"),
        ("seeds = [-1]\n[methods.afl]", "seeds = [-1] given; allowed: a list of whole numbers from 0 to"),
        ("seeds = [99999999999999999999999]\n[methods.afl]", "whole numbers from 0 to 9223372036854775807"),
        ("[methods.afl]\nseeds = [9223372036854775808]", "whole numbers from 0 to 9223372036854775807"),
        (
            "[methods.fedavg]\ntune = true\ntuning_seed = -1",
            "tuning_seed = -1 given; allowed: a whole number from 0 to",
        ),
        ("threads = 0\n[methods.afl]", "threads = 0 given; allowed: a number greater than or equal to 1"),
        ("title = 3\n[methods.afl]", "title = 3 given; allowed: a text"),
        ("on_corrupt = 'drop'\n[methods.afl]", "on_corrupt = 'drop' given; allowed: 'refuse' or 'skip'"),
        ("", "plan: methods is missing; give a table [methods.NAME] for each method"),
        ("methods = {afl = []}", "methods = {'afl': []} given; allowed: a table [methods.NAME] for each method, at"),
        ("protocol = []\n[methods.afl]", "protocol = [] given; allowed: a table [protocol], or several [[protocol]]"),
        ("[methods.fedavg]\ntune = {}", "fedavg: tune = {} given; allowed: true, false, or lists of values to try"),
        ("[protocol]\nminimum = -5\n[methods.afl]", "a minimum of -5 rows for each client given; it must be 1 or more"),
        ("[protocol]\nminimum = [9, 0]\n[methods.afl]", "a minimum of 0 rows for each client given"),
        ("[methods]", "methods = {} given; allowed: a table [methods.NAME] for each method, at least one"),
        ("protocol = 3\n[methods.afl]", "protocol = 3 given; allowed: a table [protocol], or several [[protocol]]"),
        ("[methods.fedavg]\ntune = {lr = 0.1}", "fedavg: tune = {'lr': 0.1} given; allowed: true, false, or lists of"),
        ("[methods.fedavg]\nseeds = 101", "fedavg: seeds = 101 given; allowed: a list of whole numbers"),
        ("seeds = true\n[methods.afl]", "seeds = True given; allowed: a list of whole numbers"),
        ("[methods.apfll]", "did you mean 'apfl'"),
        ("[methods.apfl]\ngama = 1", "did you mean 'gamma'"),
        ("[methods.apfl]\ngamma = [1.0, -1.0]", "greater than 0"),
        ("[methods.apfl]\nbeta = []", "empty list"),
        ("[methods.central]\ntune = true", "nothing to tune"),
        ("[methods.fedavg]\nlr = 0.1\ntune = true", "both given and tuned"),
        ("[methods.fedavg]\ntune = {lrr = [1]}", "did you mean 'lr'"),
        ("[methods.fedavg]\ntune = {lr = [-1.0]}", "greater than 0"),
        ("[protocol]\nclients = 4\n[methods.afl]", "no key in protocol 'clients'"),
        ("[protocol]\nn_clients = 'many'\n[methods.afl]", "n_clients = 'many' given; allowed: a whole number or"),
        ("[protocol]\nalpha = [0.1, -1.0]\n[methods.afl]", "alpha -1.0 given"),
        ("[protocol]\npartition = 'dirichlett'\n[methods.afl]", "did you mean 'dirichlet'"),
        (
            "[protocol]\nclient_column = 'site'\npartition = 'given'\n[methods.afl]",
            "no column in digits 'site'. (have none)",
        ),
        ("[protocol]\nunseen_clients = 3\n[methods.ditto]", "no model for clients unseen"),
        ("[protocol]\nunseen_clients = 10\n[methods.afl]", "at least one must train"),
        ("[protocol]\ntest_fraction = 0.0\n[methods.afl]", "nothing to measure"),
        ("data = 'nowhere.npz'\n[methods.afl]", "no file nowhere.npz"),
        ("methods = 3", "methods = 3 given; allowed: a table [methods.NAME] for each"),
        ("methods = ['afl']", "methods = ['afl'] given; allowed: a table [methods.NAME]"),
        ("seeds = [", "is not TOML"),
    ],
)
def test_bad_plans_are_one_line_and_leave_nothing(tmp_path, capsys, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert here("bench", path, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "out").exists()


def test_titles_and_paths_are_printed_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(
        "title = 'x [/b] y'\nseeds = [0]\n[methods.afl]\n[methods.fedavg]\nn_rounds = 2\nlr = 1e39\n"
    )
    assert here("bench", "plan.toml", "--out", "q[red]x", "--jobs", "1") == 1
    said = capsys.readouterr()
    assert "x [/b] y: 2 cells on digits" in said.err
    assert "1 failed; q[red]x/failed says why" in said.err
    assert "records: q[red]x/cells\nnext:    apfl table q[red]x    apfl report q[red]x" in said.out
    assert "[bold]" not in said.out


def test_a_plan_that_is_not_there(tmp_path, capsys):
    assert here("bench", tmp_path / "none.toml") == 2
    assert "No such file" in capsys.readouterr().err


@pytest.fixture(scope="module")
def any_features(tmp_path_factory) -> Path:
    """A file that every plan can be run on: rows and classes for 100 clients, and every column that a plan names."""
    rng = np.random.default_rng(0)
    n, path = 9000, tmp_path_factory.mktemp("data") / "features.npz"
    np.savez(
        path, features=rng.random((n, 4), dtype=np.float32), labels=np.arange(n) % 100, domains=np.arange(n) // 100 % 4,
        published_client=np.arange(n) // 100 % 20, published_test=np.arange(n) % 4 == 0,
        client=np.arange(n) // 100 % 20, test=np.arange(n) % 4 == 0,
    )  # fmt: skip
    return path


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_every_plan_of_the_paper_runs_on_any_features(path, any_features, tmp_path, capsys):
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert "xpect" in header, "the header says what to expect"
    assert "Time: " in header, "and how long it takes"
    assert here("bench", path, "--data", any_features, "--out", tmp_path / "out", "--dry-run") == 0
    assert "cells" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("n_rows", "n_classes"), [(5000, 2), (300, 3), (40, 2)])
def test_the_plan_for_own_features_deals_out_small_and_binary_files(tmp_path, n_rows, n_classes):
    data = small(tmp_path / "own.npz", n_rows, n_classes)
    seeds = ",".join(map(str, range(10)))
    assert here("bench", OWN, "--data", data, "--seeds", seeds, "--out", tmp_path / "out", "--dry-run") == 0


def test_the_plan_for_own_features_runs_on_forty_rows_of_two_classes(tmp_path):
    data, out = small(tmp_path / "own.npz", 40, 2), tmp_path / "out"
    assert here("bench", OWN, "--data", data, "--out", out, "--rounds", "1", "--seeds", "0", "--jobs", "1") == 0
    assert len(read_records(out)) == 7
    assert not list(out.glob("failed/*"))


def test_options_replace_the_protocol_in_every_table(tmp_path, capsys):
    data, plan = small(tmp_path / "own.npz", 300, 2), tmp_path / "plan.toml"
    plan.write_text("[[protocol]]\nalpha = [0.1, 1.0]\n[[protocol]]\nn_clients = 20\n[methods.afl]\n")
    given = {"n_clients": 3, "alpha": 2.0, "minimum": 9, "client_column": None}
    dealt = {cell.protocol for cell in cells(read_plan(plan, protocol=given))}
    assert {(each.n_clients, each.alpha, each.minimum, each.partition) for each in dealt} == {(3, 2.0, 9, "dirichlet")}
    assert here("bench", plan, "--data", data, "--dry-run") == 2
    assert "larger --alpha, fewer --clients or a smaller --minimum" in capsys.readouterr().err
    assert here("bench", plan, "--data", data, "--clients", "2", "--alpha", "5", "--minimum", "3", "--dry-run") == 0
    out = tmp_path / "out"
    assert here("bench", plan, "--data", data, "--client-column", "ward", "--out", out, "--jobs", "1") == 0
    assert all(record.client_names == ["a", "b", "c"] for record in read_records(out))
    assert len(read_records(out)) == 3


def test_a_partition_and_a_test_column_replace_those_of_the_plan(tmp_path):
    data, plan, out = small(tmp_path / "own.npz", 60, 2), tmp_path / "plan.toml", tmp_path / "out"
    with np.load(data) as arrays:
        np.savez(data, **arrays, held=np.arange(60) % 3 == 0)
    plan.write_text("[protocol]\nn_clients = 4\nalpha = 0.5\nminimum = 2\n[methods.afl]\n")
    words = ["--partition", "iid", "--test-column", "held", "--out", out, "--jobs", "1", "--seeds", "0,"]
    assert here("bench", plan, "--data", data, *words) == 0
    (record,) = read_records(out)
    assert (record.partition, record.n_clients, sum(record.n_test)) == ("iid", 4, 20)
    assert here("bench", plan, "--data", data, "--partition", "iidd", "--dry-run") == 2


def test_a_trial_of_few_rounds_finetunes_no_longer_than_it_trains(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        "[methods.fedavg_ft]\ntune = true\n[methods.afl]\n"
        "[methods.fedprox_ft]\nn_rounds = [5, 50]\nfinetune_epochs = 4\n"
    )
    tuned, other, given = cells(read_plan(plan, rounds=2, seeds=[0]))
    assert (tuned.method.n_rounds, tuned.method.finetune_epochs, tuned.tune["finetune_epochs"]) == (2, 6, [3, 6])
    assert (given.method.n_rounds, given.method.finetune_epochs, given.tune) == (2, 4, None)
    assert other.method == load_method("afl")
    longer, *_ = cells(read_plan(plan, rounds=400))
    assert (longer.method.n_rounds, longer.method.finetune_epochs) == (400, 20)
    assert tuple(longer.tune["finetune_epochs"]) == (3, 20, 100)


def test_an_oracle_is_a_method_of_its_own_in_records(tmp_path, capsys):
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(
        "seeds = [0, 1]\n[protocol]\nn_clients = 3\n[methods.afl]\n[methods.apfl]\nd_primary = 32\noracle = true\n"
    )
    assert here("bench", plan, "--out", out, "--jobs", "1") == 0
    found = {(record.method, record.seed): record for record in read_records(out)}
    assert set(found) == {(name, seed) for name in ("afl", "apfl", "apfl_oracle") for seed in (0, 1)}
    for seed in (0, 1):
        assert found["apfl", seed].settings["beta"] == "auto"
        assert found["apfl_oracle", seed].settings["beta"] != "auto"
    capsys.readouterr()
    assert here("rerun", next(out.glob("cells/apfl_oracle-*"))) == 0
    assert "matched: apfl_oracle" in capsys.readouterr().out


def test_a_number_of_seeds_is_the_same_everywhere(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("seeds = 3\n[methods.afl]\n[methods.central]\nseeds = 2\n")
    found = [(cell.name, cell.seed) for cell in cells(read_plan(plan))]
    assert sorted(found) == [("afl", 0), ("afl", 1), ("afl", 2), ("central", 0), ("central", 1)]
    for three in (3, [0, 1, 2], "3", "0,1,2", range(3), np.arange(3)):
        assert seeds_of(three) == [0, 1, 2]
    assert seeds_of("7,") == seeds_of([7]) == [7]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (101, r"seeds=101 given; how many seeds is a number from 1 to 100.* is a list: seeds=\[101\]"),
        ("2026", "--seeds '2026' given; how many .* is a list: --seeds 2026,"),
        (-1, "how many seeds is a number from 1"),
        ([], "differ from each other"),
        ([0.5], r"seeds=\[0.5\] given; allowed: a list of whole numbers"),
        (None, "seeds=None given; allowed: a list of whole numbers"),
        (",", "whole numbers with commas"),
    ],
)
def test_other_seeds_are_refused(given, says):
    with pytest.raises(InputError, match=says):
        seeds_of(given)


def test_a_number_of_seeds_tunes_on_the_first(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("seeds = [4]\n[methods.ditto]\ntune = true\nseeds = 2\n")
    assert {cell.tuning_seed for cell in cells(read_plan(plan, seeds=[8, 9]))} == {0}


@pytest.mark.parametrize("name", ["own", "own.toml", "experiments/own.toml"])
def test_plans_that_come_with_apfl_are_found_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_plan(Path(name)) == read_plan(OWN)


def test_the_plan_of_the_readme_is_in_an_installed_package(tmp_path):
    """The package as a wheel lays it out, without the source tree: the README's first command finds its plan."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        copytree(ROOT / package, tmp_path / "site" / Path(package).name)
    for source, target in wheel["force-include"].items():
        copytree(ROOT / source, tmp_path / "site" / target)
    data = small(tmp_path / "features.npz", 90, 3)
    command = [sys.executable, "-m", "apfl", "bench", "experiments/own.toml", "--data", str(data), "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cells on features.npz" in done.stderr


def test_a_file_goes_before_a_plan_that_comes_with_apfl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text("[methods.afl]\n")
    assert list(read_plan(Path("own.toml")).methods) == ["afl"]
    for missing in (tmp_path / "own.toml.toml", Path("elsewhere/own.toml"), Path("owm")):
        with pytest.raises(InputError, match=r"cannot read the plan .*; give a file, or one of: auto-cifar100, .*own"):
            read_plan(missing)


def test_a_methods_own_first_seed_tunes_it(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[methods.ditto]\ntune = true\nseeds = [5, 6]\n[methods.fedavg]\ntune = true\n[methods.afl]\n")
    found = {cell.name: cell.tuning_seed for cell in cells(read_plan(plan, seeds=[2, 6])) if cell.tune}
    assert found == {"ditto": 5, "fedavg": 0}


def test_bench_and_rerun_read_a_table_as_run_does(tmp_path, capsys, caplog):
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    rows = "".join(f"{'oak' if i % 2 else 'elm'},{i % 7},{i % 2},{i % 5}\n" for i in range(60))
    table, out, plan = tmp_path / "trees.csv", tmp_path / "out", tmp_path / "plan.toml"
    table.write_text("species,f0,f1,g0\n" + rows)
    plan.write_text("data = 'trees.csv'\nlabel_column = 'species'\npooling = 'cls'\nseeds = [0]\n[methods.afl]\n")
    options = ("--clients", "2", "--alpha", "10", "--out", out, "--jobs", "1")
    assert here("bench", plan, "--data", table, *options) == 2
    assert "no column 'label'" in capsys.readouterr().err
    assert "its pooling, label_column left out; --pooling and --label-column would set them" in caplog.text
    columns = ("--label-column", "species", "--feature-column", "f")
    assert here("bench", plan, "--data", table, *columns, *options) == 0
    (record,) = read_records(out)
    assert record.source == {"data": str(table), "label_column": "species", "feature_column": "f"}
    assert here("rerun", out) == 0
    assert here("rerun", out, "--feature-column", "g") == 2
    assert "SHA-256 differs" in capsys.readouterr().err
    others = ("--label-column", "species", "--feature-column", "g")
    assert here("bench", plan, "--data", table, *others, *options) == 2, "other columns are other cells"
    where = ("--clients", "2", "--alpha", "10", "--methods", "afl", "--no-save-models", "--out", tmp_path / "run")
    assert here("run", "--data", table, *columns, *where) == 0
    capsys.readouterr()
    assert here("run", "--data", table, *others, *where) == 2, "and other runs"
    assert "holds records of another run" in capsys.readouterr().err


def test_a_column_that_is_the_default_is_the_same_cell(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    table, out, plan = tmp_path / "trees.csv", tmp_path / "out", tmp_path / "plan.toml"
    table.write_text("label,f0,f1\n" + "".join(f"{i % 2},{i % 7},{i % 2}\n" for i in range(60)))
    plan.write_text("data = 'trees.csv'\nseeds = [0]\n[methods.afl]\n")
    options = ("--data", table, "--clients", "2", "--alpha", "10", "--out", out, "--jobs", "1")
    assert here("bench", plan, *options) == 0
    capsys.readouterr()
    assert here("bench", plan, *options, "--label-column", "label", "--feature-column", "f") == 0
    assert "1 done before" in capsys.readouterr().err


def test_the_device_and_what_to_do_with_bad_images_reach_the_extraction(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "apfl.cli.bench.load_data",
        lambda source, device, **_: asked.append((source, device)) or load_data(Source(source.data)),
    )
    plan = tmp_path / "plan.toml"
    plan.write_text("backbone = 'identity'\non_corrupt = 'skip'\n[protocol]\nn_clients = 3\n[methods.afl]\n")
    assert here("bench", plan, "--device", "cpu", "--dry-run") == 0
    assert here("bench", plan, "--on-corrupt", "refuse", "--pooling", "mean", "--dry-run") == 0
    assert asked[0] == (Source(backbone="identity", on_corrupt="skip"), "cpu")
    assert asked[1] == (Source(backbone="identity", on_corrupt="refuse", pooling="mean"), "auto")


def test_a_plan_tunes_on_the_same_grid_as_the_command_line(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text("[methods.ditto]\ntune = true\n[methods.fedavg]\nnormalise = 'row'\ntune = true\n")
    ditto, fedavg = cells(read_plan(plan, source={"data": "digits"}))[:2]
    assert ditto.tune == dict(own_axes(load_method("ditto")))
    assert set(fedavg.tune) == {"lr"}
