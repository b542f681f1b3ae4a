"""What choosing costs, and how near `apfl` is to its matrix products: ratios from one run on one machine, as JSON.

    python benchmarks/choice.py [--runs random:512 random:1024 landmarks:4096 default ...] [--threads 2]

default     `apfl` as it is: landmarks, pilot and weight; its seconds alone
automatic   `apfl` of this map and width with everything open
fixed       the same with gamma, beta, balance, tau and weight at what was chosen
bare        the BLAS and LAPACK calls of the automatic run (`calls` names them), same shapes and dtypes, nothing else
floor       automatic / fixed if choosing were nothing but its own of these calls: gamma, eigenvectors, left-out scores

Seconds are wall, and processor seconds of all threads: these are what to compare on a machine that others use.
`benchmarks/peers.py` has what people would use instead.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from foundation import cpu_name
from torch import Tensor

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.experiments.run import Protocol, federate
from apfl.maths.banded import PANEL
from apfl.maths.gcv import EIGEN_WIDTH
from apfl.maths.hits import grid
from apfl.maths.machine import over_clients, threads
from apfl.maths.ridge import one_hot, squared
from apfl.methods import load_method

CPU = torch.device("cpu")
SKETCH, SYNTHETIC = 128, 2048
Seconds = dict[str, float]


def timed(call: Callable[[], Any]) -> tuple[Any, Seconds]:
    wall, processor = time.perf_counter(), time.process_time()
    made = call()
    return made, {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}


def ran(clients: Sequence[Shard], n_classes: int, **settings: Any) -> dict[str, Any]:
    """What a run of `apfl` chose."""
    (only,) = load_method("apfl", **settings).rounds(clients, n_classes, 0)
    return dict(only.chosen)


class Bare:
    """The calls of an automatic run, by name."""

    def __init__(self, clients: Sequence[Shard], n_classes: int, kind: str, d: int) -> None:
        self.clients, self.c, self.kind, self.d = clients, n_classes, kind, d
        self.n_in = clients[0].features.shape[1]
        self.n_betas = len(grid(1.0, beta=None, balance=None, tau=None).betas)
        self.n_weights = 2 if kind == "landmarks" else 1
        self.shared = torch.randn(d, n_classes + SKETCH, dtype=torch.float64)
        self.matrix = torch.randn(self.n_in, d, dtype=torch.float64 if kind == "landmarks" else torch.float32)
        self.definite = squared(torch.randn(d + 8, d, dtype=torch.float64)) + torch.eye(d, dtype=torch.float64)
        self.factor = torch.linalg.cholesky(self.definite)
        most = min(d, max(map(len, clients)))
        self.products = squared(torch.randn(most + 8, most))  # of rows, in their precision

    def calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Everything that must be called, under the name of its part."""
        if self.kind == "landmarks":
            yield "draw landmarks", self.draw
        yield "map, statistics", lambda: over_clients(self.sums, self.bundles(), CPU)
        yield "gamma", self.gamma
        yield "solve, sketch", self.solve
        yield "rows with themselves", lambda: over_clients(self.gram, self.clients, CPU)
        yield "eigenvectors", lambda: over_clients(self.decompose, self.clients, CPU)
        yield "left-out scores", lambda: over_clients(self.scores, self.clients, CPU)
        yield "refine", lambda: over_clients(self.refine, self.clients, CPU)

    def seconds(self) -> dict[str, Seconds]:
        return {name: timed(call)[1] for name, call in self.calls()}

    def mapped(self, features: Tensor) -> Tensor:
        phi = features.to(self.matrix) @ self.matrix
        return phi if self.kind == "random" else torch.linalg.solve_triangular(self.factor, phi.T, upper=False).T

    def bundles(self) -> list[tuple[Tensor, Tensor]]:
        """Rows together as the method takes them: few products of many rows."""
        rows = torch.cat([shard.features for shard in self.clients])
        targets = one_hot(torch.cat([shard.labels for shard in self.clients]), self.c)
        return list(zip(rows.split(4096), targets.split(4096), strict=True))

    def sums(self, bundle: tuple[Tensor, Tensor]) -> None:
        phi = self.mapped(bundle[0]).double()
        squared(phi)
        phi.T @ bundle[1]

    def draw(self) -> None:
        for shard in self.clients:
            squared(shard.features.double())
        np.linalg.eigh(squared(torch.randn(self.n_in + 8, self.n_in, dtype=torch.float64)).numpy())
        torch.randn(self.d + SYNTHETIC, self.n_in, dtype=torch.float64) @ torch.randn(self.n_in, self.n_in).double()
        for _ in range(2):  # which landmarks to keep, and L
            self.matrix.T @ self.matrix
            torch.linalg.cholesky(self.definite)
        self.mapped(torch.randn(SYNTHETIC, self.n_in))

    def gamma(self) -> None:
        if self.d <= EIGEN_WIDTH:
            torch.linalg.eigh(self.definite)
            return
        for m in range(self.d - PANEL, 0, -PANEL):  # a band form; half of a product of rank 2 b
            columns, half = self.definite[:m, :PANEL], self.definite[: m // 2, : 2 * PANEL]
            torch.geqrf(columns)
            self.definite[:m, :m] @ columns
            half @ self.definite[: 2 * PANEL, :m]

    def solve(self) -> None:
        torch.linalg.cholesky(self.definite)
        torch.cholesky_solve(self.shared[:, : self.c], self.factor)
        torch.linalg.solve_triangular(self.factor.T, self.shared[:, self.c :], upper=True)

    def psi(self, shard: Shard) -> Tensor:
        """With landmarks it is Phi, which is there already."""
        if self.kind == "random":
            return self.mapped(shard.features)
        return self.definite.repeat(1 + len(shard) // self.d, 1)[: len(shard)].float()

    def gram(self, shard: Shard) -> None:
        psi = self.psi(shard)
        squared(psi.T if len(shard) < self.d else psi)

    def decompose(self, shard: Shard) -> None:
        n, rank = len(shard), min(len(shard), self.d)
        _, vectors = torch.linalg.eigh(self.products[:rank, :rank])
        if n >= self.d:
            torch.ones(n, self.d) @ vectors

    def scores(self, shard: Shard) -> None:
        n, rank = len(shard), min(len(shard), self.d)
        u, e, v = (torch.ones(n, k) for k in (rank, self.c, SKETCH))
        torch.ones(n, self.d) @ self.shared.float()
        v @ (v.T @ u)
        for _ in range(self.n_weights):
            u.T @ e
            u @ torch.ones(rank, self.n_betas * self.c)

    def refine(self, shard: Shard) -> None:
        n, rank = len(shard), min(len(shard), self.d)
        phi, e = torch.ones(n, self.d), torch.ones(n, self.c, dtype=torch.float64)
        factor = torch.linalg.cholesky(self.system(rank))
        if n < self.d:
            fitted = (torch.cholesky_solve(e, factor).T.float() @ phi).T.double()
        else:
            fitted = torch.cholesky_solve(phi.double().T @ e, factor)
        if self.kind == "landmarks":
            torch.linalg.solve_triangular(self.factor.T, fitted, upper=True)

    def system(self, rank: int) -> Tensor:
        return torch.eye(rank, dtype=torch.float64) + torch.ones(rank, rank, dtype=torch.float64)


def measured(clients: Sequence[Shard], n_classes: int, kind: str, d: int) -> dict[str, Any]:
    """One row of the table."""
    settings: dict[str, Any] = {"d_primary": d, "map": kind}
    if kind == "landmarks":
        settings["normalise"] = "root"  # a pilot would be a second choice
    chosen, automatic = timed(lambda: ran(clients, n_classes, **settings))
    given = {name: chosen[name] for name in ("gamma", "beta", "balance", "tau")} | {"weight": chosen.get("weight", 1.0)}
    _, fixed = timed(lambda: ran(clients, n_classes, **settings, **given))
    bare = Bare(clients, n_classes, kind, d).seconds()
    total = {clock: sum(part[clock] for part in bare.values()) for clock in ("wall", "processor")}
    choosing = ("gamma", "eigenvectors", "left-out scores")
    floor = {clock: 1 + sum(bare[name][clock] for name in choosing) / fixed[clock] for clock in total}
    return {
        "map": kind, "d": d, "automatic": automatic, "fixed": fixed, "bare": total, "calls": bare, "chosen": given,
        "floor": floor,
        "automatic / fixed": {clock: automatic[clock] / fixed[clock] for clock in total},
        "automatic / bare": {clock: automatic[clock] / total[clock] for clock in total},
    }  # fmt: skip


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "numpy": np.__version__, "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(__file__).parents[2] / "shared" / "data" / "cifar100-efficientnet-lite0.npz"
    parser.add_argument("--data", type=Path, default=shared)
    parser.add_argument("--runs", nargs="+", default=["random:512", "random:1024", "random:2048", "landmarks:1024"])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    for run in arguments.runs:
        kind, _, d = run.partition(":")
        if run != "default" and not (kind in ("random", "landmarks") and d.isdecimal()):
            parser.error(f"--runs {run} given; allowed are default, random:WIDTH and landmarks:WIDTH")
    federation = federate(load_dataset(str(arguments.data)), Protocol(n_clients=arguments.clients, alpha=0.5), seed=0)
    clients, c = federation.train, federation.n_classes
    with threads(arguments.threads):
        ran(clients[:2], c, d_primary=64)  # the first run of a process pays for its libraries
        found: dict[str, Any] = {"machine": machine(), "rows": sum(map(len, clients)), "clients": len(clients)}
        found["runs"] = {}
        for run in arguments.runs:
            if run == "default":
                chosen, seconds = timed(lambda: ran(clients, c))
                found["runs"][run] = {"d": chosen["d_primary"], "automatic": seconds}
                continue
            kind, d = run.split(":")
            found["runs"][run] = measured(clients, c, kind, int(d))
    default, wide = (found["runs"].get(run) for run in ("default", "random:8192"))
    if default and wide:
        found["default / random:8192"] = {
            clock: default["automatic"][clock] / wide["automatic"][clock] for clock in ("wall", "processor")
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
