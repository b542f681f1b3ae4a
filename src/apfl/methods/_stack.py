"""All clients of a run stacked: their rows, their minibatches, their heads, and what they exchange.

Clients are in order of falling size: those with a full minibatch left are the first ones, and the last, shorter
minibatches of similar clients are done together, so no step works on padding but for a few rows of those. Several grid
points can be trained in one go: each client then has as many heads, side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.machine import over_clients
from apfl.maths.normalise import Normaliser, check_features
from apfl.methods._analytic import moments_bytes, shared_normaliser
from apfl.methods._step import LINKS, Batch, Params, Rule, descend, step

BATCHES, SAMPLING, INITIAL, WINDOWS = 1, 2, 3, 4  # what a stream of random numbers is for
BLOCK = 16  # heads trained together on a CPU: they stay in its cache for a whole round, one block for each core


def generator(seed: int, purpose: int, t: int = 0, k: int = 0) -> np.random.Generator:
    """A client's own random numbers in one round. The purpose comes last because numpy ignores trailing zeros."""
    return np.random.default_rng((seed, t, k, purpose))


class Stack:
    """The rows of all clients of a run, and the heads on them; the bytes that its exchanges moved."""

    def __init__(
        self,
        points: Sequence[Any],
        clients: Sequence[Shard],
        n_classes: int,
        seed: int,
        normaliser: Normaliser | None = None,
    ) -> None:
        first = points[0]
        self.points, self.n_classes, self.seed = points, n_classes, seed
        self.normaliser = normaliser or shared_normaliser(first.normalise, clients)
        self.order = sorted(range(len(clients)), key=lambda k: -len(clients[k]))  # place in the stack -> client
        for k in self.order:
            _check(clients[k], k, clients[0].features.shape[1], n_classes)
        if normaliser is not None:  # otherwise `shared_normaliser` has looked
            check_features(first.normalise, [shard.features for shard in clients])
        self.features = torch.cat([self.normaliser(clients[k].features) for k in self.order])
        self.target = clients[0].target
        self.labels = torch.cat([_responses(clients[k], self.features.dtype) for k in self.order])
        self.sizes = [len(clients[k]) for k in self.order]
        self.starts = np.cumsum([0, *self.sizes[:-1]])
        self.block = self._block_of(len(points))
        # Moments, if the normaliser needs them, are summed before the first round.
        up, down = moments_bytes(first.normalise, clients[0].features.shape[1], self.normaliser)
        self.bytes_up, self.bytes_down = len(clients) * up, len(clients) * down
        self.prelude = self.bytes_up
        self._schedules: dict[tuple[Any, ...], list[tuple[int, int, Tensor, Tensor]]] = {}

    def _block_of(self, n_points: int) -> int:
        """How many clients are trained together."""
        return max(1, BLOCK // n_points) if self.features.device.type == "cpu" else len(self.sizes)

    def only(self, which: Sequence[int]) -> Stack:
        """The same clients and rows with some of the grid points; what it exchanges is counted there."""
        part = copy(self)
        part.points, part.block = [self.points[i] for i in which], self._block_of(len(which))
        return part

    @property
    def everyone(self) -> range:
        return range(len(self.sizes))

    @property
    def n_heads(self) -> int:
        return len(self.sizes) * len(self.points)

    def value(self, name: str) -> Tensor:
        """A setting as (heads, 1, 1): each grid point has its own."""
        values = [float(getattr(point, name)) for point in self.points]
        return self.features.new_tensor(values).repeat(len(self.sizes))[:, None, None]

    def initial(self) -> Params:
        """One fresh model for each grid point, all the same: torch's default, U(-1/sqrt(n), 1/sqrt(n))."""
        rng, width = generator(self.seed, INITIAL), self.features.shape[1]
        params: Params = {}
        layers = [("", self.n_classes)]
        if hidden := self.points[0].adapter:
            layers = [("base_", hidden), ("", self.n_classes)]
        for prefix, n_out in layers:
            for name, rows in (("weight", width), ("bias", 1)):
                drawn = rng.uniform(-1 / math.sqrt(width), 1 / math.sqrt(width), (1, rows, n_out))
                params[prefix + name] = torch.from_numpy(drawn).to(self.features).repeat(len(self.points), 1, 1)
            width = n_out
        return params

    def spread(self, shared: Mapping[str, Tensor]) -> Params:
        """What the grid points share, one copy for each client."""
        return {name: p.repeat(len(self.sizes), 1, 1) for name, p in shared.items()}

    def participants(self, t: int) -> list[int]:
        """Places of the clients that take part in round ``t``: sampled, then some of them lost; at least one stays."""
        setting, n = self.points[0], len(self.sizes)
        if setting.participation == 1 and setting.dropout == 0:
            return list(self.everyone)
        rng = generator(self.seed, SAMPLING, t)
        sampled = rng.permutation(n)[: max(1, round(setting.participation * n))]
        stays = rng.random(len(sampled)) >= setting.dropout
        stays[0] |= not stays.any()
        present = set(sampled[stays].tolist())
        return [place for place in self.everyone if self.order[place] in present]

    def mean(
        self, params: Mapping[str, Tensor], t: int, weights: Tensor | None = None, *, everyone: bool = False
    ) -> Params:
        """The server's mean over those who took part, by their rows unless ``weights`` (heads,) are given.

        This is the exchange: they send the parameters up, and the mean goes down to everyone.
        """
        there, n_points = list(self.everyone) if everyone else self.participants(t), len(self.points)
        given = self.features.new_tensor(self.sizes).repeat_interleave(n_points) if weights is None else weights
        taking = torch.zeros_like(given).view(-1, n_points)
        taking[there] = given.view(-1, n_points)[there]
        share = taking / taking.sum(0)
        averaged = {}
        for name, p in params.items():
            flat = p.reshape(len(self.sizes), n_points, -1)
            averaged[name] = torch.einsum("kg,kgp->gp", share, flat).view(n_points, *p.shape[1:])
        one_way = sum(p[0].numel() * p.element_size() for p in params.values())
        self.count(up=len(there) * one_way, down=len(self.sizes) * one_way)
        return averaged

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Add to what has travelled, over all clients."""
        self.bytes_up += up
        self.bytes_down += down

    def shuffles(self, t: int, epochs: int, skip: int = 0) -> Callable[[int], list[np.ndarray]]:
        """The minibatch stream: a client's rows, shuffled anew for each epoch. The same for every method."""

        def rows(place: int) -> list[np.ndarray]:
            rng = generator(self.seed, BATCHES, t, self.order[place])
            drawn = [rng.permutation(self.sizes[place]) for _ in range(skip + epochs)]
            return [self.starts[place] + each for each in drawn[skip:]]

        return rows

    def train(
        self,
        params: Mapping[str, Tensor],
        t: int,
        rule: Rule = descend,
        *,
        epochs: int | None = None,
        skip: int = 0,
        everyone: bool = False,
        penalty: Callable[[Batch, Tensor], Tensor] | None = None,
    ) -> Params:
        """New parameters after some local epochs of those who take part in round ``t``; the others stay as they are.

        ``skip`` passes over so many epochs of the minibatch stream.
        """
        present = list(self.everyone) if everyone else self.participants(t)
        lr = self.value("lr")
        epochs = self.points[0].epochs if epochs is None else epochs
        if not epochs:
            return dict(params)
        index = None if len(present) == len(self.sizes) else self.heads_of(present)
        own = {name: p.clone() if index is None else p[index] for name, p in params.items()}
        rows = self.shuffles(t, epochs, skip)

        def work(first: int) -> None:
            for batch in self._block(present, first, rows, self.points[0].batch):
                step({name: p[batch.own] for name, p in own.items()}, batch, lr[batch.heads], rule, penalty=penalty)

        over_clients(work, range(0, len(present), self.block), self.features.device)
        if index is None:
            return own
        return {name: p.index_copy(0, index, own[name]) for name, p in params.items()}

    def batches(
        self, places: Sequence[int], rows: Callable[[int], list[np.ndarray]], size: int | None = None
    ) -> Iterator[Batch]:
        """Minibatches of the clients at some places; ``rows`` gives a client's rows for each epoch."""
        for first in range(0, len(places), self.block):
            yield from self._block(places, first, rows, size or self.points[0].batch)

    def _block(
        self, places: Sequence[int], first: int, rows: Callable[[int], list[np.ndarray]], size: int
    ) -> Iterator[Batch]:
        """Those of one block. Clients do not meet within a round, so it may run through all epochs by itself."""
        n_points, in_block = len(self.points), places[first : first + self.block]
        drawn = [rows(place) for place in in_block]
        table = torch.from_numpy(np.stack([np.concatenate(epoch) for epoch in zip(*drawn, strict=True)]))
        schedule = self._schedule(tuple(len(own[0]) for own in drawn), size)
        index = None if len(places) == len(self.sizes) else self.heads_of(in_block)
        for shuffled in table.to(self.features.device):
            for a, b, positions, share in schedule:
                chosen = shuffled[positions]
                x = self.features.index_select(0, chosen.flatten()).view(*chosen.shape, -1)
                own = slice(first * n_points + a, first * n_points + b)
                yield Batch(
                    own if index is None else index[a:b], own, x, self.labels[chosen], share, LINKS[self.target]
                )

    def heads_of(self, places: Sequence[int]) -> Tensor:
        """The heads of the clients at some places, (heads,)."""
        grid = torch.tensor(places)[:, None] * len(self.points) + torch.arange(len(self.points))
        return grid.flatten().to(self.features.device)

    def _schedule(self, sizes: tuple[int, ...], size: int) -> list[tuple[int, int, Tensor, Tensor]]:
        """The steps of one epoch of a block: (first head, last head + 1, where their rows stand, 1 / rows)."""
        key = (sizes, size, len(self.points))
        schedule = self._schedules.get(key)
        if schedule is None:
            if len(self._schedules) > 64:  # sampled clients make a new block almost every round
                self._schedules.clear()
            schedule = self._schedules[key] = list(self._steps(np.array(sizes), size))
        return schedule

    def _steps(self, sizes: np.ndarray, size: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        starts, n_points = np.cumsum([0, *sizes[:-1]]), len(self.points)
        for begin in range(0, int(sizes.max()), size):
            full, some = int((sizes >= begin + size).sum()), int((sizes > begin).sum())
            for a, b in ((0, full), (full, some)):
                if a == b:
                    continue
                left = np.minimum(sizes[a:b] - begin, size)[:, None]  # rows of each client's minibatch
                along = np.arange(left.max())
                positions = np.repeat(starts[a:b, None] + begin + np.minimum(along, left - 1), n_points, axis=0)
                share = np.repeat((along < left) / left, n_points, axis=0)[..., None]
                yield (
                    a * n_points,
                    b * n_points,
                    torch.from_numpy(positions).to(self.features.device),
                    torch.from_numpy(share).to(self.features),
                )


def _responses(shard: Shard, dtype: torch.dtype) -> Tensor:
    """Classes (n,), or columns of targets (n, c)."""
    return shard.labels.long() if shard.targets is None else shard.targets.to(dtype)


def _check(shard: Shard, k: int, width: int, n_classes: int) -> None:
    if not len(shard) or shard.features.shape[1] != width:
        raise InputError(f"client {k} has features {tuple(shard.features.shape)}; expected (n, {width}), n at least 1")
    if shard.targets is not None:
        if shard.targets.shape[1] != n_classes:
            raise InputError(f"client {k} has {shard.targets.shape[1]} columns of targets; expected {n_classes}")
        return
    if not 0 <= int(shard.labels.min()) <= int(shard.labels.max()) < n_classes:
        raise InputError(f"client {k} has labels outside 0 to {n_classes - 1}; say how many classes there are")
