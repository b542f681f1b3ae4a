"""FedSelect: each client keeps for itself the coordinates that change most in local training, and shares the rest.

Tamirisa et al., "FedSelect: Personalized Federated Learning with Customized Selection of Parameters for Fine-Tuning",
CVPR 2024. An epoch is two passes over the rows: personal coordinates, then shared ones. Every ``every`` rounds the
fraction ``rate`` of the still shared weights that moved most since the last time becomes personal, until more than
``limit`` is; the bias stays shared. The server's mean of a coordinate is over those who still share it, unweighted.
Evaluated after local training, before the broadcast. With rate = 0 the server runs unweighted FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._step import Params, masked
from apfl.methods._training import RATES, State, Training


@dataclass(frozen=True)
class FedSelect(Training):
    """Shares what moves little and keeps what moves much, coordinate by coordinate."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.25
    every: Annotated[int, Field(gt=0)] = 3
    limit: Annotated[float, Field(ge=0, le=1)] = 0.8

    personal: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES}

    def start(self, stack: Stack) -> State:
        initial = stack.initial()
        local = stack.spread(initial)
        mask = {name: torch.zeros_like(p) for name, p in local.items()}
        return {"global": initial, "local": local, "mask": mask, "snapshot": local, "evaluated": local}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        trained = _alternate(stack, state["local"], state["mask"], t)
        shared = _mean_of_sharers(stack, trained, state["mask"], state["global"], t)
        broadcast = stack.spread(shared)
        local = {name: torch.where(state["mask"][name] > 0, p, broadcast[name]) for name, p in trained.items()}
        mask, snapshot = state["mask"], state["snapshot"]
        if t > 0 and t % self.every == 0 and self.rate > 0:
            mask, snapshot = self._select(stack, trained, mask, snapshot, t)
        return {"global": shared, "local": local, "mask": mask, "snapshot": snapshot, "evaluated": trained}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["evaluated"]

    def _select(self, stack: Stack, trained: Params, mask: Params, snapshot: Params, t: int) -> tuple[Params, Params]:
        """The masks with the most moved coordinates added; the round's own exchange still used the former ones."""
        mask, snapshot = ({name: p.clone() for name, p in params.items()} for params in (mask, snapshot))
        for name in [name for name in mask if name.endswith("weight")]:
            for head in stack.heads_of(stack.participants(t)).tolist():
                own = mask[name][head].view(-1)
                if float(own.mean()) > self.limit:
                    continue
                moved = (trained[name][head] - snapshot[name][head]).abs().view(-1).masked_fill(own > 0, -1)
                own[moved.topk(int(self.rate * int((own == 0).sum()))).indices] = 1
                snapshot[name][head] = trained[name][head]
                if head % len(stack.points) == 0:
                    stack.count(up=-(-own.numel() // 8))  # the new mask, a bit for each coordinate
        return mask, snapshot


def _alternate(stack: Stack, local: Params, mask: Params, t: int) -> Params:
    """LocalAlt: in each epoch a pass over the personal coordinates, then one over the shared.

    The second passes take the minibatch stream as every other method does; the first ones go on after it.
    """
    epochs = stack.points[0].epochs
    if not any(bool(p.any()) for p in mask.values()):
        return stack.train(local, t)
    shared = masked({name: 1 - p for name, p in mask.items()})
    for epoch in range(epochs):
        local = stack.train(local, t, masked(mask), epochs=1, skip=epochs + epoch)
        local = stack.train(local, t, shared, epochs=1, skip=epoch)
    return local


def _mean_of_sharers(stack: Stack, trained: Params, mask: Params, former: Params, t: int) -> Params:
    """Each coordinate's mean over those present who share it; one that nobody shares is left alone."""
    there, n_points = stack.participants(t), len(stack.points)
    averaged = {}
    for name, p in trained.items():
        values, shares = (q.view(-1, n_points, *q.shape[1:])[there] for q in (p, 1 - mask[name]))
        total, sharers = (values * shares).sum(0), shares.sum(0)
        averaged[name] = torch.where(sharers > 0, total / sharers.clamp_min(1), former[name])
        each = (1 - mask[name][::n_points]).flatten(1).sum(1) * p.element_size()  # the first grid point's
        stack.count(up=int(each[there].sum()), down=int(each.sum()))
    return averaged
