"""APFL that tunes itself: wide streams, every setting chosen in closed form, and a local prior.

The two streams are those of `apfl_paper` (Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream
Least Squares"). Beyond the paper: the width follows the number of rows; gamma is chosen by generalised cross-validation
of the summed statistics; beta, balance and tau by left-out hits of both streams, added over clients; the refinement is
fitted to left-out residuals (or, as in the paper, to in-sample ones); tau * log(p_k / p) is added to the scores.
No test row is seen.

Exchanges: one of statistics, one of tables of hits (at most 2,000 integers for each client).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from apfl.exchange import message_bytes
from apfl.federation import Round, Shard
from apfl.leaveout import Refinement
from apfl.maps import Activation
from apfl.methods._primary import mapped_and_summed, moments_bytes, shared_normaliser, stream_maps
from apfl.normalise import Normalise
from apfl.personal import Auto, Choice, Rows, personalise, solve_primary, width_for
from apfl.streams import DualStream
from apfl.tables import Scope, grid

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(gt=0, le=2**20)]


@dataclass(frozen=True)
class APFL:
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
    normalise: Normalise = "root"

    personal: ClassVar[bool] = True

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        features = clients[0].features
        d_primary = width_for(sum(map(len, clients))) if self.d_primary == "auto" else self.d_primary
        d_refinement = d_primary if self.d_refinement == "auto" else self.d_refinement
        activations = (self.activation_primary, self.activation_refinement)
        widths = (d_primary, d_refinement)
        primary_map, refinement_map = stream_maps(features, widths, activations, seed, self.intercept)
        phis, summed = mapped_and_summed(clients, n_classes, normalise, primary_map)
        primary = solve_primary(summed, self.gamma)
        choice = Choice(self.beta, self.balance, self.tau, self.scope, self.refinement, self.smoothing)

        def rows_of(k: int) -> Rows:
            shard = clients[k]
            return Rows(phis[k], refinement_map(normalise(shard.features)), shard.labels, shard.groups)

        personal, chosen = personalise(rows_of, len(clients), primary, choice, self.sketch, seed)
        models = [
            DualStream(
                primary_map, primary.weights, refinement_map, own.refinement, own.balance, normalise, prior=own.prior
            )
            for own in personal
        ]
        cost = self._cost(len(clients), summed.width, n_classes, features.shape[1], choice)
        yield Round(models, chosen=chosen, **cost)  # type: ignore[arg-type]

    def _cost(self, n_clients: int, width: int, n_classes: int, n_features: int, choice: Choice) -> dict[str, int]:
        """Exchanges and bytes: statistics up; primary, sketch and class totals down; tables up; the choice down."""
        prelude = moments_bytes(self.normalise, n_features)
        up, down = message_bytes(width, n_classes) + prelude, 8 * width * n_classes + prelude
        if choice.open or choice.refinement == "cross-fitted":
            down += 8 * (width * self.sketch if self.sketch else width * (width + 1) // 2)
        if choice.open or choice.fixed("tau"):
            down += 8 * n_classes
        if choice.open:
            tried = grid(1.0, beta=choice.fixed("beta"), balance=choice.fixed("balance"), tau=choice.fixed("tau"))
            table = tried.shape[0] * tried.shape[1] * tried.shape[2]
            up += 8 * table if choice.scope != "client" else 0
            down += {"federation": 3, "client": 0, "shrunk": table}[choice.scope] * 8
        exchanges = 1 + bool(prelude) + (choice.open and choice.scope != "client")
        return {"index": exchanges, "bytes_up": n_clients * up, "bytes_down": n_clients * down}
