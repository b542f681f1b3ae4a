"""What every recipe asks of its arguments."""

from __future__ import annotations

import numpy as np

from apfl.data.missing import refuse_missing
from apfl.errors import InputError


def check_clients(n_rows: int, n_clients: int) -> None:
    """Refuse a number of clients that the rows cannot fill."""
    if not 1 <= n_clients <= n_rows:
        raise InputError(f"{n_clients} clients asked for with {n_rows} rows; allowed are 1 to {n_rows}")


def check_entries(kind: str, entries: np.ndarray, labels: np.ndarray) -> None:
    """Refuse a column that does not say for each row which client or domain it is of."""
    if entries.shape != labels.shape:
        raise InputError(f"{len(entries)} {kind} entries for {len(labels)} rows; there must be one for each")
    refuse_missing(f"{kind} entries", entries)


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that no Dirichlet distribution has."""
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha {alpha} given; the Dirichlet concentration must be greater than 0")
