"""Ridge regression on the client's own rows, shrunk towards the shared head instead of towards zero.

    P_k = argmin |Y_k - Phi_k P|^2 + beta |P - G|^2 = G + (Phi_k'Phi_k + beta I)^-1 Phi_k' (Y_k - Phi_k G)

The simplest analytic personaliser: apfl with both streams on the same map and balance 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.maps import Activation
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import one_hot
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import one_exchange, shared_ridge, upload_bytes
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class RidgeToGlobal(Method):
    """Ridge on the client's own rows, shrunk towards the shared head."""

    d: Annotated[int, Field(gt=0)] = 1024
    gamma: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(gt=0)] = 100.0
    activation: Activation = "relu"
    normalise: Normalise = "row"

    personal: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Any]] = {"gamma": (1.0, 100.0), "beta": (10.0, 100.0, 1000.0)}

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, 0

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        ridge = shared_ridge(clients, n_classes, self.normalise, self.d, self.activation, seed, self.gamma)
        primary, features = ridge.weights, clients[0].features

        def personal(k: int) -> DualStream:
            residual = one_hot(clients[k].labels, n_classes) - ridge.phis[k].to(torch.float64) @ primary
            own = primary + fit_refinement(ridge.phis[k], residual, self.beta)
            return DualStream(ridge.feature_map, own, normaliser=ridge.normalise)

        yield one_exchange(
            over_clients(personal, range(len(clients)), features.device), ridge.normalise, features.shape[1],
            up=upload_bytes(clients, ridge.stats), down=nbytes({"primary": primary}),
        )  # fmt: skip
