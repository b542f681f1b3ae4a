"""APFL that tunes itself: wide streams, every setting chosen in closed form, and a local prior.

The two streams are those of `apfl_paper` (Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream
Least Squares"). Beyond the paper: the width follows the number of rows, the normalisation the features' moments; gamma
is chosen by generalised cross-validation of the summed statistics; beta, balance and tau by left-out hits of both
streams, added over clients; tau * log(p_k / p) is added to the scores. No test row is seen.

Exchanges: one of statistics, one of tables of hits (at most 2,000 integers for each client).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.hits import Scope
from apfl.maths.leaveout import echo, leaving
from apfl.maths.machine import over_clients
from apfl.maths.maps import Activation
from apfl.maths.normalise import Normalise, needs_moments
from apfl.maths.personalise import Auto, Choice, Personal, Rows, personalise, refine, solve_primary, width_for
from apfl.maths.wire import ECHO_BYTES, description_bytes, publication_bytes, scaling_bytes, table_bytes
from apfl.methods import Method, Round
from apfl.methods._analytic import mapped_and_summed, shared_normaliser, stream_maps, upload_bytes
from apfl.models.dual_stream import DualStream

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(gt=0, le=2**20)]
REMOVED = {
    "cross-fitted": "refinement='cross-fitted' was removed: it changed nothing (docs/results/auto.md). The refinement "
    "is fitted to in-sample residuals; leave the setting out, or give 'in-sample'",
    "shrunk": "scope='shrunk' was removed: it gained nothing (docs/results/auto.md). Use 'federation' or 'client'",
}


def _not_removed(option: Any) -> Any:
    if isinstance(option, str) and option in REMOVED:
        raise PydanticCustomError("removed", REMOVED[option])
    return option


@dataclass(frozen=True)
class APFL(Method):
    """Shared primary stream, private refinement stream, every open setting chosen in closed form."""

    d_primary: Width | Auto = "auto"
    d_refinement: Width | Auto = "auto"
    gamma: Positive | Auto = "auto"
    beta: Positive | Auto = "auto"
    balance: NonNegative | Auto = "auto"
    tau: NonNegative | Auto = "auto"
    scope: Annotated[Scope, BeforeValidator(_not_removed)] = "federation"
    refinement: Annotated[Literal["in-sample"], BeforeValidator(_not_removed)] = "in-sample"
    sketch: Annotated[int, Field(ge=0, le=2**16)] = 128  # columns of the leverage sketch; 0: exact, in process alone
    smoothing: Positive = 0.03
    activation_primary: Activation = "hardswish"
    activation_refinement: Activation = "hardswish"
    intercept: bool = False
    normalise: Normalise | Auto = "auto"

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for option in (self.scope, self.refinement):
            if option in REMOVED:
                raise InputError(REMOVED[option])

    @property
    def choice(self) -> Choice:
        """The settings of the refinement, and whose rows choose them."""
        return Choice(self.beta, self.balance, self.tau, self.scope, self.smoothing)

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        """d_P and d_R of a federation with so many rows and features."""
        d_primary = width_for(n_samples, n_features) if self.d_primary == "auto" else self.d_primary
        return d_primary, d_primary if self.d_refinement == "auto" else self.d_refinement

    @property
    def chooses(self) -> bool:
        return "auto" in (self.beta, self.tau)

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        features = clients[0].features
        activations = (self.activation_primary, self.activation_refinement)
        widths = self.widths(sum(map(len, clients)), features.shape[1])
        primary_map, refinement_map = stream_maps(features, normalise, widths, activations, seed, self.intercept)
        together = [leaving(shard.features, shard.labels, shard.groups) for shard in clients]
        phis, summed = mapped_and_summed(clients, n_classes, normalise, primary_map)
        n_copies = sum(int(own.copies.sum()) for own in together)
        summed = replace(summed, n_copies=n_copies, echo=reduce(add, (echo(shard.features) for shard in clients)))
        primary = solve_primary(summed, self.gamma)

        def rows_of(k: int) -> Rows:
            psi = refinement_map(normalise(clients[k].features))
            return Rows(phis[k], psi, clients[k].labels, *together[k])

        def late_rows(shard: Shard) -> Rows:
            z = normalise(shard.features)
            seen = torch.zeros_like(shard.labels, dtype=torch.bool)
            return Rows(primary_map(z), refinement_map(z), shard.labels, seen=seen)

        def model(own: Personal) -> DualStream:
            return DualStream(
                primary_map, primary.weights, refinement_map, own.refinement, own.balance, normalise, prior=own.prior
            )

        made = personalise(rows_of, len(clients), primary, self.choice, self.sketch, seed, over=over_clients)
        chosen = {**made.account, "normalise": normalise.how}

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            """With the federation's settings, as a site that only receives."""
            setting = self._settled(chosen)
            return [model(refine(late_rows(shard), primary.shared, setting, self.smoothing)) for shard in late]

        models = [model(own) for own in made.clients]
        moments = needs_moments(self.normalise)
        each_up, each_down = self._bytes(summed.width, n_classes)
        each_up += description_bytes(features.shape[1], moments=moments) + ECHO_BYTES
        yield Round(
            models,
            index=1 + moments + (self.choice.open and self.scope != "client"),
            bytes_up=sum(upload_bytes(clients, summed)) + len(clients) * each_up,
            bytes_down=len(clients) * (each_down + scaling_bytes(normalise)),
            chosen=chosen,
            admit=admit,
        )

    @staticmethod
    def _settled(chosen: Mapping[str, Any]) -> tuple[float, float, float]:
        """beta, balance and tau where all clients have the same."""
        if "beta" not in chosen:
            raise InputError("clients differ in their settings, so a later one has none: use scope='federation'")
        return chosen["beta"], chosen["balance"], chosen["tau"]

    def _bytes(self, width: int, n_classes: int) -> tuple[int, int]:
        """Each client's table of hits up, and the publication down."""
        sends_table = self.choice.open and self.scope != "client"
        down = publication_bytes(width, n_classes, sketch=self.sketch if self.choice.open else None)
        return table_bytes(self.choice.grid(1.0).shape) if sends_table else 0, down
