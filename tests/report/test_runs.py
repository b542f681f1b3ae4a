"""`apfl.run`: what the command does, from Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

import apfl
from apfl.errors import InputError
from apfl.experiments.record import as_read, read_records
from apfl.models.file import read
from tests.commands import here

SMALL = {"apfl": {"d_primary": 64, "d_refinement": 64}}


@pytest.fixture(scope="module")
def found() -> apfl.RunResults:
    return apfl.run("digits", ["local_ridge", "apfl"], clients=5, seeds=2, settings=SMALL)


def without_clock(records) -> list[dict]:
    """All of the records but what a clock gave."""
    kept = [json.loads(record.to_json()) for record in records]
    for each in kept:
        del each["seconds"]
        each["curve"] = [point[1:] for point in each["curve"]]
    return kept


def test_records_and_models_are_those_of_the_command(found, tmp_path):
    command = ["--methods", "local_ridge,apfl", "--clients", "5", "--seeds", "2", "--out", tmp_path / "command"]
    sets = ["--set", "apfl.d_primary=64", "--set", "apfl.d_refinement=64"]
    assert here("run", *command, *sets) == 0
    theirs = read_records(tmp_path / "command")
    assert without_clock(found.records) == without_clock(theirs)
    assert read_records(found.folder) == [type(record).from_json(record.to_json()) for record in found.records]
    files = sorted(path.relative_to(found.folder) for path in found.folder.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(tmp_path / "command") for path in tmp_path.rglob("*.safetensors"))
    for file in (each for each in files if each.name.startswith("client-")):
        one, two = read(found.folder / file), read(tmp_path / "command" / file)  # headers have no order
        assert (one.kind, one.settings, one.tensors.keys()) == (two.kind, two.settings, two.tensors.keys())
        assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


def test_a_model_is_the_one_that_was_measured(found):
    record = next(each for each in found.records if each.method == "apfl" and each.seed == 1)
    federation = apfl.federation("digits", clients=5, seed=1)
    for client, test in enumerate(federation.test):
        names = found.model("apfl", client, seed=1).predict(test.features.numpy())
        right = np.mean(names == np.array(federation.class_names)[test.labels.numpy()])
        assert right == pytest.approx(record.client_accuracies[client])
    by_name, by_place = found.model("apfl", "3"), found.model("apfl", 3)
    assert torch.equal(by_name.scores(test.features), by_place.scores(test.features))


def test_a_models_file_may_go_on_with_the_clients_name(found, tmp_path):
    rows, files = torch.eye(64)[:4], tmp_path / "models" / "apfl" / "seed-0"
    copytree(found.folder / "models" / "apfl" / "seed-0", files)
    (files / "client-1.safetensors").rename(files / "client-1-St._Mary.safetensors")
    (files / "client-2.safetensors").rename(files / "client-10-East.safetensors")
    renamed = apfl.RunResults(found.records, tmp_path)
    assert torch.equal(renamed.model("apfl", 1).scores(rows), found.model("apfl", 1).scores(rows))
    with pytest.raises(InputError, match="there is no model of apfl"):
        renamed.model("apfl", 2)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("apfll",), "did you mean 'apfl'"),
        (("apfl", 5), "client 5 given; there are 5: give 0 to 4, or a name"),
        (("apfl", "nine"), "no client 'nine'"),
        (("apfl", 0, 7), "seed 7 given; these results have 0, 1"),
    ],
)
def test_models_that_are_not_there(found, asked, says):
    with pytest.raises(InputError, match=says):
        found.model(*asked)


def test_results_are_shown_as_table_frame_figure_and_page(found, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = found.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(zip(frame["method"], frame["seed"], strict=True)) == [(r.method, r.seed) for r in found.records]
    mean = frame.groupby("method")["accuracy_client_mean"].mean()["apfl"]
    for shown in (found.table(), found.table("markdown"), str(found), repr(found), found._repr_html_()):
        assert f"{100 * mean:.1f}" in shown
    assert found.table("csv").startswith("method,settings")
    assert "<td>local_ridge</td>" in found._repr_html_()
    found.plot(out=tmp_path / "clients.png")
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")
    assert len(found.plot("curves").axes) == 3
    assert "<html" in found.report(tmp_path / "r.html", title="Mine <3").read_text()
    assert "Mine &lt;3" in (tmp_path / "r.html").read_text()
    with pytest.raises(InputError, match="no style 'html'"):
        found.table("html")


def test_names_from_data_cannot_break_out_of_the_notebook(found):
    from dataclasses import replace

    strange = [replace(record, data="<script>x</script>") for record in found.records]
    assert "<script>" not in apfl.RunResults(strange, Path())._repr_html_()


def test_without_a_folder_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    results = apfl.run("digits", "afl", clients=3, seeds=1)
    assert results.model("afl").predict(np.ones((1, 64))).shape == (1,)
    assert list(tmp_path.iterdir())
    del results
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="nothing to measure"):
        apfl.run("digits", "afl", clients=3, seeds=1, test_fraction=0)
    assert not list(tmp_path.iterdir())


def test_without_test_rows_there_are_models_alone(tmp_path):
    given = {"clients": 3, "seeds": [4], "test_fraction": 0}
    results = apfl.run("digits", "local_ridge", out=tmp_path / "all", **given)
    assert results.records == []
    assert not (tmp_path / "all" / "records.jsonl").exists()
    own = apfl.federation("digits", clients=3, seed=4, test_fraction=0).train[2]
    alone = list(apfl.load_method("local_ridge").rounds([own], 10, 4))[-1].models[0]
    torch.testing.assert_close(results.model("local_ridge", 2).scores(own.features), alone.scores(own.features))
    assert results.model("local_ridge", "1", seed=4).about["client"] == "1"
    for shown in (repr(results), str(results), results._repr_html_()):
        assert "no test rows, so no records; models in" in shown
    for view in (results.table, results.to_frame, results.plot, results.report):
        with pytest.raises(InputError, match=r"no records: there were no test rows to measure on. Use .* \.model\(\)"):
            view()
    with pytest.raises(InputError, match="seed 0 given; these results have 4"):
        results.model("local_ridge", seed=0)
    with pytest.raises(InputError, match="nothing would be left"):
        apfl.run("digits", "local_ridge", out=tmp_path / "none", save_models=False, **given)
    assert not (tmp_path / "none").exists()


def test_a_frame_trains_models_that_know_its_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    kinds = np.arange(120) % 3
    noise = np.random.default_rng(0).normal(size=(2, 120)) / 8
    frame = pandas.DataFrame({
        "width": np.cos(2 * kinds) + noise[0], "length": np.sin(2 * kinds) + noise[1],
        "species": np.array(["ash", "elm", "oak"])[kinds], "site": np.array(["St. Mary", "East"])[np.arange(120) // 60],
    })  # fmt: skip
    given = {"label_column": "species", "client_column": "site", "seeds": 1, "settings": SMALL}
    results = apfl.run(frame, "apfl", out=tmp_path, **given)
    model = results.model("apfl", "St. Mary")
    assert model.about == {"client": "St. Mary", "method": "apfl", "seed": 0, "feature_names": ["width", "length"]}
    assert np.mean(model.predict(frame[["species", "length", "width"]]) == frame["species"]) > 0.9


@dataclass(frozen=True)
class Alone(apfl.Method):
    """Every client alone."""

    gamma: float = 10.0

    def rounds(self, clients: Sequence[apfl.Shard], n_classes: int, seed: int) -> Iterator[apfl.Round]:
        yield from apfl.load_method("local_ridge", d=64, gamma=self.gamma).rounds(clients, n_classes, seed)


def by_turns(labels, n_clients, rng, *, alpha=1.0):
    return [np.arange(k, len(labels), n_clients) for k in range(n_clients)]


def test_a_method_and_a_partition_of_ones_own_are_objects(tmp_path, capsys):
    given = {"clients": 3, "partition": by_turns, "seeds": 1}
    results = apfl.run("digits", [Alone(gamma=2.0), "afl"], out=tmp_path / "r", **given)
    own, afl = results.records
    assert (own.method, own.settings, own.partition) == ("Alone", {"gamma": 2.0}, "by_turns")
    assert afl.n_train == own.n_train == [450, 450, 450]
    by_class = apfl.run("digits", Alone, settings={"Alone": {"gamma": 2.0}}, **given).records[0]
    assert without_clock([by_class]) == without_clock([own])
    with pytest.raises(InputError, match=r"r holds records of another run \(Alone"):
        apfl.run("digits", Alone, out=tmp_path / "r", **given)
    # The records say where method and partition were defined, so that they can be run again.
    assert {kind: file["path"] for kind, file in own.files.items()} == {
        "method": f"{__file__}:Alone", "partition": f"{__file__}:by_turns",
    }  # fmt: skip
    assert here("rerun", tmp_path / "r", "--method", "Alone") == 0
    assert "matched" in capsys.readouterr().out


def test_an_object_of_a_method_that_is_installed_keeps_its_name():
    method = apfl.load_method("afl", normalise="none")
    by_object, by_name = (
        apfl.run("digits", each, clients=3, seeds=1, settings=how).records
        for each, how in ((method, None), ("afl", {"afl": {"normalise": "none"}}))
    )
    assert without_clock(by_object) == without_clock(by_name)
    assert as_read(by_object[0].settings)["normalise"] == "none"


@pytest.mark.parametrize(
    ("methods", "given", "says"),
    [
        ([Alone(), Alone(gamma=1.0)], {}, "two methods of one class given"),
        ("afl", {"settings": {"apfl": {"gamma": 1}}}, "settings for apfl given, which is not run"),
        ("apfl", {"settings": {"apfl": {"gamma": -1}}}, "apfl.gamma=-1 given; allowed: a number greater than 0"),
        ("apfl", {"settings": {"apfl": 3}}, "settings of apfl are 3; give names and values"),
        ("afl", {"seeds": 500}, "how many seeds is a number from 1 to 100"),
        ("afl", {"partition": "iidd"}, "did you mean 'iid'"),
        ("afl", {"lable_column": "x"}, "did you mean 'label_column'"),
        ([], {}, "no method given"),
        ([3], {}, "3 given as a method; give a name, a path, or what inherits apfl.Method"),
        (dict, {}, "given as a method; give a name, a path, or what inherits apfl.Method"),
        ("afl", {"alpha": "much"}, "alpha='much' given; allowed: a number"),
        ("afl", {"clients": 2.5}, "column 'client' is float64"),
    ],
)
def test_what_cannot_be_run_is_refused(methods, given, says):
    with pytest.raises(InputError, match=says):
        apfl.run("digits", methods, **given)


def test_tuning_is_that_of_the_command(tmp_path):
    results = apfl.run("digits", "local_head", clients=3, seeds=1, tune=True, settings={"local_head": {"n_rounds": 2}},
                       out=tmp_path / "python")  # fmt: skip
    command = ["--methods", "local_head", "--clients", "3", "--seeds", "1", "--set", "local_head.n_rounds=2", "--tune"]
    assert here("run", *command, "--out", tmp_path / "command") == 0
    assert without_clock(results.records) == without_clock(read_records(tmp_path / "command"))
    tunings = [(tmp_path / each / "tuning.jsonl").read_text() for each in ("python", "command")]
    assert tunings[0] == tunings[1]


def test_threads_are_those_that_were_asked_for_and_recorded(tmp_path):
    before = torch.get_num_threads()
    found = apfl.run("digits", ["afl"], clients=3, seeds=1, threads=2)
    assert [record.threads for record in found.records] == [2]
    assert here("run", "--methods", "afl", "--clients", 3, "--seeds", 1, "--threads", 3, "--out", tmp_path / "r") == 0
    assert [record.threads for record in read_records(tmp_path / "r")] == [3]
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="threads=0 given; allowed: a whole number of at least 1"):
        apfl.run("digits", ["afl"], clients=3, seeds=1, threads=0)
