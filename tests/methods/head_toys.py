"""Small federations with a known structure, and one plain training loop to compare the stacked one with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.methods._stack import BATCHES, INITIAL, generator


@pytest.fixture(autouse=True)
def one_thread():
    """Steps of a few thousand numbers: a second thread only waits, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def clusters(
    sizes: Sequence[int], n_classes: int = 4, width: int = 6, seed: int = 0, *, skew: bool = False, spread: float = 0.3
) -> list[Shard]:
    """Clients whose classes are clusters around the same centres; with ``skew`` each has two of the classes."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(n_classes, width)) * 3
    shards = []
    for k, n in enumerate(sizes):
        labels = (k + rng.integers(2, size=n)) % n_classes if skew else rng.integers(n_classes, size=n)
        rows = centres[labels] + spread * rng.normal(size=(n, width))
        shards.append(Shard(torch.from_numpy(rows), torch.from_numpy(labels)))
    return shards


def initial_head(seed: int, width: int, n_classes: int) -> tuple[Tensor, Tensor]:
    """The head that everyone starts from."""
    rng, bound = generator(seed, INITIAL), width**-0.5
    weight, bias = rng.uniform(-bound, bound, (width, n_classes)), rng.uniform(-bound, bound, n_classes)
    return torch.from_numpy(weight), torch.from_numpy(bias)


def train_alone(
    head: tuple[Tensor, Tensor], shard: Shard, k: int, t: int, *, seed: int, lr: float, epochs: int, batch: int
) -> tuple[Tensor, Tensor]:
    """One client's local epochs by autograd and torch.optim.SGD, on the normalised rows of its own stream."""
    rows = rooted(shard)
    weight, bias = (p.clone().requires_grad_() for p in head)
    optimiser = torch.optim.SGD([weight, bias], lr=lr)
    rng = generator(seed, BATCHES, t, k)
    for _ in range(epochs):
        for some in torch.from_numpy(rng.permutation(len(shard))).split(batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(rows[some] @ weight + bias, shard.labels[some]).backward()
            optimiser.step()
    return weight.detach(), bias.detach()


def rooted(shard):
    """A client's features as the heads see them by default: square roots, each row at length sqrt(l)."""
    roots = shard.features.sign() * shard.features.abs() ** 0.5
    return roots * roots.shape[1] ** 0.5 / roots.norm(dim=1, keepdim=True)


def final(method, clients, n_classes, seed=0):
    *_, last = method.rounds(clients, n_classes, seed)
    return last


def assert_same_heads(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(a.bias, b.bias, rtol=tolerance, atol=tolerance)
