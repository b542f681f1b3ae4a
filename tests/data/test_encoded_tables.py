"""Tables of words, gaps and dates: fitted on training rows, stated by models, agreed on by sites."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.pipeline import make_pipeline
from typer.testing import CliRunner

import apfl
from apfl.cli.app import app
from apfl.data.load import load_data
from apfl.data.protocol import Protocol, deal, federate
from apfl.errors import InputError
from apfl.federate.site import Site
from apfl.maths.encoding import Encoding, Summary, settle, summarise


def invoke(*words: str):
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def frame(n: int = 240, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    made = pd.DataFrame({
        "site": rng.choice(["north", "south"], n), "age": rng.normal(50, 10, n).round(1),
        "blood": rng.choice(["A", "B", "0"], n), "pain": rng.integers(1, 4, n),
        "seen": (pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 700, n), "D")).strftime("%Y-%m-%d"),
    })  # fmt: skip
    made["label"] = np.where((made.age > 50).astype(int) + (made.blood == "A") + (made.pain == 2) > 1, "ill", "well")
    made.loc[rng.random(n) < 0.1, "age"] = None
    return made


@pytest.fixture
def csv(tmp_path) -> Path:
    path = tmp_path / "table.csv"
    frame().to_csv(path, index=False)
    return path


PROTOCOL = Protocol("given", None, client_column="site")


def test_the_encoding_is_settled_from_training_rows_alone(csv: Path) -> None:
    dataset = load_data(csv, encode="auto", categories="pain")
    halves = deal(dataset, PROTOCOL, 3)
    made = federate(dataset, PROTOCOL, 3)
    rows = pd.read_csv(csv, parse_dates=["seen"])
    columns = ["age", "blood", "pain", "seen"]
    sums = [summarise({n: rows.loc[train, n].tolist() for n in columns}, ["pain"]) for train, _ in halves]
    settled = settle(sums[0] + sums[1])
    assert "seen sine of the year" in settled.feature_names
    assert "pain=2" in settled.feature_names
    for shard, (_, test) in zip(made.test, halves, strict=True):
        expected = settled.transform({n: rows.loc[test, n].tolist() for n in columns})
        torch.testing.assert_close(shard.features.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)  # float32
    other = frame()
    test_rows = np.concatenate([test for _, test in halves])
    other.loc[test_rows, "age"], other.loc[test_rows, "blood"] = 1e6, "never seen"
    other.to_csv(csv, index=False)
    again = federate(load_data(csv, encode="auto", categories="pain"), PROTOCOL, 3)
    for before, after in zip(made.train, again.train, strict=True):
        torch.testing.assert_close(after.features, before.features, rtol=0, atol=0)


def test_run_and_predict_on_a_table_as_it_is(csv: Path, tmp_path) -> None:
    out = tmp_path / "out"
    given = ["--data", str(csv), "--client-column", "site", "--methods", "local_ridge", "--seeds", "1"]
    result = invoke("run", *given, "--encode", "auto", "--out", str(out))
    assert "columns to encode from the sums of training rows: age, blood, pain, seen" in result.stderr
    (first, _) = sorted(out.glob("models/local_ridge/seed-0/*.safetensors"))
    predicted = tmp_path / "predicted.csv"
    invoke("predict", str(first), str(csv), "--out", str(predicted))
    model = apfl.load_model(first)
    assert model.about["encoding"]["format"] == "apfl encoding 1"
    rows = pd.read_csv(csv, parse_dates=["seen"])
    assert pd.read_csv(predicted)["predicted"].tolist() == model.predict(rows).tolist()
    odd = rows.assign(age="old")
    with pytest.raises(InputError, match="expects numbers"):
        model.predict(odd)


def test_sites_agree_on_an_encoding_without_a_row(csv: Path, tmp_path) -> None:
    descriptions = []
    for site, rows in frame().groupby("site"):
        rows.drop(columns="site").to_csv(tmp_path / f"{site}.csv", index=False)
        target = tmp_path / f"{site}.json"
        said = invoke(
            "encoding", "describe", str(tmp_path / f"{site}.csv"), "--categories", "pain", "--out", str(target)
        )
        assert "names of categories" in " ".join(said.stdout.split())
        descriptions.append(target)
        assert str(rows.age.dropna().iloc[0]) not in target.read_text()
    agreed = tmp_path / "encoding.json"
    invoke("encoding", "settle", *map(str, descriptions), "--out", str(agreed))
    encoding = Encoding.from_json(agreed.read_text())
    site = Site.from_file(tmp_path / "home", "north", str(tmp_path / "north.csv"), encode=str(agreed))
    rows = pd.read_csv(tmp_path / "north.csv", parse_dates=["seen"])
    expected = encoding.transform({name: rows[name].tolist() for name in encoding.names})
    torch.testing.assert_close(site.train.features.double(), torch.from_numpy(expected), atol=1e-6, rtol=0)  # float32
    assert site.about["encoding"] == encoding.to_dict()
    with pytest.raises(InputError, match="one site cannot settle an encoding for all"):
        Site.from_file(tmp_path / "home", "north", str(tmp_path / "north.csv"), encode="auto")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"encode": "nowhere.json"}, "cannot be read"),
        ({"encode": "auto", "feature_column": "f"}, "vectors are features as they are"),
        ({"encode": "auto", "categories": "colour"}, "did you mean|have:"),
        ({"categories": "pain"}, "without --encode auto"),
        ({"encode": "auto", "drop": "site,age,blood,pain,seen"}, "no column of numbers is left"),
    ],
)
def test_bad_options_have_a_sentence(csv: Path, given: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_data(csv, **given)


def test_an_encoding_for_other_columns_is_refused(csv: Path, tmp_path) -> None:
    path = tmp_path / "encoding.json"
    path.write_text(settle(summarise({"height": [1, 2]})).to_json())
    with pytest.raises(InputError, match="has no column 'height'"):
        load_data(csv, encode=str(path))
    path.write_text(json.dumps({"format": "apfl encoding 1"}))
    with pytest.raises(InputError, match="damaged"):
        load_data(csv, encode=str(path))


def test_the_estimator_takes_a_frame_of_any_columns() -> None:
    rows = frame(400)
    labels = rows.pop("label")
    both = make_pipeline(
        apfl.Encoder(categories=["pain"], client_column="site"), apfl.APFLClassifier(d_primary=64, client_column=0)
    )
    both.fit(rows[:300], labels[:300])
    assert both.score(rows[300:], labels[300:]) > 0.8


def test_a_description_leaves_test_rows_out(tmp_path: Path) -> None:
    table = tmp_path / "site.csv"
    lines = [f"{i},{'A' if i % 2 else 'B'},{int(i >= 20)},{i % 2}" for i in range(30)]
    table.write_text("\n".join(["age,blood,held,label", *lines]))
    target = tmp_path / "site.json"
    invoke("encoding", "describe", str(table), "--test-column", "held", "--out", str(target))
    described = Summary.from_json(target.read_text())
    assert described.n_rows == 20
    assert set(described.columns) == {"age", "blood"}
    assert described.columns["age"].total == sum(range(20))
    assert described.columns["blood"].rows == {"A": 10, "B": 10}
    with pytest.raises(InputError, match="hold"):
        invoke("encoding", "describe", str(table), "--test-column", "hold", "--out", str(target))


def test_one_site_alone_settles_no_encoding(tmp_path: Path) -> None:
    one, agreed = tmp_path / "one.json", tmp_path / "agreed.json"
    one.write_text(summarise({"blood": ["A"] * 12 + ["B"] * 12}).to_json())
    with pytest.raises(InputError, match="--min-clients 1"):
        invoke("encoding", "settle", str(one), "--out", str(agreed))
    assert not agreed.exists()
    invoke("encoding", "settle", str(one), "--min-clients", "1", "--out", str(agreed))
    assert Encoding.from_json(agreed.read_text()).columns[0].categories == ("A", "B")


def test_a_site_counts_once(tmp_path: Path) -> None:
    one, copy, other, agreed = (tmp_path / f"{name}.json" for name in ("one", "copy", "other", "agreed"))
    for path, words in ((one, "AB"), (copy, "AB"), (other, "AC")):
        path.write_text(summarise({"blood": [*words] * 12}).to_json())
    for twice in (one, copy):
        with pytest.raises(InputError, match=r"says the same as .*one.json: each site counts once"):
            invoke("encoding", "settle", str(one), str(other), str(twice), "--out", str(agreed))
    assert not agreed.exists()
    invoke("encoding", "settle", str(one), str(other), "--out", str(agreed))
    assert Encoding.from_json(agreed.read_text()).columns[0].categories == ("A",)
