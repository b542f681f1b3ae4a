"""Speed of the core, as ratios against a peer in the same run: medians of interleaved repeats.

    python benchmarks/foundation.py [--repeats 5] [--data ../shared/data/cifar100-efficientnet-lite0.npz]

server   fold K = 50 statistics at d = 1024, against the paper's recursion and against adding in place + one Cholesky
client   `statistics` at 50000 x 1024, c = 100, against bare X'X and X'Y in numpy; peak memory when streamed
whole    CIFAR-100 features, 100 clients, d = 1024, fixed settings: features in memory to personal models in memory,
         against its matrix products alone (same shapes and dtypes)
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.linalg.blas import dsyrk
from timing import interleaved

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.experiments.run import Protocol, federate
from apfl.maths.machine import over_clients
from apfl.maths.maps import random_map
from apfl.maths.recursion import fold, upload
from apfl.maths.ridge import one_hot, solve, statistics, total
from apfl.methods import load_method


def line(what: str, ours: float, peer: float, peer_name: str, target: str) -> None:
    print(f"| {what} | {ours:.3f} s | {peer_name}: {peer:.3f} s | {ours / peer:.3g} | {target} |", flush=True)


def server(repeats: int) -> None:
    rng = np.random.default_rng(0)
    y = one_hot(torch.from_numpy(rng.integers(100, size=400)), 100)
    parts = [statistics(torch.from_numpy(rng.normal(size=(400, 1024))), y) for _ in range(50)]

    def bare() -> None:
        matrix, cross = parts[0].autocorrelation.clone(), parts[0].crosscorrelation.clone()
        for part in parts[1:]:
            matrix += part.autocorrelation
            cross += part.crosscorrelation
        matrix.diagonal().add_(1.0)
        torch.cholesky_solve(cross, torch.linalg.cholesky(matrix))

    times = interleaved(max(repeats, 5), ours=lambda: solve(total(parts), 1.0), bare=bare)
    line("server: sum and solve, K=50, d=1024", times["ours"], times["bare"], "add in place + Cholesky", "≤ 1.3")
    uploads = [upload(part, 1.0) for part in parts]
    recursion = interleaved(1, fold=lambda: fold(uploads, 1.0))["fold"]
    line("server: the same", times["ours"], recursion, "the paper's recursion", "≤ 0.01")


def client(repeats: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50_000, 1024))
    y = one_hot(torch.from_numpy(rng.integers(100, size=50_000)), 100)
    phi = torch.from_numpy(x)

    def bare() -> None:
        x.T @ x
        x.T @ y.numpy()

    times = interleaved(repeats, ours=lambda: statistics(phi, y), bare=bare)
    line("client: statistics, 50000 x 1024, c=100", times["ours"], times["bare"], "numpy X'X, X'Y", "≤ 1.15")
    if sys.platform == "linux":
        few, many = (peak_megabytes(n) for n in (10, 200))
        print(
            f"| client: streamed, peak memory | {many:.0f} MB (200 batches) "
            f"| 10 batches: {few:.0f} MB | {many / few:.2f} | 1 |"
        )


def peak_megabytes(n_batches: int) -> float:
    """Peak resident memory of a fresh process that streams batches of 2000 x 1024."""
    code = (
        "import torch; from apfl.maths.ridge import accumulate, one_hot\n"
        "y = one_hot(torch.zeros(2000, dtype=torch.long), 100)\n"
        f"accumulate((torch.randn(2000, 1024, dtype=torch.float64), y) for _ in range({n_batches}))\n"
        "print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) / 1024


def whole(repeats: int, data: Path) -> None:
    dataset = load_dataset(str(data))
    federation = federate(dataset, Protocol(n_clients=100, alpha=0.1), seed=0)
    clients, c = federation.train, federation.n_classes
    method = load_method("apfl_paper", d_primary=1024, d_refinement=1024)
    times = interleaved(repeats, ours=lambda: list(method.rounds(clients, c, 0)), bare=bare_products(clients, c, 1024))
    line("whole run: CIFAR-100, 100 clients, d=1024", times["ours"], times["bare"], "its matrix products", "≤ 1.5")


def bare_products(clients: Sequence[Shard], n_classes: int, d: int) -> Callable[[], object]:
    """What must be multiplied for `apfl_paper` of this width, on the same worker threads, and nothing else."""
    maps = [random_map(clients[0].features.shape[1], d, seed=seed).matrix for seed in (0, 1)]
    primary = torch.randn(d, n_classes, dtype=torch.float64)
    targets = [one_hot(shard.labels, n_classes) for shard in clients]

    def products(k: int) -> None:
        shard = clients[k]
        phi, psi = (shard.features @ matrix for matrix in maps)
        phi64, psi64 = phi.double(), psi.double()
        dsyrk(1.0, phi64.numpy().T, lower=0)  # Phi'Phi
        phi64.T @ targets[k]
        phi64 @ primary
        dsyrk(1.0, psi64.numpy().T, trans=int(len(shard) < d), lower=0)  # Psi Psi' or Psi'Psi
        psi64.T @ targets[k]

    return lambda: over_clients(products, range(len(clients)), torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    shared = Path(__file__).parents[2] / "shared" / "data" / "cifar100-efficientnet-lite0.npz"
    parser.add_argument("--data", type=Path, default=shared)
    arguments = parser.parse_args()
    print(f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, numpy {np.__version__}\n")
    print("| what | ours | peer | ratio | target |\n| --- | --- | --- | --- | --- |")
    server(arguments.repeats)
    client(arguments.repeats)
    if arguments.data.exists():
        whole(arguments.repeats, arguments.data)
    else:
        print(f"\nwhole run left out: there is no {arguments.data}; give a features file with --data")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
