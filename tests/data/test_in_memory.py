"""Data that are given as objects: arrays, tables, federations, functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import apfl
from apfl.data.protocol import Protocol, federate
from apfl.errors import InputError

X, Y = load_digits(return_X_y=True)
X, Y = X[:240] / 16, Y[:240]
SITE = np.array(["north", "south", "west"])[np.arange(240) % 3]


def test_arrays_tensors_and_lists_are_the_same_data():
    pandas = pytest.importorskip("pandas")
    forms = [
        (X, Y), (torch.from_numpy(X), torch.from_numpy(Y)), (X.tolist(), Y.tolist()),
        (pandas.DataFrame(X), pandas.Series(Y)), (X, Y.astype(float)),
    ]  # fmt: skip
    loaded = [apfl.load_data(features, labels) for features, labels in forms]
    assert len({each.sha256 for each in loaded}) == 1
    assert loaded[0].features.dtype == torch.float32
    assert torch.equal(loaded[0].labels, torch.from_numpy(Y))
    assert apfl.load_data((X, Y)).sha256 == loaded[0].sha256


def test_other_rows_labels_names_or_columns_are_other_data():
    names = np.array(list("abcdefghij"))[Y]
    given = [(X, Y), (X + 1e-3, Y), (X, 9 - Y), (X, names)]
    hashes = {apfl.load_data(features, labels).sha256 for features, labels in given}
    hashes |= {apfl.load_data(X, Y, columns={"site": site}).sha256 for site in (SITE, SITE[::-1])}
    assert len(hashes) == 6


@pytest.mark.parametrize("kind", ["pandas", "datasets"])
def test_a_table_in_memory_is_read_as_a_file_is(kind, tmp_path):
    pandas, library = pytest.importorskip("pandas"), pytest.importorskip(kind)
    frame = pandas.DataFrame(X[:, 2:6], columns=[f"f{i}" for i in range(4)]).assign(species=Y.astype(str), site=SITE)
    frame.to_parquet(tmp_path / "t.parquet")
    table = frame if kind == "pandas" else library.Dataset.from_pandas(frame)
    here, there = (apfl.load_data(each, label_column="species") for each in (table, tmp_path / "t.parquet"))
    assert torch.equal(here.features, there.features)
    assert torch.equal(here.labels, there.labels)
    assert (here.class_names, list(here.columns)) == (there.class_names, list(there.columns))
    with pytest.raises(InputError, match=r"the table in memory has no column 'label' \(it has: f0"):
        apfl.load_data(table)


def test_the_named_numbers_of_a_table_in_memory_are_features():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "patient_id": np.arange(240),
            "age": X[:, 2],
            "dose": X[:, 5],
            "ward": np.arange(240) % 3,
            "site": SITE,
            "y": Y,
        }
    )
    loaded = apfl.load_data(frame, label_column="y")
    assert loaded.feature_names == ("age", "dose", "ward")
    assert torch.equal(loaded.features[:, :2], torch.from_numpy(X[:, [2, 5]]).float())
    assert apfl.federation(frame, label_column="y", client_column="ward").train[0].features.shape[1] == 2
    chosen = [apfl.load_data(frame, label_column="y", features=each) for each in (["dose", "age"], "dose,age")]
    assert [each.feature_names for each in chosen] == [("dose", "age")] * 2
    assert loaded.sha256 != chosen[0].sha256 == chosen[1].sha256
    with pytest.raises(InputError, match="features: no column in the table in memory 'doze'; did you mean 'dose'"):
        apfl.load_data(frame, label_column="y", features=["doze"])


def test_class_names_and_images_of_a_hugging_face_dataset_are_kept():
    datasets, pil = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    kinds = datasets.ClassLabel(names=["zebra", "ape"])
    vectors = datasets.Dataset.from_dict({"label": [0, 1, 0], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]})
    loaded = apfl.load_data(vectors.cast_column("label", kinds).select([2, 1]))
    assert [loaded.class_names[i] for i in loaded.labels] == ["zebra", "ape"]
    assert loaded.features.tolist() == [[5.0, 6.0], [3.0, 4.0]]
    pictures = datasets.Dataset.from_dict({"label": [0], "image": [pil.new("RGB", (4, 4))]})
    with pytest.raises(InputError, match="'in memory' holds images; name the backbone"):
        apfl.load_data(pictures.cast_column("label", kinds))


@pytest.mark.parametrize(
    ("data", "given", "says"),
    [
        (X, {}, "ndarray given as data; give a name or path, features with labels"),
        (X, {"labels": Y[:9]}, "240 rows of features and 9 labels given"),
        (X, {"labels": [None] * 240}, "240 of 240 labels of in memory are missing"),
        (
            X,
            {"labels": Y + 0.5, "target": "classification"},
            "in memory: 'labels' are float64, for example 0.5; expected integers or strings",
        ),
        (X[0], {"labels": Y[:1]}, r"'features' is float64 of shape \(64,\)"),
        (X, {"labels": Y, "columns": {"site": SITE[:5]}}, r"column 'site' is <U5 with shape \(5,\); .* the 240 rows"),
        (X, {"labels": Y, "columns": {"site": 3.5}}, r"column 'site' is float64 with shape \(\); it must"),
        ([[1.0, 2.0], [3.0]], {"labels": [0, 1]}, "list given that is no array .*; give rows of one length"),
        (X, {"labels": Y, "label_column": "y"}, "label_column given, which is of no use for ndarray in memory"),
        ("digits", {"lable_column": "y"}, "no data option 'lable_column'; did you mean 'label_column'"),
    ],
)
def test_what_cannot_be_read_is_refused(data, given, says):
    with pytest.raises(InputError, match=says):
        apfl.load_data(data, **given)


def test_several_splits_are_refused_with_the_remedy():
    datasets = pytest.importorskip("datasets")
    both = datasets.DatasetDict({side: datasets.Dataset.from_dict({"label": [0], "f0": [1.0]}) for side in ("a", "b")})
    with pytest.raises(InputError, match=r"2 splits given \(a, b\); give one of them, or datasets.concatenate"):
        apfl.load_data(both)


def test_a_federation_is_dealt_out_as_by_its_protocol():
    dataset = apfl.load_data("digits")
    here = apfl.federation("digits", clients=6, alpha=0.5, seed=3)
    there = federate(dataset, Protocol(n_clients=6, alpha=0.5), 3)
    for one, two in zip([*here.train, *here.test], [*there.train, *there.test], strict=True):
        assert torch.equal(one.features, two.features)


def test_clients_may_be_named_row_by_row():
    federation = apfl.federation(X, Y, clients=SITE)
    assert list(federation.names) == ["north", "south", "west"]
    assert [len(a) + len(b) for a, b in zip(federation.train, federation.test, strict=True)] == [80, 80, 80]
    with pytest.raises(InputError, match="both name the clients"):
        apfl.federation(X, Y, clients=SITE, client_column="site")


def test_a_federation_becomes_data_and_the_same_federation_again():
    first = apfl.federation(X, Y, clients=12, alpha=10)  # 10 and 11 come after 9
    again = apfl.federation(first)
    assert list(again.names) == list(first.names)
    for one, two in zip([*first.train, *first.test], [*again.train, *again.test], strict=True):
        assert torch.equal(one.features, two.features)
        assert torch.equal(one.labels, two.labels)


def test_a_folder_of_pfllib_keeps_its_clients(tmp_path):
    (tmp_path / "config.json").write_text('{"num_clients": 2, "num_classes": 10}')
    for k, side, rows in [(0, "train", 30), (0, "test", 7), (1, "train", 20), (1, "test", 5)]:
        (tmp_path / side).mkdir(exist_ok=True)
        held = {"x": X[:rows].astype(np.float32), "y": Y[:rows]}
        np.savez(tmp_path / side / f"{k}.npz", data=np.array(held, dtype=object))
    federation = apfl.federation(tmp_path)
    assert [len(each) for each in [*federation.train, *federation.test]] == [30, 20, 7, 5]


def with_gaps(values: np.ndarray, gap: object) -> list[object]:
    return [gap if row in (4, 9) else value for row, value in enumerate(values.tolist())]


def forms(values: list[object]) -> list[object]:
    """A column as one may have it in Python; numpy and pandas turn a gap among strings into 'nan' if they are let."""
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(values)
    return [
        values,
        tuple(values),
        np.array(values, dtype=object),
        series,
        series.astype(object),
        series.astype("category"),
    ]


@pytest.mark.parametrize("gap", ["None", "nan", "float32 nan", "NA", "NaT", "empty"])
@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
def test_a_missing_label_client_or_group_is_data(gap, named):
    pandas = pytest.importorskip("pandas")
    values = {"None": None, "nan": float("nan"), "float32 nan": np.float32("nan"), "empty": ""}
    value = values[gap] if gap in values else getattr(pandas, gap)
    if gap == "empty" and not named:
        return
    rows = r"^2 of 240 .* are missing \(rows 4, 9, counted from 0\)"
    for labels in forms(with_gaps(np.array(list("abcdefghij"))[Y] if named else Y, value)):
        with pytest.raises(InputError, match=rows):
            apfl.load_data(X, labels)
    for column in forms(with_gaps(SITE if named else np.arange(240) % 3, value)):
        with pytest.raises(InputError, match=rows):
            apfl.federation(X, Y, clients=column)
        data = apfl.load_data(X, Y, columns={"patient": column})
        assert len(data.columns["patient"]) == 240  # a column with gaps is kept, and refused if it is used
        with pytest.raises(InputError, match=rows):
            apfl.federation(data, clients=3, group_column="patient")


@pytest.mark.parametrize("unit", ["D", "ns"])
def test_a_date_is_its_number_of_nanoseconds(unit):
    days = np.array(["2024-01-01", "2024-01-02"], f"datetime64[{unit}]")[np.arange(240) % 2]
    assert [name[:10] for name in apfl.federation(X, Y, clients=days).names] == ["2024-01-01", "2024-01-02"]
    days[[4, 9]] = "NaT"
    with pytest.raises(InputError, match=r"2 of 240 .* are missing \(rows 4, 9,"):
        apfl.federation(X, Y, clients=days)
