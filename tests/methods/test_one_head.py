"""Shared heads of one exchange: identities of each, and what adapting does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.ridge import one_hot
from apfl.methods import load_method
from apfl.methods.deepafl import sandwiched
from apfl.methods.fedpft import SMALLEST_VARIANCE, mixtures, synthetic
from apfl.models.file import load_model, write
from tests.conftest import draw_clients
from tests.methods.test_methods import last_round

HEADS = ("fedncm", "fedlda", "fedcgs", "fed3r", "fedcof", "fedpft")


def by_rows(clients: list[Shard]) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows at length sqrt(l), and their one-hot labels."""
    rows = torch.cat([s.features for s in clients]).double()
    labels = torch.cat([s.labels for s in clients])
    return rows * math.sqrt(rows.shape[1]) / rows.norm(dim=1, keepdim=True), one_hot(labels, 3)


@pytest.mark.parametrize("name", HEADS)
class TestAdapting:
    def test_only_own_labels_are_named_and_their_order_stays(self, name: str) -> None:
        clients = draw_clients([30, 30, 30], 6, 3, 0)
        poor = Shard(clients[0].features, clients[0].labels.clamp_max(1))
        shared = last_round(name, [poor, *clients[1:]], 3).models[0].scores(clients[1].features)
        own = last_round(name, [poor, *clients[1:]], 3, adapt="labels").models[0].scores(clients[1].features)
        torch.testing.assert_close(own[:, :2], shared[:, :2], rtol=1e-9, atol=1e-9)
        assert bool(own[:, 2].isneginf().all())

    def test_the_prior_adds_the_log_ratio_of_frequencies(self, name: str) -> None:
        clients = draw_clients([40, 40], 6, 3, 1)
        shared = last_round(name, clients, 3)
        own = last_round(name, clients, 3, adapt="prior", tau=0.5)
        counts = [one_hot(s.labels, 3).sum(0) for s in clients]
        for k, shard in enumerate(clients):
            # One row a client at least is smoothed by 1 / n, everyone's counts by 0.03.
            ratio = torch.log(counts[k] + max(0.03, 1 / 40)) - torch.log(sum(counts) + 0.03)
            gained = own.models[k].scores(shard.features) - shared.models[k].scores(shard.features)
            # The gradient head scores in float32.
            torch.testing.assert_close(gained.double(), (0.5 * ratio).expand_as(gained), rtol=0, atol=1e-5)
        assert own.bytes_down == shared.bytes_down + 2 * 3 * 8

    def test_personal_only_if_it_adapts(self, name: str) -> None:
        assert not load_method(name).personal
        assert load_method(name, adapt="prior").personal
        assert "tau" in load_method(name, adapt="prior").grid
        assert "tau" not in load_method(name).grid


def test_adapting_in_another_way_is_refused() -> None:
    with pytest.raises(InputError, match="adapt"):
        load_method("fedcof", adapt="local")


def test_fedcof_of_one_row_a_client_is_ridge_on_the_scatter_within_classes() -> None:
    """Then the spread of the means is that of the rows, and the estimate is exact."""
    (pooled,) = draw_clients([60], 6, 3, 0)
    clients = [Shard(pooled.features[i : i + 1], pooled.labels[i : i + 1]) for i in range(60)]
    z, y = by_rows(clients)
    n = y.sum(0)
    within = z - y @ ((y.T @ z) / n[:, None])
    gram = (
        within.T @ within + 0.7 * float((n - 1).sum()) * torch.eye(6).double() + 60 * torch.outer(z.mean(0), z.mean(0))
    )
    expected = torch.linalg.lstsq(gram, z.T @ y).solution
    head = last_round("fedcof", clients, 3, shrinkage=0.7).models[0]
    torch.testing.assert_close(head.weight, expected / expected.norm(dim=0), rtol=1e-9, atol=1e-12)


def test_fedcof_sends_means_and_counts_alone() -> None:
    clients = draw_clients([20, 35], 6, 3, 0)
    assert last_round("fedcof", clients, 3).bytes_up == 2 * 8 * (6 * 3 + 3)


def test_fedcgs_has_the_covariance_of_all_rows_and_fedlda_that_within_classes() -> None:
    clients = draw_clients([40, 25, 60], 6, 3, 1)
    z, y = by_rows(clients)
    n, means = y.sum(0), (y.T @ z) / y.sum(0)[:, None]
    within = z - y @ means
    for name, covariance in (
        ("fedcgs", torch.cov(z.T) + 1e-3 * torch.cov(z.T).diagonal().mean() * torch.eye(6).double()),
        ("fedlda", 0.99 * within.T @ within / 125 + 0.01 * (within**2).mean() * torch.eye(6).double()),
    ):
        inverse = torch.linalg.inv(covariance)
        expected = z @ inverse @ means.T + n.log() - ((means @ inverse) * means).sum(1) / 2
        model = last_round(name, clients, 3).models[0]
        torch.testing.assert_close(model.scores(torch.cat([s.features for s in clients])), expected, rtol=0, atol=1e-8)


class TestFedPFT:
    def test_a_component_for_each_row_gives_the_rows_back(self) -> None:
        rows = Shard(torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 1]))
        drawn = synthetic(mixtures(rows, 9, 0), rows.features, 0)
        for row, label in zip(drawn.features, drawn.labels, strict=True):
            near = (rows.features - row).abs().amax(1)[rows.labels == label].min()
            assert float(near) < 6 * math.sqrt(SMALLEST_VARIANCE) + 2e-3  # six deviations, and float16

    def test_one_component_has_mean_and_variance_of_the_class(self) -> None:
        rows = Shard(torch.randn(50, 4, dtype=torch.float64), torch.zeros(50, dtype=torch.long))
        (only,) = mixtures(rows, 1, 0)
        np.testing.assert_allclose(only.means[0], rows.features.mean(0), rtol=0, atol=1e-3)  # float16
        expected = rows.features.var(0, correction=0) + SMALLEST_VARIANCE
        np.testing.assert_allclose(only.variances[0], expected, rtol=2e-3)
        assert only.n_bytes == 2 * (1 + 4 + 4) + 16

    def test_rare_classes_are_not_left_out(self) -> None:
        rows = Shard(torch.randn(12, 4), torch.tensor([0] * 11 + [1]))
        assert [each.n_rows for each in mixtures(rows, 5, 0)] == [11, 1]


class TestDeepAFL:
    def test_without_blocks_it_is_central_ridge_on_random_features(self) -> None:
        clients = draw_clients([30, 20], 6, 3, 0)
        deep = last_round("deepafl", clients, 3, seed=4, d=12, blocks=0, gamma=2.0)
        central = last_round("central", clients, 3, seed=2, d=12, activation="tanh", gamma=2.0)  # draws from 2 * seed
        torch.testing.assert_close(
            deep.models[0].weight, central.models[0].primary, rtol=1e-6, atol=1e-7
        )  # float32 rows
        assert deep.index == 1

    def test_a_block_solves_its_least_squares(self) -> None:
        rng = torch.Generator().manual_seed(0)
        f, w, r = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((20, 5), (4, 3), (20, 3)))
        # vec(F Delta W) = (F kron W') vec(Delta), row by row; the penalty as further rows.
        system = torch.cat([torch.kron(f, w.T.contiguous()), math.sqrt(0.3) * torch.eye(20, dtype=torch.float64)])
        right = torch.cat([r.reshape(-1), torch.zeros(20, dtype=torch.float64)])
        expected = torch.linalg.lstsq(system, right[:, None]).solution.reshape(5, 4)
        torch.testing.assert_close(sandwiched(f, w, r, 0.3), expected, rtol=1e-9, atol=1e-10)

    def test_blocks_fit_the_rows_better_and_do_not_see_how_they_are_spread(self) -> None:
        clients = draw_clients([30, 50], 6, 3, 0)
        z, y = torch.cat([s.features for s in clients]), by_rows(clients)[1]
        losses = []
        for blocks in (0, 1, 4):
            model = last_round("deepafl", clients, 3, d=10, d_block=8, blocks=blocks).models[0]
            losses.append(float((model.scores(z) - y).square().sum()))
        assert losses[0] > losses[1] > losses[2]
        moved = [Shard(z[:10], torch.cat([s.labels for s in clients])[:10])]
        moved.append(Shard(z[10:], torch.cat([s.labels for s in clients])[10:]))
        same = last_round("deepafl", moved, 3, d=10, d_block=8, blocks=4).models[0]
        torch.testing.assert_close(same.scores(z), model.scores(z), rtol=1e-9, atol=1e-9)

    def test_exchanges_and_bytes(self) -> None:
        clients = draw_clients([30, 50, 20], 6, 3, 0)
        last = last_round("deepafl", clients, 3, d=10, d_block=8, blocks=2)
        assert last.index == 5
        assert last.bytes_up == 3 * 8 * (3 * (55 + 30) + 2 * (36 + 80))
        assert last.bytes_down == 3 * 8 * (3 * 30 + 2 * 80)

    def test_comes_back_from_disk(self, tmp_path) -> None:
        clients = draw_clients([30, 50], 6, 3, 0)
        settings = {"d": 10, "d_block": 8, "blocks": 2, "normalise": "columns", "adapt": "prior"}
        model = last_round("deepafl", clients, 3, **settings).models[1]
        write(model.container(), tmp_path / "m.safetensors")
        z = clients[0].features
        back = load_model(tmp_path / "m.safetensors")
        torch.testing.assert_close(back.scores(z), model.scores(z), rtol=1e-9, atol=1e-9)
        with pytest.raises(InputError, match="this model was made for"):
            model.scores(z[:, :3])
