"""FedProx-FT: FedProx, then each client goes on training the final head on its own rows, without the proximal term.

What is tuned is the number of fine-tuning epochs, as for FedAvg-FT; mu stays at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._training import RATES, State, Training
from apfl.methods.fedavg_ft import finetuned
from apfl.methods.fedprox import proximal_round


@dataclass(frozen=True)
class FedProxFT(Training):
    """FedProx, then some epochs of fine-tuning on the client's own rows."""

    mu: Annotated[float, Field(ge=0)] = 0.01
    finetune_epochs: Annotated[int, Field(ge=0)] = 20

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    stacked: ClassVar[frozenset[str]] = frozenset({"finetune_epochs", "lr", "mu"})
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES, "finetune_epochs": (3, 20, 100)}

    def start(self, stack: Stack) -> State:
        return {"global": stack.initial()}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        return {"global": proximal_round(stack, state["global"], t)}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return finetuned(stack, state, t) if t == self.n_rounds else state["global"]
