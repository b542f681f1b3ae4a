"""Label skew as PFLlib deals it, which most published tables use: Dirichlet shares of every class, self-balancing.

Class by class, shares ~ Dirichlet(alpha) over the clients; a client that already has N / K rows gets no more. The whole
draw is repeated until every client has ``minimum`` rows.
"""

from __future__ import annotations

import numpy as np

from apfl.data.partition._check import check_alpha, check_clients
from apfl.errors import InputError

ATTEMPTS = 1000  # whole draws; PFLlib goes on for ever


def partition(
    labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, alpha: float, minimum: int | None = None
) -> list[np.ndarray]:
    """Deal rows out; ``minimum`` defaults to PFLlib's: 40 rows, or half a fair share if that is less."""
    check_clients(len(labels), n_clients)
    check_alpha(alpha)
    fair = len(labels) / n_clients
    least = int(min(40, fair / 2)) if minimum is None else minimum
    if least > fair:
        raise InputError(
            f"a minimum of {least} rows for {n_clients} clients is more than the {len(labels)} rows there are: "
            "use a smaller --minimum or fewer --clients"
        )
    for _ in range(ATTEMPTS):
        parts = _draw(labels, n_clients, alpha, rng)
        if min(len(part) for part in parts) >= max(least, 1):
            return [np.sort(part) for part in parts]
    raise InputError(
        f"no draw in {ATTEMPTS} gave each of {n_clients} clients {max(least, 1)} of the {len(labels)} rows at "
        f"alpha {alpha:g}: use a larger --alpha, fewer --clients or a smaller --minimum"
    )


def _draw(labels: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    sizes = np.zeros(n_clients)
    pieces: list[list[np.ndarray]] = [[] for _ in range(n_clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(n_clients, alpha)) * (sizes < len(labels) / n_clients)
        if not shares.sum() > 0:  # a tiny alpha may give all of a class to a client that is full
            shares = (sizes == sizes.min()).astype(float)
        cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
        for k, piece in enumerate(np.split(rows, cuts)):
            pieces[k].append(piece)
            sizes[k] += len(piece)
    return [np.concatenate(piece) for piece in pieces]
