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
from apfl.methods._step import Heads, Params, represent
from apfl.methods._training import State, Training
from apfl.methods.fedas import class_means

ENTRIES = 2**19  # similarities computed at a time on a CPU: two megabytes, which stay in its cache


@dataclass(frozen=True)
class FedPCL(Training):
    """Private projection trained against shared prototypes; predicts only classes the client has."""

    lr: Annotated[float, Field(gt=0)] = 1e-3  # of Adam
    adapter: Annotated[int, Field(gt=0)] = 256  # width of the projection
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    tau: Annotated[float, Field(ge=0.01)] = 0.07  # below, exponentials would overflow

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
            local = _train(stack, local, Prototypes.of(**state["prototypes"]), t)
        means, counts = class_means(stack, local, unit=True)
        prototypes = {"means": means, "counts": counts}
        _count(stack, counts, t)
        return {"local": local, "prototypes": prototypes}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        means, counts = state["prototypes"]["means"], state["prototypes"]["counts"]
        # The nearest prototype has the highest u.C - |C|^2 / 2.
        bias = (means.square().sum(2) / -2).masked_fill(counts == 0, -math.inf)[:, None]
        return state["local"] | {"weight": means.mT.contiguous(), "bias": bias}


@dataclass(frozen=True, eq=False)
class Prototypes:
    """What everyone has: Cbar, and each client's own prototypes; a class that a client lacks has Cbar's.

    One column serves all clients that lack a class, so a row is compared with no prototype twice.
    """

    columns: Tensor  # (c + m, r): Cbar, then the m own ones
    owner: Tensor  # (m,): whose they are
    lacks: Tensor  # (K, c): 1 where a client has Cbar's prototype
    known: Tensor  # (c, 1): 1 for a class that anyone has
    labels: Tensor  # (c, r): Cbar^y + mean_i C_i^y, which a row of class y is drawn to

    @classmethod
    def of(cls, means: Tensor, counts: Tensor) -> Prototypes:
        """From the clients' class means (K, c, r), zero where a client has no such rows, and their counts (K, c)."""
        has = counts > 0
        holders = has.sum(0)
        shared = means.sum(0) / holders.clamp_min(1)[:, None]
        columns = torch.cat([shared, means[has]])
        lacks, known = (~has & (holders > 0)).to(means), (holders > 0).to(means)[:, None]
        filled = (means.sum(0) + lacks.sum(0)[:, None] * shared) / len(means)
        return cls(columns, has.nonzero()[:, 0], lacks, known, shared + filled)

    def gradient(self, u: Tensor, y: Tensor, tau: float) -> Tensor:
        """Of each row's loss with respect to u (n, r), rows of length 1 or 0 without a negative entry."""
        return torch.cat([self._gradient(*own, tau) for own in zip(*self._blocks(u, y), strict=True)])

    def _blocks(self, u: Tensor, y: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """On a CPU, rows whose similarities stay in the cache."""
        entries = ENTRIES if u.device.type == "cpu" else 2**9 * ENTRIES
        n = max(16, entries // len(self.columns))
        return torch.split(u, n), torch.split(y, n)

    def _gradient(self, u: Tensor, y: Tensor, tau: float) -> Tensor:
        # Nothing has a negative entry, so similarities lie between 0 and 1, and no exponential overflows.
        similar = (self.columns @ (u.T / tau)).sub_(0.5 / tau).exp_()  # (c + m, n)
        shared, own = torch.split(similar, [len(self.known), len(self.owner)])
        shared.mul_(self.known)
        sums = (self.lacks @ shared).index_add_(0, self.owner, own)  # (K, n)
        part = sums.mul_(len(sums)).reciprocal_()  # the mean over clients
        own.mul_(part.index_select(0, self.owner))
        shared.mul_(1 / shared.sum(0) + self.lacks.T @ part)
        return (similar.T @ self.columns - self.labels[y]) / tau


def _train(stack: Stack, local: Params, prototypes: Prototypes, t: int) -> Params:
    setting = stack.points[0]
    out = {name: p.clone() for name, p in local.items()}
    heads = {name: p.unbind() for name, p in out.items()}  # views of `out`: Adam counts the steps of each head
    adam = torch.optim.Adam(
        [head for each in heads.values() for head in each], lr=setting.lr, weight_decay=setting.weight_decay,
        fused=stack.features.device.type in ("cpu", "cuda"),
    )  # fmt: skip
    for batch in stack.batches(stack.participants(t), stack.shuffles(t, setting.epochs)):
        below = represent({name: p[batch.heads] for name, p in out.items()}, batch.x)
        norm = below.norm(dim=2, keepdim=True).clamp_min(1e-12)
        u = below / norm
        du = prototypes.gradient(u.flatten(0, 1), batch.y.flatten(), setting.tau).view_as(u) * batch.share
        gradient = (du - u * (u * du).sum(2, keepdim=True)) / norm * (below > 0)
        adam.zero_grad()  # a head without a gradient is passed over
        _set_gradients(heads["base_weight"], batch.heads, batch.x.mT @ gradient)
        _set_gradients(heads["base_bias"], batch.heads, gradient.sum(1, keepdim=True))
        adam.step()
    return out


def _set_gradients(heads: Sequence[Tensor], which: Heads, gradients: Tensor) -> None:
    own = heads[which] if isinstance(which, slice) else [heads[place] for place in which.tolist()]
    for head, gradient in zip(own, gradients, strict=True):
        head.grad = gradient


def _count(stack: Stack, counts: Tensor, t: int) -> None:
    """Up: a client's own prototypes; down, to everyone: the shared ones and all clients' own."""
    one = stack.points[0].adapter * stack.features.element_size()
    n_classes = (counts > 0).sum(1)
    everyones = int(n_classes.sum()) + int((counts.sum(0) > 0).sum())
    sending = stack.participants(t) if t > 0 else list(stack.everyone)  # all begin with prototypes of their own
    stack.count(up=int(n_classes[sending].sum()) * one, down=len(stack.sizes) * everyones * one)
