"""Ditto: FedAvg, and beside it a private head for each client, pulled towards the shared one.

    v_k <- v_k - lr (grad CE(v_k) + lambda (v_k - w_t))        w_t: the shared head at the start of the round

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021. Private and shared heads see
the same minibatches. Departure from the authors' code: the server's mean is weighted by rows. With lambda = 0 the
private heads are local_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._step import proximal
from apfl.methods._training import RATES, State, Training


@dataclass(frozen=True)
class Ditto(Training):
    """FedAvg plus a private head pulled towards the shared one (``pull`` is the paper's lambda)."""

    pull: Annotated[float, Field(ge=0)] = 1.0

    personal: ClassVar[bool] = True
    stacked: ClassVar[frozenset[str]] = frozenset({"lr", "pull"})
    grid: ClassVar[Mapping[str, Any]] = {"lr": RATES, "pull": (0.1, 1.0, 2.0)}

    def start(self, stack: Stack) -> State:
        initial = stack.initial()
        return {"global": initial, "personal": stack.spread(initial)}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        received = stack.spread(state["global"])
        towards = proximal(received, stack.value("lr") * stack.value("pull"))
        personal = stack.train(state["personal"], t, towards)
        return {"global": stack.mean(stack.train(received, t), t), "personal": personal}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["personal"]
