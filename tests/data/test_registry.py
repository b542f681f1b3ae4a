"""A method, a partition and a backbone from outside: by an entry point, and by a path."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from apfl import InputError, load_method, method_names
from apfl.cli import bench as bench_module
from apfl.cli.app import app
from apfl.data import load_dataset, open_source
from apfl.data.backbones import backbone_names, load_backbone
from apfl.data.extract.features import cached_file
from apfl.data.partition import load_partition, partition_names
from apfl.data.protocol import Protocol, deal
from apfl.data.sources import digits
from apfl.experiments.cells import cells
from apfl.experiments.plan import read_plan, to_toml
from apfl.experiments.record import read_records
from apfl.report.sheet import gather
from tests.commands import here

METHOD = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from apfl import Method, load_method


@dataclass(frozen=True)
class Mine(Method):
    """Ridge at home, with a setting of its own."""

    strength: float = 2.0

    def rounds(self, clients, n_classes, seed):
        yield from load_method("local_ridge", d=16, gamma=self.strength).rounds(clients, n_classes, seed)
'''

PARTITION = '''
import numpy as np


def partition(labels, n_clients, rng, *, alpha, twist=1):
    """Every n-th row; the protocol's alpha is how many rows at a time."""
    return [np.flatnonzero(np.arange(len(labels)) // int(alpha) % n_clients == k) for k in range(n_clients)]
'''

BACKBONE = """
from apfl.data.backbones import load_backbone
from dataclasses import replace


def load(*, pooling=None):
    return replace(load_backbone("identity"), name="doubled", forward=lambda batch: 2 * batch)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """Three files of the user's own in the folder one is in."""
    for name, text in {"mine": METHOD, "rows": PARTITION, "doubled": BACKBONE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def install(folder: Path, monkeypatch, entry_points: str, name: str = "theirs") -> None:
    """What an installed distribution leaves on sys.path."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def installed(mine, monkeypatch):
    for name in ("mine", "rows", "doubled"):
        (mine / f"{name}.py").rename(mine / f"their_{name}.py")
        monkeypatch.delitem(sys.modules, f"their_{name}", raising=False)
    points = {"methods": "theirs = their_mine:Mine", "partitions": "theirs = their_rows"}
    points |= {"backbones": "two-fold = their_doubled:load"}
    install(mine, monkeypatch, "".join(f"[apfl.{group}]\n{line}\n" for group, line in points.items()))


def test_an_installed_method_partition_and_backbone(installed):
    assert "theirs" in method_names()
    assert load_method("theirs", strength="3").strength == 3.0
    assert "theirs" in partition_names()
    assert len(deal(digits.load(), Protocol("theirs", 4, alpha=2.0), 0)) == 4
    assert "two-fold" in backbone_names()
    assert load_backbone("two-fold").forward(torch.ones(1)).item() == 2
    with pytest.raises(InputError, match="did you mean 'theirs'"):
        load_method("their")


def test_an_entry_point_that_fails_names_its_distribution(mine, monkeypatch):
    (mine / "broken_one.py").write_text("import nothing_of_this_name")
    install(mine, monkeypatch, "[apfl.methods]\nbroken = broken_one:Mine\napfl = broken_one:Other\n", "unlucky")
    with pytest.raises(InputError, match=r"'broken' .*'unlucky' cannot be loaded .*nothing_of_this_name"):
        load_method("broken")
    with pytest.raises(InputError, match="'apfl' is in apfl itself and in distribution 'unlucky'"):
        load_method("apfl")
    assert load_method("afl")  # the others are none the worse


@pytest.mark.parametrize("name", ["efficientnet-lite0", "dinov2-small"])
def test_an_installed_backbone_cannot_take_the_name_of_ours(mine, monkeypatch, name):
    install(mine, monkeypatch, f"[apfl.backbones]\n{name} = doubled:load\n")
    with pytest.raises(InputError, match=f"has a backbone '{name}', as apfl itself"):
        load_backbone(name)


def test_a_partition_asks_for_what_it_needs(mine):
    parts = load_partition("./rows.py:partition")(np.zeros(8), 2, np.random.default_rng(0), alpha=2)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    one, two = (deal(digits.load(), Protocol("./rows.py", 2, alpha=alpha, test_fraction=0), 0) for alpha in (1.0, 5.0))
    assert one[0][0][:3].tolist() == [0, 2, 4]
    assert two[0][0][:3].tolist() == [0, 1, 2]
    (mine / "greedy.py").write_text(PARTITION.replace("twist=1", "twist"))
    with pytest.raises(InputError, match="asks for 'twist'"):
        deal(digits.load(), Protocol("./greedy.py", 2), 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("./none.py:Mine", "there is no file"),
        ("./mine.py:Yours", "has no attribute 'Yours'"),
        ("./mine.py:dataclass", "must be a dataclass that inherits apfl.Method"),
        ("./apfl.py", "'apfl' is the name of an installed method"),
        ("./twins.py", "2 classes"),
    ],
)
def test_a_path_that_is_no_method(mine, given, message):
    (mine / "apfl.py").write_text(METHOD)
    (mine / "twins.py").write_text(METHOD + METHOD.partition("ClassVar\n")[2].replace("Mine", "Other"))
    with pytest.raises(InputError, match=message):
        load_method(given)


def apfl(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_run_takes_methods_partitions_and_settings_by_path(mine):
    apfl(
        "run", "--methods", "./mine.py:Mine,afl", "--data", "digits", "--clients", "3", "--seeds", "0", "--out", "out",
        "--partition", "./rows.py:partition", "--alpha", "2", "--set", "Mine.strength=5", "--device", "cpu",
    )  # fmt: skip
    first, second = read_records(mine / "out")
    assert (first.method, second.method, first.partition, first.alpha) == ("Mine", "afl", "partition", 2.0)
    assert first.settings == {"strength": 5.0}
    assert (mine / "out" / "models" / "Mine" / "seed-0" / "client-2.safetensors").exists()


def change(file: Path, old: str, new: str) -> None:
    """Another text of a file, seen by what is started from now on."""
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    restart(file.parent)


def restart(folder: Path) -> None:
    """As a new process: no file of the folder is loaded."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


RUN = (
    "run", "--methods", "./mine.py:Mine", "--data", "digits", "--clients", "3", "--seeds", "0", "--device", "cpu",
    "--partition", "./rows.py:partition", "--alpha", "2", "--no-save-models", "--out",
)  # fmt: skip


def test_rerun_finds_a_method_and_a_partition_by_path(mine, monkeypatch, capsys):
    apfl(*RUN, "out")
    (elsewhere := mine / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    restart(mine)
    assert here("rerun", "../out") == 0
    assert "matched: Mine, seed 0" in capsys.readouterr().out
    change(mine / "mine.py", "d=16", "d=8")
    assert here("rerun", "../out") == 1
    assert "mine.py:Mine has changed: SHA-256" in capsys.readouterr().out
    change(mine / "mine.py", "d=8", "d=16")
    (mine / "mine.py").rename(elsewhere / "mine.py")
    assert here("rerun", "../out") == 2
    assert "mine.py:Mine, which is not there; give its file with --method" in capsys.readouterr().err
    assert here("rerun", "../out", "--method", "./mine.py:Mine") == 0
    (mine / "rows.py").unlink()
    assert here("rerun", "../out", "--method", "./mine.py:Mine") == 2
    assert "the record's partition was in" in capsys.readouterr().err


def test_a_record_that_does_not_say_where_its_method_is(mine, capsys):
    apfl(*RUN, "out")
    record = json.loads((mine / "out" / "records.jsonl").read_text())
    assert record.pop("files").keys() == {"method", "partition"}
    (mine / "old.json").write_text(json.dumps(record))
    assert here("rerun", "old.json") == 2
    assert "does not say in which file its method Mine is; give its file with --method" in capsys.readouterr().err
    assert here("rerun", "old.json", "--method", "./mine.py:Mine") == 0


PLAN = 'seeds = [0]\n[protocol]\nn_clients = 3\npartition = "./rows.py:partition"\n[methods."./mine.py:Mine"]\n'


def keys(plan: Path) -> tuple[str, str]:
    (cell,) = cells(read_plan(plan))
    return cell.key("data", "cpu"), cell.tuning_key("data", "cpu")


@pytest.mark.parametrize(("file", "old"), [("mine.py", "strength"), ("rows.py", "rng")])
def test_a_changed_file_is_another_cell(mine, file, old):
    (mine / "plan.toml").write_text(PLAN)
    before = keys(mine / "plan.toml")
    change(mine / file, old, old)  # written again, the same
    assert keys(mine / "plan.toml") == before
    change(mine / file, "\n\n\n", "\n\n\n\n")
    assert all(now != then for now, then in zip(keys(mine / "plan.toml"), before, strict=True))


def test_bench_never_mixes_two_texts_of_a_file(mine, monkeypatch, capsys):
    (mine / "plan.toml").write_text(PLAN.replace("./rows.py:partition", "iid"))
    bench = ("bench", "plan.toml", "--data", "digits", "--jobs", "1", "--device", "cpu", "--out")
    show = bench_module._show

    def edit(*given):  # after the plan was checked, before any process is started
        show(*given)
        (mine / "mine.py").write_text(METHOD.replace("d=16", "d=8"))

    monkeypatch.setattr(bench_module, "_show", edit)
    assert here(*bench, "out") == 1
    assert "mine.py:Mine has changed while the plan ran" in capsys.readouterr().err
    assert not list((mine / "out" / "cells").glob("*"))
    monkeypatch.setattr(bench_module, "_show", show)
    restart(mine)
    assert here(*bench, "out") == 0
    change(mine / "mine.py", "d=8", "d=4")
    assert here(*bench, "out") == 2
    assert "a file of your own that has changed" in capsys.readouterr().err


def test_run_never_mixes_two_texts_of_a_file(mine, capsys, monkeypatch):
    with (mine / "mine.py").open("a") as file:
        file.write('\n    @property\n    def grid(self):\n        return {"strength": [1.0, 2.0]}\n')
    loaded = []
    monkeypatch.setattr("apfl.experiments.run.load", lambda path, what: loaded.append(what))
    apfl(*RUN, "out", "--tune")
    apfl(*RUN, "out", "--tune")
    assert len((mine / "out" / "tuning.jsonl").read_text().splitlines()) == 1
    change(mine / "mine.py", "d=16", "d=8")
    assert here(*RUN, "out") == 2
    assert "holds records of another run (Mine" in capsys.readouterr().err
    (mine / "out" / "records.jsonl").rename(mine / "before.jsonl")
    apfl(*RUN, "out", "--tune")
    assert len((mine / "out" / "tuning.jsonl").read_text().splitlines()) == 2
    assert loaded[0] == loaded[1] != loaded[2], "a checkpoint of another text is of another run"

    then, now = read_records(mine / "before.jsonl")[0], read_records(mine / "out")[0]
    assert then.run != now.run
    rows = [row.label for row in gather([then, now]).rows]
    assert len(rows) == 2, "never averaged, and told apart"
    assert all(re.fullmatch(r"Mine \(.*file=[0-9a-f]{8}.*\)", row) for row in rows)


def test_a_setting_of_several_values_is_the_same_run_again(mine):
    change(mine / "mine.py", "strength: float = 2.0", "strength: float = 2.0\n    layers: tuple[int, ...] = (1, 2)")
    apfl(*RUN, "out")
    apfl(*RUN, "out")
    assert len(read_records(mine / "out")) == 1


def test_a_changed_file_makes_other_data_and_other_features(mine):
    imports = "from apfl.data.samples import vectors\nfrom apfl.data.sources import digits\n"
    (mine / "data.py").write_text("from apfl.data.sources.digits import load\n")
    (mine / "pixels.py").write_text(f"{imports}def load():\n    return vectors(digits.load())\n")

    def identities():
        samples, backbone = open_source("./pixels.py"), load_backbone("./doubled.py:load")
        return [load_dataset("./data.py").sha256, samples.revision, cached_file(samples, backbone).name]

    before = identities()
    restart(mine)
    assert identities() == before
    change(mine / "data.py", "import load", "import  load")
    change(mine / "doubled.py", "2 * batch", "3 * batch")
    after = identities()
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert after[2] != before[2], "the cache would have had the features of the former text"
    change(mine / "pixels.py", "return", "return ")
    assert identities()[1] != before[1]


def test_two_paths_of_one_name_are_refused(mine):
    (mine / "other.py").write_text(METHOD)
    result = CliRunner().invoke(app, ["run", "--methods", "./mine.py:Mine,./other.py:Mine"])
    assert isinstance(result.exception, InputError) or result.exit_code == 2
    assert re.search("need two names", f"{result.output}{result.exception}")


def test_bench_runs_a_method_by_path_in_its_processes(mine):
    (mine / "plan.toml").write_text("seeds = [0]\n[protocol]\nn_clients = 3\n[methods.afl]\n[methods.central]\n")
    apfl(
        "bench", "plan.toml", "--methods", "./mine.py:Mine,afl", "--data", "digits", "--out", "out", "--jobs", "1",
        "--device", "cpu",
    )  # fmt: skip
    assert sorted(record.method for record in read_records(mine / "out")) == ["Mine", "afl"]
    again = read_plan(mine / "out" / "plan.toml")
    assert {cell.name for cell in cells(again)} == {"Mine", "afl"}
    assert '[methods."./mine.py:Mine"]' in to_toml(again)
