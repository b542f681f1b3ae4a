"""`apfl` beside what people would use instead: seconds and accuracy of each in one run on one machine, as one JSON.

    python benchmarks/peers.py [--rows 8000] [--threads 1] [--width 1024] [--out FILE] [--plot FILE] [--data FILE]

apfl             everything chosen by itself, with this many landmarks; without pilot and weight; all settings given
apfl_paper       the published method, of this width; AFL; FedAvg for 200 rounds of 3 epochs, on our engine
shared stream    statistics of every client, then the sum, or the paper's recursion (its equations 3 to 8)
AFL's law        C_k and W_k of every client, aggregated as published, with an inverse for each
scikit-learn     RidgeClassifier and RidgeClassifierCV on pooled rows; a random forest for each client
bare             the BLAS and LAPACK calls of `apfl` and of `apfl_paper`, with the same shapes and nothing else

Every --stride-th row of CIFAR-100 features if they are there, else generated rows of the same shape; 50 clients,
Dirichlet 0.5, one seed. Accuracy is the mean over clients on their own test rows. Seconds are those of the processor,
all threads together, which others on the machine hardly change with --threads 1; wall seconds stand beside them. What
takes less than `SHORT` seconds is repeated, and the best counts.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from choice import Bare, machine
from foundation import bare_products
from torch import Tensor

from apfl.data import load_dataset
from apfl.data.federation import Dataset, Federation, Shard
from apfl.data.in_memory import from_arrays
from apfl.experiments.metrics import client_accuracies
from apfl.experiments.run import Protocol, federate
from apfl.maths.machine import over_clients, threads
from apfl.maths.recursion import fold, upload
from apfl.maths.ridge import Statistics, one_hot, solve, statistics, total
from apfl.methods import load_method
from apfl.methods._analytic import shared_normaliser, stream_maps

CPU = torch.device("cpu")
CLIENTS, ALPHA, CLASSES, FEATURES = 50, 0.5, 100, 1280
SHORT, REPEATS = 3.0, 3
SHARED = Path(__file__).parents[2] / "shared" / "data" / "cifar100-efficientnet-lite0.npz"


@dataclass(frozen=True)
class Peer:
    """One line: what it is, against what its seconds are a ratio, how to run it, and how good what it makes is."""

    name: str
    against: str
    run: Callable[[], Any]
    accuracy: Callable[[Any], float] | None = None


class Peers:
    """All lines on one federation."""

    def __init__(self, federation: Federation, width: int) -> None:
        self.federation, self.d, self.c = federation, width, federation.n_classes
        self.clients, self.tests = federation.train, federation.test
        self.rows = np.concatenate([shard.features.numpy() for shard in self.clients])
        self.labels = np.concatenate([shard.labels.numpy() for shard in self.clients])

    def method(self, name: str, **settings: Any) -> Callable[[], Any]:
        def run() -> Any:
            (*_, last) = load_method(name, **settings).rounds(self.clients, self.c, 0)
            return last

        return run

    def of_round(self, last: Any) -> float:
        return _mean(client_accuracies(last.models, self.tests))

    def of_one(self, model: Any) -> float:
        return self.of_each([model] * len(self.tests))

    def of_each(self, models: Sequence[Any]) -> float:
        """Models of scikit-learn."""
        pairs = zip(models, self.tests, strict=True)
        return _mean([float((m.predict(t.features.numpy()) == t.labels.numpy()).mean()) for m, t in pairs if len(t)])

    def all(self, chosen: dict[str, Any]) -> list[Peer]:
        """``chosen`` are the settings of a run of `apfl`."""
        from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV

        no_pilot = {"d_primary": self.d, "normalise": "root", "weight": 1.0}
        given = {name: chosen[name] for name in ("gamma", "beta", "balance", "tau")}
        bare = Bare(self.clients, self.c, "landmarks", self.d)
        shared = self.shared_stream()
        return [
            Peer("apfl, automatic", "", self.method("apfl", d_primary=self.d), self.of_round),
            Peer("apfl, without pilot and weight", "", self.method("apfl", **no_pilot), self.of_round),
            Peer("apfl, settings given", "", self.method("apfl", **no_pilot, **given), self.of_round),
            Peer("its BLAS and LAPACK calls, bare", "apfl, without pilot and weight", bare.seconds),
            Peer(
                "apfl_paper", "", self.method("apfl_paper", d_primary=self.d, d_refinement=self.d), self.of_round
            ),
            Peer("its matrix products, bare", "apfl_paper", bare_products(self.clients, self.c, self.d)),
            Peer("shared stream: the sum", "", lambda: solve(total(shared), 1.0)),
            Peer("shared stream: the paper's recursion", "shared stream: the sum", lambda: recursion(shared)),
            Peer("AFL: the sum", "", self.method("afl"), self.of_round),
            Peer("AFL: its published law", "AFL: the sum", lambda: published_law(self.clients, self.c)),
            Peer("RidgeClassifier, pooled", "", self.fitted(RidgeClassifier()), self.of_one),
            Peer("RidgeClassifierCV, pooled", "", self.fitted(RidgeClassifierCV(np.logspace(-3, 3, 7))), self.of_one),
            Peer("random forest per client", "", self.forests, self.of_each),
            Peer("FedAvg, 200 rounds", "", self.method("fedavg", n_rounds=200), self.of_round),
        ]  # fmt: skip

    def fitted(self, model: Any) -> Callable[[], Any]:
        return lambda: model.fit(self.rows, self.labels)

    def forests(self) -> list[Any]:
        from sklearn.ensemble import RandomForestClassifier

        return [
            RandomForestClassifier(n_jobs=-1, random_state=0).fit(shard.features.numpy(), shard.labels.numpy())
            for shard in self.clients
        ]

    def shared_stream(self) -> list[Statistics]:
        """Every client's statistics, which the sum and the recursion begin with."""
        features, normalise = self.clients[0].features, shared_normaliser("row", self.clients)
        first, _ = stream_maps(features, normalise, (self.d, self.d), ("relu", "relu"), 0, False)

        def own(shard: Shard) -> Statistics:
            return statistics(first(normalise(shard.features)).double(), one_hot(shard.labels, self.c))

        return over_clients(own, self.clients, CPU)


def recursion(sent: Sequence[Statistics]) -> Tensor:
    """What clients send in the paper, and what its server makes of it."""
    return fold([upload(each, 1.0) for each in sent], 1.0)


def published_law(clients: Sequence[Shard], n_classes: int, gamma: float = 1.0) -> Tensor:
    """AFL's absolute aggregation law, two at a time, then all K gamma removed; a test compares it with the sum."""
    summed, head = torch.zeros(0, 0), torch.zeros(0, 0)
    for k, shard in enumerate(clients):
        rows = torch.nn.functional.normalize(shard.features).double()
        own = rows.T @ rows
        own.diagonal().add_(gamma)
        inverse = torch.linalg.inv(own)
        fitted = inverse @ (rows.T @ one_hot(shard.labels, n_classes))
        if not k:
            summed, head = own, fitted
            continue
        of_all, both = torch.linalg.inv(summed), torch.linalg.inv(summed + own)
        unit = torch.eye(len(own), dtype=own.dtype)
        left = unit - of_all @ own @ (unit - both @ own)
        right = unit - inverse @ summed @ (unit - both @ summed)
        summed, head = summed + own, left @ head + right @ fitted
    removed = summed.clone()
    removed.diagonal().sub_(len(clients) * gamma)
    return torch.linalg.pinv(removed, hermitian=True) @ (summed @ head)


def measured(peer: Peer) -> dict[str, Any]:
    """The best of some runs, or the only one of what takes long."""
    best: dict[str, Any] = {"seconds": float("inf")}
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.process_time()
        made = peer.run()
        took = {"seconds": time.process_time() - processor, "wall": time.perf_counter() - wall}
        best = min(best, took, key=lambda each: each["seconds"])
        if took["seconds"] > SHORT:
            break
    return {**best, "accuracy": None if peer.accuracy is None else peer.accuracy(made)}


def dataset(path: Path, n_rows: int) -> tuple[Dataset, bool]:
    """Evenly spread rows of a file, or generated ones of its shape; and whether they are generated."""
    if path.exists():
        whole = load_dataset(str(path))
        places = np.linspace(0, len(whole.features), min(n_rows, len(whole.features)), endpoint=False).astype(int)
        return from_arrays(path.name, whole.features[places], whole.labels.numpy()[places], {}), False
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=n_rows)
    centres = rng.standard_normal((CLASSES, FEATURES), np.float32)
    made = np.abs(centres[labels] + 3 * rng.standard_normal((n_rows, FEATURES), np.float32))
    return from_arrays("generated", made, labels, {}), True


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skip", nargs="*", default=[], help="lines to leave out, by the beginning of their names")
    parser.add_argument("--out", type=Path, help="file for the JSON, beside the standard output")
    parser.add_argument("--plot", type=Path, help="file for the picture")
    given = parser.parse_args()
    rows, generated = dataset(given.data, given.rows)
    federation = federate(rows, Protocol(n_clients=CLIENTS, alpha=ALPHA), seed=0)
    told: dict[str, Any] = {
        "data": {
            "name": "generated" if generated else given.data.stem, "rows": len(rows.features),
            "training_rows": sum(map(len, federation.train)), "features": rows.features.shape[1],
            "classes": federation.n_classes, "clients": CLIENTS, "alpha": ALPHA,
        },
        "width": given.width, "peers": {},
    }  # fmt: skip
    with threads(given.threads):
        told = {"machine": machine(), **told}
        peers = Peers(federation, given.width)
        peers.method("apfl", d_primary=64)()  # the first run of a process pays for its libraries
        chosen = peers.method("apfl", d_primary=given.width, normalise="root", weight=1.0)().chosen
        for peer in peers.all(chosen):
            if any(peer.name.startswith(name) for name in given.skip):
                continue
            found = measured(peer)
            if peer.against in told["peers"]:
                found["ratio"] = found["seconds"] / told["peers"][peer.against]["seconds"]
                found["against"] = peer.against
            told["peers"][peer.name] = found
            print(f"{peer.name}: {found['seconds']:.2f} s", flush=True)
    first = next(iter(told["peers"].values()))["seconds"]
    for found in told["peers"].values():
        found["to apfl"] = found["seconds"] / first
    print(json.dumps(told, indent=2))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(told, indent=2) + "\n")
    if given.plot is not None:
        pictures = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "pictures"))
        pictures["save"](pictures["speed"](told), given.plot)


if __name__ == "__main__":
    main()
