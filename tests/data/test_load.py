"""The one door to data: sources found by file, by entry point and by path; one `Source` behind four commands."""

from __future__ import annotations

import pickle
from dataclasses import fields
from importlib.metadata import EntryPoint

import pytest
import torch
import typer

from apfl.cli.app import app
from apfl.cli.federation import method_settings
from apfl.cli.options import assignment
from apfl.data import Source, load_data, load_dataset
from apfl.data.device import float64_device
from apfl.data.sources import SOURCES
from apfl.errors import InputError
from apfl.experiments.plan import read_plan
from tests.commands import here

MINE = """
import torch
from apfl.data.federation import Dataset
def load():
    return Dataset("rings", torch.randn(40, 3), torch.arange(40) % 2, ("a", "b"), sha256="0")
"""
LINES = """
from pathlib import Path
import torch
from apfl.data.federation import Dataset
from apfl.data.sources import by_ending
READS = "a file .lines"
def accepts(source):
    return by_ending(source, ".lines")
def load(source, *, label_column=None):
    n = len(Path(source).read_text().splitlines())
    return Dataset(Path(source).name, torch.ones(n, 2), torch.arange(n) % 2, ("a", "b"), sha256=label_column)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two sources of another distribution: one by its name, one by the ending of a file."""
    (tmp_path / "rings_data.py").write_text(MINE)
    (tmp_path / "lines_data.py").write_text(LINES)
    monkeypatch.syspath_prepend(tmp_path)
    entries = [EntryPoint("rings", "rings_data", SOURCES.group), EntryPoint("lines", "lines_data", SOURCES.group)]
    monkeypatch.setattr(
        "apfl.data.registry.entry_points",
        lambda group, name=None: [each for each in entries if group == SOURCES.group and name in (None, each.name)],
    )


@pytest.mark.usefixtures("installed")
def test_a_source_of_another_distribution_is_read_by_name_and_by_ending(tmp_path):
    assert load_dataset("rings").features.shape == (40, 3)
    (tmp_path / "x.lines").write_text("1\n2\n3\n")
    assert len(load_dataset(str(tmp_path / "x.lines"), label_column="y").labels) == 3
    with pytest.raises(InputError, match=r"--revision given, which is of no use"):
        load_dataset(str(tmp_path / "x.lines"), revision="main")
    with pytest.raises(InputError, match=r"no data 'nothing': give .*'rings'.*a file \.lines"):
        load_dataset("nothing")


def test_a_file_with_a_load_is_a_source(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    out = ("--seeds", "0", "--methods", "afl", "--clients", "2", "--alpha", "10", "--out", tmp_path / "out")
    assert here("run", "--data", tmp_path / "mine.py", *out) == 0
    assert load_dataset(f"{tmp_path / 'mine.py'}:load").name == "rings"
    (tmp_path / "odd.py").write_text("def load():\n    return 3\n")
    with pytest.raises(InputError, match="loads as int; its load must return a Dataset or Samples"):
        load_dataset(str(tmp_path / "odd.py"))


def test_every_command_has_every_data_option():
    names = {each.name for each in fields(Source)}
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in ("run", "bench", "rerun", "features"):
        given = {each.name: each for each in commands[command].params}
        assert names <= given.keys(), command
        assert given["label_column"].help.startswith("Label column"), command


@pytest.mark.parametrize("name", [each.name for each in fields(Source)])
def test_a_plan_has_every_data_option_as_a_key(tmp_path, name):
    plan, value = tmp_path / "plan.toml", {"on_corrupt": "skip", "target": "regression"}.get(name, "something")
    plan.write_text(f"{name} = '{value}'\n[methods.afl]\n")
    assert read_plan(plan).source == {"data": Source.data} | {name: value}
    plan.write_text("[methods.afl]\n")
    assert Source(**read_plan(plan).source) == Source(), "and its default"


def test_a_source_is_what_its_record_keeps_and_travels_to_other_processes():
    source = Source("x.csv", label_column="species", on_corrupt="skip")
    assert source.changed() == {"data": "x.csv", "label_column": "species", "on_corrupt": "skip"}
    assert Source(**source.changed()) == source == pickle.loads(pickle.dumps(source))
    assert load_data.__module__ == "apfl.data.load", "a worker does not import the command line"


def test_run_takes_the_device_that_features_takes(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert float64_device("mps") == torch.device("cpu")
    quick = ("--seeds", "0", "--methods", "afl", "--clients", "2", "--alpha", "10", "--no-save-models")
    assert here("run", "--device", "mps", *quick, "--out", tmp_path / "out") == 0
    assert '"device":"cpu"' in (tmp_path / "out" / "records.jsonl").read_text()


def test_set_is_read_alike_by_run_and_federate():
    assert assignment("apfl.balance = 0.3", "apfl.balance=0.3") == ("apfl.balance", "0.3")
    assert method_settings(["d_primary = 64", "kernel=a=b"]) == {"d_primary": "64", "kernel": "a=b"}
    for text, example in (("balance=1", "apfl.balance=0.3"), (".x=1", "apfl.balance=0.3"), ("d_primary", "d=1")):
        with pytest.raises(InputError, match="KEY=VALUE, for example"):
            assignment(text, example)


def test_no_file_and_a_wrong_ending_say_so(tmp_path):
    for name in ("x.csv", "x.npy", "x.npz", "x.parquet"):
        with pytest.raises(InputError, match="there is no file"):
            load_dataset(str(tmp_path / name))
