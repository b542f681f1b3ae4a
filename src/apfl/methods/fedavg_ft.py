"""FedAvg-FT: FedAvg, then each client goes on training the final head on its own rows.

Fine-tuning is plain SGD with the same rate and minibatches, by all clients, after the last round. Earlier rounds show
the shared head, so the last point of the curve is the fine-tuned one. Long fine-tuning ends at the local-only solution:
the number of epochs is what matters and is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.methods._grid import alike
from apfl.methods._stack import Stack
from apfl.methods._training import RATES, State
from apfl.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """FedAvg, then some epochs of fine-tuning on the client's own rows."""

    finetune_epochs: Annotated[int, Field(ge=0)] = 20

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    stacked: ClassVar[frozenset[str]] = frozenset({"finetune_epochs", "lr"})
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES, "finetune_epochs": (3, 20, 100)}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        return before_finetuning(super().advance, stack, state, t)

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return finetuned(stack, state, t) if t == self.n_rounds else state["global"]


def before_finetuning(advance: Callable[[Stack, State, int], State], stack: Stack, state: State, t: int) -> State:
    """A round in which grid points that differ only in what comes after it are trained once."""
    groups = alike(stack.points, without=("finetune_epochs",))
    firsts = stack.only([places[0] for places in groups])
    first = {name: p[[places[0] for places in groups]] for name, p in state["global"].items()}
    trained = advance(firsts, {"global": first}, t)["global"]
    stack.bytes_up, stack.bytes_down = firsts.bytes_up, firsts.bytes_down
    group_of = {place: i for i, places in enumerate(groups) for place in places}
    each = [group_of[place] for place in range(len(stack.points))]
    return {"global": {name: p[each] for name, p in trained.items()}}


def finetuned(stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
    """Everyone's copy of the shared head, trained on; the minibatch stream goes on where the rounds ended.

    Grid points that ask for fewer epochs stop there, and the others go on.
    """
    heads, done = stack.spread(state["global"]), 0
    for epochs in sorted({point.finetune_epochs for point in stack.points}):
        going = [i for i, point in enumerate(stack.points) if point.finetune_epochs >= epochs]
        index = (
            torch.arange(stack.n_heads, device=stack.features.device).view(-1, len(stack.points))[:, going].flatten()
        )
        own = {name: p[index] for name, p in heads.items()}
        trained = stack.only(going).train(own, t, epochs=epochs - done, skip=done, everyone=True)
        heads = {name: p.index_copy(0, index, trained[name]) for name, p in heads.items()}
        done = epochs
    return heads
