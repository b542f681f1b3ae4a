"""APFL as published: a shared primary stream and a private refinement stream for each client, with fixed settings.

Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream Least Squares". (The name is also
used elsewhere for *Adaptive* personalised federated learning, Deng et al. 2020, which is another method.)

Departures from the paper, each of which leaves the result the same: clients send statistics instead of (A_k, G_k) and
the server adds instead of folding; a client with fewer rows than d_refinement solves its refinement in dual form.
The paper does not say how features are scaled; here each row is brought to length sqrt(l).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.exchange import message_bytes, nbytes
from apfl.federation import Round, Shard
from apfl.maps import Activation
from apfl.methods._primary import mapped_and_summed, moments_bytes, shared_normaliser, stream_maps
from apfl.normalise import Normalise
from apfl.ridge import one_hot, solve
from apfl.streams import DualStream, fit_refinement
from apfl.workers import over_clients


@dataclass(frozen=True)
class APFLPaper:
    """APFL exactly as published: width, ridges and balance fixed for everyone."""

    d_primary: Annotated[int, Field(gt=0, le=2**20)] = 1024
    d_refinement: Annotated[int, Field(gt=0, le=2**20)] = 1024
    gamma: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(gt=0)] = 1.0
    balance: Annotated[float, Field(ge=0)] = 0.5
    activation_primary: Activation = "relu"
    activation_refinement: Activation = "relu"
    intercept: bool = False
    normalise: Normalise = "row"

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        features = clients[0].features
        activations = (self.activation_primary, self.activation_refinement)
        widths = (self.d_primary, self.d_refinement)
        primary_map, refinement_map = stream_maps(features, widths, activations, seed, self.intercept)
        phis, summed = mapped_and_summed(clients, n_classes, normalise, primary_map)
        primary = solve(summed, self.gamma)

        def personal(shard: Shard, phi: Tensor) -> DualStream:
            psi = refinement_map(normalise(shard.features))
            residual = one_hot(shard.labels, n_classes) - phi.to(torch.float64) @ primary
            refinement = fit_refinement(psi, residual, self.beta)
            return DualStream(primary_map, primary, refinement_map, refinement, self.balance, normalise)

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            return [personal(shard, primary_map(normalise(shard.features))) for shard in late]

        models = over_clients(lambda k: personal(clients[k], phis[k]), range(len(clients)), features.device)
        prelude = moments_bytes(self.normalise, features.shape[1])
        yield Round(
            models,
            index=2 if prelude else 1,
            bytes_up=len(clients) * (message_bytes(summed.width, n_classes) + prelude),
            bytes_down=len(clients) * (nbytes({"primary": primary}) + prelude),
            admit=admit,
        )
