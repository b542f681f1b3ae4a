"""A method, a partition and a backbone from outside: by an entry point, and by a path."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from apfl import InputError, load_method, method_names
from apfl.cli.app import app
from apfl.data.backbones import backbone_names, load_backbone
from apfl.data.partition import load_partition, partition_names
from apfl.data.protocol import Protocol, deal
from apfl.data.sources import digits
from apfl.experiments.cells import cells
from apfl.experiments.plan import read_plan, to_toml
from apfl.experiments.record import read_records

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
