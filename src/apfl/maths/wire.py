"""What travels between client and server, and what it weighs.

Ours: the statistics themselves, with half of the symmetric matrix; or, of a client with fewer rows than columns, the
trapezoid of a QR factorisation, which is smaller still. The paper's: A_k = Phi'Phi + gamma I and
G_k = A_k^-1 Phi'Y, folded one by one (its equations 5 to 8). Both give the same primary stream; the recursion is kept
as a tested equivalent because it is what the paper publishes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.ridge import Statistics, accumulate, solve

__all__ = [
    "Upload",
    "factor_bytes",
    "factor_message",
    "fold",
    "from_message",
    "message",
    "message_bytes",
    "nbytes",
    "pack",
    "statistics_from_upload",
    "unpack",
    "upload",
]


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


def pack(symmetric: Tensor) -> Tensor:
    """The lower triangle, row by row: d (d + 1) / 2 numbers instead of d^2.

    >>> pack(torch.tensor([[1, 2], [2, 3]])).tolist()
    [1, 2, 3]
    """
    d = len(symmetric)
    packed = symmetric.new_empty(d * (d + 1) // 2)
    for i in range(d):
        packed[i * (i + 1) // 2 : (i + 1) * (i + 2) // 2] = symmetric[i, : i + 1]
    return packed


def unpack(packed: Tensor) -> Tensor:
    """The symmetric matrix back from `pack`."""
    d = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    if d * (d + 1) // 2 != len(packed):
        raise InputError(f"{len(packed)} numbers are not the triangle of any square matrix")
    symmetric = packed.new_empty(d, d)
    for i in range(d):
        row = packed[i * (i + 1) // 2 : (i + 1) * (i + 2) // 2]
        symmetric[i, : i + 1] = row
        symmetric[: i + 1, i] = row
    return symmetric


def _pack_trapezoid(upper: Tensor) -> Tensor:
    return torch.cat([row[i:] for i, row in enumerate(upper)])


def _unpack_trapezoid(packed: Tensor, n_rows: int) -> Tensor:
    width = (len(packed) + n_rows * (n_rows - 1) // 2) // max(n_rows, 1)
    if n_rows < 1 or n_rows > width or n_rows * width - n_rows * (n_rows - 1) // 2 != len(packed):
        raise InputError(f"{len(packed)} numbers are not the trapezoid of {n_rows} rows of any factor")
    upper, start = packed.new_zeros(n_rows, width), 0
    for i in range(n_rows):
        upper[i, i:] = packed[start : start + width - i]
        start += width - i
    return upper


def _squared(factor: Tensor) -> Tensor:
    """R'R, symmetric to the last bit."""
    return accumulate([(factor, factor.new_ones(len(factor), 1))]).autocorrelation


def message(stats: Statistics, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A client's statistics as the tensors that travel; the two large ones in ``dtype``."""
    return {
        "autocorrelation": pack(stats.autocorrelation.to(dtype)),
        "crosscorrelation": stats.crosscorrelation.to(dtype),
        "class_counts": stats.class_counts,
        "n_samples": torch.tensor(stats.n_samples, dtype=torch.int64),
        "target_energy": torch.tensor(stats.target_energy, dtype=torch.float64),
    }


def factor_message(phi: Tensor, targets: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A client's rows as R and Q'Y of Phi = Q R: the same statistics, R'R and R'(Q'Y), in fewer numbers when n < d.

    With r = min(n, d) these are r d - r (r - 1) / 2 and r c numbers. R has no negative entry on its diagonal, which
    makes it the same for the same rows, and what Phi'Phi itself would tell: no more leaves the client.
    """
    q, factor = torch.linalg.qr(phi.to(torch.float64))  # (n, r), (r, d)
    turned = q.T @ targets.to(torch.float64)  # Q'Y (r, c)
    signs = torch.where(factor.diagonal() < 0, -1.0, 1.0).to(factor)[:, None]
    n, energy = len(phi), float(targets.to(torch.float64).square().sum())
    return {
        "factor": _pack_trapezoid((signs * factor).to(dtype)),
        "turned_targets": (signs * turned).to(dtype),
        "class_counts": targets.to(torch.float64).sum(0),
        "n_samples": torch.tensor(n, dtype=torch.int64),
        "target_energy": torch.tensor(energy, dtype=torch.float64),
    }


def factor_bytes(n_samples: int, width: int, n_classes: int, dtype: torch.dtype = torch.float64) -> int:
    """`nbytes` of a `factor_message`, known without making it."""
    r = min(n_samples, width)
    return (r * width - r * (r - 1) // 2 + r * n_classes) * dtype.itemsize + 8 * n_classes + 16


def from_message(received: Mapping[str, Tensor]) -> Statistics:
    """The statistics back from `message` or `factor_message`, in float64."""
    try:
        if "factor" in received:
            turned = received["turned_targets"].to(torch.float64)
            factor = _unpack_trapezoid(received["factor"].to(torch.float64), len(turned))
            autocorrelation, crosscorrelation = _squared(factor), factor.T @ turned
        else:
            autocorrelation = unpack(received["autocorrelation"].to(torch.float64))
            crosscorrelation = received["crosscorrelation"].to(torch.float64)
        return Statistics(
            autocorrelation,
            crosscorrelation,
            received["class_counts"].to(torch.float64),
            int(received["n_samples"]),
            float(received["target_energy"]),
        )
    except KeyError as error:
        raise InputError(f"a message of statistics lacks {error}; it has: {', '.join(sorted(received))}") from error


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Payload of some tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def message_bytes(width: int, n_classes: int, dtype: torch.dtype = torch.float64) -> int:
    """`nbytes` of a `message`, known without making it."""
    return (width * (width + 1) // 2 + width * n_classes) * dtype.itemsize + 8 * n_classes + 16
