"""One ridge regression on the pooled rows: what apfl's primary stream equals by Theorem 1. Not federated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.maps import Activation
from apfl.maths.normalise import Normalise
from apfl.methods import Method, Round
from apfl.methods._analytic import shared_ridge
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class Central(Method):
    """Ridge on all rows pooled in one place, for reference: not federated, nothing personal."""

    d: Annotated[int, Field(gt=0, le=2**20)] = 1024
    gamma: Annotated[float, Field(ge=0)] = 1.0
    activation: Activation = "relu"
    intercept: bool = False
    normalise: Normalise = "row"

    personal: ClassVar[bool] = False

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, 0

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        settings = (self.normalise, self.d, self.activation, seed, self.gamma)
        ridge = shared_ridge(clients, n_classes, *settings, intercept=self.intercept)
        model = DualStream(ridge.feature_map, ridge.weights, normaliser=ridge.normalise)
        yield Round([model] * len(clients), index=0)
