"""APFL that tunes itself: wide streams, every setting chosen in closed form, and a local prior.

The two streams are those of `apfl_paper` (Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream
Least Squares"). Beyond the paper: the width follows the number of rows, the normalisation the features' moments; gamma
is chosen by generalised cross-validation
of the summed statistics; beta, balance and tau by left-out hits of both streams, added over clients; the refinement is
fitted to left-out residuals (or, as in the paper, to in-sample ones); tau * log(p_k / p) is added to the scores.
No test row is seen.

Exchanges: one of statistics, one of tables of hits (at most 2,000 integers for each client).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.hits import Scope, grid
from apfl.maths.leaveout import Refinement, echo, leaving
from apfl.maths.maps import Activation
from apfl.maths.normalise import Normalise, needs_moments
from apfl.maths.personalise import Auto, Choice, Personal, Rows, personalise, solve_primary, width_for
from apfl.maths.wire import ECHO_BYTES, description_bytes, publication_bytes, scaling_bytes, table_bytes
from apfl.methods import Method, Round
from apfl.methods._analytic import mapped_and_summed, shared_normaliser, stream_maps, upload_bytes
from apfl.models.dual_stream import DualStream

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(gt=0, le=2**20)]


@dataclass(frozen=True)
class APFL(Method):
    """Shared primary stream, private refinement stream, every open setting chosen in closed form."""

    d_primary: Width | Auto = "auto"
    d_refinement: Width | Auto = "auto"
    gamma: Positive | Auto = "auto"
    beta: Positive | Auto = "auto"
    balance: NonNegative | Auto = "auto"
    tau: NonNegative | Auto = "auto"
    scope: Scope = "federation"
    refinement: Refinement = "cross-fitted"
    sketch: Annotated[int, Field(ge=0, le=2**16)] = 128  # columns of the leverage sketch; 0 sends the factor itself
    smoothing: Positive = 0.03
    activation_primary: Activation = "hardswish"
    activation_refinement: Activation = "hardswish"
    intercept: bool = False
    normalise: Normalise | Auto = "auto"

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True

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
        choice = Choice(self.beta, self.balance, self.tau, self.scope, self.refinement, self.smoothing)

        def rows_of(shard: Shard, phi: Tensor) -> Rows:
            psi = refinement_map(normalise(shard.features))
            return Rows(phi, psi, shard.labels, leaving(shard.features, shard.labels, shard.groups))

        def model(own: Personal) -> DualStream:
            return DualStream(
                primary_map, primary.weights, refinement_map, own.refinement, own.balance, normalise, prior=own.prior
            )

        personal, chosen = personalise(
            lambda k: rows_of(clients[k], phis[k]), len(clients), primary, choice, self.sketch, seed
        )
        chosen["normalise"] = normalise.how

        def admit(late: Sequence[Shard]) -> list[DualStream]:
            """The federation's settings; the primary has not seen their rows, so their residuals are left-out ones."""
            beta, balance, tau = self._settled(chosen)
            given = Choice(beta, balance, tau, refinement="in-sample", smoothing=self.smoothing)
            phi = [primary_map(normalise(shard.features)) for shard in late]
            fitted, _ = personalise(lambda k: rows_of(late[k], phi[k]), len(late), primary, given, self.sketch, seed)
            return [model(own) for own in fitted]

        models = [model(own) for own in personal]
        moments = needs_moments(self.normalise)
        each_up, each_down = self._bytes(summed.width, n_classes, choice)
        each_up += description_bytes(features.shape[1], moments=moments) + ECHO_BYTES
        yield Round(
            models,
            index=1 + moments + (choice.open and choice.scope != "client"),
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

    def _bytes(self, width: int, n_classes: int, choice: Choice) -> tuple[int, int]:
        """Each client's table of hits up; down, the publication and with scope="shrunk" the sum of the tables."""
        tried = grid(1.0, beta=choice.fixed("beta"), balance=choice.fixed("balance"), tau=choice.fixed("tau"))
        table = table_bytes(tried.shape)
        leverage = self.sketch if choice.open or choice.refinement == "cross-fitted" else None
        down = publication_bytes(width, n_classes, sketch=leverage)
        if choice.scope == "shrunk":
            down += table
        return table if choice.open and choice.scope != "client" else 0, down
