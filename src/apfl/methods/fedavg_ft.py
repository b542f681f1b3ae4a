"""FedAvg-FT: FedAvg, then each client goes on training the final head on its own rows.

Fine-tuning is plain SGD with the same rate and minibatches, by all clients, after the last round. Earlier rounds show
the shared head, so the last point of the curve is the fine-tuned one. Long fine-tuning ends at the local-only solution:
the number of epochs is what matters and is tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

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

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return finetuned(stack, state, t) if t == self.n_rounds else state["global"]


def finetuned(stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
    """Everyone's copy of the shared head, trained on; the minibatch stream goes on where the rounds ended."""
    return stack.train(stack.spread(state["global"]), t, epochs=stack.value("finetune_epochs"), everyone=True)
