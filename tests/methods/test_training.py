"""Rounds of the gradient methods: how they are counted, what a later client gets, and when training is stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apfl.errors import InputError
from apfl.methods import load_method
from apfl.methods._stack import Stack
from apfl.methods._training import stacked_rounds
from apfl.methods.fedavg import FedAvg
from tests.methods.head_toys import assert_same_heads, clusters, final

SIZES = [37, 5, 20]
HEAD = 8 * (6 * 4 + 4)  # bytes of 6 x 4 weights and 4 biases, float64
MOMENTS_UP, MOMENTS_DOWN = 8 * (1 + 2 * 6 + 3), 8 * 2 * 6


@pytest.mark.parametrize(
    ("name", "normalise", "indices", "up", "down"),  # bytes of each client before the first round, and of each round
    [
        ("fedavg", "root", [1, 2, 3], (0, HEAD), (0, HEAD)),
        ("fedavg", "standardise", [2, 3, 4], (MOMENTS_UP, HEAD), (MOMENTS_DOWN, HEAD)),
        ("local_head", "root", [0, 0, 0], (0, 0), (0, 0)),
        ("local_head", "standardise", [1, 1, 1], (MOMENTS_UP, 0), (MOMENTS_DOWN, 0)),
    ],
)
def test_exchanges_and_their_bytes_are_counted_round_by_round(name, normalise, indices, up, down):
    rounds = list(load_method(name, n_rounds=3, batch=16, normalise=normalise).rounds(clusters(SIZES), 4, 0))
    assert [each.index for each in rounds] == indices
    assert [each.bytes_up for each in rounds] == [3 * (up[0] + t * up[1]) for t in (1, 2, 3)]
    assert [each.bytes_down for each in rounds] == [3 * (down[0] + t * down[1]) for t in (1, 2, 3)]


@pytest.mark.parametrize("normalise", ["root", "standardise"])
def test_a_resumed_run_counts_what_an_unbroken_one_does(normalise):
    clients = clusters(SIZES)
    method = load_method("fedavg", n_rounds=4, batch=16, participation=0.6, normalise=normalise)
    unbroken = list(method.rounds(clients, 4, 0))
    resumed = list(method.resume(unbroken[1].state, clients, 4, 0))
    for a, b in zip(resumed, unbroken[1:], strict=True):
        assert (a.index, a.bytes_up, a.bytes_down) == (b.index, b.bytes_up, b.bytes_down)
        assert_same_heads(a.models, b.models, 0)


@pytest.mark.parametrize(("normalise", "remedy"), [("row", "use a smaller lr$"), ("none", "lr, or normalise='row'$")])
def test_training_that_diverges_says_when_and_what_to_do(normalise, remedy):
    method = load_method("fedavg", lr=1e308, n_rounds=3, normalise=normalise)
    with pytest.raises(InputError, match=r"diverged in round [12] \(lr 1e\+308\): .*" + remedy):
        final(method, clusters([10, 10]), 4)


def test_of_a_grid_the_point_that_diverges_loses_and_the_others_train_on():
    clients = clusters(SIZES)
    good = load_method("fedavg", n_rounds=2, batch=16)
    *_, last = stacked_rounds([good, replace(good, lr=1e308)], clients, 4, 0)
    assert_same_heads(last[0].models, final(good, clients, 4).models)
    assert not torch.isfinite(last[1].models[0].weight).all()


def test_a_later_client_gets_the_shared_model_fine_tuned_if_the_method_does_so():
    clients, late = clusters(SIZES), clusters([9, 14, 30], seed=5)
    shared = final(load_method("fedavg", n_rounds=2, batch=16), clients, 4)
    given = shared.admit(late)
    assert len(given) == 3
    for model in given:
        assert torch.equal(model.weight, shared.models[0].weight)
    tuning = load_method("fedavg_ft", n_rounds=2, batch=16, finetune_epochs=3)
    tuned = final(tuning, clients, 4).admit(late)
    assert not torch.equal(tuned[0].weight, tuned[1].weight)
    assert final(load_method("ditto", n_rounds=1), clients, 4).admit is None  # a model of its own has nobody else
    *_, grid = stacked_rounds([tuning, replace(tuning, lr=0.3)], clients, 4, 0)
    assert [each.admit for each in grid] == [None, None]


@pytest.mark.parametrize(("width", "threads"), [(6, 1), (20_000, 3)])
def test_small_steps_run_on_one_thread_and_large_ones_on_all(width, threads, monkeypatch):
    """3 clients x 64 rows x 4 classes: from some 13,000 columns on a step has ten million products."""
    seen = []

    def advance(self, stack, state, t):
        seen.append(torch.get_num_threads())
        return state

    monkeypatch.setattr(FedAvg, "advance", advance)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        final(load_method("fedavg", n_rounds=2), clusters(SIZES, width=width), 4)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [threads] * 2


def test_defaults_are_the_documented_ones_and_settings_have_limits():
    made = load_method("fedavg")
    assert (made.lr, made.epochs, made.n_rounds, made.batch, made.adapter) == (0.1, 3, 200, 64, 0)
    assert (made.participation, made.dropout, made.normalise, made.finetune_epochs) == (1.0, 0.0, "root", 0)
    for refused in (
        {"lr": 0}, {"epochs": 0}, {"n_rounds": 0}, {"batch": 0}, {"adapter": -1},
        {"participation": 0}, {"participation": 1.01}, {"dropout": -0.1}, {"dropout": 1},
    ):  # fmt: skip
        with pytest.raises(InputError, match=next(iter(refused))):
            load_method("fedavg", **refused)
    load_method("fedavg", lr=1e-9, epochs=1, n_rounds=1, batch=1, adapter=1, participation=1e-9, dropout=0.99)


@pytest.mark.parametrize(
    "settings", [{"participation": 0.01}, {"dropout": 0.99}, {"participation": 0.01, "dropout": 0.5}]
)
def test_at_least_one_client_takes_part_and_not_always_the_same(settings):
    stack = Stack([load_method("fedavg", **settings)], clusters([9] * 6), 4, 0)
    drawn = [stack.participants(t) for t in range(60)]
    assert min(map(len, drawn)) == 1
    assert len({places[0] for places in drawn if len(places) == 1}) > 3
    if "participation" in settings:
        assert max(map(len, drawn)) == 1


@pytest.mark.parametrize("everyone", [False, True])
def test_the_servers_mean_is_by_rows_or_by_weights_over_those_who_took_part(everyone):
    """Two grid points side by side: each has its own heads, and weights of its own."""
    method = load_method("fedavg", participation=0.5)
    stack = Stack([method, replace(method, lr=0.3)], clusters([9, 30, 14, 20]), 4, 0)
    there = list(range(4)) if everyone else stack.participants(2)
    assert everyone or len(there) == 2
    heads = torch.randn(4, 2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # client, point
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = torch.tensor(stack.sizes, dtype=torch.float64)[:, None].expand(4, 2)
    for given, by in ((None, rows), (weights.flatten(), weights)):
        before = stack.bytes_up, stack.bytes_down
        found = stack.mean({"weight": heads.view(8, 6, 4)}, 2, given, everyone=everyone)["weight"]
        expected = (by[there, :, None, None] * heads[there]).sum(0) / by[there].sum(0)[:, None, None]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert (stack.bytes_up - before[0], stack.bytes_down - before[1]) == (len(there) * 6 * 4 * 8, 4 * 6 * 4 * 8)


def test_what_travels_one_way_is_counted_one_way():
    stack = Stack([load_method("fedavg")], clusters([9, 5]), 4, 0)
    stack.count(up=7)
    assert (stack.bytes_up, stack.bytes_down) == (7, 0)
    stack.count(down=3)
    assert (stack.bytes_up, stack.bytes_down) == (7, 3)
