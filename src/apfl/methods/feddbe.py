"""FedDBE: FedAvg plus a private offset of the representation, and a mean representation held near the others'.

Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023.

    loss = CE(h(f(x) + m_k)) + kappa mean_j (r_k - g)_j^2 / 2        r_k: running mean of f(x), g: its federation mean

**With a linear head** (no adapter) f has nothing to train and the regulariser has no gradient: FedDBE is then FedAvg
with a private input offset, logits = W (z + m_k) + b, that is, a private bias W m_k; kappa is fixed at 0 and no mean is
exchanged, and tuning tries the learning rate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from apfl.methods._stack import Stack
from apfl.methods._step import Batch, Heads, Rule, descend
from apfl.methods._training import RATES, State, Training


@dataclass(frozen=True)
class FedDBE(Training):
    """FedAvg plus a private offset; with a linear head that is a private bias and nothing more."""

    momentum: Annotated[float, Field(ge=0, le=1)] = 0.1
    kappa: Annotated[float, Field(ge=0)] = 0.0  # without effect unless there is an adapter
    offset_rate: Annotated[float, Field(ge=0)] = 1.0  # times lr; 0 freezes the offset, which leaves FedAvg

    personal: ClassVar[bool] = True
    stacked: ClassVar[frozenset[str]] = frozenset({"kappa", "lr"})

    @property
    def grid(self) -> Mapping[str, Any]:
        return {"lr": RATES} | ({"kappa": (0.0, 1.0, 50.0)} if self.adapter else {})

    def start(self, stack: Stack) -> State:
        initial = stack.initial()
        width = initial["weight"].shape[1]
        offsets = {"offset": initial["weight"].new_zeros(stack.n_heads, 1, width)}
        state = {"global": initial, "private": offsets}
        if self.adapter and any(point.kappa for point in stack.points):
            # The initialisation period: train once without offsets, for the running means alone.
            running = offsets["offset"].clone()
            stack.train(stack.spread(initial), 0, everyone=True, penalty=_track(stack, running, None))
            state["consensus"] = stack.mean({"mean": running}, 0, everyone=True)
        return state

    def advance(self, stack: Stack, state: State, t: int) -> State:
        penalty = None
        if "consensus" in state:
            running = state["private"]["offset"].new_zeros(state["private"]["offset"].shape)
            penalty = _track(stack, running, stack.spread(state["consensus"])["mean"])
        local = stack.train(stack.spread(state["global"]) | state["private"], t, _slower_offset(stack), penalty=penalty)
        offset = local.pop("offset")
        return state | {"global": stack.mean(local, t), "private": {"offset": offset}}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["global"] | state["private"]


def _slower_offset(stack: Stack) -> Rule:
    rate = stack.value("offset_rate")

    def rule(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        descend(name, heads, parameter, left, right * rate[heads] if name == "offset" else right)

    return rule


def _track(stack: Stack, running: Tensor, consensus: Tensor | None) -> Callable[[Batch, Tensor], Tensor]:
    """Follow the mean representation in ``running``; give the gradient of its distance to the consensus."""
    momentum, kappa = stack.value("momentum"), stack.value("kappa")

    def penalty(batch: Batch, rep: Tensor) -> Tensor:
        mean = (rep * batch.share).sum(1, keepdim=True)
        followed = running[batch.heads].lerp(mean, momentum[batch.heads])
        running[batch.heads] = followed
        if consensus is None:
            return running.new_zeros(1, 1, 1)
        pull = kappa[batch.heads] * momentum[batch.heads] / rep.shape[2] * (followed - consensus[batch.heads])
        return pull * batch.share

    return penalty
