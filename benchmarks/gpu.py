"""Seconds of whole runs on a GPU, and their share of the matrix products alone, as JSON.

    python benchmarks/gpu.py [--device cuda] [--data ../shared/data/cifar100-efficientnet-lite0.npz] [--repeats 4]

Every case runs from features on the device to personal models on it, first once to warm up; the best of the others
counts. "Bare" are the products of the same shapes and precisions with nothing in between. Without the features file the
rows are synthetic and of the same size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.experiments.run import Protocol, federate
from apfl.methods import load_method

AUTO = {"map": "landmarks", "weight": "auto"}
CASES: dict[str, tuple[str, dict[str, Any], float]] = {  # method, settings, seconds wanted on one H200
    "apfl_paper, d = 1024": ("apfl_paper", {"d_primary": 1024, "d_refinement": 1024}, 0.06),
    "apfl, random maps, d = 1024": ("apfl", {"map": "random", "weight": 1.0, "d_primary": 1024}, 0.3),
    "apfl, landmarks, d = 1024, no pilot": ("apfl", AUTO | {"d_primary": 1024, "normalise": "root"}, 0.3),
    "apfl, landmarks, d = 1024": ("apfl", AUTO | {"d_primary": 1024}, 1.0),
    "apfl, landmarks, default width": ("apfl", AUTO, 1.0),
}


def best(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of some calls, after one that warms up."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds()
    return min(seconds() for _ in range(repeats))


def bare(clients: Sequence[Shard], n_classes: int, d: int, landmarks: bool) -> Callable[[], None]:
    """The matrix products of a run, with clients of one size."""
    features, k = clients[0].features, len(clients)
    n, n_in, device = sum(map(len, clients)) // k, features.shape[1], features.device

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    rows, matrix, targets = drawn(k * n, n_in), drawn(n_in, d), drawn(k * n, n_classes)
    shared = drawn(d, n_classes + 128)  # the primary and its sketch
    half, double = drawn(d, max(1, d // 2)), drawn(d, d, dtype=torch.float64)
    folded = drawn(d, k * n_classes // 2, dtype=torch.float64)

    def products() -> None:
        phi = rows @ matrix
        own = phi.view(k, n, d)
        if landmarks:
            phi @ half  # by a triangle
            for some in own.split(max(1, 2**28 // d**2)):
                some.mT @ some
            double @ folded
        else:
            rows @ matrix
            phi.double().T @ phi.double()
        phi.T @ targets
        phi @ shared
        dual = own @ own.mT if n < d else own.mT @ own
        dual @ dual[..., :n_classes]

    return products


def measured(clients: Sequence[Shard], n_classes: int, case: str, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    name, settings, target = CASES[case]
    method, device = load_method(name, **settings), clients[0].features.device
    seconds = best(lambda: list(method.rounds(clients, n_classes, 0)), repeats, device)
    d, _ = method.widths(sum(map(len, clients)), clients[0].features.shape[1])
    products = best(bare(clients, n_classes, d, settings.get("map") == "landmarks"), repeats, device)
    return {"d": d, "seconds": seconds, "target": target, "bare": products, "share of the limit": products / seconds}


def synthetic(n_clients: int, n_rows: int, n_features: int, n_classes: int, device: str) -> list[Shard]:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(n_classes, n_features))

    def one(n: int) -> Shard:
        labels = rng.integers(n_classes, size=n)
        rows = np.abs(centres[labels] + rng.normal(size=(n, n_features))).astype(np.float32)
        return Shard(torch.from_numpy(rows).to(device), torch.from_numpy(labels).to(device))

    shares = rng.dirichlet([5.0] * n_clients)
    return [one(max(8, int(share * n_rows))) for share in shares]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(__file__).parents[2] / "shared" / "data" / "cifar100-efficientnet-lite0.npz"
    parser.add_argument("--data", type=Path, default=shared)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rows", type=int, default=45_000, help="synthetic ones, if there is no features file")
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    if given.data.exists():
        made = federate(load_dataset(str(given.data)), Protocol(n_clients=given.clients, alpha=0.1), 0).to(given.device)
        clients, c = made.train, made.n_classes
    else:
        clients, c = synthetic(given.clients, given.rows, 1280, 100, given.device), 100
    on_gpu = given.device.startswith("cuda")
    told: dict[str, Any] = {
        "machine": {"device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__},
        "rows": sum(map(len, clients)), "clients": len(clients), "synthetic": not given.data.exists(),
        "runs": {case: measured(clients, c, case, given.repeats) for case in given.cases},
    }  # fmt: skip
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
