"""FedNCM: the nearest class mean, from the clients' class sums and counts. One round, no training.

Legate et al., "Guiding The Last Layer in Federated Learning with Pre-Trained Models", NeurIPS 2023. The nearest mean by
Euclidean distance has the highest z.mu - |mu|^2 / 2, so it is a linear head. A class that nobody has is ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.maths.wire import nbytes
from apfl.methods._analytic import shared_normaliser
from apfl.methods._head import Head, OneHead, class_sums
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class FedNCM(OneHead):
    """Nearest class mean over the whole federation: one head for everyone, nothing personal."""

    normalise: Normalise = "row"

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise = shared_normaliser(self.normalise, clients)
        uploads = [class_sums(shard, n_classes, normalise) for shard in clients]
        sums = torch.stack([own for own, _ in uploads]).sum(0)  # (l, c)
        counts = torch.stack([own for _, own in uploads]).sum(0)
        means = sums / counts.clamp_min(1)
        bias = (means.square().sum(0) / -2).masked_fill(counts == 0, -math.inf)
        up = [nbytes({"sums": own, "counts": n}) for own, n in uploads]
        model = LinearHead(means, bias, normaliser=normalise)
        return Head(model, counts, up, nbytes({"means": means, "bias": bias}))
