"""FedAS: a shared base, aligned with the client's own prototypes before training, and a head that is never shared.

Yang et al., "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.

**With a linear head** (no adapter) there is no base: nothing is aligned and nothing exchanged, so FedAS *is* local
training, the same numbers as local_head. With an adapter as base: class prototypes under the client's former base, one
epoch at rate 0.01 and batch 16 that draws the received base to them, local training of base and head, and a mean of the
bases weighted by the squared norms of the batch gradients (the paper's Fisher trace). Departures: every client aligns a
copy of the received base (the authors' code passes one object on from client to client), and prototypes use all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from apfl.data.targets import Target
from apfl.methods._analytic import ANY_TARGET
from apfl.methods._stack import Stack
from apfl.methods._step import Heads, Params, represent, step
from apfl.methods._training import RATES, State, Training

ALIGN_RATE, ALIGN_BATCH = 0.01, 16


@dataclass(frozen=True)
class FedAS(Training):
    """Shared base, private head; with a linear head there is no base and it is local training alone."""

    personal: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES}

    @property
    def predicts(self) -> Sequence[Target]:  # type: ignore[override]  # with a base it aligns prototypes of classes
        return ("classification",) if self.adapter else ANY_TARGET

    def start(self, stack: Stack) -> State:
        initial = stack.initial()
        return {"local": stack.spread(initial), "base": _base(initial)}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        if not self.adapter:
            return {"local": stack.train(state["local"], t), "base": {}}
        aligned = _aligned(stack, state["local"], stack.spread(state["base"]), t)
        local = stack.train(aligned, t)
        weights = _fisher(stack, local, t)
        stack.count(up=4 * len(stack.participants(t)))  # the weight itself
        return {"local": local, "base": stack.mean(_base(local), t, weights)}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["local"]


def _base(params: Params) -> Params:
    return {name: p for name, p in params.items() if name.startswith("base_")}


def _aligned(stack: Stack, local: Params, received: Params, t: int) -> Params:
    """The clients' models with the received base, after one epoch towards their own prototypes.

    Minibatch loss: for each label in it, the mean squared distance of its rows to the label's prototype, summed.
    """
    present = stack.participants(t)
    prototypes = class_means(stack, _base(local))[0]
    aligned = {name: p.clone() for name, p in local.items()}
    for name, p in _base(received).items():
        aligned[name][stack.heads_of(present)] = p[stack.heads_of(present)]
    base = _base(aligned)
    for batch in stack.batches(present, stack.shuffles(t, 1, skip=stack.points[0].epochs), ALIGN_BATCH):
        own = {name: p[batch.heads] for name, p in base.items()}
        rep = represent(own, batch.x)
        real = batch.share.expand(*batch.y.shape, 1)[..., 0] > 0
        same = (batch.y[:, :, None] == batch.y[:, None, :]) & real[:, None, :]
        target = prototypes[batch.heads].gather(1, batch.y[..., None].expand(rep.shape))
        gradient = 2 * (rep - target) * (rep > 0) * (real / same.sum(2) / rep.shape[2])[..., None]
        base["base_weight"][batch.heads] = own["base_weight"].baddbmm(batch.x.mT, gradient, alpha=-ALIGN_RATE)
        base["base_bias"][batch.heads] = own["base_bias"] - ALIGN_RATE * gradient.sum(1, keepdim=True)
    return aligned


def class_means(stack: Stack, base: Mapping[str, Tensor], *, unit: bool = False) -> tuple[Tensor, Tensor]:
    """Mean representation of each class of each head's own rows (heads, c, r), and how many rows it has (heads, c)."""
    means, counts = [], []
    for place, n in enumerate(stack.sizes):
        rows = slice(int(stack.starts[place]), int(stack.starts[place]) + n)
        x, hot = stack.features[rows], torch.nn.functional.one_hot(stack.labels[rows], stack.n_classes)
        for head in range(place * len(stack.points), (place + 1) * len(stack.points)):
            rep = represent({name: p[head : head + 1] for name, p in base.items()}, x[None])[0]
            rep = torch.nn.functional.normalize(rep) if unit else rep
            counts.append(hot.sum(0))
            means.append(hot.to(rep).T @ rep / counts[-1].clamp_min(1)[:, None])
    return torch.stack(means), torch.stack(counts)


def _fisher(stack: Stack, local: Params, t: int) -> Tensor:
    """Sum over minibatches of the squared norm of the gradient, (heads,)."""
    total = stack.features.new_zeros(stack.n_heads)

    def measure(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        total[heads] += (left @ right).square().sum((1, 2))

    one = stack.features.new_ones(1, 1, 1)
    for batch in stack.batches(stack.everyone, stack.shuffles(t, 1)):
        step({name: p[batch.own] for name, p in local.items()}, batch, one, measure)
    return total
