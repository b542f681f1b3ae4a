"""Natural skew: each domain (a style, a hospital, a device) is shared equally among clients of its own."""

from __future__ import annotations

import numpy as np

from apfl.data.partition._check import check_clients, check_entries
from apfl.errors import InputError


def partition(labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, domains: np.ndarray) -> list[np.ndarray]:
    """Deal each domain's rows to ``n_clients`` / number of domains clients; domain by domain in the result."""
    check_clients(len(labels), n_clients)
    check_entries("domain", domains, labels)
    names = np.unique(domains)
    if n_clients % len(names):
        raise InputError(f"{n_clients} clients cannot be shared equally by {len(names)} domains: use a multiple")
    each = n_clients // len(names)
    parts = []
    for name in names:
        rows = np.flatnonzero(domains == name)
        check_clients(len(rows), each)
        parts += [np.sort(part) for part in np.array_split(rng.permutation(rows), each)]
    return parts
