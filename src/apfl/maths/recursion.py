"""The paper's own upload and its recursion: A_k = Phi'Phi + gamma I and G_k = A_k^-1 Phi'Y, folded one by one.

Equations 3 to 8. The sum of statistics (`apfl.maths.ridge`) gives the same primary stream in fewer numbers; the
recursion is kept as a tested equivalent because it is what the paper publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.ridge import Statistics, solve

__all__ = ["Upload", "fold", "statistics_from_upload", "upload"]


@dataclass(frozen=True, eq=False)
class Upload:
    """What a client sends in the paper: (A_k, G_k)."""

    regularised: Tensor  # A_k = Phi_k'Phi_k + gamma I (d, d)
    primary: Tensor  # G_k = A_k^-1 Phi_k'Y_k (d, c)


def upload(stats: Statistics, gamma: float) -> Upload:
    """The paper's upload, its equations 3 and 4."""
    regularised = stats.autocorrelation.clone()
    regularised.diagonal().add_(gamma)
    return Upload(regularised, solve(stats, gamma))


def statistics_from_upload(sent: Upload, gamma: float, class_counts: Tensor) -> Statistics:
    """The statistics behind an upload: A_k - gamma I and A_k G_k = Phi_k'Y_k.

    So whoever holds an upload holds the class-wise sums of the client's features; (A_k, G_k) hides nothing that the
    statistics show. It carries no counts, so these must be given.
    """
    autocorrelation = sent.regularised.clone()
    autocorrelation.diagonal().sub_(gamma)
    n_samples = round(float(class_counts.sum()))
    return Statistics(
        autocorrelation, sent.regularised @ sent.primary, class_counts.to(torch.float64), n_samples, float(n_samples)
    )


def fold(uploads: Sequence[Upload], gamma: float) -> Tensor:
    """The primary stream by the paper's recursion, equations 5 to 8, with F_1 = G_1 where it prints F_1 = P_1.

    Inverses are applied as solves with one factorisation each of the running sum and of A_k.
    """
    if not uploads:
        raise InputError("no uploads to fold: at least one client is needed")
    summed, fused = uploads[0].regularised.clone(), uploads[0].primary  # Atilde_1, F_1
    factor = torch.linalg.cholesky(summed)
    identity = torch.eye(len(summed), dtype=summed.dtype, device=summed.device)
    for sent in uploads[1:]:
        previous, previous_factor = summed.clone(), factor
        summed += sent.regularised  # eq 5
        factor = torch.linalg.cholesky(summed)
        own_factor = torch.linalg.cholesky(sent.regularised)
        # eq 7: Lambda = I - Atilde_{k-1}^-1 A_k (I - Atilde_k^-1 A_k)
        #       Delta  = I - A_k^-1 Atilde_{k-1} (I - Atilde_k^-1 Atilde_{k-1})
        inner = identity - torch.cholesky_solve(sent.regularised, factor)
        fused_weight = identity - torch.cholesky_solve(sent.regularised @ inner, previous_factor)
        inner = identity - torch.cholesky_solve(previous, factor)
        own_weight = identity - torch.cholesky_solve(previous @ inner, own_factor)
        fused = fused_weight @ fused + own_weight @ sent.primary  # eq 6
    target = summed @ fused
    summed.diagonal().sub_((len(uploads) - 1) * gamma)  # eq 8: one ridge stays
    return torch.cholesky_solve(target, torch.linalg.cholesky(summed))
