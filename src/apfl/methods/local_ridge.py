"""Every client alone: a ridge regression on its own rows. What a federation has to beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.maps import random_map
from apfl.maths.normalise import described, normaliser
from apfl.maths.ridge import one_hot
from apfl.methods import Round
from apfl.methods._analytic import OneMap, shared_normaliser
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class LocalRidge(OneMap):
    """Ridge on the client's own rows alone: no exchange at all."""

    gamma: Annotated[float, Field(gt=0)] = 1.0  # a client may have fewer rows than columns
    intercept: bool = False

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        shared_normaliser(self.normalise, clients)  # refuses an empty federation, and rows that cannot be used
        features = clients[0].features
        n_in = normaliser(self.normalise, described(self.normalise, features)).width(features.shape[1])
        feature_map = random_map(n_in, self.d, self.activation, 2 * seed, intercept=self.intercept)
        feature_map = feature_map.like(features)

        def alone(shard: Shard) -> DualStream:
            own = normaliser(self.normalise, described(self.normalise, shard.features))
            phi = feature_map(own(shard.features))
            weights = fit_refinement(phi, one_hot(shard.labels, n_classes), self.gamma)
            return DualStream(feature_map, weights, normaliser=own)

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            return [alone(shard) for shard in late]

        yield Round(over_clients(alone, clients, features.device), index=0, admit=admit)
