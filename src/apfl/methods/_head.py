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
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

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
from apfl.methods._grid import alike
from apfl.methods._stack import Stack
from apfl.methods._step import Params
from apfl.methods._training import RATES, stacked_rounds
from apfl.methods.local_head import LocalHead
from apfl.models.linear_head import LinearHead
from apfl.models.residual import ResidualBlocks

__all__ = [
    "SMOOTHING", "Adapt", "Adapting", "Head", "Made", "OneHead", "TrainedHead", "adapted_bias", "class_sums",
    "finetuned_together", "trained_heads",
]  # fmt: skip

Adapt = Literal["none", "labels", "prior", "finetune"]
Shared = TypeVar("Shared", LinearHead, ResidualBlocks)
ADAPTING = ("adapt", "tau", "finetune_epochs", "finetune_lr")  # what a client does with the head
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


@dataclass(frozen=True, eq=False)
class Made(Generic[Shared]):
    """The model everyone gets, everyone's class counts, and the last round if nobody adapts it."""

    model: Shared
    class_counts: Tensor  # (c,)
    last: Round


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

    @abstractmethod
    def made(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Made[Any]:
        """The model that everyone gets."""

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        made = self.made(clients, n_classes, seed)
        yield self._closed(made, self.adapted(made.model, clients, made.class_counts, seed))

    def together(
        self, points: Sequence[Any], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[tuple[int, Round]]:
        """Points that differ in what a client does with the model share it, and their fine-tuning runs side by side."""
        for places, made in self.all_made(points, clients, n_classes, seed):
            trained = [place for place in places if points[place].adapt == "finetune"]
            models = finetuned_together(made.model, clients, seed, [points[place] for place in trained])
            by_place = dict(zip(trained, models, strict=True))
            for place in places:
                point = points[place]
                own = by_place.pop(place, None) or point.adapted(made.model, clients, made.class_counts, seed)
                yield place, point._closed(made, own)

    def all_made(
        self, points: Sequence[Any], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[tuple[list[int], Made[Any]]]:
        """The shared model of each of several settings, with the places of those that have it."""
        for places in alike(points, without=ADAPTING):
            yield places, points[places[0]].made(clients, n_classes, seed)

    def _closed(self, made: Made[Any], models: Sequence[Any]) -> Round:
        n, told = len(models), self.adapting_bytes(len(made.class_counts))
        return replace(made.last, models=models, bytes_down=made.last.bytes_down + n * told)

    def adapted(self, shared: Shared, clients: Sequence[Shard], class_counts: Tensor, seed: int) -> list[Shared]:
        """What each client makes of the shared model."""
        if self.adapt == "none":
            return [shared] * len(clients)
        if self.adapt == "finetune":
            (models,) = finetuned_together(shared, clients, seed, [self])
            return models
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

    def made(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Made[LinearHead]:
        return _closing(self.head(clients, n_classes, seed), clients)


@dataclass(frozen=True)
class TrainedHead(OneHead):
    """One linear head for everyone, which the server trains on rows that it draws; rates are trained side by side."""

    lr: Annotated[float, Field(gt=0)] = 0.1

    @abstractmethod
    def heads(self, clients: Sequence[Shard], n_classes: int, seed: int, rates: Sequence[float]) -> list[Head]:
        """The shared head of each rate."""

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        (only,) = self.heads(clients, n_classes, seed, [self.lr])
        return only

    def all_made(
        self, points: Sequence[Any], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[tuple[list[int], Made[Any]]]:
        for places in alike(points, without=(*ADAPTING, "lr")):
            rates = list(dict.fromkeys(points[place].lr for place in places))
            heads = points[places[0]].heads(clients, n_classes, seed, rates)
            for rate, head in zip(rates, heads, strict=True):
                yield [place for place in places if points[place].lr == rate], _closing(head, clients)


def trained_heads(
    rows: Shard, n_classes: int, seed: int, *, rates: Sequence[float], epochs: int, batch: int = 64
) -> list[LinearHead]:
    """A head for each rate, trained on one table of rows by the engine of the gradient methods."""
    engines = [LocalHead(lr=lr, epochs=1, n_rounds=epochs, batch=batch, normalise="none") for lr in rates]
    (*_, last) = stacked_rounds(engines, [rows], n_classes, seed)
    heads = [each.models[0] for each in last]
    return [head for head in heads if isinstance(head, LinearHead)]


def _closing(head: Head, clients: Sequence[Shard]) -> Made[LinearHead]:
    width = clients[0].features.shape[1]
    models = [head.model] * len(clients)
    last = one_exchange(models, head.model.normaliser, width, up=head.up, down=head.down)
    return Made(head.model, head.class_counts, last)


def finetuned_together(
    shared: Shared, clients: Sequence[Shard], seed: int, points: Sequence[Adapting]
) -> list[list[Shared]]:
    """For each point everyone's copy of the last layer, trained on in single precision; what lies beneath it stays.

    All rates are trained side by side for as many epochs as any point asks for; on the way there the others are kept.
    """
    if not points:
        return []
    rows = [Shard(shared.represent(shard.features).float(), shard.labels) for shard in clients]
    rates = list(dict.fromkeys(point.finetune_lr for point in points))
    stack = Stack([LocalHead(lr=rate, normalise="none") for rate in rates], rows, len(shared.bias), seed)
    start = {"weight": shared.weight.float()[None], "bias": shared.bias.float()[None, None]}
    params = stack.spread({name: p.repeat(len(rates), 1, 1) for name, p in start.items()})
    kept: dict[int, Params] = {0: params}
    done = 0
    for epochs in sorted({point.finetune_epochs for point in points} - {0}):
        params = stack.train(params, 0, epochs=epochs - done, skip=done, everyone=True)
        kept[epochs], done = params, epochs
    return [
        [shared] * len(clients)
        if point.finetune_epochs == 0
        else _own_layers(shared, stack, kept[point.finetune_epochs], rates.index(point.finetune_lr))
        for point in points
    ]


def _own_layers(shared: Shared, stack: Stack, trained: Params, rate: int) -> list[Shared]:
    """The models of one rate, in the clients' order."""
    models: dict[int, Shared] = {}
    for place, k in enumerate(stack.order):
        weight, bias = (trained[name][place * len(stack.points) + rate] for name in ("weight", "bias"))
        models[k] = replace(shared, weight=weight.to(shared.weight), bias=bias[0].to(shared.bias))
    return [models[k] for k in range(len(models))]


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
