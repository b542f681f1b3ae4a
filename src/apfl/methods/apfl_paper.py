"""APFL as published: a shared primary stream and a private refinement stream for each client, with fixed settings.

Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream Least Squares". (The name is also
used elsewhere for *Adaptive* personalised federated learning, Deng et al. 2020, which is another method.)

Departures from the paper, each of which leaves the result the same: clients send statistics instead of (A_k, G_k) and
the server adds instead of folding; a client with fewer rows than d_refinement solves its refinement in dual form.
The paper does not say how features are scaled; here each row is brought to length sqrt(l).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.maths.leaveout import fit_refinement
from apfl.maths.machine import over_clients
from apfl.maths.maps import Activation
from apfl.maths.normalise import Normalise
from apfl.maths.personalise import Rows, Shared, refine_all
from apfl.maths.ridge import solve
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import (
    ANY_TARGET,
    Width,
    mapped,
    mapped_and_summed,
    one_exchange,
    shared_normaliser,
    stream_maps,
    upload_bytes,
)
from apfl.methods._grid import alike
from apfl.models.dual_stream import DualStream


@dataclass(frozen=True)
class APFLPaper(Method):
    """APFL exactly as published: width, ridges and balance fixed for everyone."""

    d_primary: Width = 1024
    d_refinement: Width = 1024
    gamma: Annotated[float, Field(ge=0)] = 1.0
    beta: Annotated[float, Field(gt=0)] = 1.0
    balance: Annotated[float, Field(ge=0)] = 0.5
    activation_primary: Activation = "relu"
    activation_refinement: Activation = "relu"
    intercept: bool = False
    normalise: Normalise = "row"

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    predicts: ClassVar[Sequence[Target]] = ANY_TARGET

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d_primary, self.d_refinement

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        for _, only in self.together([self], clients, n_classes, seed):
            yield only

    def together(
        self, points: Sequence[APFLPaper], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[tuple[int, Round]]:
        """Those that agree in the primary solve it once; if only the balance differs they share the refinements."""
        for places in alike(points, without=("beta", "balance")):
            fitted = _Fitted(points[places[0]], clients, n_classes, seed)
            for same in alike([points[place] for place in places], without=("balance",)):
                shared = [places[i] for i in same]
                yield from zip(shared, fitted.rounds([points[place] for place in shared]), strict=True)


class _Fitted:
    """The primary stream of a federation, and what its clients fit on top of it."""

    def __init__(self, method: APFLPaper, clients: Sequence[Shard], n_classes: int, seed: int) -> None:
        self.method, self.clients, self.n_classes = method, clients, n_classes
        self.device = clients[0].features.device if clients else torch.device("cpu")
        self.normalise = shared_normaliser(method.normalise, clients)
        activations = (method.activation_primary, method.activation_refinement)
        widths = (method.d_primary, method.d_refinement)
        self.maps = stream_maps(clients[0].features, self.normalise, widths, activations, seed, method.intercept)
        self.phis, summed = mapped_and_summed(clients, n_classes, self.normalise, self.maps[0])
        self.primary = solve(summed, method.gamma)
        self.shared = Shared(self.primary, summed.class_counts)
        self.upload_bytes = upload_bytes(clients, summed)

    def refinements(self, clients: Sequence[Shard], phis: Sequence[Tensor], beta: float) -> list[Tensor]:
        if clients and clients[0].targets is not None:
            return over_clients(lambda k: self._refinement(clients[k], phis[k], beta), range(len(clients)), self.device)
        psi_of = mapped(clients, self.normalise, self.maps[1])

        def rows_of(k: int) -> Rows:
            return Rows(phis[k], psi_of(k), clients[k].labels)

        return refine_all(rows_of, [*map(len, clients)], self.shared, beta, over=over_clients)

    def _refinement(self, shard: Shard, phi: Tensor, beta: float) -> Tensor:
        """P_k (d_R, c) of targets that are no classes."""
        psi = self.maps[1](self.normalise(shard.features))
        return fit_refinement(psi, shard.responses(self.n_classes) - phi.double() @ self.primary, beta)

    def model(self, refinement: Tensor, balance: float) -> DualStream:
        primary_map, refinement_map = self.maps
        return DualStream(primary_map, self.primary, refinement_map, refinement, balance, self.normalise)

    def rounds(self, points: Sequence[APFLPaper]) -> Iterator[Round]:
        """A round for each of some settings that differ in nothing but the balance."""
        features, beta = self.clients[0].features, points[0].beta
        refinements = self.refinements(self.clients, self.phis, beta)
        for point in points:

            def admit(late: Sequence[Shard], balance: float = point.balance) -> list[DualStream]:
                phis = [self.maps[0](self.normalise(shard.features)) for shard in late]
                return [self.model(each, balance) for each in self.refinements(late, phis, beta)]

            yield one_exchange(
                [self.model(each, point.balance) for each in refinements], self.normalise, features.shape[1],
                up=self.upload_bytes, down=nbytes({"primary": self.primary}),
                admit=admit,
            )  # fmt: skip
