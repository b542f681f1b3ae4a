"""Every client alone: as many epochs of SGD on its own rows as the federated methods take in all. No exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._training import RATES, State, Training


@dataclass(frozen=True)
class LocalHead(Training):
    """A head trained on the client's own rows alone: no exchange at all."""

    personal: ClassVar[bool] = True
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES}

    def start(self, stack: Stack) -> State:
        return {"local": stack.spread(stack.initial())}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        return {"local": stack.train(state["local"], t)}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["local"]
