"""One rule for what is missing."""

from __future__ import annotations

import numpy as np
import pytest

from apfl.data.missing import missing, refuse_missing
from apfl.errors import InputError

MISSING = [None, float("nan"), np.float32("nan"), "", b"", np.str_(""), np.datetime64("NaT"), np.timedelta64("NaT")]
PRESENT = [0, 0.0, False, " ", "nan", "None", float("inf"), np.datetime64("2024-01-01"), (), np.zeros(2), ["a", "b"]]


@pytest.mark.parametrize("value", MISSING, ids=repr)
def test_missing_in_a_list_and_in_an_array(value):
    assert missing(["a", value]).tolist() == [False, True]
    assert missing((value, "a")).tolist() == [True, False]
    assert missing(np.array(["a", value], dtype=object)).tolist() == [False, True]
    assert missing(np.array([value])).tolist() == [True]  # as numpy types it


@pytest.mark.parametrize("value", PRESENT, ids=repr)
def test_present(value):
    assert missing([value, None]).tolist() == [False, True]


def test_the_kinds_of_arrays():
    for present in (np.arange(2), np.array([True, False]), np.array(["a", "b"]), np.array([], dtype="U1")):
        assert missing(present).tolist() == [False] * len(present)
    assert missing(np.array([[1.0, np.nan], [2.0, 3.0]])).tolist() == [[False, True], [False, False]]
    assert missing(np.array(["a", ""])).tolist() == [False, True]
    assert missing(np.array([b"a", b""])).tolist() == [False, True]


def test_pandas_columns():
    pd = pytest.importorskip("pandas")
    for column in (
        pd.Series(["a", None]),
        pd.Series(["a", pd.NA], dtype=object),
        pd.Series(["a", pd.NA], dtype="string"),
        pd.Series(["a", None], dtype="category"),
        pd.Series([1, None], dtype="Int64"),
        pd.Series([1.0, None]),
        pd.Series([True, None], dtype="boolean"),
        pd.Series(pd.to_datetime(["2024-01-01", None])),
        pd.Series(pd.to_datetime(["2024-01-01", None], utc=True)),
        [0, pd.NA],
        [0, pd.NaT],
    ):
        assert missing(column).tolist() == [False, True], column
    assert not missing(pd.Series(["a", "b"], index=[7, 7])).any()


def test_the_refusal_counts_the_rows_and_names_the_first():
    refuse_missing("labels", ["a", "b"])
    refuse_missing("labels", [])
    with pytest.raises(InputError, match=r"^1 of 3 clients is missing \(row 2, counted from 0\); "):
        refuse_missing("clients", ["a", "b", None])
    with pytest.raises(ValueError, match=r"^6 of 7 groups are missing \(rows 1, 2, 3, 4, 5, \.\.\., counted"):
        refuse_missing("groups", [0, *[np.nan] * 6])
    with pytest.raises(InputError, match=r"^1 of 2 labels is missing \(row 1,"):
        refuse_missing("labels", np.array([[1.0, 2.0], [np.nan, np.nan]]))
