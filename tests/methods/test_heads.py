"""The stacked training loop against one client at a time, and what a run of many rounds promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.data.federation import Dataset, Shard
from apfl.errors import InputError
from apfl.experiments.record import Record
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import _stack, _step, load_method
from apfl.methods._training import stacked_rounds
from tests.methods.head_toys import (  # noqa: F401
    assert_same_heads,
    clusters,
    final,
    initial_head,
    one_thread,
    sampled_clients,
    train_alone,
)

SIZES = [37, 5, 64, 1, 20]  # out of order, one smaller than a minibatch, one a multiple of it


def test_stacked_training_is_one_client_at_a_time() -> None:
    clients = clusters(SIZES)
    setting = {"seed": 3, "lr": 0.2, "epochs": 2, "batch": 16}
    method = load_method("fedavg", n_rounds=20, lr=0.2, epochs=2, batch=16)
    weight, bias = initial_head(3, 6, 4)
    for t, current in enumerate(method.rounds(clients, 4, 3)):
        local = [train_alone((weight, bias), shard, k, t, **setting) for k, shard in enumerate(clients)]
        share = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        weight, bias = (sum(s * p for s, p in zip(share, ps, strict=True)) for ps in zip(*local, strict=True))
        torch.testing.assert_close(current.models[0].weight, weight, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(current.models[0].bias, bias, rtol=1e-9, atol=1e-9)
    assert t == 19


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=6), st.integers(1, 17), st.integers(1, 5), st.integers(0, 2**31)
)
def test_any_sizes_batches_and_blocks_train_alike(sizes: list[int], batch: int, block: int, seed: int) -> None:
    clients = clusters(sizes, seed=1)
    method = load_method("local_head", n_rounds=2, lr=0.3, epochs=2, batch=batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_stack, "BLOCK", block)
        models = final(method, clients, 4, seed).models
    for k, shard in enumerate(clients):
        head = initial_head(seed, 6, 4)
        for t in range(2):
            head = train_alone(head, shard, k, t, seed=seed, lr=0.3, epochs=2, batch=batch)
        torch.testing.assert_close(models[k].weight, head[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(models[k].bias, head[1], rtol=1e-9, atol=1e-9)


def test_blocks_on_threads_of_their_own_train_alike(monkeypatch) -> None:
    monkeypatch.setattr(_stack, "BLOCK", 2)
    stack = _stack.Stack([load_method("fedavg", batch=8)], clusters([30, 17, 9, 40, 22, 5, 31]), 4, 0)
    start = stack.spread(stack.initial())
    alone = stack.train(start, 0)
    torch.set_num_threads(3)
    together = stack.train(start, 0)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert torch.get_num_threads() == 3


def test_feddbes_consensus_is_of_all_clients() -> None:
    """Before the first round everyone sends a running mean, also who is not sampled for it."""
    method = load_method("feddbe", adapter=5, kappa=1.0, participation=0.5, batch=8)
    stack = _stack.Stack([method], clusters([40, 25, 30, 20]), 4, 0)
    assert len(stack.participants(0)) == 2
    state, running, former = method.start(stack), [], stack.mean
    assert stack.bytes_up == 4 * 5 * state["consensus"]["mean"].element_size()

    def spy(params, *arguments, **options):
        running.append(params["mean"])
        return former(params, *arguments, **options)

    stack.mean = spy  # type: ignore[method-assign]
    again = method.start(stack)
    weights = torch.tensor(stack.sizes, dtype=torch.float64) / sum(stack.sizes)
    expected = torch.einsum("k,kij->ij", weights, running[0].double())
    torch.testing.assert_close(again["consensus"]["mean"][0].double(), expected, rtol=1e-9, atol=1e-12)


def test_adapter_gradient_is_autograd() -> None:
    """Head, offset and adapter after one step on all rows, against the chain rule as torch applies it."""
    (shard,) = clusters([24])
    method = load_method("feddbe", adapter=5, n_rounds=1, epochs=1, batch=24, lr=0.5)
    stack = _stack.Stack([method], [shard], 4, 0)
    params = stack.initial() | {"offset": torch.linspace(-1, 1, 5, dtype=torch.float64).view(1, 1, 5)}
    stepped = stack.train(params, 0)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    hidden = torch.relu(stack.features @ leaves["base_weight"] + leaves["base_bias"]) + leaves["offset"]
    logits = (hidden @ leaves["weight"] + leaves["bias"])[0]
    torch.nn.functional.cross_entropy(logits, stack.labels).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(stepped[name], leaf.detach() - 0.5 * leaf.grad, rtol=1e-9, atol=1e-12)


def test_who_watches_a_step_sees_the_logits_before_it() -> None:
    (shard,) = clusters([24])
    stack = _stack.Stack([load_method("fedavg", batch=24)], [shard], 4, 0)
    params, seen = stack.initial(), []
    (batch,) = stack.batches([0], stack.shuffles(0, 1))
    expected = batch.x @ params["weight"] + params["bias"]
    _step.step(params, batch, stack.value("lr"), watch=lambda own, logits: seen.append((own, logits.clone())))
    assert [own for own, _ in seen] == [batch]
    torch.testing.assert_close(seen[0][1], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg_ft", "fedprox", "ditto", "fedala", "feddbe", "fedas", "fedselect"])
@pytest.mark.parametrize("adapter", [0, 5])
def test_grid_points_side_by_side_are_runs_of_their_own(name: str, adapter: int) -> None:
    clients = clusters(SIZES, skew=True)
    method = load_method(name, n_rounds=7, batch=16, adapter=adapter)
    points = [replace(method, lr=lr) for lr in (0.05, 0.4)]
    if name == "fedavg_ft":
        points = [replace(points[0], finetune_epochs=2), replace(points[1], finetune_epochs=5)]
    if name == "feddbe" and adapter:
        points = [replace(point, kappa=10.0) for point in points]
    *_, last = stacked_rounds(points, clients, 4, 0)
    for point, together in zip(points, last, strict=True):
        alone = final(point, clients, 4)
        assert_same_heads(together.models, alone.models)
        assert (together.bytes_up, together.bytes_down) == (alone.bytes_up, alone.bytes_down)
    assert not torch.allclose(last[0].models[0].weight, last[1].models[0].weight)


def test_sampling_and_dropout_draw_the_same_clients_for_every_method() -> None:
    clients = clusters([20] * 8)
    stacks = [
        _stack.Stack([load_method(name, participation=0.5, dropout=0.4)], clients, 4, 7) for name in ("fedavg", "ditto")
    ]
    draws = [[stack.participants(t) for t in range(30)] for stack in stacks]
    assert draws[0] == draws[1]
    # Clients of one size stand in the stack in their own order.
    assert draws[0] == [sampled_clients(7, t, 8, 0.5, 0.4) for t in range(30)]
    assert {len(places) for places in draws[0]} == {1, 2, 3, 4}
    assert set().union(*draws[0]) == set(range(8))


@pytest.mark.parametrize("seed", [0, 5])
def test_rounds_of_sampled_clients_are_one_client_at_a_time(seed: int) -> None:
    clients = clusters(SIZES)
    method = load_method("fedavg", n_rounds=6, participation=0.6, dropout=0.3, batch=16, epochs=1, lr=0.2)
    head, taking_part = initial_head(seed, 6, 4), []
    for t, current in enumerate(method.rounds(clients, 4, seed)):
        taking_part.append(sampled_clients(seed, t, 5, 0.6, 0.3))
        local = [train_alone(head, clients[k], k, t, seed=seed, lr=0.2, epochs=1, batch=16) for k in taking_part[-1]]
        rows = torch.tensor([SIZES[k] for k in taking_part[-1]], dtype=torch.float64)
        head = tuple(torch.einsum("k,k...->...", rows / rows.sum(), torch.stack(ps)) for ps in zip(*local, strict=True))
        torch.testing.assert_close(current.models[0].weight, head[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(current.models[0].bias, head[1], rtol=1e-9, atol=1e-9)
    assert len({tuple(ks) for ks in taking_part}) > 1


def test_who_is_away_neither_trains_nor_counts() -> None:
    clients = clusters(SIZES)
    method = load_method("fedavg", n_rounds=1, participation=0.4, batch=16, epochs=1, lr=0.2)
    drawn = sampled_clients(0, 0, 5, 0.4)
    assert len(drawn) == 2
    local = [train_alone(initial_head(0, 6, 4), clients[k], k, 0, seed=0, lr=0.2, epochs=1, batch=16)[0] for k in drawn]
    expected = sum(SIZES[k] * weight for k, weight in zip(drawn, local, strict=True)) / sum(SIZES[k] for k in drawn)
    last = final(method, clients, 4)
    torch.testing.assert_close(last.models[0].weight, expected, rtol=1e-9, atol=1e-12)
    assert last.bytes_up == 2 * 28 * 8  # two clients, 6 x 4 weights and 4 biases, float64
    assert last.bytes_down == 5 * 28 * 8


@pytest.mark.parametrize("name", ["fedavg_ft", "ditto", "fedala", "feddbe", "fedas", "fedpcl", "fedselect"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(name: str) -> None:
    clients = clusters(SIZES, skew=True)
    method = load_method(name, n_rounds=8, batch=16, adapter=5, participation=0.6)
    unbroken = list(method.rounds(clients, 4, 0))
    resumed = list(method.resume(unbroken[4].state, clients, 4, 0))
    assert len(resumed) == 4  # the round it was at, and the three that were left
    assert_same_heads(resumed[0].models, unbroken[4].models, 0)
    assert_same_heads(resumed[-1].models, unbroken[-1].models, 0)
    assert (resumed[-1].index, resumed[-1].bytes_up) == (unbroken[-1].index, unbroken[-1].bytes_up)


def test_ctrl_c_loses_no_whole_round(tmp_path) -> None:
    shards = clusters([40, 60, 80])
    rows, labels = torch.cat([s.features for s in shards]).float(), torch.cat([s.labels for s in shards])
    dataset, protocol = Dataset("toy", rows, labels, ("a", "b", "c", "d")), Protocol(n_clients=3, alpha=5.0)
    federation = federate(dataset, protocol, 0)
    method, path = load_method("ditto", n_rounds=6), tmp_path / "checkpoint.safetensors"
    seen = []

    def stop(current) -> None:
        seen.append(current.index)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("ditto", method, federation, dataset, protocol, 0, on_round=stop, checkpoint=path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    record, models = run(
        "ditto", method, federation, dataset, protocol, 0, on_round=lambda r: seen.append(r.index), checkpoint=path
    )
    expected, unbroken = run("ditto", method, federation, dataset, protocol, 0)
    assert seen == [1, 2, 3, 4, 4, 5, 6]
    assert_same_heads(models, unbroken, 0)
    assert [point[1:] for point in record.curve] == [point[1:] for point in expected.curve]
    assert len(record.curve) == 6
    assert record.curve[-1][2] == record.accuracy_client_mean
    assert Record.from_json(record.to_json()).curve == record.curve
    with pytest.raises(InputError, match="another run"):
        run("ditto", method, federation, dataset, protocol, 1, checkpoint=path)


def test_a_head_survives_its_file(tmp_path) -> None:
    from apfl.models.file import load_model, write

    clients = clusters(SIZES, skew=True)
    for name in ("fedavg", "feddbe", "fedpcl", "oll"):
        small = {} if name == "oll" else {"n_rounds": 2, "adapter": 5}
        model = final(load_method(name, **small), clients, 4).models[1]
        write(model.container(), tmp_path / "model.safetensors")
        again = load_model(tmp_path / "model.safetensors")
        rows = clients[0].features
        torch.testing.assert_close(again.scores(rows), model.scores(rows), rtol=1e-12, atol=1e-12)


def test_bad_clients_are_refused() -> None:
    good = clusters([10, 10])
    method = load_method("fedavg", n_rounds=1)
    for bad, reason in (
        (Shard(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64)), "n at least 1"),
        (Shard(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)), "expected"),
        (Shard(torch.zeros(3, 6), torch.full((3,), 4)), "labels outside 0 to 3"),
        (Shard(torch.full((3, 6), torch.nan), torch.zeros(3, dtype=torch.int64)), "NaN"),
    ):
        with pytest.raises(InputError, match=reason):
            final(method, [*good, bad], 4)
    with pytest.raises(InputError, match="at least one"):
        final(method, [], 4)
    with pytest.raises(InputError, match="diverged"):
        final(load_method("fedavg", lr=1e308, n_rounds=3), good, 4)
    with pytest.raises(InputError, match=r"made for \(n, 6\)"):
        final(method, good, 4).models[0].scores(torch.zeros(2, 7))


def test_initial_head_has_torchs_default_bounds() -> None:
    stack = _stack.Stack([load_method("fedavg", adapter=50)], clusters([10], width=400), 4, 0)
    for name, width in (("base_weight", 400), ("base_bias", 400), ("weight", 50), ("bias", 50)):
        drawn = np.abs(stack.initial()[name].numpy())
        assert drawn.max() <= width**-0.5
        assert drawn.max() > 0.6 * width**-0.5
