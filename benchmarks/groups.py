"""What leaving groups out takes: against leaving rows out, and against refitting both streams for each group.

    python benchmarks/groups.py [--repeats 3] [--patients 5000]

Breast cancer (569 rows), all betas, one thread. Refitting is timed for a few groups and one beta, and multiplied
by the number of groups and betas. --patients measures one beta for that many groups of 3 rows at width 256, in
processor seconds.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from timing import interleaved
from torch import Tensor

from apfl.maths.hits import grid
from apfl.maths.leaveout import HatBasis, LeftOut, fit_refinement, hat_basis, whiten
from apfl.maths.maps import random_map
from apfl.maths.ridge import factorise, one_hot, solve, statistics

GAMMA, WIDTH, REFITTED = 1.0, 256, 2  # ridge, width of both streams, groups that are refitted


class Client:
    """One client's rows in both streams."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.phi, self.psi = (random_map(features.shape[1], WIDTH, seed=s)(features).double() for s in (0, 1))
        self.y = one_hot(labels, int(labels.max()) + 1)
        factor = factorise(statistics(self.phi, self.y), GAMMA)
        self.whitened = whiten(self.phi, factor)
        self.residual = self.y - self.phi @ torch.cholesky_solve(self.phi.T @ self.y, factor)
        self.hat: HatBasis = hat_basis(self.psi)
        unit = float(self.psi.square().sum(1).mean())
        self.betas = grid(unit, beta=None, balance=None, tau=None).betas

    def left_out(self, groups: Tensor | None, n_betas: int | None = None) -> None:
        found = LeftOut(self.hat, self.whitened, self.residual, groups)
        for beta in self.betas[:n_betas]:
            found.refinement(beta)

    def refit(self, groups: Tensor) -> None:
        """Both streams again, for the first `REFITTED` groups and one beta."""
        names = torch.unique(groups)
        for out in names[:REFITTED]:
            targets = self.y - self.phi @ self._primary(groups != out)
            stay = groups != out
            self.psi[~stay] @ fit_refinement(self.psi[stay], targets[stay], self.betas[0])

    def _primary(self, stay: Tensor) -> Tensor:
        return solve(statistics(self.phi[stay], self.y[stay]), GAMMA)


def compare(repeats: int) -> None:
    features, labels = load_breast_cancer(return_X_y=True)
    client = Client(torch.from_numpy(StandardScaler().fit_transform(features)).float(), torch.from_numpy(labels))
    n = len(labels)
    threes = torch.arange(n) // 3
    print(f"| 569 rows, {len(client.betas)} betas | rows | groups of 1 | groups of 3 | refitting, groups of 3 |")
    print("| --- | --- | --- | --- | --- |")
    sides = {"rows": None, "ones": torch.arange(n), "threes": threes}
    times = interleaved(repeats, **{k: lambda g=g: client.left_out(g) for k, g in sides.items()})
    again = interleaved(1, refit=lambda: client.refit(threes))["refit"]
    again *= len(torch.unique(threes)) / REFITTED * len(client.betas)
    cells = [f"{times['rows']:.3f} s", f"{times['ones'] / times['rows']:.2g} times that"]
    cells += [f"{times['threes'] / times['rows']:.2g} times that", f"{again / times['rows']:,.0f} times that"]
    print(f"| left out | {' | '.join(cells)} |", flush=True)


def patients(count: int) -> None:
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(2, size=3 * count))
    client = Client(torch.from_numpy(rng.normal(size=(3 * count, 30))).float(), labels)
    start = time.process_time()
    client.left_out(torch.arange(3 * count) // 3, n_betas=1)
    took = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{count} groups of 3 rows, width {WIDTH}, one beta: {took:.1f} s, peak memory {peak:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patients", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.patients:
        patients(given.patients)
    else:
        compare(given.repeats)


if __name__ == "__main__":
    main()
