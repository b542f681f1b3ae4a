"""Every client alone: a ridge regression on its own rows. What a federation has to beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.maps import Activation, random_map
from apfl.maths.normalise import Normalise, moments, normaliser
from apfl.maths.ridge import one_hot
from apfl.methods import Method, Round
from apfl.methods._analytic import shared_normaliser
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class LocalRidge(Method):
    """Ridge on the client's own rows alone: no exchange at all."""

    d: Annotated[int, Field(gt=0, le=2**20)] = 1024
    gamma: Annotated[float, Field(gt=0)] = 1.0
    activation: Activation = "relu"
    intercept: bool = False
    normalise: Normalise = "row"

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, 0

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        shared_normaliser(self.normalise, clients)  # refuses an empty federation, and rows that cannot be used
        features = clients[0].features
        n_in = normaliser(self.normalise, moments(features)).width(features.shape[1])
        feature_map = random_map(n_in, self.d, self.activation, 2 * seed, intercept=self.intercept)
        feature_map = feature_map.like(features)

        def alone(shard: Shard) -> DualStream:
            own = normaliser(self.normalise, moments(shard.features))
            phi = feature_map(own(shard.features))
            weights = fit_refinement(phi, one_hot(shard.labels, n_classes), self.gamma)
            return DualStream(feature_map, weights, normaliser=own)

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            return [alone(shard) for shard in late]

        yield Round(over_clients(alone, clients, features.device), index=0, admit=admit)
