"""What the estimators are given, checked: rows, labels or targets, and the client and group of each row."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array, check_X_y
from sklearn.utils.validation import validate_data

from apfl.data.federation import Shard
from apfl.data.missing import missing, refuse_missing
from apfl.errors import InputError
from apfl.methods._estimator.client_rows import (
    ALONE,
    client_names,
    group_code,
    no_clients,
    one_each,
    rows_by_name,
    take_out,
    tensor,
)
from apfl.methods._estimator.fitted import encode

__all__ = ["by_client", "mind", "read", "read_one"]


def read(
    estimator: Any, X: Any, clients: Any, y: Any = "no_validation", reset: bool = False, *, numbers: bool = False
) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
    """Features, labels (or with ``numbers`` targets) and the client of each row, checked; without ``y``, none.

    Targets may have several columns.
    """
    targets: dict[str, Any] = {"multi_output": True, "y_numeric": True} if numbers else {}
    column = estimator.client_column
    if estimator.unknown not in ("warn", "error", "shared"):
        raise InputError(f"unknown={estimator.unknown!r} is not allowed; use 'warn', 'error' or 'shared'")
    labelled = y is not None and not isinstance(y, str)
    if labelled and hasattr(y, "__len__"):  # a single value is refused below
        refuse_missing("targets" if numbers else "labels", y)
    if column is None:
        out = validate_data(estimator, X, y, dtype=np.float64, reset=reset, **(targets if labelled else {}))
    elif clients is not None:
        raise InputError(f"clients= given, and client_column={column!r} in the constructor; use one")
    else:
        validate_data(estimator, X, y, skip_check_array=True, reset=reset)  # counts and names the columns of X as given
        X, clients = take_out(column, X)
        checks = {"dtype": np.float64, "estimator": estimator}
        out = check_X_y(X, y, **checks, **targets) if labelled else check_array(X, input_name="X", **checks)
    X, y = out if labelled else (out, np.empty(0))
    return X, y, [ALONE] * len(X) if clients is None else client_names(clients, len(X))


def read_one(estimator: Any, client: Hashable, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
    """The rows of one client, whose column, if there is one, says the same."""
    if missing([client])[0]:
        raise InputError(f"{client!r} cannot name a client; give a string or number")
    X, y, names = read(estimator, X, None, y)
    if estimator.client_column is None:
        names = [client] * len(y)
    if others := [name for name in names if name != client]:
        raise InputError(f"client_column={estimator.client_column!r} names {others[0]!r} in the rows of {client!r}")
    return X, y, names


def by_client(
    classes: np.ndarray, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any
) -> Iterator[tuple[Hashable, Shard]]:
    """Each client with its rows."""
    labels = encode(y, classes)
    codes = None
    if groups is not None:
        # A group is known by its name, so that rows added later join it.
        codes = torch.tensor([group_code(group) for group in one_each("groups", groups, len(y))])
    for name, rows in rows_by_name(names).items():
        yield name, Shard(tensor(X[rows]), labels[rows], None if codes is None else codes[rows])


def mind(estimator: Any, strange: list[Hashable]) -> None:
    """Warn of, or refuse, rows whose clients have no model, so that the shared stream never answers unnoticed."""
    if not strange or estimator.unknown == "shared":
        return
    problem = no_clients(strange, estimator.clients_)
    if estimator.unknown == "error":
        raise InputError(f"{problem} (unknown='error')")
    warnings.warn(
        f"{problem}. The shared stream answers for these rows. Name fitted clients (clients=, or client_column= in "
        "the constructor), or set unknown='shared' if this is intended.",
        stacklevel=4,  # the caller of predict and its like
    )
