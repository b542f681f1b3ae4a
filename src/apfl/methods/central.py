"""One ridge regression on the pooled rows: what apfl's primary stream equals by Theorem 1. Not federated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from apfl.data.federation import Shard
from apfl.methods import Round
from apfl.methods._analytic import OneMap
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class Central(OneMap):
    """Ridge on all rows pooled in one place, for reference: not federated, nothing personal."""

    intercept: bool = False

    personal: ClassVar[bool] = False

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        ridge = self.shared(clients, n_classes, seed, intercept=self.intercept)
        model = DualStream(ridge.feature_map, ridge.weights, normaliser=ridge.normalise)
        yield Round([model] * len(clients), index=0)
