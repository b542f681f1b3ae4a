"""Methods of one exchange whose clients share one head, and what a client may do with it by itself.

    labels   only the classes that the client has (Fanì et al., "Resource-Efficient Personalization in Federated
             Learning with Closed-Form Classifiers", IEEE Access 2025: OLL); the others score minus infinity
    prior    tau log(p_k / p) is added to the scores: the client's own class frequencies instead of everyone's
    finetune some epochs of gradient descent on the cross-entropy of the client's own rows, from the shared head on

The same three for every head, so that a comparison of heads is about the head and not about who adapts it. Fine-tuning
is that of `fedavg_ft`, minibatches and all. It takes the scores as logits; those of a ridge head lie between 0 and 1,
those of a Gaussian one are log-likelihoods, so the rate that suits them differs and is tuned.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.hits import local_prior
from apfl.maths.lifts import Products
from apfl.maths.normalise import Normaliser
from apfl.maths.ridge import one_hot
from apfl.methods import Method, Round
from apfl.methods._analytic import one_exchange
from apfl.methods._stack import Stack
from apfl.methods._training import RATES
from apfl.methods.local_head import LocalHead
from apfl.models.linear_head import LinearHead
from apfl.models.residual import ResidualBlocks

__all__ = ["SMOOTHING", "Adapt", "Adapting", "Head", "OneHead", "adapted_bias", "class_sums", "finetuned"]

Adapt = Literal["none", "labels", "prior", "finetune"]
Shared = TypeVar("Shared", LinearHead, ResidualBlocks)
SMOOTHING = 0.03  # of the label counts behind the prior, as in `apfl`
TAUS = (0.03, 0.1, 0.3, 1.0)  # scores of ridge heads lie between 0 and 1, those of Gaussian ones are log-likelihoods
GRIDS: Mapping[str, Mapping[str, Any]] = {
    "prior": {"tau": TAUS},
    "finetune": {"finetune_lr": RATES, "finetune_epochs": (3, 20, 100)},
}


class Head(NamedTuple):
    """The head everyone gets, everyone's class counts, and the bytes that it took."""

    model: LinearHead
    class_counts: Tensor  # (c,)
    up: Sequence[int]  # of each client
    down: int  # to every client


@dataclass(frozen=True)
class Adapting(Method):
    """One model for everyone; ``adapt`` says what each client does with it."""

    adapt: Adapt = "none"
    tau: Annotated[float, Field(ge=0)] = 0.1  # with adapt="prior" alone
    finetune_epochs: Annotated[int, Field(ge=0)] = 20  # with adapt="finetune" alone
    finetune_lr: Annotated[float, Field(gt=0)] = 0.1  # with adapt="finetune" alone

    own_grid: ClassVar[Mapping[str, Any]] = {}  # what is tuned of the head itself

    @property
    def personal(self) -> bool:
        return self.adapt != "none"

    @property
    def grid(self) -> Mapping[str, Sequence[Any]]:
        return {**self.own_grid, **GRIDS.get(self.adapt, {})}

    def adapted(self, shared: Shared, clients: Sequence[Shard], class_counts: Tensor, seed: int) -> list[Shared]:
        """What each client makes of the shared model."""
        if self.adapt == "none":
            return [shared] * len(clients)
        if self.adapt == "finetune":
            return finetuned(shared, clients, seed, lr=self.finetune_lr, epochs=self.finetune_epochs)
        biases = (adapted_bias(self.adapt, self.tau, shard, class_counts) for shard in clients)
        return [replace(shared, bias=shared.bias + bias.to(shared.bias)) for bias in biases]

    def adapting_bytes(self, n_classes: int) -> int:
        """What a client is told for it beside the model: with a prior everyone's counts, to compare its own with."""
        return 8 * n_classes if self.adapt == "prior" else 0


@dataclass(frozen=True)
class OneHead(Adapting):
    """One linear head for everyone, made in one exchange."""

    @abstractmethod
    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        """The shared head."""

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        made = self.head(clients, n_classes, seed)
        models = self.adapted(made.model, clients, made.class_counts, seed)
        down = made.down + self.adapting_bytes(n_classes)
        yield one_exchange(models, made.model.normaliser, clients[0].features.shape[1], up=made.up, down=down)


def finetuned(shared: Shared, clients: Sequence[Shard], seed: int, *, lr: float, epochs: int) -> list[Shared]:
    """Everyone's copy of the last layer, trained on in single precision; what lies beneath it stays."""
    if epochs == 0:
        return [shared] * len(clients)
    rows = [Shard(shared.represent(shard.features).float(), shard.labels) for shard in clients]
    stack = Stack([LocalHead(lr=lr, normalise="none")], rows, len(shared.bias), seed)
    start = {"weight": shared.weight.float()[None], "bias": shared.bias.float()[None, None]}
    trained = stack.train(stack.spread(start), 0, epochs=epochs, everyone=True)
    models: dict[int, Shared] = {}
    for place, k in enumerate(stack.order):
        weight, bias = trained["weight"][place], trained["bias"][place, 0]
        models[k] = replace(shared, weight=weight.to(shared.weight), bias=bias.to(shared.bias))
    return [models[k] for k in range(len(clients))]


def adapted_bias(how: Adapt, tau: float, shard: Shard, class_counts: Tensor) -> Tensor:
    """What a client adds to the scores of its own classes and of the others, (c,); nothing unless it is a bias."""
    own = one_hot(shard.labels, len(class_counts)).sum(0).to(class_counts)
    if how == "labels":
        return torch.zeros_like(own).masked_fill(own == 0, -math.inf)
    if how == "prior":
        return tau * local_prior(own, class_counts, SMOOTHING)
    return torch.zeros_like(own)


def class_sums(
    shard: Shard, n_classes: int, normalise: Normaliser, lift: Products | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of a client's normalised (and lifted) rows of each class, (l, c), and their numbers, (c,)."""
    hot = one_hot(shard.labels, n_classes)
    rows = normalise(shard.features).to(hot.dtype)
    return (rows if lift is None else lift(rows)).T @ hot, hot.sum(0)
