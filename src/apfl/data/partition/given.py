"""Clients as the data names them: one for each value of a column."""

from __future__ import annotations

import numpy as np

from apfl.data.partition._check import check_entries
from apfl.errors import InputError


def partition(
    labels: np.ndarray, n_clients: int | None, rng: np.random.Generator, *, column: np.ndarray
) -> list[np.ndarray]:
    """The rows of each distinct value of ``column``, in sorted order; ``n_clients`` must agree if given."""
    check_entries("client", column, labels)
    names = np.unique(column)
    if n_clients not in (None, len(names)):
        raise InputError(
            f"{n_clients} clients asked for, but the client column names {len(names)}; leave the number out"
        )
    return [np.flatnonzero(column == name) for name in names]
