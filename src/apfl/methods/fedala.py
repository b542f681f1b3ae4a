"""FedALA: each client mixes the received head into its own, coordinate by coordinate, with learnt weights.

    theta_k <- theta_k + (w - theta_k) . A_k,    A_k <- clip(A_k - eta grad . (w - theta_k), 0, 1)

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023. The weights start
at 1 and are learnt on a random stretch of ``sample`` of the client's rows: one epoch a round, and in the first round
epochs until the last ten losses spread by less than 0.1 (at most 200). All trainable tensors are mixed. What is
evaluated is theta_k after mixing, before training. With eta = 0 it is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from apfl.methods._stack import WINDOWS, Stack, generator
from apfl.methods._step import Batch, Heads, Params, step
from apfl.methods._training import RATES, State, Training

RECORDED, SPREAD, MOST = 10, 0.1, 200


@dataclass(frozen=True)
class FedALA(Training):
    """FedAvg whose clients mix the received head into their own with learnt weights."""

    eta: Annotated[float, Field(ge=0)] = 1.0
    sample: Annotated[float, Field(gt=0, le=1)] = 0.8

    personal: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES}

    def start(self, stack: Stack) -> State:
        initial = stack.initial()
        local = stack.spread(initial)
        return {"global": initial, "local": local, "mixing": {name: torch.ones_like(p) for name, p in local.items()}}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        trained = stack.train(state["local"], t)
        shared = stack.mean(trained, t)
        local, mixing = _mix(stack, trained, stack.spread(shared), state["mixing"], t)
        return {"global": shared, "local": local, "mixing": mixing}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["local"]


def _mix(stack: Stack, local: Params, received: Params, former: Params, t: int) -> tuple[Params, Params]:
    """The local heads after adaptive local aggregation, and the mixing weights it ended with."""
    mixing = {name: p.clone() for name, p in former.items()}
    gap = {name: received[name] - local[name] for name in local}
    mixed = {name: torch.addcmul(local[name], gap[name], mixing[name]) for name in local}
    last = stack.features.new_zeros(stack.n_heads)

    def learn(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        weights = mixing[name][heads]  # a view: everyone takes part, so heads are a slice
        weights.addcmul_(gap[name][heads], left @ right).clamp_(0, 1)
        torch.addcmul(local[name][heads], gap[name][heads], weights, out=parameter)

    def watch(batch: Batch, logits: Tensor) -> None:
        last[batch.heads] = (batch.losses(logits)[..., None] * batch.share).sum((1, 2))

    eta, rows = stack.value("eta"), _windows(stack, t)
    learning, losses = torch.ones_like(eta), []
    for _ in range(MOST if t == 0 else 1):
        for batch in stack.batches(stack.everyone, rows):
            own = {name: p[batch.own] for name, p in mixed.items()}
            rate = eta[batch.heads] * learning[batch.heads]
            step(own, batch, rate, learn, watch=watch if t == 0 else None)
        losses.append(last.clone())
        if len(losses) > RECORDED:
            spread = torch.stack(losses[-RECORDED:]).std(0, correction=0)
            learning *= (spread >= SPREAD)[:, None, None]
            if not bool(learning.any()):
                break
    return mixed, mixing


def _windows(stack: Stack, t: int) -> Callable[[int], list[np.ndarray]]:
    """A random stretch of each client's rows, in their order."""
    share = stack.points[0].sample

    def rows(place: int) -> list[np.ndarray]:
        n = stack.sizes[place]
        width = max(1, int(share * n))
        start = generator(stack.seed, WINDOWS, t, stack.order[place]).integers(n - width + 1)
        return [stack.starts[place] + start + np.arange(width)]

    return rows
