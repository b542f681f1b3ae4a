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
from apfl.methods._numbers import NumberRows, evened

__all__ = ["by_client", "mind", "numbers_by_client", "present", "read", "read_one"]

LEAST_MEAN = 1e-6  # of sample weights; at 1e-10 accuracy falls by a quarter, at 1e-20 nothing can be solved


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
    classes: np.ndarray, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any, weights: Any = None
) -> Iterator[tuple[Hashable, Shard]]:
    """Each client with its rows; ``weights`` are those of `present`."""
    labels = encode(y, classes)
    codes = None
    if groups is not None:
        # A group is known by its name, so that rows added later join it.
        codes = torch.tensor([group_code(group) for group in one_each("groups", groups, len(y))])
    for name, rows in rows_by_name(names).items():
        own = None if weights is None else torch.from_numpy(weights[rows])
        yield name, Shard(tensor(X[rows]), labels[rows], None if codes is None else codes[rows], weights=own)


def numbers_by_client(
    X: np.ndarray, targets: np.ndarray, names: list[Hashable], groups: Any, sample_weight: Any
) -> dict[Hashable, NumberRows]:
    """Each client's rows that weigh something, with targets (n,) or (n, t); copies share their weight."""
    X, targets, names, groups, weights = present(sample_weight, X, targets, names, groups)
    y, codes = tensor(np.asarray(targets, dtype=np.float64)).reshape(len(X), -1), None
    if groups is not None:
        codes = torch.tensor([group_code(group) for group in one_each("groups", groups, len(X))])
    weighing = None if weights is None or (weights == 1).all() else torch.from_numpy(weights)

    def of(rows: list[int]) -> NumberRows:
        codes_of_rows, own = (None if each is None else each[rows] for each in (codes, weighing))
        return evened(NumberRows(tensor(X[rows]), y[rows], codes_of_rows, own))

    return {name: of(rows) for name, rows in rows_by_name(names).items()}


def present(sample_weight: Any, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any) -> tuple[Any, ...]:
    """X, y, names and groups of the rows that weigh something, and what they weigh; all of them without weights."""
    if sample_weight is None:
        return X, y, names, groups, None
    weights = _numbers(sample_weight, len(X))
    if not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise InputError(
            f"sample weights from {weights.min():g} to {weights.max():g} given; none may be below zero, and not all "
            "may be zero"
        )
    mean = weights[weights > 0].mean()
    if not LEAST_MEAN <= mean <= 1 / LEAST_MEAN:
        raise InputError(
            f"sample weights with a mean of {mean:g} given, beside which ridges count for too much or too little; "
            f"allowed are {LEAST_MEAN:g} to {1 / LEAST_MEAN:g}: divide all by one number, for instance their mean"
        )
    here = weights > 0
    if groups is not None:
        groups = [group for group, kept in zip(one_each("groups", groups, len(X)), here, strict=True) if kept]
    names = [name for name, kept in zip(names, here, strict=True) if kept]
    return X[here], y[here], names, groups, weights[here]


def _numbers(sample_weight: Any, n: int) -> np.ndarray:
    """One for each of n rows; a single one holds for all."""
    try:
        weights = np.array(sample_weight, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("sample weights have entries that are no numbers; give one number for each row") from None
    if weights.ndim == 0:
        return np.full(n, weights)
    if weights.shape != (n,):
        raise InputError(f"sample weights of shape {weights.shape} given for {n} rows; give one number for each row")
    return weights


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
