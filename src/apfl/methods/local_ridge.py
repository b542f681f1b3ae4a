"""Every client alone: a ridge regression on its own rows. What a federation has to beat.

With ``gamma="auto"`` each client has the ridge with the least squared error of its left-out rows,

    sum_i |(y_i - f_i) / (1 - h_i)|^2,   f = H y,   H = Phi (Phi'Phi + gamma I)^-1 Phi',   h its diagonal

which leaves each row out in turn without fitting anew. With ``normalise="auto"`` it also has, of three ways to scale
its features, the one whose best ridge has the least of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.maps import Activation, FeatureMap, random_map
from apfl.maths.normalise import Normalise, described, normaliser
from apfl.methods import Method, Round
from apfl.methods._analytic import ANY_TARGET, Width, shared_normaliser
from apfl.models.dual_stream import DualStream

RIDGES = tuple(10.0 ** (power / 2) for power in range(-6, 11))


CANDIDATES: tuple[Normalise, ...] = ("row", "root", "columns")


class Alone(NamedTuple):
    """A client's own model, its ridge, and the error that chose it."""

    error: float
    gamma: float
    model: DualStream


@dataclass(frozen=True)
class LocalRidge(Method):
    """Ridge on the client's own rows alone: no exchange at all."""

    d: Width = 1024
    # A client may have fewer rows than columns.
    gamma: Annotated[float, Field(gt=0)] | Literal["auto"] = 1.0  # auto: by left-out rows, for each client
    activation: Activation = "relu"
    normalise: Normalise | Literal["auto"] = "row"  # auto: row, root or columns, by left-out rows
    intercept: bool = False

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    predicts: ClassVar[Sequence[Target]] = ANY_TARGET

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, 0

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        ways = CANDIDATES if self.normalise == "auto" else (self.normalise,)
        for how in ways:
            shared_normaliser(how, clients)  # refuses an empty federation, and rows that cannot be used
        features = clients[0].features
        maps = {how: self._map(how, features, seed) for how in ways}

        def alone(shard: Shard) -> Alone:
            targets = shard.responses(n_classes)
            tried = [self._fit(shard, targets, how, feature_map) for how, feature_map in maps.items()]
            return min(tried, key=lambda fit: fit.error)

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            return [alone(shard).model for shard in late]

        fits = over_clients(alone, clients, features.device)
        chosen = {"median_gamma": median(fit.gamma for fit in fits)} if self.gamma == "auto" else {}
        yield Round([fit.model for fit in fits], index=0, chosen=chosen, admit=admit)

    def _map(self, how: str, features: Tensor, seed: int) -> FeatureMap:
        n_in = normaliser(how, described(how, features)).width(features.shape[1])
        return random_map(n_in, self.d, self.activation, 2 * seed, intercept=self.intercept).like(features)

    def _fit(self, shard: Shard, targets: Tensor, how: str, feature_map: FeatureMap) -> Alone:
        own = normaliser(how, described(how, shard.features))
        phi = feature_map(own(shard.features))
        ridges = RIDGES if self.gamma == "auto" else (self.gamma,)
        chooses = "auto" in (self.gamma, self.normalise)
        phi = phi.double() if chooses else phi  # a ridge that is chosen may be below the rounding of single precision
        error, gamma = left_out_ridge(phi, targets, ridges) if chooses else (0.0, ridges[0])
        return Alone(error, gamma, DualStream(feature_map, fit_refinement(phi, targets, gamma), normaliser=own))


def left_out_ridge(phi: Tensor, targets: Tensor, ridges: Sequence[float] = RIDGES) -> tuple[float, float]:
    """The least squared error of left-out rows, and the ridge that has it.

    >>> rows, noise = torch.eye(2).repeat(3, 1), torch.tensor([[0.1], [0.0], [0.0], [0.1], [-0.1], [-0.1]])
    >>> left_out_ridge(rows, rows[:, :1] + noise)[1] < 1 < left_out_ridge(rows, noise)[1]
    True
    """
    left, size, _ = torch.linalg.svd(phi.double(), full_matrices=False)
    turned, outside = left.T @ targets.double(), 1 - left.square().sum(1)

    def error(ridge: float) -> float:
        shrunk = ridge / (size.square() + ridge)
        residual = targets - left @ ((1 - shrunk)[:, None] * turned)
        return float((residual / (outside.clamp_min(0) + left.square() @ shrunk)[:, None]).square().sum())

    return min((error(ridge), ridge) for ridge in ridges)
