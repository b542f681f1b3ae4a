"""What personalisation is for, what tuning may look at, and known scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apfl.cli import main
from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.experiments.metrics import client_accuracies
from apfl.experiments.record import read_records
from apfl.experiments.run import Protocol, federate
from apfl.experiments.tuning import grid, hold_out, trained, tune, tune_once
from apfl.methods import load_method, method_class, method_names
from apfl.methods._stack import Stack
from apfl.methods._step import Heads, proximal
from apfl.methods._training import State, Training
from apfl.methods.fedavg import FedAvg
from tests.methods.head_toys import clusters, final, one_thread  # noqa: F401

PERSONAL = ["fedavg_ft", "fedprox_ft", "ditto", "fedala", "fedselect", "fedas", "fedpcl", "local_head", "apfl"]


@pytest.mark.parametrize("name", PERSONAL)
def test_clients_that_name_classes_differently_need_heads_of_their_own(name: str) -> None:
    rng = np.random.default_rng(3)
    train, test = [], []
    for k, shard in enumerate(clusters([120] * 6, n_classes=5)):
        names = torch.from_numpy(rng.permutation(5)) if k else torch.arange(5)
        labels = names[shard.labels]
        train.append(Shard(shard.features[:80], labels[:80]))
        test.append(Shard(shard.features[80:], labels[80:]))
    settings = {"d_primary": 64} if name == "apfl" else {"n_rounds": 15}
    shared = np.mean(client_accuracies(final(load_method("fedavg", n_rounds=15), train, 5).models, test))
    own = np.mean(client_accuracies(final(load_method(name, **settings), train, 5).models, test))
    assert shared < 0.6  # one head cannot say five things
    assert own > shared + 0.3


@dataclass(frozen=True)
class PenalisedFedAvg(FedAvg):
    """FedAvg on the loss that LogisticRegression minimises: the mean loss plus l2 / 2 |W|^2, the bias free."""

    l2: float = 0.0

    def advance(self, stack: Stack, state: State, t: int) -> State:
        received = stack.spread(state["global"])
        towards_zero = proximal({n: torch.zeros_like(p) for n, p in received.items()}, stack.value("lr") * self.l2)

        def rule(name: str, heads: Heads, parameter: Tensor, left: Tensor, right: Tensor) -> None:
            if name == "weight":
                towards_zero(name, heads, parameter, left, right)
            else:
                parameter.baddbmm_(left, right)

        return {"global": stack.mean(stack.train(received, t, rule), t)}

    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        return state["global"]


def test_fedavg_on_iid_digits_is_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    federation = federate(load_dataset("digits"), Protocol(partition="iid", n_clients=5), 0)
    l2 = 0.05
    method = PenalisedFedAvg(lr=0.1, epochs=1, n_rounds=150, batch=64, l2=l2)
    *_, last = method.rounds(federation.train, 10, 0)
    rows = torch.cat([last.models[0].normaliser(s.features) for s in federation.train]).double().numpy()
    labels = torch.cat([s.labels for s in federation.train]).numpy()
    pooled = LogisticRegression(C=1 / (l2 * len(rows)), max_iter=2000).fit(rows, labels)
    test = torch.cat([s.features for s in federation.test])
    truth = torch.cat([s.labels for s in federation.test]).numpy()
    ours = (last.models[0].scores(test).argmax(1).numpy() == truth).mean()
    theirs = (pooled.predict(last.models[0].normaliser(test).double().numpy()) == truth).mean()
    assert theirs > 0.9
    assert abs(ours - theirs) <= 0.01
    # Not only the accuracy: the same head, up to minibatch jitter and the bias, slow beside rows of norm 8.
    difference = np.linalg.norm(last.models[0].weight.numpy() - pooled.coef_.T) / np.linalg.norm(pooled.coef_)
    assert difference < 0.1


def test_tuning_holds_out_a_fifth_of_the_training_rows() -> None:
    clients = clusters([50, 10, 3])
    fit, validation = hold_out(clients, 0)
    assert [(len(a), len(b)) for a, b in zip(fit, validation, strict=True)] == [(40, 10), (8, 2), (3, 0)]
    for whole, a, b in zip(clients, fit, validation, strict=True):
        rows = torch.cat([a.features, b.features])
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, whole.features.tolist()))
    groups = torch.arange(50) // 5
    fit, validation = hold_out([Shard(clients[0].features, clients[0].labels, groups)], 0)
    assert not set(fit[0].groups.tolist()) & set(validation[0].groups.tolist())


def other_value(value: Any) -> Any:
    if isinstance(value, str):
        return "row"
    return value + 1 if isinstance(value, int) else value / 2 or 0.5


GRADIENT = [name for name in method_names() if issubclass(method_class(name), Training)]


@pytest.mark.parametrize(("name", "key"), [(n, f.name) for n in GRADIENT for f in fields(method_class(n))])
def test_points_of_any_grid_are_trained_as_if_alone(name: str, key: str) -> None:
    """Whatever setting a grid is over: each point's models are those that it has by itself."""
    clients = clusters([40, 25, 30], skew=True, spread=2.0)
    adapter = 5 if name == "fedpcl" or key in ("adapter", "kappa") else 0
    method = replace(load_method(name), n_rounds=4, batch=8, adapter=adapter)
    points = [method, replace(method, **{key: other_value(getattr(method, key))})]
    together = dict(trained(points, clients, 4, 0))
    for place, point in enumerate(points):
        for joint, alone in zip(together[place], final(point, clients, 4).models, strict=True):
            torch.testing.assert_close(joint.weight, alone.weight, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(joint.bias, alone.bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("key", [field.name for field in fields(method_class("apfl_paper"))])
def test_points_of_the_published_method_are_solved_as_if_alone(key: str) -> None:
    """Whether they share the primary, the refinements or nothing: the very same models, for late clients too."""
    clients = clusters([40, 25, 30], skew=True, spread=2.0)
    method = load_method("apfl_paper", d_primary=24, d_refinement=16)
    points = [method, replace(method, balance=0.9), replace(method, **{key: other_setting(getattr(method, key))})]
    together, heard = dict(method.together(points, clients, 4, 0)), list[float]()
    tuned = dict(trained(points, clients, 4, 0, heard.append))
    assert heard == [1 / 3, 2 / 3, 1]
    for place, point in enumerate(points):
        alone = final(point, clients, 4)
        assert (together[place].bytes_up, together[place].index) == (alone.bytes_up, alone.index)
        late = zip(together[place].admit(clients[:1]), alone.admit(clients[:1]), strict=True)
        for joint, own in [*zip(tuned[place], alone.models, strict=True), *late]:
            assert torch.equal(joint.scores(clients[0].features), own.scores(clients[0].features))


def other_setting(value: Any) -> Any:
    return not value if isinstance(value, bool) else {"relu": "tanh"}.get(value) or other_value(value)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedlda", "fedpcl"])
def test_tuning_chooses_the_best_point_of_its_grid(name: str, tmp_path: Path) -> None:
    clients = clusters([60, 40, 30], skew=True, spread=2.0)
    method = load_method(name)
    method = replace(method, n_rounds=4) if name != "fedlda" else method
    heard: list[float] = []
    tuned = tune(method, clients, 4, 0, on_round=heard.append)
    points = grid(method)
    assert heard == sorted(heard)
    assert not points or (len(heard) >= 2 and heard[-1] == 1)
    assert [{key: each[key] for key in points[0]} for each in tuned.results] == points if points else not tuned.results
    fit, validation = hold_out(clients, 0)
    for point, result in zip(points, tuned.results, strict=True):
        models = final(replace(method, **point), fit, 4).models
        assert result["accuracy_client_mean"] == pytest.approx(np.mean(client_accuracies(models, validation)))
    if points:
        best = max(tuned.results, key=lambda each: each["accuracy_client_mean"])
        assert all(getattr(tuned.method, key) == best[key] for key in points[0])
    path = tmp_path / "tuning.jsonl"
    first = tune_once(path, name, method, clients, 4, 0)
    assert first.method == tuned.method
    assert path.exists() == bool(points)
    if points:  # the second time it is read, not trained: clients that would be refused are never looked at
        assert tune_once(path, name, method, [], 4, 0).method == tuned.method


@pytest.mark.parametrize("name", ["fedavg_ft", "ditto", "fedas", "fedlda", "apfl_paper"])
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_grid_goes_on_where_it_was(name: str, killed: bool, tmp_path: Path) -> None:
    """Stopped at every place in turn, or killed right after a round was kept: the same results, no round twice."""
    clients = clusters([60, 40, 30], skew=True, spread=2.0)
    method = load_method(name, **({"n_rounds": 3} if name in GRADIENT else {}))
    axes = {"beta": [1.0, 10.0], "balance": [0.3, 0.7]} if name == "apfl_paper" else None
    undisturbed: list[float] = []
    expected = tune(method, clients, 4, 0, axes, undisturbed.append)
    path, checkpoint, heard = tmp_path / "tuning.jsonl", tmp_path / "stands.safetensors", list[float]()
    stop: type[BaseException] = RuntimeError if killed else KeyboardInterrupt

    def interrupt(share: float) -> None:
        new = share not in heard
        heard.append(share)
        if new and share < 1:
            raise stop

    for _ in range(len(undisturbed)):
        with suppress(stop):
            found = tune_once(
                path, name, method, clients, 4, 0, "these", axes, interrupt, checkpoint, 0.0 if killed else 60.0
            )
            break
        assert not path.exists()
        assert checkpoint.exists() or name not in GRADIENT
    assert (found.method, found.results) == (expected.method, expected.results)
    assert sorted(set(heard)) == undisturbed
    if name in GRADIENT:  # the round that was kept is told again, and none before it
        assert max(heard.count(share) for share in undisturbed) <= 2
    assert path.exists()
    assert not checkpoint.exists()


def test_the_command_line_tunes_once_and_runs_what_was_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = ["run", "--methods", "fedavg,fedncm", "--seeds", "0,1", "--tune", "--set", "fedavg.n_rounds=2"]
    for _ in range(2):  # the second time with the tuning of the first
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--no-save-models", "--out", str(folder)])
        assert not stopped.value.code
    found, other = map(json.loads, (folder / "tuning.jsonl").read_text().splitlines())
    assert (found["method"], other["method"]) == ("fedavg", "fedncm")
    best = max(found["results"], key=lambda each: each["accuracy_client_mean"])
    records = read_records(folder / "records.jsonl")
    assert [(r.method, r.seed) for r in records] == [(m, s) for s in (0, 1) for m in ("fedavg", "fedncm")]
    assert {r.settings["lr"] for r in records if r.method == "fedavg"} == {best["lr"]} == {found["chosen"]["lr"]}
    assert {r.settings["normalise"] for r in records if r.method == "fedncm"} == {other["chosen"]["normalise"]}
    assert {each.name for each in folder.iterdir()} == {"records.jsonl", "tuning.jsonl"}


@pytest.mark.slow
def test_cifar_floor_of_an_independent_prototype(cifar100: Path) -> None:
    """Features over their rms, 100 clients, alpha 0.1, 200 rounds of 3 epochs at 0.1, then 20 epochs of fine-tuning.

    A prototype reached 71.1 % and 88.0 % on its own draw of the partition; below 70 and 87 an implementation is wrong.
    Draws differ by half a point (docs/results/baselines.md), so this is the draw that others published, made by PFLlib.
    """
    dataset = load_dataset(str(cifar100))
    dataset = replace(dataset, features=dataset.features / dataset.features.square().mean().sqrt())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    published = Protocol("given", None, client_column="published_client", test_column="published_test")
    federation = federate(dataset, published, 0).to(device)
    method = load_method("fedavg_ft", lr=0.1, finetune_epochs=20, normalise="none")
    *_, shared, personal = method.rounds(federation.train, 100, 0)
    assert np.mean(client_accuracies(shared.models, federation.test)) > 0.70
    assert np.mean(client_accuracies(personal.models, federation.test)) > 0.87
