"""The oracle is the method, with settings chosen on the test rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from apfl.data import load_dataset
from apfl.data.federation import Federation, Shard
from apfl.experiments.oracle import BALANCES, BETAS, GAMMAS, TAUS, best_on_test, on_test
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method
from apfl.methods.apfl import APFL
from apfl.models.file import Model


def draw(n: int, client: int, seed: int, grouped: bool) -> Shard:
    """Overlapping clouds, mostly of two classes; a group shares an offset."""
    rng = np.random.default_rng([seed, client])
    usual = rng.choice([client % 4, (client + 1) % 4], size=n)
    labels = np.where(rng.random(n) < 0.8, usual, rng.integers(4, size=n))
    groups = np.arange(n) // 3
    offsets = 0.5 * rng.normal(size=(n, 10))[groups]
    features = np.eye(4, 10)[labels] + offsets + 0.7 * rng.normal(size=(n, 10))
    return Shard(
        torch.from_numpy(features).float(), torch.from_numpy(labels), torch.from_numpy(groups) if grouped else None
    )


def federation(grouped: bool) -> Federation:
    train, test = ([draw(n, k, seed, grouped) for k in range(4)] for n, seed in ((45, 0), (150, 1)))
    return Federation(train, test, ("a", "b", "c", "d"))


def accuracy(method: APFL, clients: Federation) -> float:
    """Mean client accuracy of the method's models on the test rows."""
    *_, last = method.rounds(clients.train, 4, 5)

    def share(model: Model, shard: Shard) -> float:
        return float((model.scores(shard.features).argmax(1) == shard.labels).double().mean())

    return float(np.mean([share(model, shard) for model, shard in zip(last.models, clients.test, strict=True)]))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("sketch", "more"), [(0, {}), (32, {}), (32, {"map": "landmarks", "normalise": "row", "weight": 0.4})]
)
def test_with_the_methods_own_settings_it_is_the_method(grouped, sketch, more):
    clients = federation(grouped)
    method = APFL(**{"map": "random", "d_primary": 64, "sketch": sketch} | more)
    *_, last = method.rounds(clients.train, 4, 5)
    own = replace(method, **{name: last.chosen[name] for name in ("gamma", "beta", "balance", "tau")})
    table = on_test(own, clients, seed=5)
    assert table.accuracy.shape == (1, 1, 1, 1)
    # The table is in float32, where one of 600 test rows may fall the other way.
    assert float(table.accuracy) == pytest.approx(accuracy(method, clients), abs=0.002)
    assert best_on_test(own, clients, seed=5) == own


def test_every_entry_is_the_method_with_these_settings():
    """Each of the four settings decides rows, the prior's weight too: none of them can be left out."""
    clients = federation(grouped=True)
    method = APFL(map="random", d_primary=64, d_refinement=48)
    found = on_test(method, clients, seed=5)
    assert found.accuracy.shape == (len(GAMMAS), len(BETAS), len(BALANCES), len(TAUS))
    expected = []
    for where in [(0, 6, 4, 5), (6, 6, 4, 5), (0, 0, 4, 5), (0, 6, 9, 5), (0, 6, 4, 0)]:
        setting = {name: values[i] for (name, values), i in zip(found.tried.items(), where, strict=True)}
        expected.append(accuracy(replace(method, **setting), clients))
        assert float(found.accuracy[where]) == pytest.approx(expected[-1], abs=0.002)
    assert min(abs(expected[0] - other) for other in expected[1:]) > 0.01  # each change is seen


def test_the_oracle_is_the_best_of_its_grid_and_the_method_reaches_it_with_those_settings():
    """Its table comes from eigenvectors, the method's models from solving: two routes to the same accuracy."""
    dataset, protocol = load_dataset("digits"), Protocol(n_clients=5, alpha=0.5)
    federation = federate(dataset, protocol, seed=0)
    method = load_method("apfl", map="random", d_primary=64)
    table = on_test(method, federation, seed=0)
    best = best_on_test(method, federation, seed=0)
    record, _ = run("apfl", best, federation, dataset, protocol, seed=0)
    automatic, _ = run("apfl", method, federation, dataset, protocol, seed=0)
    # One test row in 90 may fall the other way: the table is in float32.
    assert record.accuracy_client_mean == pytest.approx(float(table.accuracy.max()), abs=0.005)
    assert record.accuracy_client_mean >= automatic.accuracy_client_mean - 0.005
