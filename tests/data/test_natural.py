"""Federations that people know, each on a small stand-in of the same schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from apfl.data import load_dataset
from apfl.data.federation import Dataset
from apfl.data.protocol import Protocol, federate
from apfl.data.tables import csv_reader
from apfl.errors import InputError
from tests.commands import here

ROOT = Path(__file__).parents[2]


def by_client(dataset: Dataset, test_column: str | None = None):
    return federate(dataset, Protocol("given", None, client_column="client", test_column=test_column), seed=0)


# --- LEAF ------------------------------------------------------------------------------------------------------------


def leaf_file(path: Path, sizes: dict[str, int], seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    data = {
        user: {"x": rng.random((n, 9)).round(3).tolist(), "y": rng.integers(3, size=n).tolist()}
        for user, n in sizes.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data}
    path.write_text(json.dumps(content))
    return path


def test_leaf_keeps_writers_and_test_rows(tmp_path):
    train = leaf_file(tmp_path / "data" / "train" / "all_data_0_niid.json", {"f0001_41": 8, "f0002_07": 5})
    leaf_file(tmp_path / "data" / "train" / "all_data_1_niid.json", {"f0003_00": 6}, seed=1)
    leaf_file(tmp_path / "data" / "test" / "all_data_0_niid.json", {"f0001_41": 3, "f0002_07": 2, "f0003_00": 1}, 2)
    dataset = load_dataset(str(tmp_path / "data"))
    federation = by_client(dataset, "test")
    assert list(federation.names) == ["f0001_41", "f0002_07", "f0003_00"]
    assert [len(shard) for shard in federation.train] == [8, 5, 6]
    assert [len(shard) for shard in federation.test] == [3, 2, 1]
    written = json.loads(train.read_text())["user_data"]["f0002_07"]
    np.testing.assert_array_equal(federation.train[1].features.numpy(), np.array(written["x"], np.float32))
    assert [dataset.class_names[y] for y in federation.train[1].labels] == list(map(str, written["y"]))


def test_leaf_without_a_split_is_a_folder_of_files_or_a_file(tmp_path):
    file = leaf_file(tmp_path / "all_data" / "all_data_0.json", {"a": 8, "b": 5})
    for source in (file, file.parent):
        dataset = load_dataset(str(source))
        assert "test" not in dataset.columns
        assert dataset.columns["client"].tolist() == ["a"] * 8 + ["b"] * 5


def test_what_leaf_does_not_write_is_refused(tmp_path):
    file = tmp_path / "x.json"
    for content, says in (
        ("{", "cannot be read as a file of LEAF"),
        ('{"users": ["a"]}', "'users' and 'user_data'"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["to be"], "y": ["o"]}}}', "has texts"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1, 2]], "y": [1, 2]}}}', "user a has x of shape"),
        (
            '{"users": ["a", "b"], "user_data": {"a": {"x": [[1, 2]], "y": [1]}, "b": {"x": [[1]], "y": [1]}}}',
            "rows of 1 and of 2 numbers",
        ),
    ):
        file.write_text(content)
        with pytest.raises(InputError, match=says):
            load_dataset(str(file))
    with pytest.raises(InputError, match="there is no file"):
        load_dataset(str(tmp_path / "none.json"))


ROWS = {"x": [[1, 2], [3, 4]], "y": [0, 1]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, "RecursionError"),
        ({"users": [], "user_data": {}}, "names no users; expected an object with 'users'"),
        ({"users": "a", "user_data": {"a": ROWS}}, "'users' is \"a\", not a list"),
        ({"users": ["a", "a"], "user_data": {"a": ROWS}}, "names user a twice"),
        ({"users": ["z"], "user_data": {"a": ROWS}}, "no rows of user z in 'user_data'"),
        ({"users": ["a"], "user_data": {"a": {"x": [[10**400]], "y": [0]}}}, "user a .*too large.*leave this user out"),
        ({"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [0, 1]}}}, "user a .*equally many numbers"),
        ({"users": ["a"], "user_data": {"a": {"x": [["7", "Mon", "to be"]], "y": [1]}}}, "has texts"),
    ],
)
def test_a_damaged_file_of_leaf_says_what_is_wrong(tmp_path, content, says):
    file = tmp_path / "x.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=says):
        load_dataset(str(file))


def test_a_folder_that_is_called_like_a_file_of_leaf_is_passed_over(tmp_path):
    leaf_file(tmp_path / "data" / "b.json", {"a": 8, "b": 5})
    (tmp_path / "data" / "a.json").mkdir()
    assert len(load_dataset(str(tmp_path / "data")).labels) == 13


# --- HAR -------------------------------------------------------------------------------------------------------------


def har_folder(folder: Path, people: dict[str, list[int]], per_person: int = 12) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = []
    for side, subjects in people.items():
        (folder / side).mkdir(parents=True)
        x = rng.uniform(-1, 1, (per_person * len(subjects), 7)).round(4)
        np.savetxt(folder / side / f"X_{side}.txt", x, fmt="%16.7e")
        np.savetxt(folder / side / f"y_{side}.txt", rng.permutation(len(x)) % 3 + 1, fmt="%d")
        np.savetxt(folder / side / f"subject_{side}.txt", np.repeat(subjects, per_person), fmt="%d")
        rows.append(x)
    (folder / "activity_labels.txt").write_text("1 WALKING\n2 WALKING_UPSTAIRS\n3 SITTING\n")
    return np.concatenate(rows)


def test_har_is_one_table_by_person(tmp_path):
    rows = har_folder(tmp_path / "UCI HAR Dataset", {"train": [1, 3], "test": [2]})
    dataset = load_dataset(str(tmp_path / "UCI HAR Dataset"))
    assert dataset.class_names == ("WALKING", "WALKING_UPSTAIRS", "SITTING")
    np.testing.assert_allclose(dataset.features.numpy(), rows, rtol=1e-6)  # written with seven digits
    assert dataset.columns["official"].tolist() == ["train"] * 24 + ["test"] * 12
    federation = by_client(dataset)
    assert list(federation.names) == ["1", "2", "3"]
    assert all(len(shard) for shard in federation.test)


def test_a_damaged_har_is_refused(tmp_path):
    folder = tmp_path / "har"
    har_folder(folder, {"train": [1, 3], "test": [2]})
    (folder / "test" / "y_test.txt").write_text("1\n")
    with pytest.raises(InputError, match="X, y and subject have 12, 1, 12 rows"):
        load_dataset(str(folder))
    (folder / "test" / "X_test.txt").write_text("walking")
    with pytest.raises(InputError, match="cannot be read as rows of numbers"):
        load_dataset(str(folder))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("train/y_train.txt", b"", "y_train.txt has no rows; unpack"),
        ("train/y_train.txt", b"nan\n" + b"1\n" * 23, "row 0, counted from 0, is 'nan'; expected one whole number"),
        ("train/y_train.txt", b"1\n" * 23 + b"1.5\n", "row 23, counted from 0, is '1.5'; expected one whole number"),
        ("test/y_test.txt", b"1 2\n" * 12, "y_test.txt: row 0, counted from 0, is '1 2'; expected one whole number"),
        ("test/subject_test.txt", b"-inf\n" * 12, "is '-inf'; expected one whole number"),
        ("train/subject_train.txt", None, "subject_train.txt cannot be read as rows of numbers .*unpack"),
        ("test/X_test.txt", b"\xe9" * 12, "X_test.txt cannot be read as rows of numbers"),
        ("activity_labels.txt", b"1 caf\xe9\n", "activity_labels.txt cannot be read as lines of a number and a name"),
        ("activity_labels.txt", b"1 A\n2 A\n", "activity_labels.txt calls two activities 'A'"),
    ],
)
def test_a_damaged_file_of_har_is_named(tmp_path, file, content, says):
    har_folder(tmp_path / "har", {"train": [1, 3], "test": [2]})
    (tmp_path / "har" / file).unlink()
    if content is not None:
        (tmp_path / "har" / file).write_bytes(content)
    with pytest.raises(InputError, match=says):
        load_dataset(str(tmp_path / "har"))


def test_activities_without_a_name_keep_their_number(tmp_path):
    har_folder(tmp_path / "har", {"train": [1, 3], "test": [2]})
    (tmp_path / "har" / "activity_labels.txt").write_text("1 WALKING\n\n2\n")
    assert load_dataset(str(tmp_path / "har")).class_names == ("WALKING", "2", "3")


# --- heart disease ---------------------------------------------------------------------------------------------------


def heart_folder(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for center, n in (("cleveland", 40), ("hungarian", 30), ("switzerland", 20), ("va", 25)):
        lines = []
        for i in range(n):
            entries = [f"{v:.1f}" for v in (*rng.uniform(30, 70, 2), i % 4 + 1, *rng.uniform(0, 200, 3), i % 3)]
            entries += [f"{v:.1f}" for v in rng.uniform(0, 3, 3)]
            lines.append(",".join([*entries, "?", "?", "?", str(i % 5)]))
        lines[3] = lines[3].replace(lines[3].split(",")[4], "?", 1)  # a row that stays out
        (folder / f"processed.{center}.data").write_text("\n".join(lines) + "\n")
    return folder


def test_heart_disease_is_prepared_as_in_flamby(tmp_path):
    pandas = pytest.importorskip("pandas")
    folder = heart_folder(tmp_path / "heart")
    dataset = load_dataset(str(folder))
    frames = []
    for file in sorted(folder.glob("*.data")):
        frame = pandas.read_csv(file, header=None, na_values="?").drop(columns=[10, 11, 12]).dropna()
        frames.append(frame.assign(center=file.name.split(".")[1]))
    every = pandas.concat(frames, ignore_index=True)
    expected = pandas.get_dummies(every.drop(columns=[13, "center"]), columns=[2, 6], drop_first=True).astype(float)
    assert dataset.features.shape == (111, 13)  # eight numbers, three kinds of pain and two of electrocardiogram more
    np.testing.assert_allclose(dataset.features.numpy(), expected.to_numpy(np.float32), rtol=1e-6)
    np.testing.assert_array_equal(dataset.labels.numpy(), (every[13] > 0).astype(int))
    assert dataset.columns["client"].tolist() == every["center"].tolist()
    assert dataset.feature_names[-5:] == ("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2")


def test_a_damaged_heart_file_is_refused(tmp_path):
    folder = heart_folder(tmp_path / "heart")
    file = folder / "processed.va.data"
    file.write_text("63.0,1.0\n")
    with pytest.raises(InputError, match="row 0, counted from 0, has 2 columns; expected 14"):
        load_dataset(str(folder))
    file.write_text(",".join(["old"] * 14))
    with pytest.raises(InputError, match="row 0, counted from 0, cannot be read as numbers and '\\?'"):
        load_dataset(str(folder))
    file.write_bytes(b"\xe9")
    with pytest.raises(InputError, match=r"cannot be read as rows of numbers and '\?' .*fetch it again"):
        load_dataset(str(folder))


@pytest.mark.parametrize(
    ("column", "entry", "says"),
    [
        (2, "nan", "row 0, counted from 0, has 'nan'; expected numbers"),
        (13, "nan", "row 0, counted from 0, has 'nan'; expected numbers"),
        (13, "-9", "row 0, counted from 0, has the label '-9'; expected 0"),
        (13, "0.5", "row 0, counted from 0, has the label '0.5'; expected 0"),
    ],
)
def test_what_is_no_patient_of_heart_disease_is_refused(tmp_path, column, entry, says):
    folder = heart_folder(tmp_path / "heart")
    first, *others = (folder / "processed.va.data").read_text().splitlines()
    entries = first.split(",")
    entries[column] = entry
    (folder / "processed.va.data").write_text("\n".join([",".join(entries), *others]))
    with pytest.raises(InputError, match=says):
        load_dataset(str(folder))


def test_no_hospital_disappears(tmp_path):
    folder = heart_folder(tmp_path / "heart")
    file = folder / "processed.va.data"
    (folder / "processed.va.new.data").write_text(file.read_text())
    assert set(load_dataset(str(folder)).columns["client"]) == {"cleveland", "hungarian", "switzerland", "va", "va.new"}
    for content in ("", "?,1,1,1,1,1,1,1,1,1,?,?,?,0\n"):
        file.write_text(content)
        with pytest.raises(InputError, match=r"processed.va.data: none of \d rows .* take it out of the folder"):
            load_dataset(str(folder))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_recipe_for_wisdm_makes_a_table_that_is_read(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    lines = [
        f"{user},{activity},{1000 + t},{x:.5f},{y:.5f},{z:.5f};"
        for user in (17, 33)
        for activity, scale in (("Jogging", 8), ("Sitting", 0.5))
        for t, (x, y, z) in enumerate(scale * rng.normal(size=(1250, 3)))
    ]
    lines[5] = "33,Jogging,49;"  # the public file has broken lines too
    lines[6] = "33,Jogging,1006,1.0,2.0,;"
    (tmp_path / "WISDM_ar_v1.1_raw.txt").write_text("\n".join(lines) + "\n\n")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto.md").read_text(), re.DOTALL)
    (recipe,) = [block for block in blocks if "WISDM" in block]
    exec(compile(recipe, "howto.md", "exec"), {})
    dataset = load_dataset(str(tmp_path / "wisdm.csv"), label_column="activity", drop="user")
    assert dataset.features.shape == (24, 9)  # six whole windows of each user and activity
    assert dataset.class_names == ("Jogging", "Sitting")
    spread = dataset.features.numpy()[:, list(dataset.feature_names).index("std_x")]
    assert spread[dataset.labels.numpy() == 0].min() > spread[dataset.labels.numpy() == 1].max()


def test_the_plan_for_clients_that_nobody_drew_runs_on_hospitals(tmp_path):
    heart_folder(tmp_path / "heart")
    options = ("--seeds", "0,", "--rounds", "2", "--jobs", "1", "--out", tmp_path / "out")
    assert here("bench", "natural", "--data", tmp_path / "heart", *options) == 0
    records = [json.loads(file.read_text()) for file in (tmp_path / "out" / "cells").glob("*.json")]
    assert {record["method"] for record in records} == {"local_ridge", "afl", "fedavg_ft", "apfl_paper", "apfl"}
    assert {tuple(record["client_names"]) for record in records} == {("cleveland", "hungarian", "switzerland", "va")}


def test_the_plan_for_clients_that_nobody_drew_reads_people_and_writers(tmp_path, capsys):
    har_folder(tmp_path / "har", {"train": [1, 3], "test": [2]})
    leaf_file(tmp_path / "leaf" / "train" / "a.json", {"f1": 30, "f2": 40})
    leaf_file(tmp_path / "leaf" / "test" / "a.json", {"f1": 10, "f2": 12}, seed=1)
    for options in (("--data", tmp_path / "har"), ("--data", tmp_path / "leaf", "--test-column", "test")):
        assert here("bench", "natural", *options, "--dry-run") == 0
        assert "15 cells" in capsys.readouterr().err


def test_a_table_whose_header_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"caf\xe9,b,label\n1,2,x\n3,4,y\n")
    for read in (lambda path: load_dataset(str(path)), csv_reader):
        with pytest.raises(InputError, match=r"names of its columns are not UTF-8 .* save it as UTF-8"):
            read(tmp_path / "rows.csv")


@pytest.fixture
def patients(tmp_path):
    """As a table of TCGA: centres of different size, a gene that means the same everywhere, one that does not."""
    rng, lines = np.random.default_rng(0), ["centre,age,gene_a,gene_b,time,event"]
    for centre, n, sign in (("MSKCC", 120, 1), ("Mayo", 100, -1), ("UCSF", 24, 1)):
        for _ in range(n):
            event = int(rng.integers(2))
            a, b = 2 * event + rng.normal(), sign * (2 * event - 1) + rng.normal()
            lines.append(f"{centre},{rng.uniform(30, 80):.1f},{a:.3f},{b:.3f},{rng.uniform(10, 900):.0f},{event}")
    path = tmp_path / "tcga.csv"
    path.write_text("\n".join(lines))
    return path


def test_a_run_on_given_clients_says_who_gains(patients, tmp_path, capsys):
    options = ("--label-column", "event", "--drop", "time", "--methods", "afl,apfl", "--seeds", "1")
    named = ("--client-column", "centre", "--out", tmp_path / "out")
    assert here("run", "--data", patients, *options, *named) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "against going alone client test rows alone apfl gain ± s.e." in shown
    for centre in ("MSKCC", "Mayo", "UCSF"):
        assert re.search(rf"{centre} \d+ [\d.]+ [\d.]+ [+-][\d.]+ [\d.]+", shown)
    assert re.search(r"\d of 3 clients gain \(\d clearly\), \d lose", shown)
    records = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in records] == ["afl", "apfl"]  # going alone is printed, not kept


@pytest.mark.parametrize(
    "drawn",
    [("--clients", "3", "--alpha", "5"), ("--partition", "domains", "--client-column", "centre", "--clients", "6")],
)
def test_a_run_on_drawn_clients_does_not(patients, tmp_path, capsys, drawn):
    options = ("--label-column", "event", "--drop", "time", "--methods", "afl", "--seeds", "1")
    assert here("run", "--data", patients, *options, *drawn, "--out", tmp_path / "out") == 0
    assert "going alone" not in capsys.readouterr().out
