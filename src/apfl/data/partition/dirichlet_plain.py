"""Label skew by Dirichlet shares of every class, without balancing: client sizes differ as they fall."""

from __future__ import annotations

import numpy as np

from apfl.data.partition._check import check_alpha, check_clients
from apfl.errors import InputError

ATTEMPTS = 1000


def partition(
    labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, alpha: float, minimum: int | None = None
) -> list[np.ndarray]:
    """Deal rows out, drawing again until every client has ``minimum`` rows (default 2: one to train, one to test)."""
    check_clients(len(labels), n_clients)
    check_alpha(alpha)
    least = min(2, len(labels) // n_clients) if minimum is None else max(minimum, 1)
    if least * n_clients > len(labels):
        raise InputError(
            f"a minimum of {least} rows for {n_clients} clients is more than the {len(labels)} rows there are: "
            "use a smaller --minimum or fewer --clients"
        )
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(ATTEMPTS):
        owner = np.empty(len(labels), dtype=int)
        for rows in classes:
            cuts = (np.cumsum(rng.dirichlet(np.full(n_clients, alpha))) * len(rows)).astype(int)[:-1]
            for k, piece in enumerate(np.split(rng.permutation(rows), cuts)):
                owner[piece] = k
        if np.bincount(owner, minlength=n_clients).min() >= least:
            return [np.flatnonzero(owner == k) for k in range(n_clients)]
    raise InputError(
        f"no draw in {ATTEMPTS} gave each of {n_clients} clients {least} of the {len(labels)} rows at alpha {alpha:g}: "
        "use a larger --alpha, fewer --clients, a smaller --minimum, or the self-balancing partition 'dirichlet'"
    )
