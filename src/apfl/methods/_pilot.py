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
from apfl.maths.hits import best_of, prefer
from apfl.maths.leaveout import Leaving, leaving
from apfl.maths.machine import over_clients
from apfl.maths.normalise import Normaliser, check_features
from apfl.maths.personalise import Auto, Choice, Rows, leave_out, solve_primary
from apfl.maths.pilot import BITS, CANDIDATES, Described, describe, pilot_map, pilot_points, pilot_rows
from apfl.maths.wire import Traffic, publication_bytes, table_bytes
from apfl.methods._streams import SYNTHETIC, Published, Streams, own_seed, summed_landmarks

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


@dataclass(frozen=True)
class _Trial:
    """One candidate."""

    hits: float
    n_rows: int  # that were left out, copies not counted
    width: int
    gamma: float
    sizes: Sequence[int]  # bytes of each client's statistics


def pilot(
    clients: Sequence[Shard], n_classes: int, choice: Choice, gamma: float | Auto, sketch: int, bits: int, seed: int
) -> Pilot:
    """Every normalisation on a narrow map; the usual one for such moments, or another that is clearly better."""
    if not clients:
        raise InputError("no clients given; a federation needs at least one")
    features = [shard.features for shard in clients]
    check_features("auto", features)
    shared = reduce(add, map(describe, features))
    usual, scalings = shared.usual, shared.normalisers
    some = _some_rows(clients, seed)
    together = [leaving(shard.features, shard.labels, shard.groups) for shard in some]

    def tried(how: str) -> _Trial:
        return _try(some, n_classes, scalings[how], shared, together, choice, gamma, sketch, bits, seed)

    trials = {how: tried(how) for how in CANDIDATES if how == usual or _usable(how, features)}
    hits = {how: trial.hits for how, trial in trials.items()}
    chosen = prefer(hits, trials[usual].n_rows, usual)
    check_features(chosen, features)
    account = {
        "usual": usual, "rows": trials[usual].n_rows, "width": {how: trial.width for how, trial in trials.items()},
        "hits": {how: round(trial.hits, 2) for how, trial in trials.items()},
        "gamma": {how: trial.gamma for how, trial in trials.items()},
    }  # fmt: skip
    return Pilot(scalings[chosen], account, _traffic(trials, features[0].shape[1], n_classes, choice, sketch, bits))


def _some_rows(clients: Sequence[Shard], seed: int) -> list[Shard]:
    """The rows that take part."""
    n_all = sum(map(len, clients))
    places = (pilot_rows(len(shard), n_all, own_seed(seed, k)) for k, shard in enumerate(clients))
    return [
        Shard(shard.features[own], shard.labels[own], None if shard.groups is None else shard.groups[own])
        for shard, own in zip(clients, places, strict=True)
    ]


def _traffic(
    trials: Mapping[str, _Trial], n_features: int, n_classes: int, choice: Choice, sketch: int, bits: int
) -> Traffic:
    """What the pilot adds, in two exchanges: the moments before them are counted with the normalisation.

    Up: two more sets of moments, and of each candidate the statistics and the table of hits. Down: the mean and the
    standard deviation of all three sets, and of each candidate the publication.
    """
    dtype = torch.int16 if bits else torch.float64
    fixed = 2 * (16 * n_features + 24) + len(trials) * table_bytes(choice.grid(1.0).shape)
    up = [fixed + sum(own) for own in zip(*(trial.sizes for trial in trials.values()), strict=True)]
    down = sum(publication_bytes(trial.width, n_classes, sketch=sketch, dtype=dtype) for trial in trials.values())
    return Traffic({"pilot": up}, {"pilot": 3 * 16 * n_features + down}, 2)


def _usable(how: str, features: Sequence[Tensor]) -> bool:
    """Whether no row drowns the others under this normalisation."""
    try:
        check_features(how, features)
    except InputError:
        return False
    return True


def _try(
    clients: Sequence[Shard],
    n_classes: int,
    scaling: Normaliser,
    shared: Described,
    together: Sequence[Leaving],
    choice: Choice,
    gamma: float | Auto,
    sketch: int,
    bits: int,
    seed: int,
) -> _Trial:
    """Map, sum, solve, leave out: the method itself, narrow and without its refinements."""
    device = clients[0].features.device
    drawn = pilot_map(scaling, shared, sum(map(len, clients)), 2 * seed).like(clients[0].features)
    columns = (
        drawn.mean_squares(pilot_points(scaling, shared, SYNTHETIC, 2 * seed + 1).to(device).float()) if bits else None
    )
    repeats = [(int(own.copies.sum()), None) for own in together]
    made = summed_landmarks(clients, n_classes, scaling, drawn, columns, BITS, seed, repeats)
    phis, summed = made.phis, replace(made.stats, n_copies=sum(n_copies for n_copies, _ in repeats), echo=None)
    primary = solve_primary(summed, gamma)
    told = (Published.of(primary) if bits else primary).with_leverage(sketch, seed)
    tried = choice.grid(primary.unit(drawn.width))

    def table(k: int) -> Tensor:
        rows = Rows(phis[k], phis[k], clients[k].labels, *together[k])
        return leave_out(rows, told, choice.smoothing, tried).table

    tables = over_clients(table, range(len(clients)), device)
    _, hits = best_of(torch.stack(tables).sum(0))
    return _Trial(hits, summed.n_samples - summed.n_copies, drawn.width, primary.gamma, made.sizes)
