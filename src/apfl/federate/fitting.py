"""What a client computes from a publication: its table of left-out hits, and its personal model.

Rows that the primary has not seen (withheld classes; all rows of a client that only receives) have no leverage in it,
and leaving them out changes nothing about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.federate.landmarks import Landmarks, agreed_maps
from apfl.federate.messages import Broadcast
from apfl.federate.terms import Terms
from apfl.maths.alone import Comparison, go_alone, own_way
from apfl.maths.centred import CentredMap
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN, LandmarkMap, draw_points, landmark_map, spread
from apfl.maths.leaveout import leaving
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser, described, needs_moments, normaliser
from apfl.maths.personalise import Plan, Rows, Setting, Shared, leave_out, refine, width_for
from apfl.methods._streams import Map
from apfl.models.dual_stream import DualStream
from apfl.models.landmark import LandmarkModel

__all__ = ["Fitted", "left_out_hits", "one_stream", "personal_model"]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A client's model, and how the published primary served the client's own rows."""

    model: DualStream | LandmarkModel
    comparison: Comparison
    alone: bool  # whether the model goes without the primary, and without anything else of the others
    weight: float  # on the primary


def left_out_hits(
    shard: Shard, terms: Terms, landmarks: Landmarks | None, broadcast: Broadcast, member: bool
) -> Tensor:
    """How many of the rows behind the statistics each setting gets right once they are left out, int64."""
    rows, tried = _mapped(shard.only_shared(), terms, landmarks, member), terms.grid(broadcast.unit)
    found = leave_out(rows, _shared(broadcast), terms.method.smoothing, tried, weights=terms.choice.weights)
    return torch.stack([*found.tables.values()]).view(terms.table_shape)


def personal_model(
    shard: Shard, terms: Terms, landmarks: Landmarks | None, broadcast: Broadcast, member: bool, plan: Plan,
    scaling: str,
) -> Fitted:  # fmt: skip
    """The client's model with these settings, from all its rows; without the primary if it does not help.

    ``scaling`` is the normalisation of the invitation. Whoever describes rows has a part in the agreed mean and std, so
    a client that goes alone takes its own. So it is with landmarks.
    """
    rows, smoothing = _mapped(shard, terms, landmarks, member), terms.method.smoothing
    features = shard.features
    own = normaliser(scaling, described(scaling, features)) if needs_moments(scaling) else terms.normaliser()
    own_map = _own_landmarks(terms, own, features) if terms.landmarked else terms.refinement_map(features, own)
    alone = go_alone(own_map(own(features)), rows.labels, terms.n_classes, (rows.groups, rows.copies))
    weight, comparison = own_way(rows, _shared(broadcast), plan, smoothing, alone)
    if not (comparison.goes_alone or (terms.method.gamma == "auto" and comparison.blind)):
        maps = agreed_maps(terms, features, landmarks)
        model = _two_streams(rows, terms, maps, broadcast, plan.settings[weight], weight)
        return Fitted(model, comparison, alone=False, weight=weight)
    model = one_stream(own_map, alone.weights, own, terms.class_names)
    return Fitted(model, comparison, alone=True, weight=0.0)


def one_stream(
    feature_map: Map | CentredMap, weights: Tensor, scaling: Normaliser, class_names: Sequence[str] | None
) -> DualStream | LandmarkModel:
    """A model of one map and its weights."""
    if isinstance(feature_map, LandmarkMap | CentredMap):
        return _folded(feature_map, weights, scaling, class_names, None)
    return DualStream(feature_map, weights, normaliser=scaling, class_names=class_names)


def _own_landmarks(terms: Terms, own: Normaliser, features: Tensor) -> LandmarkMap:
    """A map with landmarks drawn from the client's own rows, as wide as so many rows need."""
    z = own(features)
    n, n_in = z.shape
    d = min(terms.width, width_for(n, n_in))
    points = draw_points(d, 2 * terms.seed, spread(z, full=n >= ROWS_FOR_EACH_COLUMN * n_in))
    return landmark_map(points.to(features.device))


def _two_streams(
    rows: Rows,
    terms: Terms,
    maps: tuple[Map | CentredMap, Map | CentredMap],
    broadcast: Broadcast,
    setting: Setting,
    weight: float,
) -> DualStream | LandmarkModel:
    own = refine(rows, _shared(broadcast), setting, terms.method.smoothing, weight)
    primary = broadcast.weights if weight == 1 else weight * broadcast.weights
    primary_map, refinement_map = maps
    if not isinstance(primary_map, FeatureMap) or not isinstance(refinement_map, FeatureMap):  # one for both
        assert not isinstance(primary_map, FeatureMap)
        weights = primary + own.balance * own.refinement
        return _folded(primary_map, weights, terms.normaliser(), terms.class_names, own.prior)
    return DualStream(
        primary_map, primary, refinement_map, own.refinement, own.balance, terms.normaliser(),
        terms.class_names, prior=own.prior,
    )  # fmt: skip


def _folded(
    mapped: LandmarkMap | CentredMap, weights: Tensor, scaling: Normaliser, class_names: Sequence[str] | None,
    prior: Tensor | None,
) -> LandmarkModel:  # fmt: skip
    """A model of one matrix; what the centre adds to each score goes with the prior."""
    if isinstance(mapped, LandmarkMap):
        return LandmarkModel(mapped, mapped.fold(weights), scaling, class_names, prior=prior)
    matrix, offset = mapped.fold(weights)
    prior = offset if prior is None else offset + prior
    return LandmarkModel(mapped.landmarks, matrix, scaling, class_names, prior=prior)


def _mapped(rows: Shard, terms: Terms, landmarks: Landmarks | None, member: bool) -> Rows:
    features = rows.features.double() if terms.private else rows.features
    z = terms.normaliser()(features)
    primary_map, refinement_map = agreed_maps(terms, rows.features, landmarks)
    phi = primary_map(z)
    psi = phi if refinement_map is primary_map else refinement_map(z)
    together = leaving(rows.features, rows.labels, rows.groups)
    shared = torch.ones_like(rows.labels, dtype=torch.bool) if rows.shared is None else rows.shared
    return Rows(phi, psi, rows.labels, *together, seen=shared & member)


def _shared(broadcast: Broadcast) -> Shared:
    return Shared(broadcast.weights, broadcast.class_counts, broadcast.leverage)
