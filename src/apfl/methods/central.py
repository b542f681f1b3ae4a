"""One ridge regression on the pooled rows: what apfl's primary stream equals by Theorem 1. Not federated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.maps import Activation, random_map
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import solve
from apfl.methods import Method, Round
from apfl.methods._analytic import mapped_and_summed, shared_normaliser
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
        normalise = shared_normaliser(self.normalise, clients)
        features = clients[0].features
        n_in = normalise.width(features.shape[1])
        feature_map = random_map(n_in, self.d, self.activation, 2 * seed, intercept=self.intercept)
        _, summed = mapped_and_summed(clients, n_classes, normalise, feature_map.like(features))
        model = DualStream(feature_map, solve(summed, self.gamma), normaliser=normalise)
        yield Round([model] * len(clients), index=0)
