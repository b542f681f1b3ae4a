"""Shared heads of one exchange: identities of each, and what adapting does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.lifts import Buckets
from apfl.maths.ridge import one_hot, statistics
from apfl.methods import load_method
from apfl.methods.deepafl import sandwiched
from apfl.methods.fedpft import SMALLEST_VARIANCE, mixtures, synthetic
from apfl.methods.gh_ofl import fisher_subspace
from apfl.models.file import load_model, write
from tests.conftest import draw_clients
from tests.methods.head_toys import clusters
from tests.methods.test_methods import last_round

HEADS = ("fedncm", "fedlda", "fedcgs", "fed3r", "fedcof", "fedpft", "gh_ofl", "safle")


def by_rows(clients: list[Shard]) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows at length sqrt(l), and their one-hot labels."""
    rows = torch.cat([s.features for s in clients]).double()
    labels = torch.cat([s.labels for s in clients])
    return rows * math.sqrt(rows.shape[1]) / rows.norm(dim=1, keepdim=True), one_hot(labels, 3)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_comes_back_from_disk(name: str, tmp_path) -> None:
    clients = draw_clients([30, 50], 6, 3, 0)
    kinds = ("nb", "qda", "lda") if name == "gh_ofl" else (None,)
    for kind in kinds:
        model = last_round(name, clients, 3, adapt="prior", **({} if kind is None else {"kind": kind})).models[1]
        write(model.container(), tmp_path / "m.safetensors")
        back = load_model(tmp_path / "m.safetensors")
        scores = model.scores(clients[0].features)
        torch.testing.assert_close(back.scores(clients[0].features), scores, rtol=1e-9, atol=1e-9)
        with pytest.raises(InputError, match="this model was made for"):
            back.scores(clients[0].features[:, :3])


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
        assert {"finetune_lr", "finetune_epochs"} <= set(load_method(name, adapt="finetune").grid)

    def test_finetuning_descends_from_the_shared_head(self, name: str) -> None:
        """Against autograd: clients with fewer rows than a minibatch take one step of all their rows each epoch."""
        clients = draw_clients([40, 12], 6, 3, 2)
        shared = last_round(name, clients, 3)
        tuned = last_round(name, clients, 3, adapt="finetune", finetune_epochs=3, finetune_lr=0.2)
        assert (tuned.bytes_up, tuned.bytes_down, tuned.index) == (shared.bytes_up, shared.bytes_down, shared.index)
        for shard, before, after in zip(clients, shared.models, tuned.models, strict=True):
            rows = before.represent(shard.features).double()
            weight, bias = (p.double().clone().requires_grad_() for p in (before.weight, before.bias))
            for _ in range(3):
                loss = torch.nn.functional.cross_entropy(rows @ weight + bias, shard.labels)
                steps = torch.autograd.grad(loss, (weight, bias))
                weight, bias = (
                    (p - 0.2 * g).detach().requires_grad_() for p, g in zip((weight, bias), steps, strict=True)
                )
            # The engine trains in float32.
            torch.testing.assert_close(after.weight.double(), weight.detach(), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(after.bias.double(), bias.detach(), rtol=1e-4, atol=1e-4)

    def test_no_epochs_of_finetuning_leave_the_shared_head(self, name: str) -> None:
        clients = draw_clients([40, 12], 6, 3, 2)
        tuned = last_round(name, clients, 3, adapt="finetune", finetune_epochs=0).models
        assert tuned[0] is tuned[1]


@pytest.mark.parametrize("name", ["fedlda", "fedpft", "gh_ofl", "deepafl"])
def test_points_of_a_grid_worked_on_together_are_those_worked_on_alone(name: str) -> None:
    """Heads, rates and epochs that are shared on the way: the same models, bytes and exchanges, point by point."""
    clients = draw_clients([30, 50, 20], 6, 3, 0)
    quick = {"deepafl": {"d": 16, "d_block": 8, "blocks": 2}, "fedpft": {"epochs": 3}, "gh_ofl": {"drawn": 20}}
    varied = [
        {"adapt": "finetune", "finetune_lr": 0.1, "finetune_epochs": 5},
        {"adapt": "prior", "tau": 0.3},
        {"adapt": "finetune", "finetune_lr": 0.3, "finetune_epochs": 2},
        {"adapt": "finetune", "finetune_lr": 0.1, "finetune_epochs": 0},
        {"adapt": "labels", "normalise": "root"},
        {"adapt": "finetune", "finetune_lr": 0.1, "finetune_epochs": 2, "normalise": "root"},
        {"adapt": "none"},
    ]
    varied += [each | {"lr": 0.03} for each in varied[:3]] if name in ("fedpft", "gh_ofl") else []
    points = [load_method(name, **(quick.get(name, {}) | each)) for each in varied]
    for place, last in points[0].together(points, clients, 3, 7):
        (alone,) = points[place].rounds(clients, 3, 7)
        assert (last.index, last.bytes_up, last.bytes_down) == (alone.index, alone.bytes_up, alone.bytes_down)
        for model, own, shard in zip(last.models, alone.models, clients, strict=True):
            # Single precision: heads side by side are added up in another order.
            torch.testing.assert_close(model.scores(shard.features), own.scores(shard.features), rtol=1e-4, atol=1e-5)
        varied[place] = {}
    assert not any(varied)


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

    def test_one_component_is_what_expectation_maximisation_gives(self) -> None:
        (rows,) = draw_clients([50], 6, 3, 0)
        for found in mixtures(rows, 1, seed=0):
            own = rows.features[rows.labels == found.label].double().numpy()
            fitted = GaussianMixture(1, covariance_type="diag", reg_covar=SMALLEST_VARIANCE, random_state=0).fit(own)
            # float16 travels: a difference of 1e-12 may round to the next one.
            np.testing.assert_allclose(found.means, fitted.means_, rtol=1e-3)
            np.testing.assert_allclose(found.variances, fitted.covariances_, rtol=1e-3)

    def test_rare_classes_are_not_left_out(self) -> None:
        rows = Shard(torch.randn(12, 4), torch.tensor([0] * 11 + [1]))
        assert [each.n_rows for each in mixtures(rows, 5, 0)] == [11, 1]


class TestGHOFL:
    @pytest.mark.parametrize("kind", ["nb", "qda"])
    def test_scores_are_log_likelihoods_of_gaussian_classes(self, kind: str) -> None:
        clients = draw_clients([40, 25, 60], 4, 3, 1)
        z, y = by_rows(clients)
        labels = y.argmax(1)
        expected = np.empty((125, 3))
        for c in range(3):
            own = z[labels == c].numpy()
            covariance = np.cov(own.T)
            if kind == "nb":
                covariance = np.diag(np.diag(covariance))
            shrunk = 0.8 * covariance + 0.2 * np.trace(covariance) / 4 * np.eye(4)
            expected[:, c] = multivariate_normal(own.mean(0), shrunk).logpdf(z) + np.log(len(own))
        model = last_round("gh_ofl", clients, 3, kind=kind, shrinkage=0.2).models[0]
        scores = model.scores(torch.cat([s.features for s in clients])).numpy() - 2 * math.log(2 * math.pi)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)  # rows are normalised in float32

    def test_lda_is_fedlda_with_one_degree_of_freedom_a_class_fewer(self) -> None:
        """Sigma grows by N / (N - c): the scores without the prior shrink by as much."""
        clients = draw_clients([40, 25, 60], 6, 3, 1)
        z = torch.cat([s.features for s in clients])
        prior = by_rows(clients)[1].sum(0).log()
        own = last_round("gh_ofl", clients, 3, kind="lda", shrinkage=0.05).models[0].scores(z) - prior
        lda = last_round("fedlda", clients, 3, shrinkage=0.05).models[0].scores(z) - prior
        torch.testing.assert_close(own, lda * 122 / 125, rtol=1e-9, atol=1e-9)

    def test_lda_shrunk_to_the_identity_is_the_nearest_mean(self) -> None:
        """With as many rows of each class; `fedncm` up to the scale of the scores."""
        (drawn,) = draw_clients([90], 6, 3, 1)
        clients = [Shard(drawn.features[k::3], torch.arange(30) % 3) for k in range(3)]
        own, ncm = (
            last_round(name, clients, 3, **more).models[0].scores(drawn.features)
            for name, more in (("gh_ofl", {"kind": "lda", "shrinkage": 1.0}), ("fedncm", {}))
        )
        own, ncm = own - own[:, :1], ncm - ncm[:, :1]
        ratio = float((own * ncm).sum() / (ncm * ncm).sum())
        torch.testing.assert_close(own, ratio * ncm, rtol=1e-9, atol=1e-9)
        assert ratio > 0

    def test_the_fisher_subspace_whitens_and_keeps_what_lda_sees(self) -> None:
        clients = draw_clients([40, 25, 60], 6, 3, 1)
        z, y = by_rows(clients)
        n, means = y.sum(0), (y.T @ z) / y.sum(0)[:, None]
        scatter = (z - y @ means).T @ (z - y @ means) / 122
        within = 0.95 * scatter + 0.05 * scatter.diagonal().mean() * torch.eye(6).double()
        v = fisher_subspace(statistics(z, y), within, 1.0)
        assert v.shape == (6, 2)  # one fewer than classes
        torch.testing.assert_close(v.T @ within @ v, torch.eye(2).double(), rtol=0, atol=1e-9)
        inside = (z @ v) @ (means @ v).T - (means @ v).square().sum(1) / 2 + n.log()
        inverse = torch.linalg.inv(within)
        whole = z @ inverse @ means.T - ((means @ inverse) * means).sum(1) / 2 + n.log()
        torch.testing.assert_close(inside - inside[:, :1], whole - whole[:, :1], rtol=0, atol=1e-9)
        assert fisher_subspace(statistics(z, y), within, 0.1).shape == (6, 1)

    def test_the_trained_head_stays_in_the_subspace_and_learns(self) -> None:
        clients = clusters([60, 40, 50])
        rows, labels = torch.cat([s.features for s in clients]), torch.cat([s.labels for s in clients])
        trained = last_round("gh_ofl", clients, 4, drawn=100).models[0]
        assert int(torch.linalg.matrix_rank(trained.weight)) == 3
        lda = last_round("gh_ofl", clients, 4, kind="lda").models[0]
        assert (trained.predict(rows) == labels).double().mean() >= (lda.predict(rows) == labels).double().mean() - 0.05

    def test_a_class_with_one_row_has_the_common_covariance_and_one_without_rows_is_ruled_out(self) -> None:
        clients = draw_clients([40], 4, 3, 1)
        labels = torch.cat([torch.tensor([2]), torch.arange(39) % 2])
        for kind in ("nb", "qda", "lda", "fishermix"):
            model = last_round("gh_ofl", [Shard(clients[0].features, labels)], 4, kind=kind, drawn=20).models[0]
            scores = model.scores(clients[0].features)
            assert bool(scores[:, :3].isfinite().all())
            assert bool(scores[:, 3].isneginf().all())

    def test_bytes_are_those_of_the_moments(self) -> None:
        clients = draw_clients([20, 35], 6, 3, 0)
        sent = {kind: last_round("gh_ofl", clients, 3, kind=kind, drawn=5).bytes_up for kind in ("nb", "lda", "qda")}
        assert sent["nb"] == 2 * 8 * (12 * 3 + 3)
        assert sent["qda"] == 2 * 8 * ((6 + 21) * 3 + 3)
        assert sent["lda"] == last_round("fedlda", clients, 3).bytes_up


class TestSAFLe:
    def test_scores_are_sums_of_looked_up_rows(self) -> None:
        """The paper's formula, bit by bit."""
        clients = draw_clients([30, 20], 6, 3, 0)
        model = last_round("safle", clients, 3, levels=3, bits=2, groups=5, normalise="row").models[0]
        rows = clients[0].features.double()
        rows = rows * math.sqrt(6) / rows.norm(dim=1, keepdim=True)
        columns, thresholds = model.feature_map.chosen
        tables = model.weight.reshape(5, 4, 3)
        for row, scored in zip(rows, model.scores(clients[0].features), strict=True):
            on = [int(row[i] > t) for i, t in zip(columns, thresholds, strict=True)]
            looked_up = sum(tables[j][on[2 * j] + 2 * on[2 * j + 1]] for j in range(5))
            torch.testing.assert_close(scored, looked_up, rtol=1e-9, atol=1e-12)

    def test_every_bit_is_used_at_most_once_and_thresholds_are_quantiles(self) -> None:
        lift = Buckets(4, levels=3, bits=3, groups=4, seed=5)
        columns, thresholds = lift.chosen
        pairs = set(zip(columns.tolist(), thresholds.tolist(), strict=True))
        assert len(pairs) == 12
        np.testing.assert_allclose(sorted({t for _, t in pairs}), [-0.6744897501960817, 0, 0.6744897501960817])
        assert Buckets(4, levels=3, bits=5, groups=9).shape == (2, 5)  # two bits are over
        assert Buckets(1, levels=3, bits=5, groups=9).shape == (1, 3)

    def test_without_a_ridge_groups_of_one_bit_are_least_squares_on_bits_and_a_constant(self) -> None:
        clients = draw_clients([30, 50], 5, 3, 0)
        z, y = by_rows(clients)
        last = last_round("safle", clients, 3, levels=1, bits=1, groups=99, gamma=0.0, normalise="row")
        bits = np.column_stack([np.ones(80), z.numpy() > 0])
        fitted = bits @ np.linalg.lstsq(bits, y.numpy(), rcond=None)[0]
        scores = last.models[0].scores(torch.cat([s.features for s in clients]))
        np.testing.assert_allclose(scores, fitted, rtol=0, atol=1e-9)

    def test_with_a_ridge_it_is_ridge_on_the_one_hot_codes_however_rows_are_spread(self) -> None:
        clients = draw_clients([30, 50], 5, 3, 0)
        model = last_round("safle", clients, 3, levels=2, bits=3, groups=3, gamma=0.7).models[0]
        pooled = Shard(*(torch.cat([getattr(s, name) for s in clients]) for name in ("features", "labels")))
        phi = model.represent(pooled.features).numpy()
        system = np.vstack([phi, math.sqrt(0.7) * np.eye(24)])
        right = np.vstack([one_hot(pooled.labels, 3).numpy(), np.zeros((24, 3))])
        np.testing.assert_allclose(model.weight, np.linalg.lstsq(system, right, rcond=None)[0], rtol=0, atol=1e-9)
        alone = last_round("safle", [pooled], 3, levels=2, bits=3, groups=3, gamma=0.7).models[0]
        torch.testing.assert_close(alone.weight, model.weight, rtol=1e-9, atol=1e-9)

    def test_another_seed_is_another_permutation_and_moments_are_an_exchange(self) -> None:
        clients = draw_clients([30, 50], 5, 3, 0)
        one, other = (last_round("safle", clients, 3, seed=seed, normalise="row") for seed in (0, 1))
        assert not torch.equal(one.models[0].feature_map.chosen[0], other.models[0].feature_map.chosen[0])
        assert (one.index, last_round("safle", clients, 3).index) == (1, 2)

    def test_bytes_of_counts_or_of_the_factor(self) -> None:
        clients = draw_clients([2, 2000], 6, 3, 0)
        last = last_round("safle", clients, 3, levels=2, bits=2, groups=3, normalise="row")
        counts = 4 * (12 * 13 // 2 - 3 * 6 + 12 * 3)
        factor = 8 * (2 * 12 - 1 + 2 * 3) + 8 * 3 + 16
        assert last.bytes_up == factor + counts + 8 * 3
        assert last.bytes_down == 2 * 8 * 12 * 3


class TestDeepAFL:
    def test_the_head_can_be_finetuned_and_the_blocks_stay(self) -> None:
        clients = draw_clients([30, 20], 6, 3, 0)
        shared = last_round("deepafl", clients, 3, d=10, d_block=8, blocks=2).models[0]
        tuned = last_round("deepafl", clients, 3, d=10, d_block=8, blocks=2, adapt="finetune").models
        for shard, model in zip(clients, tuned, strict=True):
            losses = [
                torch.nn.functional.cross_entropy(m.scores(shard.features), shard.labels) for m in (shared, model)
            ]
            assert losses[1] < losses[0]
            assert torch.equal(model.represent(shard.features), shared.represent(shard.features))

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
