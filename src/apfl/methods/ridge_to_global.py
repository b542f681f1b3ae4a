"""Ridge regression on the client's own rows, shrunk towards the shared head instead of towards zero.

    P_k = argmin |Y_k - Phi_k P|^2 + beta |P - G|^2 = G + (Phi_k'Phi_k + beta I)^-1 Phi_k' (Y_k - Phi_k G)

The simplest analytic personaliser: apfl with both streams on the same map and balance 1. With ``map="landmarks"`` it
has the map of apfl on landmarks, whose rows are at most 1 long: choose gamma and beta for that (``--tune`` does).

With psi = phi and lambda = 1 this is the natural reading of FedHiP, whose third phase is not published; until it is,
FedHiP itself is no method here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.ridge import solve
from apfl.maths.wire import nbytes
from apfl.methods import Round
from apfl.methods._analytic import OneMap, one_exchange, shared_normaliser, upload_bytes
from apfl.methods._streams import folded, landmark_streams
from apfl.models.dual_stream import DualStream

RANDOM_ROW = 512.0  # mean squared length of a row of the default random map; that of a row of landmarks is near 1


@dataclass(frozen=True)
class RidgeToGlobal(OneMap):
    """Ridge on the client's own rows, shrunk towards the shared head."""

    beta: Annotated[float, Field(gt=0)] = 100.0
    map: Literal["random", "landmarks"] = "random"

    personal: ClassVar[bool] = True

    @property
    def grid(self) -> Mapping[str, Any]:
        """The same shares of a row's squared length on both maps."""
        unit = 1.0 if self.map == "random" else RANDOM_ROW
        return {
            "gamma": tuple(gamma / unit for gamma in (1.0, 100.0)),
            "beta": tuple(beta / unit for beta in (10.0, 100.0, 1000.0)),
        }

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        make = self._on_landmarks if self.map == "landmarks" else self._on_a_random_map
        yield make(clients, n_classes, seed)

    def _on_a_random_map(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Round:
        ridge = self.shared(clients, n_classes, seed)

        def personal(k: int) -> DualStream:
            own = self._personal(ridge.phis[k], clients[k], ridge.weights)
            return DualStream(ridge.feature_map, own, normaliser=ridge.normalise)

        return one_exchange(
            over_clients(personal, range(len(clients)), clients[0].features.device), ridge.normalise,
            clients[0].features.shape[1], up=upload_bytes(clients, ridge.stats),
            down=nbytes({"primary": ridge.weights}),
        )  # fmt: skip

    def _on_landmarks(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Round:
        normalise = shared_normaliser(self.normalise, clients)
        made_of = landmark_streams(clients, n_classes, normalise, self.d, "federation", 0, seed)
        primary = solve(made_of.stats, self.gamma)
        weights = (self._personal(phi, shard, primary) for phi, shard in zip(made_of.phis, clients, strict=True))
        models = [*folded(made_of, weights, [None] * len(clients))]
        traffic = made_of.traffic
        last = one_exchange(
            models, normalise, clients[0].features.shape[1],
            up=[sum(own) for own in zip(*traffic.up.values(), strict=True)],
            down=nbytes({"primary": primary}) + sum(traffic.down.values()),
        )  # fmt: skip
        return replace(last, index=last.index + traffic.rounds)

    def _personal(self, phi: Tensor, shard: Shard, primary: Tensor) -> Tensor:
        """P_k (d, c)."""
        residual = shard.responses(primary.shape[1]) - phi.to(torch.float64) @ primary
        return primary + fit_refinement(phi, residual, self.beta)
