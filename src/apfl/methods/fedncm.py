"""FedNCM: the nearest class mean, from the clients' class sums and counts. One round, no training.

Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023. The nearest mean by
Euclidean distance has the highest z.mu - |mu|^2 / 2, so it is a linear head. A class that nobody has is ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import one_hot
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import one_exchange, shared_normaliser
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class FedNCM(Method):
    """Nearest class mean over the whole federation: one head for everyone, nothing personal."""

    normalise: Normalise = "row"

    personal: ClassVar[bool] = False
    grid: ClassVar[Mapping[str, Any]] = {}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        uploads = []
        for shard in clients:
            hot = one_hot(shard.labels, n_classes)
            uploads.append((normalise(shard.features).to(hot.dtype).T @ hot, hot.sum(0)))
        sums = torch.stack([own for own, _ in uploads]).sum(0)  # (l, c)
        counts = torch.stack([own for _, own in uploads]).sum(0)
        means = sums / counts.clamp_min(1)
        bias = (means.square().sum(0) / -2).masked_fill(counts == 0, -math.inf)
        yield one_exchange(
            [LinearHead(means, bias, normaliser=normalise)] * len(clients), normalise, clients[0].features.shape[1],
            up=[nbytes({"sums": own, "counts": n}) for own, n in uploads], down=nbytes({"means": means, "bias": bias}),
        )  # fmt: skip
