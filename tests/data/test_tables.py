"""Tables as people have them: named columns, identifiers, other delimiters, gaps, words, scales."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from apfl.data import load_dataset
from apfl.data.hints import hints
from apfl.data.protocol import Protocol, federate
from apfl.errors import InputError
from tests.commands import here as apfl

pytest.importorskip("pyarrow", reason="needs apfl[tables]")

ROWS = "patient_id,age,bmi,glucose1,glucose2,sex,hospital,label\n" + "".join(
    f"{900 + i},{40 + i},{20 + i / 4},{5 + i / 8},{6 + i / 8},{'fm'[i % 2]},{i % 3},{'ab'[i % 2]}\n" for i in range(24)
)


def table(folder: Path, text: str = ROWS, name: str = "own.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_all_columns_of_numbers_but_identifiers_are_features(tmp_path: Path) -> None:
    dataset = load_dataset(table(tmp_path))
    assert dataset.feature_names == ("age", "bmi", "glucose1", "glucose2", "hospital")
    assert dataset.features[2].tolist() == [42, 20.5, 5.25, 6.25, 2]


@pytest.mark.parametrize("role", ["client_column", "group_column", "test_column"])
def test_a_column_that_names_clients_groups_or_tests_is_no_feature(tmp_path: Path, role: str) -> None:
    """A client's number among its features would tell the model who it is."""
    path = table(tmp_path, "a,b,site,label\n" + "".join(f"{i / 8},{i % 5},{i // 4 % 2},{i % 2}\n" for i in range(32)))
    protocol = Protocol("given" if role == "client_column" else "iid", None if role == "client_column" else 2,
                        **{role: "site"})  # fmt: skip
    federation = federate(load_dataset(path), protocol, seed=0)
    assert {shard.features.shape[1] for shard in federation.train} == {2}
    rows = np.concatenate([shard.features.numpy() for shard in [*federation.train, *federation.test]])
    assert sorted(rows[:, 0].tolist()) == [i / 8 for i in range(32)]


def test_features_and_drop_choose_columns_and_are_part_of_what_the_data_are(tmp_path: Path) -> None:
    path = table(tmp_path)
    assert load_dataset(path, features="bmi, glucose*").feature_names == ("bmi", "glucose1", "glucose2")
    assert load_dataset(path, features="patient_id").features[0].tolist() == [900]
    dropped = load_dataset(path, drop="hospital,glucose?")
    assert dropped.feature_names == ("age", "bmi")
    assert dropped.column("hospital").tolist()[:4] == [0, 1, 2, 0]
    plain = load_dataset(path).sha256
    assert load_dataset(path, features="age,bmi,glucose1,glucose2,hospital").sha256 == plain
    assert load_dataset(path, drop="patient_id").sha256 == plain
    assert len({plain, dropped.sha256, load_dataset(path, drop="age").sha256}) == 3
    assert dropped.sha256 == load_dataset(path, features="age,bmi").sha256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "agee"}, "--features: no column in own.csv 'agee'; did you mean 'age'"),
        ({"drop": "x*"}, r"--drop: no column in own.csv 'x\*'"),
        ({"features": "age,sex"}, "column 'sex', row 0 holds 'f'.*encode words as numbers.*--drop 'sex'"),
        ({"features": "age", "feature_column": "glucose"}, "name the features with one of them"),
        ({"drop": "age,bmi,glucose*,hospital"}, "no column of numbers is left"),
        (
            {"label_column": "bmi", "target": "classification"},
            "labels in 'bmi' are float64, for example 20.25; .*divide the values into classes",
        ),
    ],
)
def test_a_choice_that_cannot_be(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_dataset(table(tmp_path), **options)


def test_numbered_columns_are_an_embedding_if_they_are_most_numbers(tmp_path: Path) -> None:
    few = load_dataset(table(tmp_path, "label,age,bmi,v1,v2\n1,2,3,4,5\n2,3,4,5,6\n"))
    assert few.feature_names == ("age", "bmi", "v1", "v2")
    most = load_dataset(table(tmp_path, "label,age,v1,v2\n1,2,4,5\n2,3,5,6\n"))
    assert most.feature_names == ("v1", "v2")
    assert hints(most, Protocol())[1].startswith("not features, though numbers: age")


@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("own.tsv", "\t"), *((name, each) for name in ("own.csv", "own.csv.gz") for each in ";\t|,")],
)
def test_delimiters_and_compression_are_read(tmp_path: Path, name: str, delimiter: str) -> None:
    text = ROWS.replace(",", delimiter)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    read, plain = load_dataset(str(path)), load_dataset(table(tmp_path, ROWS, "plain.csv"))
    assert read.feature_names == plain.feature_names
    assert read.features.tolist() == plain.features.tolist()


def test_a_decimal_comma_is_read(tmp_path: Path) -> None:
    path = table(tmp_path, "label;a;b;note\n1;0,5;2;x,y\n2;-1,25;3;z\n")
    assert load_dataset(path).features.tolist() == [[0.5, 2], [-1.25, 3]]


def test_a_truncated_gz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress(ROWS.encode())[:40])
    with pytest.raises(InputError, match=r"own\.csv\.gz cannot be read as csv\.gz"):
        load_dataset(str(tmp_path / "own.csv.gz"))


def test_whole_floats_are_labels(tmp_path: Path) -> None:
    dataset = load_dataset(table(tmp_path, "label,a\n1.0,2\n0.0,3\n"))
    assert (dataset.class_names, dataset.labels.tolist()) == (("0", "1"), [1, 0])
    np.savez(tmp_path / "a.npz", features=np.eye(2), labels=[1.0, 0.0])
    assert load_dataset(str(tmp_path / "a.npz")).class_names == ("0", "1")
    np.savez(tmp_path / "a.npz", features=np.eye(2), labels=[1.5, 0.0])
    with pytest.raises(InputError, match=r"'labels' are float64, for example 1\.5"):
        load_dataset(str(tmp_path / "a.npz"), target="classification")
    assert load_dataset(str(tmp_path / "a.npz")).target == "regression"


def test_dates_are_clients(tmp_path: Path) -> None:
    text = "label,a,day,at\n" + "".join(f"{i % 2},{i},2024-01-0{1 + i % 2},2024-01-01 0{i}:00:00\n" for i in range(8))
    dataset = load_dataset(table(tmp_path, text))
    federation = federate(dataset, Protocol("given", None, client_column="day"), seed=0)
    assert list(federation.names) == ["2024-01-01", "2024-01-02"]
    assert dataset.column("at")[3] == "2024-01-01T03:00:00"


def test_gaps_in_features_name_their_columns(tmp_path: Path) -> None:
    text = "label,age,bmi,bp\n1,2,,4\n2,,5,6\n1,NA,3,4\n2,3,4,5\n"
    with pytest.raises(InputError, match=r"3 of 4 rows .*age \(2\), bmi \(1\) \(rows 0, 1, 2, .*median.*--drop"):
        load_dataset(table(tmp_path, text))
    assert load_dataset(table(tmp_path, text), drop="age,bmi").features.tolist() == [[4], [6], [4], [5]]


def test_one_odd_entry_does_not_lose_a_feature(tmp_path: Path) -> None:
    path = table(tmp_path, "label,age,bmi\n1,2,?\n2,3,4\n1,3,5\n2,3,6\n")
    with pytest.raises(InputError, match=r"column 'bmi', row 0 holds '\?'.*--drop 'bmi'"):
        load_dataset(path)
    dropped = load_dataset(path, drop="bmi")
    assert dropped.feature_names == ("age",)
    assert dropped.column("bmi").tolist() == ["?", "4", "5", "6"]


def test_hints_name_features_words_identifiers_and_scales(tmp_path: Path) -> None:
    text = "customer_id,age,income,region,label\n" + "".join(
        f"{i},{20 + i},{10000 * i},{'ns'[i % 2]},{i % 2}\n" for i in range(9)
    )
    dataset = load_dataset(table(tmp_path, text))
    features, words, identifiers, scales = hints(dataset, Protocol())
    assert features == "features: age, income"
    assert "no numbers: region (--encode auto makes features of them)" in words
    assert "identifiers by their names: customer_id" in identifiers
    assert "scales differ: income varies by 2.58e+04, age by 2.58" in scales
    assert len(hints(dataset, Protocol("given", None, client_column="region"))) == 3
    assert not hints(load_dataset("digits"), Protocol())


def test_a_table_runs_and_says_which_columns_it_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = table(tmp_path), tmp_path / "out"
    options = ("--methods", "afl", "--seeds", "0", "--client-column", "hospital", "--out", out)
    assert apfl("run", "--data", path, *options, "--drop", "glucose2") == 0
    assert "features: age, bmi, glucose1\n" in capsys.readouterr().err
    record = json.loads((out / "records.jsonl").read_text())
    assert record["source"] == {"data": path, "drop": "glucose2"}
    assert record["client_names"] == ["0", "1", "2"]
    assert apfl("rerun", out) == 0


def test_the_file_of_features_has_no_column_that_is_a_feature_too(tmp_path: Path) -> None:
    """`run --client-column hospital` on it would leave the client's number among the features."""
    assert apfl("features", table(tmp_path), "--backbone", "identity", "--out", tmp_path / "f.npz") == 0
    dataset = load_dataset(str(tmp_path / "f.npz"))
    assert dataset.features.shape == (24, 5)
    assert set(dataset.columns) == {"patient_id", "sex"}


def test_every_named_feature_is_listed_and_an_embedding_in_short(tmp_path: Path) -> None:
    names = [f"{'xyz'[i % 3]}{chr(97 + i)}" for i in range(26)]
    text = ",".join(["", *names, "label"]) + "\n" + "".join(f"{i}," + f"{i}," * 26 + f"{i}\n" for i in range(2))
    features, identifiers = hints(load_dataset(table(tmp_path, text)), Protocol())
    assert features == f"features: {', '.join(names)}"
    assert "identifiers by their names: ''" in identifiers  # what pandas writes before the first column
    wide = ",".join([*(f"f{i}" for i in range(99)), "label"]) + "\n" + "1," * 99 + "0\n" + "2," * 99 + "1\n"
    [short] = hints(load_dataset(table(tmp_path, wide)), Protocol())
    assert short.endswith("f10, f11, ... (99)")
