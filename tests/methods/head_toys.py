"""Small federations with a known structure, and one plain training loop to compare the stacked one with.

The loop takes nothing from the engine, its random numbers least of all. The recipe is written out here a second time: a
stream of numpy's default generator for each seed, round, client and purpose, so that no client or round moves another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from apfl.data.federation import Shard


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


def minibatch_stream(seed: int, t: int, k: int) -> np.random.Generator:
    """Shuffles of client ``k`` in round ``t``: one permutation of its rows for each epoch."""
    return np.random.default_rng((seed, t, k, 1))


def sampled_clients(seed: int, t: int, n_clients: int, participation: float, dropout: float = 0.0) -> list[int]:
    """Who takes part in round ``t``: the first of a permutation, without those lost; the first stays if all are."""
    rng = np.random.default_rng((seed, t, 0, 2))
    drawn = rng.permutation(n_clients)[: max(1, round(participation * n_clients))].tolist()
    lost = (rng.random(len(drawn)) < dropout).tolist()
    return sorted(k for k, gone in zip(drawn, lost, strict=True) if not gone) or [drawn[0]]


def initial_head(seed: int, width: int, n_classes: int) -> tuple[Tensor, Tensor]:
    """The head that everyone starts from."""
    rng, bound = np.random.default_rng((seed, 0, 0, 3)), width**-0.5
    weight, bias = rng.uniform(-bound, bound, (width, n_classes)), rng.uniform(-bound, bound, n_classes)
    return torch.from_numpy(weight), torch.from_numpy(bias)


def train_alone(
    head: tuple[Tensor, Tensor], shard: Shard, k: int, t: int, *, seed: int, lr: float, epochs: int, batch: int
) -> tuple[Tensor, Tensor]:
    """One client's local epochs by autograd and torch.optim.SGD, on the normalised rows of its own stream."""
    rows = rooted(shard)
    weight, bias = (p.clone().requires_grad_() for p in head)
    optimiser = torch.optim.SGD([weight, bias], lr=lr)
    rng = minibatch_stream(seed, t, k)
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
