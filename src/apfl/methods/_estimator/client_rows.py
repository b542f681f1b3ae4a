"""The rows that an estimator was given, by client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.missing import as_array, refuse_missing
from apfl.errors import InputError, unknown
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel
from apfl.models.undecided import undecided

__all__ = [
    "ALONE",
    "client_names",
    "digest",
    "group_code",
    "no_clients",
    "one_each",
    "rows_by_name",
    "scores_and_reasons",
    "seed_of",
    "take_out",
    "tensor",
]

ALONE = "alone"  # the name of the one client there is when none are named
NAMES_SHOWN = 5


def digest(rows: Shard, classes: np.ndarray) -> str:
    """The same for the same rows in any order, also after other classes have come."""
    names = torch.tensor([group_code(name) for name in classes.tolist()])  # seven bytes each: no two are alike
    columns = [rows.features, names[rows.labels][:, None].view(torch.float64)]
    table = torch.cat(columns if rows.weights is None else [*columns, rows.weights[:, None]], 1).numpy()
    return hashlib.sha256(b"".join(sorted(row.tobytes() for row in table))).hexdigest()


def one_each(what: str, values: Any, n: int) -> list[Any]:
    """The values of n rows, none of them missing; a single string or number holds for every row.

    >>> one_each("groups", np.array([3.0, 4.5]), 2)
    [3, 4.5]
    >>> one_each("groups", "north", 2)
    ['north', 'north']
    """
    one = isinstance(values, (str, bytes)) or not isinstance(values, Iterable)
    array = as_array(values if one or hasattr(values, "__array__") else list(values))
    if array.ndim == 0:
        array = np.repeat(array, n)
    if len(array) != n:
        raise InputError(f"{len(array)} {what} for {n} rows; give one for each row, or a single one for all")
    refuse_missing(what, array)
    return [_plain(value) for value in array.tolist()]


def _plain(value: Any) -> Any:
    """Python's own value, with one spelling for equal numbers: 3 for np.int64(3) and for 3.0."""
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def client_names(clients: Any, n: int) -> list[Hashable]:
    """The client of each of n rows."""
    names = one_each("clients", clients, n)
    for name in names:
        if not isinstance(name, Hashable):
            raise InputError(f"{name!r} cannot name a client; give one string or number for each row")
    return names


def take_out(column: int | str, X: Any) -> tuple[Any, Any]:
    """The other columns of X, and this one; X is an array, a list of rows or a DataFrame.

    >>> features, clients = take_out(-1, [[0.5, 2.0, "north"], [1.5, 3.0, "south"]])
    >>> features.tolist(), clients.tolist()
    ([[0.5, 2.0], [1.5, 3.0]], ['north', 'south'])
    """
    if not hasattr(X, "shape"):
        X = np.array(X, dtype=object)  # or numpy would turn numbers beside a string into strings
    if len(X.shape) != 2:
        raise InputError(f"client_column is a column of X, so X must have rows and columns; it has shape {X.shape}")
    position = _position(column, X)
    cells = getattr(X, "iloc", X)
    return cells[:, [i for i in range(X.shape[1]) if i != position]], cells[:, position]


def _position(column: int | str, X: Any) -> int:
    if isinstance(column, str):
        if not hasattr(X, "columns"):
            raise InputError(
                f"client_column={column!r} is a name, but the columns of X ({type(X).__name__}) have none; "
                "give X as a DataFrame, or client_column as an index"
            )
        names: list[Any] = list(X.columns)
        if column not in names:
            raise unknown("column", column, map(str, names))
        return names.index(column)
    width = X.shape[1]
    if isinstance(column, bool) or not isinstance(column, (int, np.integer)) or not -width <= column < width:
        raise InputError(
            f"client_column={column!r} is no column of X; give an index from 0 to {width - 1}, "
            "or a name if X is a DataFrame"
        )
    return int(column % width)


def no_clients(strange: Iterable[Hashable], known: Iterable[Hashable]) -> str:
    """That these clients have no model, with the nearest that do.

    >>> no_clients(["nroth", "0"], ["north", 0])
    "no client 'nroth' (did you mean 'north'?), '0' (of type str; the client 0 is of type int); have: 'north', 0"
    """
    strange, known = list(strange), list(known)
    who = "is named" if strange == [ALONE] else _some(strange, lambda name: repr(name) + _hint(name, known))
    return f"no client {who}; have: {_some(known, repr)}"


def _hint(name: Hashable, known: list[Hashable]) -> str:
    by_text = {str(each): each for each in known}
    for text in get_close_matches(str(name), by_text, n=1):
        near = by_text[text]
        if text == str(name):
            return f" (of type {type(name).__name__}; the client {near!r} is of type {type(near).__name__})"
        return f" (did you mean {near!r}?)"
    return ""


def _some(names: list[Hashable], describe: Callable[[Hashable], str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(map(describe, names[:NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


def rows_by_name(names: list[Hashable]) -> dict[Hashable, list[int]]:
    """Which rows each client has, in one pass."""
    places: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        places.setdefault(name, []).append(row)
    return places


def tensor(rows: np.ndarray) -> Tensor:
    """The rows as a tensor; copied where torch could not share them (read-only, or with negative strides)."""
    return torch.from_numpy(np.require(rows, requirements=["C", "W"]))


def seed_of(random_state: Any) -> int:
    """The seed of the maps, from what scikit-learn takes for one."""
    if isinstance(random_state, (int, np.integer)):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def group_code(group: Hashable) -> int:
    """A number for a group's name, the same in every call."""
    return int.from_bytes(hashlib.sha256(repr(group).encode()).digest()[:7])


def scores_and_reasons(model: DualStream | LandmarkModel, features: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (n, c), always finite, and why a row has no decision (n,): such a row scores the local prior, or zeros."""
    scores = model.scores(features)
    reasons = undecided(model, features, scores)
    scores[reasons > 0] = scores.new_zeros(scores.shape[1]) if model.prior is None else model.prior
    return scores, reasons
