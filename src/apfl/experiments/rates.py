"""How many operations of each kind one core of this machine does in a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from apfl.maths.hat import eigh
from apfl.maths.landmarks import kernel
from apfl.maths.machine import threads
from apfl.maths.ridge import squared

__all__ = ["Operations", "Rates", "measured_rates"]

WIDEST, DECOMPOSED, ODD = 2048, 1536, 24  # whose rates are measured
Operations = Mapping[str, float]  # kind -> how many


@dataclass(frozen=True)
class Rates:
    """Operations a second on this machine: products, factorisations, decompositions, kernel entries.

    Those of rows are in single precision, those of sums in double.
    """

    single: float
    double: float
    cholesky: float
    eigen: float
    eigen_single: float
    kernel: float

    def seconds(self, operations: Operations) -> float:
        """What so many of each kind take."""
        return float(sum(n / vars(self)[kind] for kind, n in operations.items()))


def measured_rates(size: int = 1024) -> Rates:
    """This machine's rates on one core, from operations of this width: about a second up to 1024, then four.

    Small matrices are factorised at a fraction of the rate of large ones; beyond `WIDEST` they are alike. Processor
    seconds of one thread are told: of several on a busy machine, each waits for the last, and rates come out ten times
    too low.
    """
    size = max(64, min(size, WIDEST))
    with threads(1):
        rows = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        single, system = rows.float(), rows.T @ rows + size * torch.eye(size, dtype=torch.float64)
        unit = rows / rows.norm(dim=1, keepdim=True)
        odd = size - ODD  # as many rows as sites have: no power of two
        small, wide = system[: min(odd, DECOMPOSED), : min(odd, DECOMPOSED)].contiguous(), system[:odd, :odd].float()
        return Rates(
            single=_rate(size**3, lambda: squared(single)),
            double=_rate(size**3, lambda: squared(rows)),
            cholesky=_rate(size**3 / 3, lambda: torch.linalg.cholesky(system)),
            eigen=_rate(9 * len(small) ** 3, lambda: eigh(small)),
            eigen_single=_rate(9 * odd**3, lambda: torch.linalg.eigh(wide)),
            kernel=_rate(size**2, lambda: kernel(unit[:, :1].float(), unit[:, :1].float())),
        )


def _rate(operations: float, work: Callable[[], Any]) -> float:
    def taken() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    first = taken()
    return operations / min(taken() for _ in range(5 if first < 0.1 else 2 if first < 0.5 else 1))
