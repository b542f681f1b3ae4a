"""SAFLe: features cut into bits, shuffled and grouped; each group looks up a row of its own table of scores. One round.

    b = (z_i > t_l),   idx_j = sum_i 2^(i-1) b_(j, i),   scores = sum_j W_j[idx_j]        j = 1 .. groups

Bacellar et al., "Single-Round Scalable Analytic Federated Learning", CVPR 2026 (arXiv 2512.03336). Looking up is a
product with a one-hot code Phi, so the tables are least squares on Phi, and the clients' sums of Phi'Phi and Phi'Y give
them in one exchange, whatever the clients are. There is no public code; this is built from the public text.

Not defined there, and so ours: where the thresholds lie (at the quantiles of a standard normal, on features with
mean 0 and variance 1, which costs the exchange of the moments; `normalise="row"` does without it), how the
"binary overlapping" bits of the paper's best bucketing are made (here a thermometer code, one bit for each threshold,
in which neighbouring values share all bits but one), and the permutation. Their buckets as integers or one-hot codes,
which lost in the paper, are not here.

Departures. The paper groups all bits, l times levels of them; with thousands of columns a group that is too wide to
solve densely, so at most ``groups`` groups of the shuffled bits are taken. The paper removes all of its ridge and takes
a pseudo-inverse, which is `gamma=0`: with fewer rows than columns it interpolates the labels. Here a ridge is kept and
tuned. Counts are charged as integers of 32 bits, or a client with few rows sends the factor, as for other methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.lifts import Buckets
from apfl.maths.machine import check_width
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import Statistics, accumulate, one_hot, solve
from apfl.maths.wire import statistics_bytes
from apfl.methods._analytic import shared_normaliser
from apfl.methods._head import Head, OneHead
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class SAFLe(OneHead):
    """Tables of scores, looked up by groups of feature bits: one head for everyone."""

    levels: Annotated[int, Field(gt=0, le=255)] = 7  # thresholds of each feature: one less than the paper's bins
    bits: Annotated[int, Field(gt=0, le=12)] = 5  # of a group: tables of 2^bits rows, 32 to 64 in the paper
    groups: Annotated[int, Field(gt=0, le=2**16)] = 128  # at most
    gamma: Annotated[float, Field(ge=0)] = 10.0  # 0: a pseudo-inverse, as in the paper
    normalise: Normalise = "columns"

    own_grid: ClassVar[Mapping[str, Any]] = {"gamma": (1.0, 10.0, 100.0), "groups": (128, 256)}

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return Buckets(n_features, self.levels, self.bits, self.groups).width, 0

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise = shared_normaliser(self.normalise, clients)
        lift = Buckets(normalise.width(clients[0].features.shape[1]), self.levels, self.bits, self.groups, seed)
        check_width(lift.width, sum(map(len, clients)), 1, clients[0].features.device)
        summed = accumulate(
            (lift(normalise(shard.features.double())), one_hot(shard.labels, n_classes)) for shard in clients
        )
        weight = solve(summed, self.gamma) if self.gamma else smallest_solution(summed)
        bias = torch.zeros_like(summed.class_counts).masked_fill(summed.class_counts == 0, -torch.inf)
        model = LinearHead(weight, bias, feature_map=lift, normaliser=normalise)
        up = [upload_bytes(lift, len(shard), n_classes) for shard in clients]
        return Head(model, summed.class_counts, up, 8 * weight.numel())


def smallest_solution(stats: Statistics) -> Tensor:
    """(Phi'Phi)^+ Phi'Y: of all least-squares solutions the one of smallest norm, (d, c).

    Phi is never of full rank: the columns of each group add up to one.
    """
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    least = stats.width * torch.finfo(torch.float64).eps * float(values.max())
    inverse = torch.where(values > least, values, torch.inf).reciprocal()
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ stats.crosscorrelation))
    return solution.contiguous()


def upload_bytes(lift: Buckets, n_rows: int, n_classes: int) -> int:
    """Counts of 32 bits, the triangle of Phi'Phi without the zeros within groups and Phi'Y; or the factor, if less."""
    groups, bits = lift.shape
    d, table = lift.width, 1 << bits
    counts = 4 * (d * (d + 1) // 2 - groups * table * (table - 1) // 2 + d * n_classes) + 8 * n_classes
    return min(counts, statistics_bytes(n_rows, d, n_classes))
