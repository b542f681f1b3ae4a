"""FedCOF: class covariances from the spread of the clients' class means. One round, no training, no second moments.

    Sigma_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / (K_c - 1)          over the K_c clients that have class c
    G       = sum_c (n_c - 1)(Sigma_c + shrinkage I) + N mu mu',   W = G^-1 B,   columns of W at length one

Goswami et al., "Covariances for Free: Exploiting Mean Distributions for Training-free Federated Learning", NeurIPS
2025 (arXiv 2412.14326). If rows of a class are spread over the clients at random, n_kc times the covariance of a mean
is that of a row: Sigma_c is unbiased. B has the class sums, and G stands for Z'Z without the scatter between classes,
which the authors found better. Their code takes a pseudo-inverse, which leaves out nothing here: with shrinkage above
zero G is positive definite. Departure: a class that nobody has is ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.maths.wire import nbytes
from apfl.methods._analytic import shared_normaliser
from apfl.methods._head import Head, OneHead, class_sums
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class FedCOF(OneHead):
    """A ridge head from class means alone, whose spread over the clients tells the covariances."""

    shrinkage: Annotated[float, Field(gt=0)] = 1.0  # of rows whose mean square is 1; the authors' default
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"shrinkage": (0.01, 0.1, 1.0, 10.0)}

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise = shared_normaliser(self.normalise, clients)
        uploads = [class_sums(shard, n_classes, normalise) for shard in clients]
        counts = torch.stack([own for _, own in uploads])
        total, n = torch.stack([own for own, _ in uploads]).sum(0), counts.sum(0)  # B (l, c), n_c
        means = total / n.clamp_min(1)
        holders = counts.gt(0).sum(0)  # K_c
        weight = (n - 1).clamp_min(0) / (holders - 1).clamp_min(1)  # of each class's scatter of means
        gram = torch.outer(total.sum(1), total.sum(1)) / n.sum()
        for own, n_own in uploads:
            here = n_own > 0
            centred = (own / n_own.clamp_min(1) - means)[:, here] * (weight * n_own)[here].sqrt()
            gram.addmm_(centred, centred.T)
        gram.diagonal().add_(self.shrinkage * (n - 1).clamp_min(0).sum().clamp_min(1))
        head = torch.cholesky_solve(total, torch.linalg.cholesky(gram))
        head = head / head.norm(dim=0).clamp_min(1e-12)
        bias = torch.zeros_like(n).masked_fill(n == 0, -math.inf)
        sent = [nbytes({"means": own, "counts": n_own}) for own, n_own in uploads]
        return Head(LinearHead(head, bias, normaliser=normalise), n, sent, nbytes({"head": head}))
