"""APFL that tunes itself: one map of landmarks, every setting chosen in closed form, and a local prior.

The two streams are those of `apfl_paper` (Fan et al., "APFL: Analytic Personalized Federated Learning via Dual-Stream
Least Squares"). Beyond the paper: both streams share one map of landmarks, whose number follows the number of rows, and
statistics travel as integers (`map="random"`: two random maps, in float64); a pilot chooses the normalisation; gamma is
chosen by generalised cross-validation of the summed statistics; beta, balance, tau and the weight on the primary by
left-out hits of both streams, added over clients; tau * log(p_k / p) is added to the scores. No test row is seen.

With numbers or several labels as targets it averages the models of `apfl.methods._numbers`.

Exchanges: one of moments, two of the pilot, one of the moments behind the landmarks, one of statistics, one of tables
of hits (at most 2,000 integers for each client). Settings that are given save those that choose them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.errors import InputError
from apfl.maths.hits import Scope
from apfl.maths.integers import bits_for
from apfl.maths.machine import over_clients, too_much
from apfl.maths.maps import Activation, FeatureMap
from apfl.maths.normalise import Normalise, needs_moments
from apfl.maths.personalise import (
    Auto,
    Choice,
    Personal,
    Primary,
    Rows,
    landmarks_for,
    personalise,
    refine,
    solve_primary,
    width_for,
)  # fmt: skip
from apfl.maths.wire import ECHO_BYTES, Traffic, description_bytes, publication_bytes, scaling_bytes, table_bytes
from apfl.methods import Method, Round
from apfl.methods._analytic import (
    ANY_TARGET,
    Echoes,
    Repeated,
    mapped_and_summed,
    repeated_rows,
    shared_normaliser,
    stream_maps,
    upload_bytes,
)  # fmt: skip
from apfl.methods._number_rounds import number_round
from apfl.methods._numbers import Asked
from apfl.methods._pilot import Pilot, pilot
from apfl.methods._private import PRIVATE_BITS, WIDTH, Noise, Privacy, check_private, private_streams
from apfl.methods._streams import COLUMNS, PUBLIC, Published, Streams, folded, landmark_streams
from apfl.methods._when_asked import WhenAsked
from apfl.models.dual_stream import DualStream
from apfl.models.file import Model
from apfl.models.landmark import LandmarkModel

NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Width = Annotated[int, Field(gt=0, le=2**20)]
# '0' on the command line is a text, which no literal equals.
Bits = Annotated[
    Literal[0] | Annotated[int, Field(ge=8, le=32)], BeforeValidator(lambda given: 0 if given == "0" else given)
]
LANDMARKS = ("federation", "free")
OF_CLASSES = (  # settings that numbers and several labels do not have
    "map", "bits", "epsilon", "delta", "noise", "colluders", "landmarks", "tau", "smoothing", "normalise",
    "d_refinement", "scope", "sketch", "activation_primary", "activation_refinement", "intercept",
)  # fmt: skip
EXACT = {"bits": (0,)}  # what they always have, given or not
OF_RANDOM_MAPS = {"bits": 0, "weight": 1.0}  # what auto means with them
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
    weight: Share | Auto = "auto"  # on the primary: E = Y - weight Phi G; 0: going alone; auto is 1 with random maps
    scope: Annotated[Scope, BeforeValidator(_not_removed)] = "federation"
    refinement: Annotated[Literal["in-sample"], BeforeValidator(_not_removed)] = "in-sample"
    sketch: Annotated[int, Field(ge=0, le=2**16)] = 128  # columns of the leverage sketch; 0: exact, in process alone
    smoothing: Positive = 0.03
    activation_primary: Activation = "hardswish"
    activation_refinement: Activation = "hardswish"
    intercept: bool = False
    normalise: Normalise | Auto = "auto"
    map: Literal["landmarks", "random"] = "landmarks"  # one map for both streams (`apfl.maths.landmarks`), or two
    landmarks: str = "federation"  # drawn from everyone's moments, from nobody's (free), or from those of a public FILE
    bits: Bits | Auto = "auto"  # of an entry of the statistics; auto: as few as do no harm; 0: float64
    epsilon: Positive | Literal["none"] = "none"  # of what is released, unit one row; moments take a tenth of it
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5  # beside epsilon; far below one over the number of rows
    noise: Noise = "central"  # under epsilon: once at a server that is trusted, or in shares of the clients
    colluders: Annotated[int, Field(ge=0)] = 0  # clients whose shares of the noise the server may know

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    predicts: ClassVar[Sequence[Target]] = ANY_TARGET

    def __post_init__(self) -> None:
        for option in (self.scope, self.refinement):
            if option in REMOVED:
                raise InputError(REMOVED[option])
        if self.landmarks not in (*LANDMARKS, PUBLIC) and not Path(self.landmarks).is_file():
            raise InputError(
                f"landmarks={self.landmarks} given; allowed: {' or '.join(LANDMARKS)}, or a file of public features"
            )
        if self.map == "random":
            for name, usual in OF_RANDOM_MAPS.items():
                if getattr(self, name) == "auto":
                    object.__setattr__(self, name, usual)
        if self.bits and self.map != "landmarks":
            raise InputError(f"bits={self.bits} with map='random': only rows of the landmark map have a bounded length")
        if self.map == "landmarks":
            self._check_one_map()
        if self.private:
            check_private(self.map, self.landmarks, self.integers([1]), self.normalise)

    def _check_one_map(self) -> None:
        """Refuse what only random maps have, which would do nothing."""
        given = {name: getattr(self, name) for name in ("activation_primary", "activation_refinement", "intercept")}
        if self.d_refinement != self.d_primary:
            given["d_refinement"] = self.d_refinement
        for name, value in given.items():
            if value != getattr(APFL, name):
                raise InputError(
                    f"{name}={value} with map='landmarks' given: both streams have one map of d_primary landmarks, "
                    "without activation and intercept. Leave the setting out, or use map='random'"
                )

    @property
    def private(self) -> bool:
        """Whether the sums have noise."""
        return self.epsilon != "none"

    @property
    def choice(self) -> Choice:
        """The settings of the refinement, and whose rows choose them: under epsilon no tables are added up."""
        scope: Scope = "client" if self.private else self.scope
        return Choice(self.beta, self.balance, self.tau, scope, self.smoothing, self.weight, cautious=self.private)

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        """d_P and d_R of a federation with so many rows and features."""
        d_primary = self._width(n_samples, n_features) if self.d_primary == "auto" else self.d_primary
        return d_primary, d_primary if self.d_refinement == "auto" else self.d_refinement

    def _width(self, n_samples: int, n_features: int) -> int:
        if self.private:
            return WIDTH
        return (landmarks_for if self.map == "landmarks" else width_for)(n_samples, n_features)

    def integers(self, sizes: Sequence[int], width: int = 1) -> int:
        """Bits of an entry of the statistics, with clients of these sizes; 0: float64."""
        if self.bits != "auto":
            return self.bits
        return PRIVATE_BITS if self.private else bits_for(sum(sizes), len(sizes), max(sizes, default=1), width)

    @property
    def chooses(self) -> bool:
        return "auto" in (self.beta, self.tau, self.weight)

    def streams(
        self, clients: Sequence[Shard], n_classes: int, seed: int, together: Sequence[Repeated] | None = None
    ) -> Streams:
        """Both maps, every client's rows through the first of them, and the sum of their statistics."""
        if self.map == "landmarks":
            return self._landmark_streams(clients, n_classes, seed, together or repeated_rows(clients))
        normalise, features = shared_normaliser(self.normalise, clients), clients[0].features
        widths = self.widths(sum(map(len, clients)), features.shape[1])
        activations = (self.activation_primary, self.activation_refinement)
        maps = stream_maps(features, normalise, widths, activations, seed, self.intercept)
        phis, stats = mapped_and_summed(clients, n_classes, normalise, maps[0])
        return Streams(normalise, *maps, phis, stats, Traffic({"statistics": upload_bytes(clients, stats)}))

    def _landmark_streams(
        self, clients: Sequence[Shard], n_classes: int, seed: int, together: Sequence[Repeated]
    ) -> Streams:
        sizes = [*map(len, clients)]
        d, _ = self.widths(sum(sizes), clients[0].features.shape[1] if clients else 0)
        bits = self.integers(sizes, d)
        if self.epsilon != "none":
            asked = Privacy(self.epsilon, self.delta, self.noise, self.colluders)
            return private_streams(clients, n_classes, self.normalise, d, self.landmarks, bits, seed, asked)
        first: Pilot | None = None
        if self.normalise == "auto":
            first = pilot(clients, n_classes, self.choice, self.sketch, bits, seed)
        normalise = first.normalise if first else shared_normaliser(self.normalise, clients)
        repeats = Echoes(together)
        made = landmark_streams(clients, n_classes, normalise, d, self.landmarks, bits, seed, repeats)
        return first.before(made) if first else made

    def numbers(self, target: Target) -> Asked:
        """What of the settings numbers and several labels have; the others are refused if they are given."""
        for name in OF_CLASSES:
            if getattr(self, name) not in (getattr(APFL, name), *EXACT.get(name, ())):
                raise InputError(
                    f"{name}={getattr(self, name)} given, which is of no use for {target}: leave it out. The settings "
                    "for it are d_primary (landmarks), gamma, beta, balance and weight"
                )
        given = {name: getattr(self, name) for name in ("gamma", "beta", "balance", "weight")}
        if self.weight == APFL.weight:  # of classes; numbers are averaged over going alone
            del given["weight"]
        fixed = {name: value for name, value in given.items() if value != "auto"}
        width = None if self.d_primary == "auto" else self.d_primary
        return Asked(width=width, labels=target == "multilabel", **fixed)

    def check_target(self, target: Target) -> None:
        if target != "classification":
            self.numbers(target)

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        if clients and clients[0].targets is not None:
            yield number_round(clients, self.numbers(clients[0].target), seed)
            return
        together = repeated_rows(clients)
        made_of = self.streams(clients, n_classes, seed, together)
        normalise, primary_map, refinement_map = made_of.normalise, made_of.primary_map, made_of.refinement_map
        phis, psi_of = made_of.phis, made_of.psi_of(clients)
        primary = self._solved(made_of, together)

        def rows_of(k: int) -> Rows:
            return Rows(phis[k], psi_of(k), clients[k].labels, together[k].groups, together[k].copies)

        def late_rows(shard: Shard) -> Rows:
            phi = primary_map(normalise(shard.features))
            seen = torch.zeros_like(shard.labels, dtype=torch.bool)
            return Rows(phi, made_of.psi(shard.features, phi), shard.labels, seen=seen)

        def models(personal: Sequence[Personal]) -> list[DualStream] | list[LandmarkModel]:
            if not isinstance(primary_map, FeatureMap) or not isinstance(refinement_map, FeatureMap):  # one for both
                weights = (own.weight * primary.weights + own.balance * own.refinement for own in personal)
                return [*folded(made_of, weights, [own.prior for own in personal])]
            return [
                DualStream(
                    primary_map, primary.weights if own.weight == 1 else own.weight * primary.weights, refinement_map,
                    own.refinement, own.balance, normalise, prior=own.prior,
                )
                for own in personal
            ]  # fmt: skip

        held = not too_much(2 * 8 * len(clients) * made_of.stats.width * n_classes, primary.weights.device)
        sizes = [*map(len, clients)]
        made = personalise(rows_of, sizes, primary, self.choice, self.sketch, seed, over=over_clients, fit=held)
        chosen = {**made.account, "normalise": normalise.how}

        def fitted(ks: Sequence[int]) -> Sequence[Model]:
            """The models of these clients, made again from their rows."""
            own = [made.clients[k] for k in ks]
            return models(
                [
                    refine(rows_of(k), primary.shared, each.setting, self.smoothing, each.weight)
                    for k, each in zip(ks, own, strict=True)
                ]
            )

        def admit(late: Sequence[Shard]) -> list[DualStream] | list[LandmarkModel]:
            """With the federation's settings, as a site that only receives; under noise with their own."""
            if self.private:
                own = personalise(
                    lambda k: late_rows(late[k]), [*map(len, late)], primary, self.choice, self.sketch, seed
                )
                return models(own.clients)
            setting, weight = self._settled(chosen), chosen.get("weight", 1.0)
            return models([refine(late_rows(shard), primary.shared, setting, self.smoothing, weight) for shard in late])

        traffic = made_of.traffic + self._traffic(clients, made_of, n_classes)
        yield Round(
            models(made.clients) if held else WhenAsked(len(clients), fitted, max(1, COLUMNS // n_classes)),
            index=traffic.rounds,
            bytes_up=traffic.total_up,
            bytes_down=traffic.total_down(len(clients)),
            chosen=chosen | made_of.account | {"bytes": traffic.account, "precision": made_of.precision},
            admit=admit,
            primary=next(folded(made_of, [primary.weights], [None])) if self.map == "landmarks" else None,
        )

    def _solved(self, made_of: Streams, together: Sequence[Repeated]) -> Primary:
        """The primary of the sums; under noise of these alone, with the gamma that it asks for."""
        if made_of.gamma is not None:
            gamma = made_of.gamma if self.gamma == "auto" else self.gamma
            return Published.of(solve_primary(made_of.stats, gamma))
        if made_of.bits:  # which tell the repeated rows
            return Published.of(solve_primary(made_of.stats, self.gamma))
        n_copies, echoes = sum(own.n_copies for own in together), reduce(add, (own.echo for own in together))
        return solve_primary(replace(made_of.stats, n_copies=n_copies, echo=echoes), self.gamma)

    @staticmethod
    def _settled(chosen: Mapping[str, Any]) -> tuple[float, float, float]:
        """beta, balance and tau where all clients have the same."""
        if "beta" not in chosen:
            raise InputError("clients differ in their settings, so a later one has none: use scope='federation'")
        return chosen["beta"], chosen["balance"], chosen["tau"]

    def _traffic(self, clients: Sequence[Shard], made_of: Streams, n_classes: int) -> Traffic:
        """What travels beside the statistics and what went before them: descriptions, tables, the publication."""
        choice, n_clients = self.choice, len(clients)
        moments = needs_moments(self.normalise) and not self.private
        up = {"description": [description_bytes(clients[0].features.shape[1], moments=moments)] * n_clients}
        if not made_of.bits:  # integers tell the echo, and none is sent under noise
            up["echo"] = [ECHO_BYTES] * n_clients
        sends_table = choice.open and choice.scope != "client"
        if sends_table:
            up["table"] = [len(choice.weights) * table_bytes(choice.grid(1.0).shape)] * n_clients
        dtype = torch.int16 if made_of.bits else torch.float64
        sketch = self.sketch if choice.open else None
        down = {"publication": publication_bytes(made_of.stats.width, n_classes, sketch=sketch, dtype=dtype)}
        if scaling := scaling_bytes(made_of.normalise):
            down["scaling"] = scaling
        return Traffic(up, down, 1 + moments + sends_table)
