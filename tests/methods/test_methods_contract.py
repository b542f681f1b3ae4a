"""What every method promises beyond the contract in test_methods; new files of the folder are picked up alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from apfl.data.federation import Shard
from apfl.methods import load_method, method_class, method_names
from apfl.methods._training import Training
from tests.methods.head_toys import clusters, final, one_thread  # noqa: F401
from tests.methods.test_methods import small


@pytest.mark.parametrize("name", method_names())
class TestEveryMethod:
    def test_bytes_only_grow_and_rounds_are_kept_apart(self, name: str) -> None:
        clients = clusters([40, 13, 25], skew=True)
        rows, method = clients[0].features, load_method(name, **small(name))
        rounds = list(method.rounds(clients, 4, 0))
        for former, later in pairwise(rounds):
            assert later.index >= former.index
            assert later.bytes_up >= former.bytes_up
            assert later.bytes_down >= former.bytes_down
        assert (rounds[-1].index == 0) == (rounds[-1].bytes_up == 0)
        # Training in place must not reach back into what an earlier round gave.
        again = next(method.rounds(clients, 4, 0))
        for kept, fresh in zip(rounds[0].models, again.models, strict=True):
            assert torch.equal(kept.scores(rows), fresh.scores(rows))

    def test_says_what_it_personalises(self, name: str) -> None:
        cls = method_class(name)
        # Each names the classes differently, so that personalising is worth it even to a method that asks first.
        shards = clusters([40, 13, 25], skew=True)
        clients = [Shard(shard.features, (shard.labels + k) % 4) for k, shard in enumerate(shards)]
        models = final(load_method(name, **small(name)), clients, 4).models
        rows = torch.cat([shard.features for shard in clients])
        alike = all(torch.equal(model.scores(rows), models[0].scores(rows)) for model in models)
        assert cls.personal is not alike
        assert len((cls.__doc__ or "").strip().splitlines()) == 1


@pytest.mark.parametrize("name", [name for name in method_names() if issubclass(method_class(name), Training)])
class TestEveryGradientMethod:
    def test_another_seed_is_another_run(self, name: str) -> None:
        clients = clusters([40, 13, 25], skew=True)
        method = load_method(name, **small(name) | {"batch": 8})
        one, other = (final(method, clients, 4, seed).models[0].weight for seed in (0, 1))
        assert not torch.equal(one, other)
        assert torch.equal(one, final(method, clients, 4, 0).models[0].weight)

    def test_clients_with_the_same_rows_shuffle_them_differently(self, name: str) -> None:
        """Else the mean over clients is that of one, and the noise of a minibatch does not average out."""
        (shard,) = clusters([40])
        method = load_method(name, **small(name) | {"batch": 8})
        alone, twice = (final(method, [shard] * n, 4).models for n in (1, 2))
        assert not torch.allclose(alone[0].weight, twice[-1].weight, rtol=1e-9, atol=1e-12)
