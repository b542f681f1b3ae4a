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
from apfl.methods._training import State
from apfl.methods.fedavg_ft import FedAvgFT, before_finetuning, finetuned
from apfl.methods.fedprox import FedProx


@dataclass(frozen=True)
class FedProxFT(FedProx):
    """FedProx, then some epochs of fine-tuning on the client's own rows."""

    finetune_epochs: Annotated[int, Field(ge=0)] = FedAvgFT.finetune_epochs

    personal: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    stacked: ClassVar[frozenset[str]] = frozenset({"finetune_epochs", "lr", "mu"})
    grid: ClassVar[Mapping[str, Any]] = FedAvgFT.grid

    def advance(self, stack: Stack, state: State, t: int) -> State:
        return before_finetuning(super().advance, stack, state, t)

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return finetuned(stack, state, t) if t == self.n_rounds else state["global"]
