"""FedPCL: private projections learnt by contrast with everyone's class prototypes; only prototypes travel.

Tan et al., "Federated Learning from Pre-Trained Models: A Contrastive Learning Approach", NeurIPS 2022.

    u = normalise(max(0, z A_k + a_k)),  loss = CE(u Cbar' / tau) + mean_i CE(u C_i' / tau)

Cbar^y is the mean over the clients that have class y; a class that client i lacks is filled from it. Prototypes are
indexed by class id. Inference: the nearest own prototype, among the classes the client has. Departures: the loss is the
paper's two terms as a cross-entropy over prototypes (the authors' code has one term, over samples); cached features
have one view; nothing is trained in the first round, when there are no prototypes yet. Adam restarts in every round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.targets import Target
from apfl.methods._stack import Stack
from apfl.methods._step import Heads, Params, Rule, represent
from apfl.methods._training import State, Training
from apfl.methods.fedas import class_means


@dataclass(frozen=True)
class FedPCL(Training):
    """Private projection trained against shared prototypes; predicts only classes the client has."""

    lr: Annotated[float, Field(gt=0)] = 1e-3  # of Adam
    adapter: Annotated[int, Field(gt=0)] = 256  # width of the projection
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    tau: Annotated[float, Field(gt=0)] = 0.07

    personal: ClassVar[bool] = True
    unit: ClassVar[bool] = True
    predicts: ClassVar[Sequence[Target]] = ("classification",)  # prototypes are of classes
    stacked: ClassVar[frozenset[str]] = frozenset()
    grid: ClassVar[Mapping[str, Any]] = {}

    def start(self, stack: Stack) -> State:
        drawn = stack.spread(stack.initial())
        return {"local": {name: p for name, p in drawn.items() if name.startswith("base_")}}

    def advance(self, stack: Stack, state: State, t: int) -> State:
        local = state["local"]
        if t > 0:
            local = _train(stack, local, _filled(state["prototypes"]), t)
        means, counts = class_means(stack, local, unit=True)
        prototypes = {"means": means, "counts": counts}
        _count(stack, counts, t)
        return {"local": local, "prototypes": prototypes}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        means, counts = state["prototypes"]["means"], state["prototypes"]["counts"]
        # The nearest prototype has the highest u.C - |C|^2 / 2.
        bias = (means.square().sum(2) / -2).masked_fill(counts == 0, -math.inf)[:, None]
        return state["local"] | {"weight": means.mT.contiguous(), "bias": bias}


def _filled(prototypes: Params) -> tuple[Tensor, Tensor, Tensor]:
    """Cbar (c, r), all C_i with gaps filled (K, c, r), and which classes anyone has (c,)."""
    has = prototypes["counts"] > 0
    holders = has.sum(0)
    # A client's mean of a class it lacks is zero, so the sum is over the holders.
    shared = prototypes["means"].sum(0) / holders.clamp_min(1)[:, None]
    return shared, torch.where(has[..., None], prototypes["means"], shared), holders > 0


def _train(stack: Stack, local: Params, prototypes: tuple[Tensor, Tensor, Tensor], t: int) -> Params:
    setting = stack.points[0]
    shared, filled, known = prototypes
    columns = torch.cat([shared[None], filled]).flatten(0, 1)  # (c + K c, r): Cbar first
    out = {name: p.clone() for name, p in local.items()}
    rule = _adam(out, setting.lr, setting.weight_decay)
    for batch in stack.batches(stack.participants(t), stack.shuffles(t, setting.epochs)):
        own = {name: p[batch.heads] for name, p in out.items()}
        below = represent(own, batch.x)
        norm = below.norm(dim=2, keepdim=True).clamp_min(1e-12)
        u = below / norm
        logits = (u @ columns.T / setting.tau).unflatten(2, (-1, stack.n_classes))  # (a, b, 1 + K, c)
        residual = logits.masked_fill(~known, -math.inf).softmax(-1)
        label = batch.y[..., None, None].expand(*residual.shape[:3], 1)
        residual.scatter_add_(3, label, residual.new_full((1, 1, 1, 1), -1).expand(label.shape))
        residual[:, :, 1:] /= len(filled)  # the mean over clients
        du = residual.flatten(2) @ columns * (batch.share / setting.tau)
        gradient = (du - u * (u * du).sum(2, keepdim=True)) / norm * (below > 0)
        ones = gradient.new_ones(1, 1, 1).expand(len(gradient), 1, gradient.shape[1])
        for name, left in (("base_weight", batch.x.mT), ("base_bias", ones)):
            rule(name, batch.heads, own[name], left, gradient)
            if not isinstance(batch.heads, slice):
                out[name][batch.heads] = own[name]
    return out


def _adam(params: Params, lr: float, decay: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """Adam with L2 decay; each head counts its own steps."""
    first = {name: torch.zeros_like(p) for name, p in params.items()}
    second = {name: torch.zeros_like(p) for name, p in params.items()}
    steps = {name: p.new_zeros(len(p), 1, 1) for name, p in params.items()}

    def rule(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        gradient = torch.baddbmm(parameter, left, right, beta=decay)
        steps[name][heads] += 1
        t = steps[name][heads]
        m = first[name][heads].lerp(gradient, 1 - beta1)
        v = second[name][heads].mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first[name][heads], second[name][heads] = m, v
        root = (v / (1 - beta2**t)).sqrt_().add_(eps)
        parameter.addcdiv_(m / (1 - beta1**t), root, value=-lr)

    return rule


def _count(stack: Stack, counts: Tensor, t: int) -> None:
    """Up: a client's own prototypes; down, to everyone: the shared ones and all clients' own."""
    one = stack.points[0].adapter * stack.features.element_size()
    n_classes = (counts > 0).sum(1)
    everyones = int(n_classes.sum()) + int((counts.sum(0) > 0).sum())
    sending = stack.participants(t) if t > 0 else list(stack.everyone)  # all begin with prototypes of their own
    stack.count(up=int(n_classes[sending].sum()) * one, down=len(stack.sizes) * everyones * one)
