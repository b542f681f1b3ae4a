"""Pathological label skew: every client has rows of n classes only (McMahan et al. 2017)."""

from __future__ import annotations

import numpy as np

from apfl.data.partition._check import check_clients
from apfl.errors import InputError


def partition(
    labels: np.ndarray, n_clients: int, rng: np.random.Generator, *, classes_per_client: int
) -> list[np.ndarray]:
    """Deal the classes out like cards, evenly, then share each class's rows equally among its holders."""
    check_clients(len(labels), n_clients)
    classes = np.unique(labels)
    if not 1 <= classes_per_client <= len(classes):
        raise InputError(f"{classes_per_client} classes per client asked for; allowed are 1 to {len(classes)}")
    if classes_per_client * n_clients < len(classes):
        raise InputError(
            f"{n_clients} clients with {classes_per_client} classes each cannot hold all {len(classes)} classes: "
            f"use at least {-(-len(classes) // classes_per_client)} clients or more classes for each"
        )
    holders = _deal(classes, n_clients, classes_per_client, rng)
    pieces: list[list[np.ndarray]] = [[] for _ in range(n_clients)]
    for label, who in holders.items():
        shares = np.array_split(rng.permutation(np.flatnonzero(labels == label)), len(who))
        for k, share in zip(rng.permutation(who), shares, strict=True):
            pieces[k].append(share)
    parts = [np.sort(np.concatenate(piece)) for piece in pieces]
    if min(len(part) for part in parts) == 0:
        raise InputError(f"{n_clients} clients are too many for {len(labels)} rows dealt by class: use fewer")
    return parts


def _deal(
    classes: np.ndarray, n_clients: int, classes_per_client: int, rng: np.random.Generator
) -> dict[int, list[int]]:
    """The clients that hold each class."""
    holders: dict[int, list[int]] = {int(label): [] for label in classes}
    for k in range(n_clients):
        # The least dealt classes first, in random order among equals: every class is dealt, and evenly.
        order = sorted(rng.permutation(classes).tolist(), key=lambda label: len(holders[label]))
        for label in order[:classes_per_client]:
            holders[label].append(k)
    return holders
