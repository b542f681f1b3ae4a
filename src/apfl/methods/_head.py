"""Methods of one exchange whose clients share one head, and what a client may do with it by itself.

    labels   only the classes that the client has (Fanì et al., "Resource-Efficient Personalization in Federated
             Learning with Closed-Form Classifiers", IEEE Access 2025: OLL); the others score minus infinity
    prior    tau log(p_k / p) is added to the scores: the client's own class frequencies instead of everyone's

The same two for every head, so that a comparison of heads is about the head and not about who adapts it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.hits import local_prior
from apfl.maths.normalise import Normaliser
from apfl.maths.ridge import one_hot
from apfl.methods import Method, Round
from apfl.methods._analytic import one_exchange
from apfl.models.linear_head import LinearHead

__all__ = ["SMOOTHING", "Adapt", "Adapting", "Head", "OneHead", "adapted_bias", "class_sums"]

Adapt = Literal["none", "labels", "prior"]
SMOOTHING = 0.03  # of the label counts behind the prior, as in `apfl`
TAUS = (0.03, 0.1, 0.3, 1.0)  # scores of ridge heads lie between 0 and 1, those of Gaussian ones are log-likelihoods


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

    own_grid: ClassVar[Mapping[str, Any]] = {}  # what is tuned of the head itself

    @property
    def personal(self) -> bool:
        return self.adapt != "none"

    @property
    def grid(self) -> Mapping[str, Sequence[Any]]:
        return {**self.own_grid, "tau": TAUS} if self.adapt == "prior" else self.own_grid


@dataclass(frozen=True)
class OneHead(Adapting):
    """One linear head for everyone, made in one exchange."""

    @abstractmethod
    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        """The shared head."""

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        made = self.head(clients, n_classes, seed)
        models = [made.model] * len(clients)
        if self.adapt != "none":
            biases = (adapted_bias(self.adapt, self.tau, shard, made.class_counts) for shard in clients)
            models = [replace(made.model, bias=made.model.bias + bias.to(made.model.bias)) for bias in biases]
        counts = 8 * n_classes if self.adapt == "prior" else 0  # everyone's, to be compared with one's own
        yield one_exchange(
            models, made.model.normaliser, clients[0].features.shape[1], up=made.up, down=made.down + counts
        )


def adapted_bias(how: Adapt, tau: float, shard: Shard, class_counts: Tensor) -> Tensor:
    """What a client adds to the scores of its own classes and of the others, (c,)."""
    own = one_hot(shard.labels, len(class_counts)).sum(0).to(class_counts)
    if how == "labels":
        return torch.zeros_like(own).masked_fill(own == 0, -math.inf)
    if how == "prior":
        return tau * local_prior(own, class_counts, SMOOTHING)
    return torch.zeros_like(own)


def class_sums(shard: Shard, n_classes: int, normalise: Normaliser) -> tuple[Tensor, Tensor]:
    """The sum of a client's normalised rows of each class, (l, c), and their numbers, (c,)."""
    hot = one_hot(shard.labels, n_classes)
    return normalise(shard.features).to(hot.dtype).T @ hot, hot.sum(0)
