"""Each method becomes another one where its difference is switched off."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from apfl.errors import InputError
from apfl.methods import fedpcl, load_method
from apfl.methods._stack import Stack
from apfl.methods.fedala import _mix
from tests.methods.head_toys import assert_same_heads, clusters, final, initial_head, one_thread, rooted, train_alone  # noqa: F401

SIZES = [37, 5, 64, 20]
COMMON = {"n_rounds": 8, "batch": 16, "lr": 0.2}


def models(name: str, sizes=SIZES, **settings):
    return final(load_method(name, **COMMON | settings), clusters(sizes, skew=True), 4).models


@pytest.mark.parametrize("adapter", [0, 5])
@pytest.mark.parametrize("participation", [1.0, 0.5])
class TestReductions:
    def test_fedprox_without_pull_is_fedavg(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        assert_same_heads(models("fedprox", mu=0, **common), models("fedavg", **common), 0)
        assert not torch.equal(models("fedprox", mu=1, **common)[0].weight, models("fedavg", **common)[0].weight)

    def test_fedprox_ft_without_pull_is_fedavg_ft(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        assert_same_heads(models("fedprox_ft", mu=0, **common), models("fedavg_ft", **common), 0)

    def test_fedavg_ft_without_epochs_is_fedavg(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        assert_same_heads(models("fedavg_ft", finetune_epochs=0, **common), models("fedavg", **common), 0)

    def test_ditto_without_pull_is_local_head(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        assert_same_heads(models("ditto", pull=0, **common), models("local_head", **common), 0)
        assert not torch.equal(models("ditto", pull=1, **common)[0].weight, models("local_head", **common)[0].weight)

    def test_fedala_without_learning_is_fedavg(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        # theta + (w - theta) * 1 rounds differently from w itself
        assert_same_heads(models("fedala", eta=0, **common), models("fedavg", **common), 1e-9)

    def test_feddbe_with_a_frozen_offset_is_fedavg(self, adapter: int, participation: float) -> None:
        common = {"adapter": adapter, "participation": participation}
        frozen = models("feddbe", offset_rate=0, **common)
        assert_same_heads(frozen, models("fedavg", **common), 0)
        assert all(float(model.offset.abs().max()) == 0 for model in frozen)


def test_fedselect_without_masks_serves_unweighted_fedavg() -> None:
    clients = clusters(SIZES, skew=True)
    setting = {"seed": 0, "lr": 0.2, "epochs": 3, "batch": 16}
    head = initial_head(0, 6, 4)
    for t, current in enumerate(load_method("fedselect", rate=0, **COMMON).rounds(clients, 4, 0)):
        local = [train_alone(head, shard, k, t, **setting) for k, shard in enumerate(clients)]
        head = tuple(torch.stack(parts).mean(0) for parts in zip(*local, strict=True))
        torch.testing.assert_close(current.state["global.weight"][0], head[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(current.state["global.bias"][0, 0], head[1], rtol=1e-9, atol=1e-9)
        assert current.models[1].weight.allclose(local[1][0])  # evaluated before the broadcast
    assert t == 7


def test_fedselect_keeps_what_moved_most_up_to_its_limit() -> None:
    clients = clusters(SIZES, skew=True)
    rounds = list(load_method("fedselect", **COMMON | {"n_rounds": 30}).rounds(clients, 4, 0))
    personal = [current.state["mask.weight"].flatten(1).mean(1) for current in rounds]
    # 24 weights: a quarter of what is still shared, rounded down, after rounds 3, 6, 9, ... until more than 80 %.
    expected, count = [], 0
    for t in range(30):
        if t > 0 and t % 3 == 0 and count / 24 <= 0.8:
            count += (24 - count) // 4
        expected.append(count / 24)
    assert [float(each[0]) for each in personal] == pytest.approx(expected)
    assert all(bool((current.state["mask.bias"] == 0).all()) for current in rounds)
    first = rounds[3]
    moved = (first.state["evaluated.weight"] - rounds[0].state["snapshot.weight"]).abs()
    mask = first.state["mask.weight"] > 0
    assert all(float(moved[k][mask[k]].min()) >= float(moved[k][~mask[k]].max()) for k in range(len(SIZES)))
    # What is shared is the same for all who share it; what is personal differs.
    after = rounds[4].state["local.weight"]
    shared = ~mask.any(0)
    assert bool((after[:, shared] == after[:1, shared]).all())
    assert not bool((after == after[:1]).all())


def test_fedavg_with_one_client_is_local_head() -> None:
    assert_same_heads(models("fedavg", [50]), models("local_head", [50]), 0)


def test_fedavg_with_one_full_batch_step_is_a_central_gradient_step() -> None:
    clients = clusters(SIZES)
    last = final(load_method("fedavg", n_rounds=1, epochs=1, batch=1000, lr=0.7), clients, 4)
    rows = torch.cat([rooted(s) for s in clients])
    weight, bias = (p.requires_grad_() for p in initial_head(0, 6, 4))
    torch.nn.functional.cross_entropy(rows @ weight + bias, torch.cat([s.labels for s in clients])).backward()
    torch.testing.assert_close(last.models[0].weight, (weight - 0.7 * weight.grad).detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(last.models[0].bias, (bias - 0.7 * bias.grad).detach(), rtol=1e-9, atol=1e-12)


def test_fedas_with_a_linear_head_is_local_training_and_exchanges_nothing() -> None:
    clients = clusters(SIZES, skew=True)
    last = final(load_method("fedas", **COMMON), clients, 4)
    assert_same_heads(last.models, models("local_head"), 0)
    assert (last.index, last.bytes_up, last.bytes_down) == (0, 0, 0)
    shared = final(load_method("fedas", adapter=5, **COMMON), clients, 4)
    assert shared.bytes_up == 8 * len(SIZES) * (35 * 8 + 4)  # the base, (6 + 1) x 5, and the weight it is averaged by


def test_feddbe_with_a_linear_head_is_a_private_bias() -> None:
    heads = models("feddbe")
    rows = clusters([9])[0].features
    own = heads[0]
    assert all(head.weight is own.weight for head in heads)
    without = type(own)(own.weight, own.bias + own.offset @ own.weight, normaliser=own.normaliser)
    torch.testing.assert_close(own.scores(rows), without.scores(rows), rtol=1e-9, atol=1e-9)
    assert_same_heads(heads, models("feddbe", kappa=50.0), 0)


def test_feddbe_regulariser_draws_the_mean_representations_together() -> None:
    def scatter(kappa: float) -> float:
        clients = clusters(SIZES, skew=True)
        heads = final(load_method("feddbe", adapter=5, kappa=kappa, momentum=1.0, **COMMON), clients, 4).models
        base = heads[0]
        rows = [torch.relu(base.normaliser(s.features) @ base.base_weight + base.base_bias).mean(0) for s in clients]
        return float(torch.stack(rows).var(0).sum())

    assert scatter(50.0) < 0.8 * scatter(0.0)


def test_fedala_mixing_weight_is_a_projected_gradient_step() -> None:
    """One epoch of one minibatch, against autograd through theta + (w - theta) A."""
    (shard,) = clusters([20])
    method = load_method("fedala", batch=64, sample=1.0, eta=0.5)
    stack = Stack([method], [shard], 4, 0)
    local, received = stack.initial(), {name: p + 1 for name, p in stack.initial().items()}
    weights = {name: torch.full_like(p, 0.5).requires_grad_() for name, p in local.items()}
    mixed = {name: local[name] + (received[name] - local[name]) * weights[name] for name in local}
    logits = (stack.features @ mixed["weight"] + mixed["bias"])[0]
    torch.nn.functional.cross_entropy(logits, stack.labels).backward()
    got, mixing = _mix(stack, local, received, {name: p.detach() for name, p in weights.items()}, t=1)
    for name, p in weights.items():
        expected = (p.detach() - 0.5 * p.grad).clamp(0, 1)
        torch.testing.assert_close(mixing[name], expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got[name], local[name] + expected * 1, rtol=1e-9, atol=1e-9)


def test_fedpcl_step_is_torchs_adam_on_the_two_losses() -> None:
    clients = clusters([12, 12], skew=True)
    method = load_method("fedpcl", adapter=5, n_rounds=2, epochs=2, batch=12)
    before, after = list(method.rounds(clients, 4, 0))
    means, counts = before.state["prototypes.means"], before.state["prototypes.counts"]
    holders = (counts > 0).sum(0)
    known = holders > 0
    shared = means.sum(0) / holders.clamp_min(1)[:, None]
    filled = torch.where((counts > 0)[..., None], means, shared)
    stack = Stack([method], clients, 4, 0)
    weight, bias = (before.state[f"local.{name}"][0].clone().requires_grad_() for name in ("base_weight", "base_bias"))
    optimiser = torch.optim.Adam([weight, bias], lr=1e-3, weight_decay=1e-4)
    x, y = stack.features[:12], stack.labels[:12]
    code = torch.cumsum(known, 0) - 1  # class id -> its place among the known classes
    for _ in range(2):
        optimiser.zero_grad()
        u = torch.nn.functional.normalize(torch.relu(x @ weight + bias))
        losses = [torch.nn.functional.cross_entropy(u @ c[known].T / 0.07, code[y]) for c in (shared, *filled)]
        (losses[0] + (losses[1] + losses[2]) / 2).backward()
        optimiser.step()
    # Adam divides by the root of a tiny second moment, which magnifies rounding.
    torch.testing.assert_close(after.state["local.base_weight"][0], weight.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tau", [0.01, 0.07, 1.0])
def test_fedpcls_gradient_is_autograds_in_blocks_of_rows_too(monkeypatch: pytest.MonkeyPatch, tau: float) -> None:
    """Class 3 is nobody's, class 1 has one owner; 40 rows are more than one block."""
    monkeypatch.setattr(fedpcl, "ENTRIES", 1)
    rng = torch.Generator().manual_seed(0)
    counts = torch.tensor([[2, 1, 0, 0, 5], [1, 0, 3, 0, 0], [0, 0, 4, 0, 2]])
    means = torch.nn.functional.normalize(torch.rand(3, 5, 6, generator=rng, dtype=torch.float64), dim=2)
    means *= (counts > 0)[..., None]
    u = torch.nn.functional.normalize(torch.rand(40, 6, generator=rng, dtype=torch.float64)).requires_grad_()
    y = torch.tensor([0, 1, 2, 4] * 10)
    shared = means.sum(0) / (counts > 0).sum(0).clamp_min(1)[:, None]
    filled = torch.where((counts > 0)[..., None], means, shared)
    known, place = [0, 1, 2, 4], torch.tensor([0, 1, 2, -1, 3])[y]
    logits = [u @ c[known].T / tau for c in (shared, *filled)]
    losses = [torch.nn.functional.cross_entropy(each, place, reduction="sum") for each in logits]
    (losses[0] + sum(losses[1:]) / 3).backward()
    got = fedpcl.Prototypes.of(means, counts).gradient(u.detach(), y, tau)
    torch.testing.assert_close(got, u.grad, rtol=1e-9, atol=1e-9)


def test_fedpcl_refuses_a_temperature_whose_exponentials_overflow() -> None:
    with pytest.raises(InputError, match="tau"):
        load_method("fedpcl", tau=0.001)


def test_ridge_to_global_is_least_squares_around_the_shared_head() -> None:
    """By lstsq on the augmented system: rows of the client, and sqrt(beta) times the identity that asks for G."""
    clients = clusters(SIZES, skew=True)
    own = final(load_method("ridge_to_global", d=16, beta=3.0, gamma=0.5), clients, 4).models[2]
    shared = final(load_method("central", d=16, gamma=0.5), clients, 4).models[2].primary
    phi = own.primary_map(own.normaliser(clients[2].features))
    left = torch.cat([phi, 3.0**0.5 * torch.eye(16, dtype=torch.float64)])
    right = torch.cat([torch.nn.functional.one_hot(clients[2].labels, 4).double(), 3.0**0.5 * shared])
    torch.testing.assert_close(own.primary, torch.linalg.lstsq(left, right).solution, rtol=1e-9, atol=1e-9)


def test_fedlda_is_scikit_learns_lda_on_the_pooled_rows() -> None:
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    clients = clusters(SIZES, spread=3.0)
    model = final(load_method("fedlda", shrinkage=1e-12, normalise="none"), clients, 4).models[0]
    rows, labels = torch.cat([s.features for s in clients]).numpy(), torch.cat([s.labels for s in clients]).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(rows, labels)
    ours = torch.softmax(model.scores(torch.from_numpy(rows)), 1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_proba(rows), rtol=1e-6, atol=1e-9)  # shrinkage is not quite 0


def test_fedncm_is_the_nearest_centroid_of_the_pooled_rows() -> None:
    from sklearn.neighbors import NearestCentroid

    clients = clusters(SIZES, spread=3.0)
    model = final(load_method("fedncm", normalise="none"), clients, 4).models[0]
    rows, labels = torch.cat([s.features for s in clients]), torch.cat([s.labels for s in clients])
    theirs = NearestCentroid().fit(rows.numpy(), labels.numpy()).predict(rows.numpy())
    assert model.scores(rows).argmax(1).tolist() == theirs.tolist()


def test_oll_never_predicts_a_class_the_client_lacks() -> None:
    clients = clusters(SIZES, skew=True)
    rows = torch.cat([s.features for s in clients])
    oll = final(load_method("oll", d=32), clients, 4).models
    central = final(load_method("central", d=32), clients, 4).models[0].scores(rows)
    for model, shard in zip(oll, clients, strict=True):
        seen = shard.labels.unique()
        assert set(model.scores(rows).argmax(1).tolist()) <= set(seen.tolist())
        torch.testing.assert_close(model.scores(rows)[:, seen], central[:, seen], rtol=1e-9, atol=1e-9)
