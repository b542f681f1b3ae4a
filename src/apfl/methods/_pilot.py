"""The pilot of `apfl` on landmarks: one exchange of narrow statistics and one of tables, for all candidates at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.machine import over_clients
from apfl.maths.normalise import Normaliser, check_features
from apfl.maths.personalise import Choice, Rows, left_out_tables, solve_primary
from apfl.maths.pilot import (
    BITS,
    CANDIDATES,
    Candidate,
    candidate,
    describe,
    fits,
    judge,
    pilot_bytes,
    pilot_rows,
)
from apfl.maths.wire import Traffic
from apfl.methods._analytic import Repeated, in_one, repeated_rows
from apfl.methods._streams import Published, Streams, own_seed, summed_landmarks

__all__ = ["Pilot", "pilot"]


@dataclass(frozen=True, eq=False)
class Pilot:
    """The normalisation that was chosen, why, and what that cost each client."""

    normalise: Normaliser
    account: dict[str, Any]
    traffic: Traffic

    def before(self, streams: Streams) -> Streams:
        """The streams, with the pilot among what went before them."""
        account = {**streams.account, "pilot": self.account}
        return replace(streams, traffic=self.traffic + streams.traffic, account=account)


@dataclass(frozen=True, eq=False)
class _Trial:
    """One candidate."""

    tables: Sequence[Tensor]  # of each client
    width: int
    gamma: float
    sizes: Sequence[int]  # bytes of each client's statistics


def pilot(clients: Sequence[Shard], n_classes: int, choice: Choice, sketch: int, bits: int, seed: int) -> Pilot:
    """Every normalisation on a narrow map; the usual one for such moments, or another that is clearly better.

    gamma is chosen for each of them: one that is given is meant for the full map, and for finer integers.
    """
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = [shard.features for shard in clients]
    check_features("auto", features)
    pooled = in_one(features)
    shared = reduce(add, over_clients(describe, pooled, features[0].device))
    usual, scalings = shared.usual, shared.normalisers
    some = _some_rows(clients, seed)
    together = repeated_rows(some)

    def tried(how: str) -> _Trial:
        drawn = candidate(scalings[how], shared, seed, like=features[0])
        return _try(some, n_classes, drawn, together, choice, sketch, bits, seed)

    trials = {how: tried(how) for how in CANDIDATES if how == usual or fits(how, pooled)}
    tables = [torch.stack(own) for own in zip(*(trial.tables for trial in trials.values()), strict=True)]
    n_rows = [len(shard) - own.n_copies for shard, own in zip(some, together, strict=True)]
    judged = judge([*trials], tables, n_rows, usual)
    if not fits(judged.normalise, pooled):
        check_features(judged.normalise, features)  # which says whose
    widths = {how: trial.width for how, trial in trials.items()}
    account = judged.account(widths, {how: trial.gamma for how, trial in trials.items()})
    traffic = _traffic(trials, clients, n_classes, choice, sketch, bits)
    return Pilot(scalings[judged.normalise], account, traffic)


def _some_rows(clients: Sequence[Shard], seed: int) -> list[Shard]:
    """The rows that take part."""
    n_all = sum(map(len, clients))
    drawn = [pilot_rows(len(shard), n_all, own_seed(seed, k)) for k, shard in enumerate(clients)]
    places = torch.split(torch.cat(drawn).to(clients[0].features.device), [*map(len, drawn)])
    return [
        Shard(shard.features[own], shard.labels[own], None if shard.groups is None else shard.groups[own])
        for shard, own in zip(clients, places, strict=True)
    ]


def _traffic(
    trials: Mapping[str, _Trial], clients: Sequence[Shard], n_classes: int, choice: Choice, sketch: int, bits: int
) -> Traffic:
    """What the pilot adds, in two exchanges: the moments before them are counted with the normalisation."""
    widths, dtype = [trial.width for trial in trials.values()], torch.int16 if bits else torch.float64
    n_features, n_samples = clients[0].features.shape[1], sum(map(len, clients))
    fixed = pilot_bytes(widths, n_features, n_classes, n_samples, choice.grid(1.0).shape, sketch, dtype)
    up = [fixed.up + sum(own) for own in zip(*(trial.sizes for trial in trials.values()), strict=True)]
    return Traffic({"pilot": up}, {"pilot": fixed.down}, 2)


def _try(
    clients: Sequence[Shard],
    n_classes: int,
    drawn: Candidate,
    together: Sequence[Repeated],
    choice: Choice,
    sketch: int,
    bits: int,
    seed: int,
) -> _Trial:
    """Map, sum, solve, leave out: the method itself, narrow and without its refinements."""
    feature_map = drawn.feature_map
    columns, purpose = drawn.mean_squares if bits else None, f"pilot {drawn.scaling.how}"
    repeats = [(own.n_copies, None) for own in together]
    made = summed_landmarks(clients, n_classes, drawn.scaling, feature_map, columns, BITS, seed, repeats, purpose)
    phis, summed = made.phis, replace(made.stats, n_copies=sum(n_copies for n_copies, _ in repeats), echo=None)
    primary = solve_primary(summed, "auto")
    told = (Published.of(primary) if bits else primary).with_leverage(sketch, seed)
    tried = choice.grid(primary.unit(feature_map.width))

    def rows_of(k: int) -> Rows:
        return Rows(phis[k], phis[k], clients[k].labels, together[k].groups, together[k].copies)

    tables = left_out_tables(rows_of, [*map(len, clients)], told, choice.smoothing, tried, over=over_clients)
    return _Trial(tables, feature_map.width, primary.gamma, made.sizes)
