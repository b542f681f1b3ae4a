"""What every method promises, whatever it is: the files of the folder are picked up by themselves."""

from __future__ import annotations

import copy
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch

from apfl.federation import Model
from apfl.measure import client_accuracies
from apfl.methods import load_method, method_class, method_names
from head_toys import clusters, final, one_thread  # noqa: F401

SMALL = {"n_rounds": 12, "d": 64, "d_primary": 64, "d_refinement": 64}


def small(name: str):
    known = {field.name for field in fields(method_class(name))}
    return load_method(name, **{key: value for key, value in SMALL.items() if key in known})


@pytest.mark.parametrize("name", method_names())
class TestEveryMethod:
    def test_gives_each_client_a_model_and_learns(self, name: str) -> None:
        train, test = clusters([90, 30, 50, 70], skew=True), clusters([40, 40, 40, 40], seed=0, skew=True)
        last = final(small(name), train, 4)
        assert len(last.models) == 4
        for model, shard in zip(last.models, test, strict=True):
            assert isinstance(model, Model)
            scores = model.scores(shard.features)
            assert scores.shape == (40, 4)
            assert not scores.isnan().any()
        # Four clusters that hardly overlap, but FedAvg alone needs more than these 12 rounds to be perfect.
        assert np.mean(client_accuracies(last.models, test)) > 0.9

    def test_same_seed_same_result(self, name: str) -> None:
        clients = clusters([40, 13, 25], skew=True)
        scores = [[m.scores(clients[0].features) for m in final(small(name), clients, 4, 5).models] for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*scores, strict=True))

    def test_leaves_its_inputs_alone(self, name: str) -> None:
        clients = clusters([40, 13, 25], skew=True)
        before = copy.deepcopy(clients)
        final(small(name), clients, 4)
        for a, b in zip(clients, before, strict=True):
            assert torch.equal(a.features, b.features)
            assert torch.equal(a.labels, b.labels)

    def test_bytes_only_grow_and_rounds_are_kept_apart(self, name: str) -> None:
        clients = clusters([40, 13, 25], skew=True)
        rounds = list(small(name).rounds(clients, 4, 0))
        first = [model.scores(clients[0].features).clone() for model in rounds[0].models]
        for former, later in pairwise(rounds):
            assert (later.index, later.bytes_up, later.bytes_down) >= (former.index, former.bytes_up, former.bytes_down)
        again = next(small(name).rounds(clients, 4, 0))
        assert all(torch.equal(a, m.scores(clients[0].features)) for a, m in zip(first, again.models, strict=True))
        assert (rounds[-1].index == 0) == (rounds[-1].bytes_up == 0)

    def test_says_what_it_personalises(self, name: str) -> None:
        cls = method_class(name)
        clients = clusters([40, 13, 25], skew=True)
        models = final(small(name), clients, 4).models
        rows = torch.cat([shard.features for shard in clients])
        alike = all(torch.equal(model.scores(rows), models[0].scores(rows)) for model in models)
        assert cls.personal is not alike
        assert len((cls.__doc__ or "").strip().splitlines()) == 1
