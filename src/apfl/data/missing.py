"""What counts as a missing label, client or group, in files and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from apfl.errors import InputError

__all__ = ["as_array", "missing", "refuse_missing", "rows_in_words"]

ROWS_SHOWN = 5


def as_array(values: Any) -> np.ndarray:
    """The values as an array; a list as objects, because numpy would turn ["a", nan] into ["a", "nan"].

    >>> as_array(["a", float("nan")]).tolist()
    ['a', nan]
    """
    return np.fromiter(values, object) if isinstance(values, (list, tuple)) else np.asarray(values)


def missing(values: Any) -> np.ndarray:
    """Which values are missing: None, NaN, NaT, pandas' NA and the empty string.

    Takes an array, a list or a pandas column, and returns booleans of the same shape.

    >>> missing(["a", None, float("nan"), "", 0]).tolist()
    [False, True, True, True, False]
    >>> missing(np.array(["2024-01-01", "NaT"], dtype="datetime64[D]")).tolist()
    [False, True]
    """
    values = as_array(values)
    if values.dtype.kind in "biu":
        return np.zeros(values.shape, bool)
    if values.dtype.kind in "fc":
        return np.asarray(np.isnan(values))
    return np.fromiter(map(_is_missing, values.ravel()), bool, values.size).reshape(values.shape)


def refuse_missing(what: str, values: Any) -> None:
    """An error that names the rows, if any value is missing; ``what`` is the plural of what the values are.

    >>> refuse_missing("labels", ["cat", "", "dog", None])
    Traceback (most recent call last):
    ...
    apfl.errors.InputError: 2 of 4 labels are missing (rows 1, 3, counted from 0); fill them in or leave these rows out
    """
    gone = missing(values)
    rows = np.unique(np.nonzero(gone)[0])
    if len(rows):
        raise InputError(
            f"{len(rows)} of {len(gone)} {what} {'is' if len(rows) == 1 else 'are'} missing "
            f"({rows_in_words(rows)}); fill them in or leave these rows out"
        )


def rows_in_words(rows: Sequence[int] | np.ndarray) -> str:
    """Which rows, or the first of them.

    >>> rows_in_words([3]), rows_in_words(range(2, 9))
    ('row 3, counted from 0', 'rows 2, 3, 4, 5, 6, ..., counted from 0')
    """
    shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", ..." if len(rows) > ROWS_SHOWN else "")
    return f"row{'' if len(rows) == 1 else 's'} {shown}, counted from 0"


def _is_missing(value: Any) -> bool:
    if value is None or isinstance(value, (str, bytes)):
        return not value
    try:
        return bool(value != value)  # NaN and NaT alone differ from themselves
    except TypeError:  # pandas' NA alone cannot say
        return True
    except ValueError:  # an array of several: no name, but not missing either
        return False
