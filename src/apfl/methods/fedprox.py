"""FedProx: FedAvg whose local objective holds on to the received head, CE + mu / 2 |w - w_t|^2.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. With mu = 0 it is FedAvg. The paper's
stragglers, who train for fewer epochs, are left out: everyone trains for the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from apfl.methods._stack import Stack
from apfl.methods._step import proximal
from apfl.methods._training import RATES, State
from apfl.methods.fedavg import FedAvg

MU = (0.001, 0.01, 0.1)


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term: one head for everyone, nothing personal."""

    mu: Annotated[float, Field(ge=0)] = 0.01

    personal: ClassVar[bool] = False
    stacked: ClassVar[frozenset[str]] = frozenset({"lr", "mu"})
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES, "mu": MU}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        received = stack.spread(state["global"])
        local = stack.train(received, t, proximal(received, stack.value("lr") * stack.value("mu")))
        return {"global": stack.mean(local, t)}
