"""Records made by hand, for tests of what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from apfl.experiments.record import Record

CHOSEN = {
    "d_primary": 8, "gamma": 1.0, "beta": 10.0, "balance": 0.5, "tau": 0.0, "left_out_accuracy": 0.9,
    "table": {
        "beta": [1.0, 10.0], "balance": [0.0, 0.5, 1.0], "tau": [0.0, 0.1],
        "hits": [[[60, 61], [70, 71], [65, 66]], [[60, 61], [72, 70], [69, 70]]],
    },
    "gamma_path": {"gamma": [0.1, 1.0, 10.0], "gcv": [None, 0.5, 0.7]},
}  # fmt: skip


def record(
    method: str = "apfl", seed: int = 0, accuracies: Sequence[float | None] = (0.9, 0.8, 0.7, 1.0), **changes: Any
) -> Record:
    """A record of 4 clients with 3 classes, unless changed."""
    known = np.array([a for a in accuracies if a is not None])
    k = len(accuracies)
    protocol = {"partition": "dirichlet", "n_clients": k, "alpha": 0.1}
    made = Record(
        method=method, seed=seed, data="toy.npz", data_sha256="a" * 64, partition="dirichlet", n_clients=k, alpha=0.1,
        settings={"lr": 0.1}, protocol=protocol, accuracy_client_mean=float(known.mean()),
        accuracy_client_std=float(known.std()), accuracy_sample_mean=float(known.mean()),
        accuracy_worst_decile=float(known.min()), balanced_accuracy_client_mean=float(known.mean()),
        auroc_client_mean=None, recall_per_class=[0.9, 0.8, None], client_accuracies=list(accuracies),
        n_clients_without_test=k - len(known), client_names=[f"site {i}" for i in range(k)], n_train=[20] * k,
        n_test=[10] * k, rounds=2, bytes_up=1000, bytes_down=500, seconds=0.5, device="cpu",
        versions={"apfl": "0", "git": None}, class_names=["x", "y", "z"], class_counts=[[10, 10, 0]] * k,
        primary_accuracies=[None if a is None else a - 0.05 for a in accuracies] if method == "apfl" else [],
        chosen=CHOSEN if method == "apfl" else {}, curve=[[0.5, 1500.0, float(known.mean())]],
    )  # fmt: skip
    return replace(made, **changes)


def a_study() -> list[Record]:
    """Four methods, two federations, three seeds; one baseline has curves, one goes alone."""
    rng = np.random.default_rng(0)
    found = []
    for alpha in (0.1, 1.0):
        for seed in range(3):
            base = rng.uniform(0.6, 0.8, 6)
            where = {"alpha": alpha, "protocol": {"partition": "dirichlet", "n_clients": 6, "alpha": alpha}}
            found.append(record("apfl", seed, list(base + 0.15), **where))
            found.append(record("local_ridge", seed, list(base), rounds=0, bytes_up=0, bytes_down=0, curve=(), **where))
            found.append(record("afl", seed, list(base + 0.05), rounds=1, **where))
            curve = [[0.1 * t, 100.0 * t, 0.5 + 0.03 * t] for t in range(1, 9)]
            found.append(record("fedavg", seed, list(base + 0.1), rounds=8, curve=curve, **where))
    return found
