"""`apfl predict` and `export`: rows without labels, tables, images, ids, probabilities; whose model it is."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from apfl.models.file import about, load_model, read, write
from tests.commands import here as apfl
from tests.data.pictures import folder_of_images, pixels

arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
needs_efficientnet = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite_pytorch") is None, reason="needs apfl[efficientnet]"
)
RUN = ("run", "--seeds", 0, "--methods", "apfl", "--set", "apfl.d_primary=32", "--set", "apfl.d_refinement=32")


def frame(n: int = 90) -> dict[str, list]:
    """A table of two measurements that tell three species apart."""
    kinds = np.arange(n) % 3
    noise = np.random.default_rng(0).normal(size=(n, 2)) / 4
    return {
        "leaf": [f"leaf {i}" for i in range(n)],
        "width": (np.cos(2 * kinds) + noise[:, 0]).tolist(),
        "length": (np.sin(2 * kinds) + noise[:, 1]).tolist(),
        "site": [("East", "North")[i // 3 % 2] for i in range(n)],
        "species": [("ash", "elm", "oak")[k] for k in kinds],
    }


def save(path: Path, columns: dict[str, list]) -> Path:
    import pyarrow.csv
    import pyarrow.parquet

    write_table = pyarrow.parquet.write_table if path.suffix == ".parquet" else pyarrow.csv.write_csv
    write_table(arrow.table(columns), path)
    return path


def trained(folder: Path) -> Path:
    """A folder with the models of East and North."""
    data = save(folder / "leaves.csv", frame())
    options = ("--label-column", "species", "--client-column", "site", "--out", folder / "out")
    assert apfl(*RUN, "--data", data, *options) == 0
    return folder / "out" / "models" / "apfl" / "seed-0"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return trained(tmp_path)


def predicted(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def without(columns: dict[str, list], *names: str) -> dict[str, list]:
    return {name: column for name, column in columns.items() if name not in names}


def test_models_are_called_after_their_clients_and_say_so(tmp_path, capsys) -> None:
    models = trained(tmp_path)
    assert "client-0-East.safetensors, client-1-North.safetensors" in capsys.readouterr().out
    north = models / "client-1-North.safetensors"
    told = about(read(north))
    assert (told["client"], told["method"], told["seed"]) == ("North", "apfl", 0)
    assert told["feature_names"] == ["width", "length"]
    assert apfl("export", north, tmp_path / "alone.safetensors") == 0
    assert "client North" in capsys.readouterr().err
    assert about(read(tmp_path / "alone.safetensors")) == told


def test_names_that_are_no_file_names_stay_in_the_folder(tmp_path) -> None:
    columns = frame(60)
    columns["site"] = [("../../evil", "a/b: " + "x" * 300)[i // 3 % 2] for i in range(60)]
    data = save(tmp_path / "leaves.csv", columns)
    options = ("--label-column", "species", "--client-column", "site", "--out", tmp_path / "out")
    assert apfl(*RUN, "--data", data, *options) == 0
    files = sorted((tmp_path / "out" / "models" / "apfl" / "seed-0").glob("client-*"))
    assert [about(read(file))["client"] for file in files] == sorted(set(columns["site"]))
    assert not list(tmp_path.glob("**/*evil"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_without_labels_in_another_order(models, tmp_path, capsys, kind: str) -> None:
    """The model knows its features by name: other columns and another order change nothing."""
    north, columns = models / "client-1-North.safetensors", frame()
    assert (
        apfl("predict", north, tmp_path / "leaves.csv", "--label-column", "species", "--out", tmp_path / "a.csv") == 0
    )
    assert "accuracy 1.0000 on 90 labelled rows" in capsys.readouterr().err
    bare = {"height": list(range(90)), **dict(reversed(without(columns, "species", "site").items()))}
    file = save(tmp_path / f"bare.{kind}", bare)
    assert apfl("predict", north, file, "--out", tmp_path / "b.csv") == 0
    said = capsys.readouterr().err
    assert "accuracy" not in said
    assert "by the model of client North" in said
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    lost = save(tmp_path / f"lost.{kind}", without(bare, "width"))
    assert apfl("predict", north, lost, "--out", tmp_path / "c.csv") == 2
    assert f"no column in lost.{kind} 'width'" in capsys.readouterr().err
    assert not (tmp_path / "c.csv").exists()


def test_ids_and_probabilities(models, tmp_path, capsys) -> None:
    file = save(tmp_path / "bare.csv", without(frame(), "species"))
    options = ("--id-column", "leaf", "--probabilities", "--out", tmp_path / "p.csv")
    assert apfl("predict", models / "client-0-East.safetensors", file, *options) == 0
    assert "not calibrated" in capsys.readouterr().err
    rows = predicted(tmp_path / "p.csv")
    assert list(rows[0]) == ["row", "leaf", "predicted", "score", "ash", "elm", "oak"]
    assert [row["leaf"] for row in rows] == frame()["leaf"]
    for row in rows:
        shares = {name: float(row[name]) for name in ("ash", "elm", "oak")}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)  # written with six digits
        assert max(shares, key=shares.__getitem__) == row["predicted"]
    assert apfl("predict", models / "client-0-East.safetensors", file, "--id-column", "leav") == 2
    assert "did you mean 'leaf'" in capsys.readouterr().err


def test_probabilities_use_the_temperature_of_the_model(models, tmp_path, capsys) -> None:
    container = read(models / "client-0-East.safetensors")
    container.settings["temperature"] = 0.25
    write(container, tmp_path / "warm.safetensors")
    np.save(tmp_path / "x.npy", np.array([[0.5, 0.25], [1.0, -1.0]], np.float32))
    options = ("--probabilities", "--out", tmp_path / "p.csv")
    assert apfl("predict", tmp_path / "warm.safetensors", tmp_path / "x.npy", *options) == 0
    assert "calibrated" not in capsys.readouterr().err
    model = load_model(tmp_path / "warm.safetensors")
    expected = torch.softmax(model.scores(torch.tensor([[0.5, 0.25], [1.0, -1.0]])) / 0.25, 1)
    found = [[float(row[name]) for name in ("ash", "elm", "oak")] for row in predicted(tmp_path / "p.csv")]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)  # written with six digits


def test_parquet_is_written_as_parquet(models, tmp_path) -> None:
    import pyarrow.parquet

    np.savez(tmp_path / "x.npz", features=np.array([[0.5, 0.25], [1.0, -1.0]]), mine=np.array([7, 8]))
    options = ("--id-column", "mine", "--out", tmp_path / "p.parquet")
    assert apfl("predict", models / "client-0-East.safetensors", tmp_path / "x.npz", *options) == 0
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert table.column("mine").to_pylist() == [7, 8]
    assert set(table.column("predicted").to_pylist()) <= {"ash", "elm", "oak"}
    assert str(table.schema.field("score").type) == "double"


def test_labels_that_are_no_classes_give_no_accuracy(models, tmp_path, capsys) -> None:
    columns = frame() | {"species": ["fir", "yew", "fig"] * 30}
    file = save(tmp_path / "others.csv", columns)
    options = ("--label-column", "species", "--out", tmp_path / "p.csv")
    assert apfl("predict", models / "client-0-East.safetensors", file, *options) == 0
    said = capsys.readouterr().err
    assert "no label of the rows is a class of the model" in said
    assert "accuracy" not in said


def test_test_fraction_0_trains_on_every_row(tmp_path, capsys) -> None:
    """The model is the one of all rows: those of a run whose test rows come on top."""
    columns = frame()
    data = save(tmp_path / "all.csv", columns)
    more = {name: column + column[:10] for name, column in columns.items()} | {"held": [False] * 90 + [True] * 10}
    with_tests = save(tmp_path / "more.csv", more)
    options = ("--label-column", "species", "--client-column", "site")
    assert apfl(*RUN, "--data", data, *options, "--test-fraction", 0, "--out", tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "trained on all rows" in said
    assert not (tmp_path / "a" / "records.jsonl").exists()
    assert apfl(*RUN, "--data", with_tests, *options, "--test-column", "held", "--out", tmp_path / "b") == 0
    rows = torch.randn(5, 2)
    for name in ("client-0-East", "client-1-North"):
        one, other = (load_model(tmp_path / each / f"models/apfl/seed-0/{name}.safetensors") for each in "ab")
        assert torch.equal(one.scores(rows), other.scores(rows))


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """A model of photos in `out`, and photos without class folders in `new`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APFL_CACHE", str(tmp_path / "cache"))
    folder_of_images(Path("photos"), each=8)
    (tmp_path / "new").mkdir()
    for k, file in enumerate(sorted(Path("photos").glob("*/00[0-1].png"))):
        shutil.copy(file, f"new/{k}.png")
    options = ("--backbone", "efficientnet-lite0", "--clients", 2, "--partition", "iid", "--out", "out")
    assert apfl(*RUN, "--data", "photos", *options) == 0
    return Path("out/models/apfl/seed-0/client-0.safetensors")


@needs_efficientnet
def test_photos_without_class_folders(photos, capsys) -> None:
    """The model says its backbone; `run` says what it needs."""
    assert apfl("predict", photos, "new", "--out", "p.csv") == 0
    rows = predicted(Path("p.csv"))
    assert [row["path"] for row in rows] == [f"{k}.png" for k in range(6)]
    assert [row["predicted"] for row in rows] == [f"class{k // 2}" for k in range(6)]
    np.save("x.npy", np.stack([pixels(900 + k, colour=k) for k in range(3)]))
    np.savez("x.npz", images=np.load("x.npy"))
    for name in ("x.npy", "x.npz"):
        assert apfl("predict", photos, name, "--out", "q.csv") == 0
        assert [row["predicted"] for row in predicted(Path("q.csv"))] == ["class0", "class1", "class2"]
    capsys.readouterr()
    assert apfl("run", "--data", "new", "--backbone", "efficientnet-lite0") == 2
    assert "holds images without a folder for each class" in capsys.readouterr().err


@needs_efficientnet
def test_a_file_does_not_choose_what_code_runs_and_other_networks_are_refused(photos, capsys) -> None:
    container = read(photos)
    Path("mine.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef load(*, pooling=None): ...\n")
    told = json.loads(json.dumps(container.settings["about"]))
    container.settings["about"]["backbone"]["backbone"]["name"] = "./mine.py:load"
    write(container, "foreign.safetensors")
    assert apfl("predict", "foreign.safetensors", "new", "--out", "p.csv") == 2
    assert "--backbone" in capsys.readouterr().err
    assert not Path("ran").exists()
    told["backbone"]["backbone"]["weights_sha256"] = "0" * 64
    container.settings["about"] = told
    write(container, "other.safetensors")
    assert apfl("predict", "other.safetensors", "new", "--out", "p.csv") == 2
    assert "fitted to features of another network" in capsys.readouterr().err
    assert not Path("p.csv").exists()
