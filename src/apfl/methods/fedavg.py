"""FedAvg: everyone trains a copy of one head for some local epochs, the server averages.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
The initial head is drawn from the seed by everyone; each round sends the trained heads up and their mean, weighted by
rows, down. Departure from common code: the last, shorter minibatch of a client is used, not dropped, so a client with
fewer rows than a minibatch trains too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._training import RATES, State, Training


@dataclass(frozen=True)
class FedAvg(Training):
    """Weighted averaging of locally trained heads: one head for everyone, nothing personal."""

    personal: ClassVar[bool] = False
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES}

    def start(self, stack: Stack) -> State:
        return {"global": stack.initial()}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        local = stack.train(stack.spread(state["global"]), t)
        return {"global": stack.mean(local, t)}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["global"]
