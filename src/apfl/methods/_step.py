"""The one training loop: the heads of all clients at once.

Parameters are stacked, (heads, rows, columns); a step multiplies the minibatches of all clients that still have one
by their heads in one batched product. The gradient of the sum of the clients' losses is each client's own gradient,

    -lr dCE/dW = rep' R,    -lr dCE/db = 1' R,    R = -lr (softmax(rep W + b) - Y) / b      b: rows of the minibatch

(for numbers logits in place of softmax, half the squared error; for several labels sigmoid, binary cross-entropy),
so every step on a parameter is a product ``left @ right``, and a method that differs from plain descent passes its own
`Rule` for what to do with it. Which rows are in a minibatch, and whose, is `_stack`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Params = dict[str, Tensor]  # each (heads, rows, columns); a bias has one row
Heads = slice | Tensor
Link = Callable[[Tensor], Tensor]  # from logits to what Y is compared with
Rule = Callable[[str, Heads, Tensor, Tensor, Tensor], None]  # name, heads, the parameter, left and right of its step


def descend(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Plain gradient descent, without ever holding the gradient."""
    parameter.baddbmm_(left, right)


def proximal(anchor: Params, strength: Tensor) -> Rule:
    """Descent on the loss plus mu / 2 |p - anchor|^2; ``strength`` (heads, 1, 1) is lr * mu."""

    def rule(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        parameter.lerp_(anchor[name][heads], strength[heads])
        parameter.baddbmm_(left, right)

    return rule


def masked(mask: Mapping[str, Tensor]) -> Rule:
    """Descent on the coordinates where ``mask`` is 1."""

    def rule(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        parameter.addcmul_(mask[name][heads], left @ right)

    return rule


@dataclass(frozen=True, eq=False)
class Batch:
    """One minibatch for each of some heads."""

    heads: Heads  # in the stack of all heads
    own: slice  # in the stack of those that take part
    x: Tensor  # (a, b, l)
    y: Tensor  # (a, b), classes; with ``link`` (a, b, c)
    share: Tensor  # (a or 1, b or 1, 1): 1 / rows of the minibatch, 0 for a row that only fills up
    link: Link | None = None  # without one, softmax of classes

    def residual(self, logits: Tensor) -> Tensor:
        """The gradient of each row's loss with respect to its logits, (a, b, c): link(logits) - Y."""
        if self.link is not None:
            return self.link(logits) - self.y
        right = logits.softmax(-1)
        return right.scatter_add_(2, self.y[..., None], right.new_full((1, 1, 1), -1).expand(*self.y.shape, 1))

    def losses(self, logits: Tensor) -> Tensor:
        """The loss of each row, (a, b): cross-entropy, squared error / 2, or binary cross-entropy over labels."""
        if self.link is None:
            return logits.logsumexp(-1) - logits.gather(2, self.y[..., None])[..., 0]
        if self.link is torch.sigmoid:
            each = torch.nn.functional.binary_cross_entropy_with_logits(logits, self.y, reduction="none")
        else:
            each = (logits - self.y).square() / 2
        return each.sum(-1)


def identity(logits: Tensor) -> Tensor:
    """The link of squared error."""
    return logits


LINKS: Mapping[str, Link | None] = {"classification": None, "regression": identity, "multilabel": torch.sigmoid}


def represent(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The adapter's output, or the features themselves without one."""
    return torch.relu_(torch.baddbmm(params["base_bias"], x, params["base_weight"])) if "base_weight" in params else x


def step(
    params: Mapping[str, Tensor],
    batch: Batch,
    lr: Tensor,
    rule: Rule = descend,
    *,
    penalty: Callable[[Batch, Tensor], Tensor] | None = None,
    watch: Callable[[Batch, Tensor], None] | None = None,
) -> None:
    """One step of the heads in ``params``, in place.

    ``penalty`` gives a further gradient with respect to the representation; ``watch`` sees the logits.
    """
    below = represent(params, batch.x)
    rep = below + params["offset"] if "offset" in params else below
    logits = torch.baddbmm(params["bias"], rep, params["weight"])  # (a, b, c)
    if watch is not None:
        watch(batch, logits)
    right = batch.residual(logits).mul_(batch.share * -lr)
    ones = right.new_ones(1, 1, 1).expand(len(right), 1, right.shape[1])
    steps = [("weight", rep.mT, right), ("bias", ones, right)]
    if len(params) > 2:  # beneath the head there is something to train
        back = right @ params["weight"].mT
        steps += [("offset", ones, back)] if "offset" in params else []
        if "base_weight" in params:
            if penalty is not None:
                back = torch.addcmul(back, penalty(batch, below), -lr)
            back = back * (below > 0)
            steps += [("base_weight", batch.x.mT, back), ("base_bias", ones, back)]
    for name, left, product in steps:
        rule(name, batch.heads, params[name], left, product)
