"""Tables as they are: the encoding from sums is that of all rows in one place, by scikit-learn's own transformers."""

from __future__ import annotations

import datetime
import json
from functools import reduce
from operator import add

import numpy as np
import pandas as pd
import pytest
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from apfl import Encoder
from apfl.errors import InputError
from apfl.maths.encoding import Encoding, Summary, settle, summarise


def table(n: int = 300, seed: int = 0) -> dict[str, list]:
    """Numbers with gaps, words with gaps and rare ones, dates with gaps."""
    rng = np.random.default_rng(seed)
    age = rng.normal(50, 10, n).tolist()
    words = rng.choice(["A", "B", "0", "AB", "Bombay"], n, p=[0.4, 0.3, 0.2, 0.09, 0.01]).tolist()
    seen = [datetime.date(2020, 1, 1) + datetime.timedelta(int(days)) for days in rng.integers(0, 900, n)]
    gone = rng.random((3, n)) < 0.1
    columns = {"age": age, "blood": words, "seen": seen}
    return {
        name: [None if g else v for v, g in zip(c, gone[i], strict=True)] for i, (name, c) in enumerate(columns.items())
    }


def part(columns: dict[str, list], rows: np.ndarray) -> dict[str, list]:
    return {name: [column[row] for row in rows] for name, column in columns.items()}


def federated(columns: dict[str, list], n_clients: int, **rule: int) -> Encoding:
    owners = np.random.default_rng(1).integers(0, n_clients, len(columns["age"]))
    return settle(
        reduce(add, (summarise(part(columns, np.flatnonzero(owners == k))) for k in range(n_clients))), **rule
    )


class TestPooled:
    """The sums of four clients against scikit-learn on all rows."""

    def test_numbers_are_imputed_and_scaled(self) -> None:
        columns = table()
        ours = federated(columns, 4).transform(columns)
        rows = np.array(columns["age"], float)[:, None]
        np.testing.assert_allclose(
            ours[:, :1], make_pipeline(SimpleImputer(), StandardScaler()).fit_transform(rows), atol=1e-9
        )
        np.testing.assert_array_equal(ours[:, 1:2], MissingIndicator().fit_transform(rows))

    @pytest.mark.parametrize("min_rows", [1, 10])
    def test_words_are_one_hot_and_rare_ones_are_the_others(self, min_rows: int) -> None:
        columns = table()
        encoding = federated(columns, 4, min_rows=min_rows, min_clients=1)
        names = encoding.feature_names
        ours = encoding.transform(columns)[:, [i for i, name in enumerate(names) if name.startswith("blood=")]]
        words = np.array(columns["blood"], object)[:, None]
        rule = {"min_frequency": min_rows, "handle_unknown": "infrequent_if_exist"} if min_rows > 1 else {}
        theirs = OneHotEncoder(sparse_output=False, **rule).fit_transform(words)
        np.testing.assert_array_equal(ours, theirs)
        assert ("blood=(other)" in names) == (min_rows > 1)

    def test_dates_are_days_and_cycles(self) -> None:
        columns = table()
        names, ours = (encoding := federated(columns, 4)).feature_names, encoding.transform(columns)
        first = names.index("seen")
        known = [i for i, day in enumerate(columns["seen"]) if day is not None]
        stamps = pd.to_datetime(pd.Series([columns["seen"][i] for i in known]))
        year, week = (stamps.dt.day_of_year - 1) / 365.25, stamps.dt.day_of_week / 7
        expected = [turn(2 * np.pi * share) for share in (year, week) for turn in (np.sin, np.cos)]
        np.testing.assert_allclose(ours[known, first + 1 : first + 5], np.stack(expected, 1), atol=1e-9)
        days = np.array([np.nan if d is None else (d - datetime.date(1970, 1, 1)).days for d in columns["seen"]])
        theirs = make_pipeline(SimpleImputer(), StandardScaler()).fit_transform(days[:, None])
        np.testing.assert_allclose(ours[:, first], theirs[:, 0], atol=1e-8)  # squares of 18,000 days lose four digits
        assert set(ours[[i for i in range(300) if i not in known], first + 1 : first + 5].ravel()) == {0.0}


def test_hours_make_a_cycle_of_their_own() -> None:
    times = [datetime.datetime(2020, 1, 1, 6), datetime.datetime(2020, 1, 2, 18)]
    encoding = settle(summarise({"at": times}))
    assert encoding.feature_names[-2:] == ["at sine of the day", "at cosine of the day"]
    np.testing.assert_allclose(encoding.transform({"at": times})[:, -2:], [[1, 0], [-1, 0]], atol=1e-9)
    same = encoding.transform({"at": [np.datetime64(each) for each in times]})
    np.testing.assert_allclose(same, encoding.transform({"at": times}), atol=1e-9)


def test_order_and_grouping_of_clients_do_not_matter() -> None:
    columns = table()
    few, many = federated(columns, 2, min_clients=1), federated(columns, 7, min_clients=1)
    assert few.feature_names == many.feature_names
    np.testing.assert_allclose(few.transform(columns), many.transform(columns), atol=1e-8)  # dates, as above


def test_what_one_client_alone_has_is_not_named() -> None:
    mine, theirs = {"town": ["here"] * 20 + ["there"] * 20}, {"town": ["there"] * 40}
    assert settle(summarise(mine) + summarise(theirs)).feature_names == ["town=there", "town=(other)"]
    assert settle(summarise(mine)).feature_names == ["town=here", "town=there"]
    withheld = summarise(mine | {"town": ["rare", *mine["town"]]}, withhold=5)
    assert "rare" not in withheld.to_json()
    assert withheld.columns["town"].n_withheld == 1
    unknown = settle(summarise(mine) + summarise(theirs)).transform({"town": ["nowhere", None, "there"]})
    assert unknown.tolist() == [[0, 1], [0, 1], [1, 0]]


def test_what_says_nothing_is_left_out() -> None:
    rows = {
        "note": [f"patient {i}" for i in range(40)],
        "always": [1] * 40,
        "never": [None] * 40,
        "age": list(range(40)),
    }
    encoding = settle(summarise(rows), min_rows=2)
    assert encoding.names == ["age"]
    assert encoding.left_out == ("note", "always", "never")
    with pytest.raises(InputError, match="no column can be encoded"):
        settle(summarise({"never": [None]}))


def test_numbers_can_be_names() -> None:
    encoding = settle(summarise({"pain": [1.0, 2, 2, 4] * 10}, ["pain"]))
    assert encoding.feature_names == ["pain=1", "pain=2", "pain=4"]


def test_files_come_back() -> None:
    columns = table()
    summary, encoding = summarise(columns), federated(columns, 3)
    assert Summary.from_json(summary.to_json()) == summary
    assert Encoding.from_json(encoding.to_json()) == encoding


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_missing": 1000}, "what no rows can add up to"),
        ({"squares": 0.0}, "what no rows can add up to"),
        ({"total": float("nan")}, "what no rows can add up to"),
        ({"surprise": 1}, "damaged"),
    ],
)
def test_a_summary_that_cannot_be_is_refused(change: dict, said: str) -> None:
    given = json.loads(summarise(table()).to_json())
    given["columns"]["age"] |= change
    with pytest.raises(InputError, match=said):
        Summary.from_json(json.dumps(given))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: summarise({"age": [1, "old"]}), "mixes 1 and 'old'"),
        (lambda: summarise({"age": [1], "size": [1, 2]}), "different lengths"),
        (lambda: summarise({"age": [1]}, ["size"]), "no column 'size'"),
        (lambda: summarise({"age": [float("inf")]}), "infinite"),
        (lambda: summarise({"age": [1]}) + summarise({"size": [1]}), "lacks the column"),
        (lambda: summarise({"age": [1]}) + summarise({"age": ["old"]}), "numbers at one client and words at another"),
        (lambda: settle(summarise({"age": [1, 2]})).transform({"age": ["old"]}), "the encoding expects numbers"),
        (lambda: settle(summarise({"age": [1, 2]})).transform({"size": [1]}), "no column 'age'"),
        (lambda: Encoding.from_json("{}"), "another kind"),
        (lambda: Encoding.from_json("[1"), "not JSON"),
        (lambda: Encoder().fit(np.zeros((2, 2))), "needs a DataFrame"),
        (lambda: Encoder(client_column="x").fit(pd.DataFrame({"a": [1]})), "no column 'x'"),
    ],
)  # fmt: skip
def test_bad_input_has_a_sentence(make, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_the_transformer_is_the_same_encoding_and_keeps_the_client() -> None:
    columns = table() | {"site": ["n", "s", "s"] * 100}
    frame = pd.DataFrame(columns)
    made = Encoder(client_column="site").fit(frame)
    by_hand = {k: v for k, v in columns.items() if k != "site"}
    parts = (summarise(part(by_hand, np.flatnonzero(np.array(columns["site"]) == site))) for site in "ns")
    assert made.encoding_ == settle(reduce(add, parts))
    out = made.transform(frame)
    assert out[:, 0].tolist() == columns["site"]
    assert next(iter(made.get_feature_names_out())) == "site"
    np.testing.assert_allclose(out[:, 1:].astype(float), made.encoding_.transform(by_hand), atol=1e-9)
