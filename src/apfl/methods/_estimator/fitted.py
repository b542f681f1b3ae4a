"""What `APFLClassifier` has learnt: sums, maps and the clients' models. A change makes a new one.

statistics   sums over the rows of all clients; a client that joins adds its own, one that leaves takes them away
models       fitted again whenever the sums change, for the clients whose rows are at hand
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.leaveout import leaving, with_copies
from apfl.maths.machine import over_clients
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser, check_features
from apfl.maths.personalise import Personal, Primary, Rows, personalise, solve_primary
from apfl.maths.refine import weighted
from apfl.maths.ridge import Statistics, one_hot, statistics, total, weighted_statistics
from apfl.methods._analytic import shared_normaliser, stream_maps
from apfl.methods._estimator.client_rows import digest
from apfl.methods._pilot import pilot
from apfl.methods._streams import Map, draw_landmarks, landmark_origin
from apfl.methods.apfl import APFL
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel

__all__ = ["ClassWeight", "Fitted", "Stream", "begin", "encode", "is_text", "plain"]

ClassWeight = Literal["balanced"] | Mapping[Any, float] | None

Stream = DualStream | LandmarkModel  # a client's model, or the primary stream alone


@dataclass(frozen=True, eq=False)
class Fitted:
    """Classes, maps and normalisation, fixed by the first rows, and what all rows so far made of them."""

    classes: np.ndarray
    normaliser: Normaliser
    maps: tuple[Map, Map]  # of landmarks there is one, for both streams
    keep_rows: bool
    statistics: Statistics | None = None  # None before the first rows, and in what was loaded from a file
    shared: Stream | None = None  # the primary stream alone
    models: Mapping[Hashable, Stream] = field(default_factory=dict)
    rows: Mapping[Hashable, Shard] = field(default_factory=dict)  # of the clients whose rows were kept
    digests: Mapping[Hashable, str] = field(default_factory=dict)  # of the rows of the others
    account: Mapping[str, Any] = field(default_factory=dict)  # the settings that were chosen
    begun: Mapping[str, Any] = field(default_factory=dict)  # what chose the normalisation and the landmarks
    class_weight: ClassWeight = None  # as it was given
    per_class: Tensor | None = None  # (c,): what it makes a row of each class weigh

    def joined(self, new: Mapping[Hashable, Shard], method: APFL) -> Fitted:
        """With more rows, of clients that are there or of new ones."""
        check_features(self.normaliser.how, [rows.features for rows in new.values()])
        for client in new:
            if client in self.models and client not in self.rows:
                raise InputError(
                    f"client {client!r} is there already and its rows were not kept (keep_rows=False): "
                    "remove it and add it again with all its rows"
                )
        merged = {client: self.rows[client] + rows if client in self.rows else rows for client, rows in new.items()}
        kept = {"rows": {**self.rows, **merged}} if self.keep_rows else {"digests": self._with_digests(merged)}
        state = replace(self, **kept)._weighing_classes({**self.rows, **merged})
        if self.class_weight == "balanced":
            return replace(state, statistics=state._summed({**self.rows, **merged})).published(method, merged)
        added = state._summed(new)
        summed = added if self.statistics is None else self.statistics + added
        return replace(state, statistics=summed).published(method, merged)

    def without(self, client: Hashable, given: Shard | None, method: APFL) -> Fitted:
        """As if this client had never been there; ``given`` are its rows if they were not kept."""
        assert self.statistics is not None, "what was loaded has no sums"
        gone = self.rows.get(client, given)
        assert gone is not None, "the caller asks for rows that were not kept"
        kept = {
            name: {other: value for other, value in getattr(self, name).items() if other != client}
            for name in ("models", "rows", "digests")
        }
        state = replace(self, **kept)._weighing_classes(kept["rows"])  # type: ignore[arg-type]
        balanced = self.class_weight == "balanced"
        left = state._summed(kept["rows"]) if balanced else self.statistics - self._statistics(gone)
        return replace(state, statistics=left).published(method)

    def published(self, method: APFL, given: Mapping[Hashable, Shard] | None = None) -> Fitted:
        """Solve the primary; refit every client whose rows are at hand; choose the temperatures."""
        assert self.statistics is not None, "there are no rows yet"
        primary = solve_primary(self.statistics, method.gamma)
        at_hand = {**self.rows, **(given or {})}
        temperature = None if self.shared is None else self.shared.temperature
        models, account = dict(self.models), self.account
        if at_hand:
            fitted, account, temperature = self._fit_clients(at_hand, primary, method)
            models |= fitted
        shared = replace(self._stream(primary.weights), temperature=temperature)
        return replace(self, shared=shared, models=models, account=account)

    def same_rows(self, client: Hashable, rows: Shard) -> bool:
        """Whether these are the rows that the client joined with, as far as is known."""
        return client not in self.digests or digest(rows, self.classes) == self.digests[client]

    def with_classes_of(self, labels: np.ndarray) -> Fitted:
        """With the classes of these labels too: zero columns in the sums, as if they had been known from the start.

        Models of clients whose rows are not at hand rule the new classes out until they are fitted again.
        """
        if is_text(labels) != is_text(self.classes):
            raise InputError(
                f"labels such as {plain(labels[0])!r} given for classes such as {plain(self.classes[0])!r}; give "
                "both as text or both as numbers"
            )
        classes = np.union1d(self.classes, labels)
        if len(classes) == len(self.classes):
            return self
        assert self.statistics is not None, "what was loaded has no sums"
        place = torch.from_numpy(np.searchsorted(classes, self.classes))
        old = self.statistics
        summed = replace(
            old,
            crosscorrelation=_spread(old.crosscorrelation, place, len(classes)),
            class_counts=_spread(old.class_counts, place, len(classes)),
        )
        rows = {client: replace(own, labels=place[own.labels]) for client, own in self.rows.items()}
        models = {client: _ruling_out(model, place, len(classes)) for client, model in self.models.items()}
        return replace(self, classes=classes, statistics=summed, rows=rows, models=models)

    def _with_digests(self, rows: Mapping[Hashable, Shard]) -> dict[Hashable, str]:
        return {**self.digests, **{client: digest(own, self.classes) for client, own in rows.items()}}

    def _weighing_classes(self, everyone: Mapping[Hashable, Shard]) -> Fitted:
        """With the weights of classes that these rows, all there are, call for."""
        if self.class_weight is None:
            return self
        if isinstance(self.class_weight, Mapping):
            given = [float(self.class_weight.get(plain(name), 1.0)) for name in self.classes]
            return replace(self, per_class=torch.tensor(given, dtype=torch.float64))
        if self.statistics is not None and not self.keep_rows:
            raise InputError(
                "class_weight='balanced' given, which weighs all rows anew when clients join or leave, and their rows "
                "were not kept (keep_rows=False); keep them, or give class_weight as a dict"
            )
        counts = torch.zeros(len(self.classes), dtype=torch.float64)
        for rows in everyone.values():
            counts.index_add_(0, rows.labels, rows.weighing)
        there = counts > 0
        return replace(self, per_class=torch.where(there, counts.sum() / (int(there.sum()) * counts), 1.0))

    def _summed(self, clients: Mapping[Hashable, Shard]) -> Statistics:
        return total(self._statistics(rows) for rows in clients.values())

    def _statistics(self, rows: Shard) -> Statistics:
        phi, targets = self.maps[0](self.normaliser(rows.features)), one_hot(rows.labels, len(self.classes))
        copies, weights = leaving(rows.features, rows.labels, None).copies, self._weights(rows)
        found = statistics(phi, targets) if weights is None else weighted_statistics(phi, targets, weights)
        return with_copies(found, rows.features, copies)

    def _weights(self, rows: Shard) -> Tensor | None:
        """What rows weigh in both ridges, (n,): their own weight times that of their class."""
        if self.per_class is None:
            return rows.weights
        return rows.weighing * self.per_class[rows.labels]

    def _weights_of(self, clients: Sequence[Shard]) -> list[Tensor | None]:
        """Of each client; if rows of one have weights, those of all."""
        found = [self._weights(rows) for rows in clients]
        if all(own is None for own in found):
            return found
        return [rows.weighing if own is None else own for rows, own in zip(clients, found, strict=True)]

    def _worth(self, clients: Sequence[Shard]) -> Tensor | None:
        """What a left-out row of each class counts that is right, (c,): one on average, so that a share is a share."""
        if self.per_class is None:
            return None
        every = torch.cat([self.per_class[rows.labels] for rows in clients])
        return self.per_class / every.mean()

    def _stream(self, primary: Tensor, own: Personal | None = None) -> Stream:
        """The model of a client with this refinement, or the primary alone."""
        primary_map, refinement_map = self.maps
        if isinstance(primary_map, FeatureMap) and isinstance(refinement_map, FeatureMap):
            if own is None:
                return DualStream(primary_map, primary, normaliser=self.normaliser)
            shared = primary if own.weight == 1 else own.weight * primary
            return DualStream(
                primary_map, shared, refinement_map, own.refinement, own.balance, self.normaliser, prior=own.prior
            )
        assert not isinstance(primary_map, FeatureMap), "one map of landmarks for both streams"
        if own is None:
            return LandmarkModel(primary_map, primary_map.fold(primary), self.normaliser)
        weights = primary_map.fold(own.weight * primary + own.balance * own.refinement)
        return LandmarkModel(primary_map, weights, self.normaliser, prior=own.prior)

    def _fit_clients(
        self, at_hand: Mapping[Hashable, Shard], primary: Primary, method: APFL
    ) -> tuple[dict[Hashable, Stream], Mapping[str, Any], float]:
        """Models of these clients, what was chosen, and the temperature of the primary alone."""
        clients = list(at_hand)
        weights = self._weights_of([*at_hand.values()])
        worth = self._worth([*at_hand.values()])

        def rows_of(k: int) -> Rows:
            rows = at_hand[clients[k]]
            z = self.normaliser(rows.features)
            together = leaving(rows.features, rows.labels, rows.groups)
            phi = self.maps[0](z)
            psi = phi if self.maps[1] is self.maps[0] else self.maps[1](z)
            importance = None if worth is None else worth[rows.labels]
            return weighted(Rows(phi, psi, rows.labels, *together), weights[k], importance)

        made = personalise(
            rows_of,
            [len(at_hand[client]) for client in clients],
            primary,
            method.choice,
            sketch_width=0,
            seed=0,
            over=over_clients,
            keep_scores=True,
        )
        labels = np.concatenate([at_hand[client].labels.numpy() for client in clients])
        given = [own for own in weights if own is not None]
        each = torch.cat(given).numpy() if given else None
        pairs = list(zip(made.clients, made.scores, strict=True))
        temperature = _temperature(
            torch.cat([left.at(own.setting, own.weight) for own, left in pairs]).numpy(), labels, each
        )
        models = {
            client: replace(self._stream(primary.weights, own), temperature=temperature, about={"client": str(client)})
            for client, own in zip(clients, made.clients, strict=True)
        }
        account = {**self.begun, **made.account, "normalise": self.normaliser.how}
        return models, account, _temperature(torch.cat([left.alone for left in made.scores]).numpy(), labels, each)


def begin(
    classes: np.ndarray,
    clients: Sequence[Shard],
    method: APFL,
    activations: tuple[str, str],
    seed: int,
    keep_rows: bool,
) -> Fitted:
    """Maps and normalisation for clients like these, however their rows weigh; none has joined yet."""
    n_rows, features = sum(map(len, clients)), clients[0].features
    widths = method.widths(n_rows, features.shape[1])
    if method.map == "random":
        normalise = shared_normaliser(method.normalise, clients)
        maps = stream_maps(features[:1], normalise, widths, activations, seed, method.intercept)
        return Fitted(classes, normalise, maps, keep_rows)
    if method.normalise == "auto":
        first = pilot(clients, len(classes), method.choice, 0, 0, seed)
        normalise, account = first.normalise, {"pilot": first.account}
    else:
        normalise, account = shared_normaliser(method.normalise, clients), {}
    origin = landmark_origin(clients, normalise, method.landmarks, 0, seed)
    drawn, _ = draw_landmarks(widths[0], seed, origin.spread, features)
    return Fitted(classes, normalise, (drawn, drawn), keep_rows, begun=account | origin.account)


def encode(labels: np.ndarray, classes: np.ndarray) -> Tensor:
    """Labels (n,) as places in the classes."""
    index = np.searchsorted(classes, labels).clip(max=len(classes) - 1)
    if not np.array_equal(classes[index], labels):
        strange = labels[classes[index] != labels][0]
        raise InputError(
            f"label {plain(strange)!r} is not among the classes {classes.tolist()}; name them all in the first call "
            "(classes=), or bring it with a new client (add_client)"
        )
    return torch.from_numpy(index)


def _temperature(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray | None) -> float:
    """argmin over T of the log-loss of softmax(scores / T)."""

    def loss(log_t: float) -> float:
        scaled = scores / np.exp(log_t)
        return float(np.average(logsumexp(scaled, axis=1) - scaled[np.arange(len(labels)), labels], weights=weights))

    return float(np.exp(minimize_scalar(loss, bounds=(-7.0, 3.0), method="bounded").x))


def _spread(columns: Tensor, place: Tensor, n_classes: int, fill: float = 0.0) -> Tensor:
    """The last dimension widened to ``n_classes``: what was in column i stands in ``place[i]``."""
    wide = columns.new_full((*columns.shape[:-1], n_classes), fill)
    wide[..., place] = columns
    return wide


def _ruling_out(model: Stream, place: Tensor, n_classes: int) -> Stream:
    """The same model with more classes, none of which it names."""
    weights = model.weights if isinstance(model, LandmarkModel) else model.primary
    prior = torch.zeros(weights.shape[1], dtype=torch.float64) if model.prior is None else model.prior
    prior, wide = _spread(prior, place, n_classes, -torch.inf), _spread(weights, place, n_classes)
    if isinstance(model, LandmarkModel):
        return replace(model, weights=wide, prior=prior)
    refinement = None if model.refinement is None else _spread(model.refinement, place, n_classes)
    return replace(model, primary=wide, refinement=refinement, prior=prior)


def is_text(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "US" or (labels.dtype.kind == "O" and isinstance(labels[0], str))


def plain(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label
