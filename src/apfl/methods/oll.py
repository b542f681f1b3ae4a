"""OLL, only local labels: the shared primary stream, with the argmax over the classes that the client has seen.

Fanì et al., "Resource-Efficient Personalization in Federated Learning with Closed-Form Classifiers", IEEE Access 2025,
there with Fed3R's head; here with the primary stream. A class without a training row at the client scores minus
infinity (the authors' code sets it to 0, no exclusion where ridge scores are negative). Nothing but the client's own
list of classes is personal, so this is what any personalised method has to beat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.maths.wire import nbytes
from apfl.methods import Round
from apfl.methods._analytic import OneMap, one_exchange, upload_bytes
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class OLL(OneMap):
    """The shared primary stream restricted to the classes the client has: no personal weights."""

    personal: ClassVar[bool] = True
    predicts: ClassVar[Sequence[Target]] = ("classification",)
    grid: ClassVar[Mapping[str, Any]] = {"gamma": (1.0, 30.0, 1000.0)}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        ridge = self.shared(clients, n_classes, seed)
        primary, models = ridge.weights, []
        for shard in clients:
            bias = torch.full((n_classes,), -math.inf, dtype=primary.dtype, device=primary.device)
            bias[shard.labels] = 0
            models.append(LinearHead(primary, bias, feature_map=ridge.feature_map, normaliser=ridge.normalise))
        yield one_exchange(
            models, ridge.normalise, clients[0].features.shape[1],
            up=upload_bytes(clients, ridge.stats), down=nbytes({"primary": primary}),
        )  # fmt: skip
