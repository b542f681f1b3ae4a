"""The closed-form choice of every setting."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import apfl.maths.gcv as gcv_room
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths import machine, memory
from apfl.maths.gcv import Path, choose_gamma, feature_energy
from apfl.maths.hits import FEW_HITS, Grid, _with_neighbours, choose, grid, hits, local_prior
from apfl.maths.leaveout import ECHO, LeftOut, fit_refinement, hat_basis, leverage_sketch, whiten
from apfl.maths.personalise import MOST_NOISE, Rows, leave_out, solve_primary, width_for
from apfl.maths.ridge import factorise, one_hot, solve, statistics, total
from apfl.methods import load_method
from apfl.methods.apfl import APFL
from tests.conftest import draw_clients
from tests.maths.test_ridge import rows


def fit_from_rows(phi: torch.Tensor, y: torch.Tensor, gamma: float) -> tuple[float, float]:
    """rss and df by their definition: the hat matrix itself."""
    hat = phi @ torch.linalg.solve(phi.T @ phi + gamma * torch.eye(phi.shape[1], dtype=torch.float64), phi.T)
    return float((y - hat @ y).square().sum()), float(hat.trace())


@given(st.integers(3, 60), st.integers(1, 40), st.integers(0, 99))
def test_gcv_from_statistics_is_gcv_from_rows(n, d, seed):
    phi, y = rows(n, d, 3, seed)
    path = choose_gamma(total([statistics(phi[:1], y[:1]), statistics(phi[1:], y[1:])]))
    assert path.gammas == sorted(path.gammas)
    rss, df = fit_from_rows(phi, y, 1e-6 * float(phi.square().sum()) / n)
    assume(not 0.9 < rss / (1e-6 * float(y.square().sum())) < 1.1)
    m = df if rss < 1e-6 * float(y.square().sum()) else n  # if the targets are interpolated, df counts the rows
    assert path.distinct_rows == pytest.approx(m, rel=1e-6)
    for gamma, score in zip(path.gammas, path.scores, strict=True):
        # A point counts if it uses at most half of the rows' degrees of freedom: then nothing cancels.
        rss, df = fit_from_rows(phi, y, gamma)
        if df <= 0.499 * m:
            assert score == pytest.approx(m * rss / (m - df) ** 2, rel=1e-6)
        elif df > 0.501 * m:
            assert score == math.inf


@pytest.mark.parametrize("d", [40, 200, 2 * 64 + 3])
def test_a_band_form_gives_the_same_curve(monkeypatch, d):
    stats = statistics(*rows(300, d, 3, 0))
    exact = choose_gamma(stats)
    monkeypatch.setattr(gcv_room, "EIGEN_WIDTH", 0)
    by_band = choose_gamma(stats)
    assert by_band.gammas == exact.gammas
    assert by_band.scores == pytest.approx(exact.scores, rel=1e-9)
    assert by_band.distinct_rows == pytest.approx(exact.distinct_rows, rel=1e-9)


@pytest.mark.parametrize("width", [1024, 0], ids=["eigenvalues", "band"])
def test_gamma_stands_clear_of_a_negative_eigenvalue(monkeypatch, width):
    """Statistics that travelled as integers may have one: no gamma below ten times its size is admitted."""
    monkeypatch.setattr(gcv_room, "EIGEN_WIDTH", width)
    stats = statistics(*rows(300, 20, 3, 0))
    values, vectors = torch.linalg.eigh(stats.autocorrelation)
    unit = feature_energy(stats)
    values[0] = -0.02 * unit
    path = choose_gamma(replace(stats, autocorrelation=vectors @ torch.diag(values) @ vectors.T))
    below = [score for gamma, score in zip(path.gammas, path.scores, strict=True) if gamma < 0.19 * unit]
    above = [score for gamma, score in zip(path.gammas, path.scores, strict=True) if gamma > 0.21 * unit]
    assert all(score == math.inf for score in below)
    assert all(map(math.isfinite, above))


def test_gamma_does_not_fall_to_the_edge_with_fewer_rows_than_columns(monkeypatch):
    """Both parts of GCV vanish with gamma there."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(560, 60))
    phi = torch.from_numpy(np.maximum(z @ rng.normal(size=(60, 600)), 0))
    labels = (z @ rng.normal(size=(60, 3)) + 4 * rng.normal(size=(560, 3))).argmax(1)
    stats = statistics(phi, one_hot(torch.from_numpy(labels), 3))
    exact = choose_gamma(stats)
    monkeypatch.setattr(gcv_room, "EIGEN_WIDTH", 0)
    by_band = choose_gamma(stats)
    assert by_band.lowest == exact.lowest
    assert by_band.chosen == exact.chosen
    assert not math.isfinite(by_band.scores[0])


def test_exact_leverage_is_not_clipped_as_a_sketched_one_is():
    """A row that nobody else supports has leverage 0.999: known exactly, it is used as it is."""
    phi = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 2]]
    y = one_hot(torch.tensor([0, 1, 1, 0]), 2)
    factor = factorise(statistics(phi, y), 1e-3)
    residual = y - phi @ torch.cholesky_solve(phi.T @ y, factor)
    exact = LeftOut(hat_basis(phi), whiten(phi, factor), residual)
    sketched = LeftOut(hat_basis(phi), whiten(phi, factor), residual, sketched=True)
    assert exact.clipped == 0
    assert sketched.clipped == 0.5
    torch.testing.assert_close(y[2] - exact.primary[2], torch.zeros(2, dtype=torch.float64), atol=1e-9, rtol=0)
    assert float((y[2] - sketched.primary[2]).abs().max()) > 0.5


def test_gamma_is_near_the_best_for_new_rows():
    """A noisy linear target: GCV finds a gamma that predicts fresh rows about as well as the best one can."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(80, 3))

    def draw(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = rng.normal(size=(n, 80))
        labels = (x @ weights + 12 * rng.normal(size=(n, 3))).argmax(1)
        return torch.from_numpy(x), one_hot(torch.from_numpy(labels), 3)

    phi, y = draw(150)
    fresh, truth = draw(4000)
    stats = statistics(phi, y)
    path = choose_gamma(stats)

    def error(gamma: float) -> float:
        return float((truth - fresh @ solve(stats, gamma)).square().mean())

    errors = [error(gamma) for gamma in path.gammas]
    assert error(path.lowest) < 1.05 * min(errors)
    assert error(path.chosen) < 1.15 * min(errors)
    assert max(errors) > 1.5 * min(errors)  # it could have gone wrong
    assert path.chosen <= path.lowest


def test_what_gamma_cannot_be_chosen_from():
    phi, y = rows(1, 4, 2, 0)
    with pytest.raises(InputError, match="1 sample"):
        choose_gamma(statistics(phi, y))
    phi, y = rows(5, 4, 2, 0)
    with pytest.raises(InputError, match="zero"):
        choose_gamma(statistics(0 * phi, y))


def test_a_table_counts_the_rows_that_refitting_would_get_right():
    """Left-out hits, the long way: without the row, refit both streams and the counts, and predict it."""
    gamma, smoothing, c = 0.5, 0.03, 3
    phi, y = rows(30, 8, c, 0)
    psi, _ = rows(12, 6, c, 1)
    labels, totals = y.argmax(1), y.sum(0)
    factor = factorise(statistics(phi, y), gamma)
    residual = y[:12] - phi[:12] @ torch.cholesky_solve(phi.T @ y, factor)
    left = LeftOut(hat_basis(psi), whiten(phi[:12], factor), residual)
    tried = Grid([0.3, 30.0], [0.0, 0.5, 1.5], [0.0, 0.2])
    table = hits(left, labels[:12], y[:12].sum(0), totals, smoothing, tried)

    expected = torch.zeros(tried.shape, dtype=torch.int64)
    for i in range(12):
        others = torch.arange(30) != i
        primary = solve(statistics(phi[others], y[others]), gamma)
        mine = [j for j in range(12) if j != i]
        targets = y[mine] - phi[mine] @ primary
        prior = local_prior(y[mine].sum(0), y[others].sum(0), smoothing)
        for b, beta in enumerate(tried.betas):
            refinement = psi[i] @ fit_refinement(psi[mine], targets, beta)
            for k, balance in enumerate(tried.balances):
                for t, tau in enumerate(tried.taus):
                    scores = phi[i] @ primary + balance * refinement + tau * prior
                    expected[b, k, t] += int(scores.argmax() == labels[i])
    assert torch.equal(table, expected)
    assert len(torch.unique(table)) > 1


def test_the_prior_that_judges_a_row_knows_nothing_of_its_group():
    """Four rows of label 0 in one group, two of label 1 in another, and no features: the prior alone decides."""
    labels, groups = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([7, 7, 7, 7, 2, 2])
    y, zeros = one_hot(labels, 2), torch.zeros(6, 1, dtype=torch.float64)
    everyone = torch.full((2,), 100.0, dtype=torch.float64)

    def right(groups: torch.Tensor | None) -> int:
        left = LeftOut(hat_basis(zeros), zeros, y, groups=groups)
        return int(hits(left, labels, y.sum(0), everyone, 0.03, Grid([1.0], [0.0], [0.1])))

    assert right(None) == 4  # three others vote for label 0
    assert right(groups) == 0  # nobody is left to vote for either group's label


def test_ties_go_to_the_most_cautious_setting():
    tried = Grid([1.0, 2.0], [0.0, 0.5], [0.0, 0.1])
    assert choose(torch.ones(2, 2, 2), tried, 1) == (2.0, 0.0, 0.0)
    table = torch.zeros(2, 2, 2)
    table[0, 1, 1] = FEW_HITS
    assert choose(table, tried, 2 * FEW_HITS) == (1.0, 0.5, 0.1)


def test_a_plateau_beats_a_spike_of_few_rows():
    tried = Grid([1.0, 2.0, 4.0], [step / 10 for step in range(9)], [0.0])
    table = torch.full((3, 9, 1), 80)
    table[:, 5:8] = 90  # the plateau: 90 with its neighbours at balance 0.6
    table[0, 1, 0] = 93  # the spike, between 80s
    assert choose(table, tried, 120)[1:] == (0.6, 0.0)
    # Of many rows a lead is no chance.
    assert choose(100 * table, tried, 12_000) == (1.0, 0.1, 0.0)


def test_of_few_rows_it_is_the_middle_of_the_settings_that_are_about_as_good():
    """So one hit more or less at either end of a plateau moves the choice by a step at most."""
    tried = Grid([1.0], [step / 10 for step in range(11)], [0.0])
    table = torch.full((1, 11, 1), 60)
    table[0, 2:9, 0] = 100
    assert choose(table, tried, 150) == (1.0, 0.5, 0.0)
    for end in (2, 8):
        more = table.clone()
        more[0, end, 0] += 1
        assert abs(choose(more, tried, 150)[1] - 0.5) < 0.11
    assert choose(100 * more, tried, 15_000) == (1.0, 0.8, 0.0)  # of many rows a lead is no chance


def test_how_good_about_as_good_is_depends_on_the_misses():
    """Two models that get nearly all rows right differ on few: then three hits are a lead."""
    tried = Grid([1.0], [step / 10 for step in range(11)], [0.0])
    table = torch.linspace(90, 100, 11).round().long()[None, :, None]
    assert choose(table, tried, 100)[1] > choose(table, tried, 400)[1]


def test_along_an_axis_that_makes_no_difference_the_choice_is_cautious():
    tried = Grid([1.0, 2.0, 4.0], [0.0, 0.1, 0.2], [0.0, 0.5])
    table = torch.tensor([10, 30, 10])[None, :, None].expand(3, 3, 2).clone()
    assert choose(table, tried, 40) == (4.0, 0.1, 0.0)


def test_a_setting_at_the_edge_counts_fewer_neighbours_as_misses():
    means = _with_neighbours(torch.full((3, 4, 5), 7))
    assert torch.equal(means, torch.full_like(means, 7e6))
    table = torch.zeros(1, 5, 1)
    table[0, :, 0] = torch.tensor([9.0, 9, 0, 3, 6])
    expected = torch.tensor([9, 6, 4, 3, 4.5]).double() * 1e6
    assert torch.equal(_with_neighbours(table)[0, :, 0], expected)
    assert choose(table, Grid([3.0], [0.0, 0.1, 0.2, 0.3, 0.4], [0.5]), 9) == (3.0, 0.0, 0.5)


def test_a_grid_of_one_setting_has_no_choice():
    assert choose(torch.tensor([[[0]]]), Grid([3.0], [0.2], [0.1]), 5) == (3.0, 0.2, 0.1)
    assert _with_neighbours(torch.tensor([[[5]]])).tolist() == [[[5e6]]]


def test_the_only_row_of_a_client_decides_its_prior():
    total_counts = torch.tensor([100.0, 100.0, 100.0]).double()
    one, many = torch.tensor([1.0, 0, 0]).double(), torch.tensor([1000.0, 0, 0]).double()
    lead = [float((prior := local_prior(counts, total_counts, 0.03))[0] - prior[1]) for counts in (one, many)]
    assert lead[0] == pytest.approx(math.log(2))  # (1 + 1) / (0 + 1)
    assert lead[1] == pytest.approx(math.log(1000.03 / 0.03))  # by the smoothing itself
    # Everyone's counts are smoothed, too: a class that nobody has is no reason for infinity.
    rare = local_prior(many, torch.tensor([100.0, 1.0, 0.0]).double(), 0.5)
    np.testing.assert_allclose(rare, np.log(np.array([1000.5, 0.5, 0.5]) / np.array([100.5, 1.5, 0.5])))
    # Without rows, as when the only one is left out, nothing is said about any class.
    none = local_prior(torch.zeros(2, 3).double(), total_counts.expand(2, 3), 0.03)
    assert torch.equal(none, none[0, 0].expand(2, 3))
    # Each client by its own number.
    both = local_prior(torch.stack([one, many]), total_counts, 0.03)
    torch.testing.assert_close(both[0], local_prior(one, total_counts, 0.03))


def test_a_fixed_setting_is_not_searched_and_tables_stay_small():
    assert grid(1.0, beta=2.0, balance=None, tau=0.0).shape == (1, 14, 1)
    assert math.prod(grid(1.0, beta=None, balance=None, tau=None).shape) <= 2000


def test_the_default_grid_is_the_documented_one():
    tried = grid(50.0, beta=None, balance=None, tau=None)
    np.testing.assert_allclose(tried.betas, 50 * np.logspace(-2, 1, 7))  # three decades, by halves
    np.testing.assert_allclose(tried.balances, np.arange(14) / 10)
    assert list(tried.taus) == [0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.17, 0.25]
    assert tried.index((tried.betas[2], tried.balances[5], tried.taus[8])) == (2, 5, 8)


def skewed(n_clients: int = 6, n: int = 60, seed: int = 0) -> list[Shard]:
    """Overlapping clouds; each client has mostly two of four classes."""
    rng = np.random.default_rng(seed)
    centres = 1.2 * np.eye(4, 10)
    shards = []
    for k in range(n_clients):
        usual = rng.choice([k % 4, (k + 1) % 4], size=n)
        labels = np.where(rng.random(n) < 0.9, usual, rng.integers(4, size=n))
        features = torch.from_numpy(centres[labels] + 0.8 * rng.normal(size=(n, 10))).float()
        shards.append(Shard(features, torch.from_numpy(labels)))
    return shards


def accuracy(name: str, **settings) -> float:
    (last,) = load_method(name, **settings).rounds(skewed(), 4, 0)
    fresh = skewed(seed=1)
    right = [
        (m.scores(s.features).argmax(1) == s.labels).double().mean() for m, s in zip(last.models, fresh, strict=True)
    ]
    return float(torch.stack(right).mean())


def test_it_tunes_itself_where_fixed_settings_fail():
    fixed = {"d_primary": 256, "d_refinement": 256}
    assert accuracy("apfl", **fixed) > accuracy("apfl_paper", **fixed, beta=1e-3, balance=1.0) + 0.05
    assert accuracy("apfl", **fixed) > accuracy("central", d=256) + 0.05


@pytest.mark.parametrize("scope", ["federation", "client"])
def test_every_scope_works(scope):
    assert accuracy("apfl", d_primary=128, scope=scope, refinement="in-sample") > 0.7


def test_what_was_chosen_is_recorded():
    (last,) = load_method("apfl", map="random", d_primary=128).rounds(skewed(), 4, 0)
    chosen = last.chosen
    assert chosen["d_primary"] == 128
    assert chosen["gamma"] in chosen["gamma_path"]["gamma"]
    assert chosen["beta"] in chosen["table"]["beta"]
    assert chosen["left_out_accuracy"] >= chosen["left_out_accuracy_primary_alone"]
    table = torch.tensor(chosen["table"]["hits"])
    own = table[tuple(chosen["table"][name].index(chosen[name]) for name in ("beta", "balance", "tau"))]
    assert chosen["left_out_accuracy"] == pytest.approx(float(own) / chosen["left_out_rows"])
    assert 0.97 * float(table.max()) < float(own) <= float(table.max())  # it was chosen with its neighbours
    assert abs(chosen["left_out_noise"]) <= MOST_NOISE
    settings = {"d_primary": 64, "gamma": 1, "beta": 2, "balance": 0.3, "tau": 0, "normalise": "row"}
    (fixed,) = load_method("apfl", map="random", **settings).rounds(skewed(), 4, 0)
    assert (fixed.chosen["gamma"], fixed.chosen["beta"], fixed.chosen["balance"]) == (1.0, 2.0, 0.3)
    assert fixed.index == 1


def test_fixed_settings_are_the_paper_preset():
    clients = draw_clients([5, 30, 12], 6, 3, 0)
    shared = {"d_primary": 25, "d_refinement": 20, "gamma": 2.0, "beta": 3.0, "balance": 0.4}
    (auto,) = load_method("apfl", map="random", **shared, tau=0, normalise="root").rounds(clients, 3, 0)
    apart = {"activation_primary": "hardswish", "activation_refinement": "hardswish", "normalise": "root"}
    (paper,) = load_method("apfl_paper", **shared, **apart).rounds(clients, 3, 0)
    for a, p, shard in zip(auto.models, paper.models, clients, strict=True):
        torch.testing.assert_close(a.scores(shard.features), p.scores(shard.features), rtol=1e-12, atol=1e-12)
    assert auto.index == paper.index
    assert auto.bytes_up == paper.bytes_up + 3 * (8 + 2 * ECHO)  # n, which the width may follow, and the echo
    assert auto.bytes_down == paper.bytes_down + 3 * 8 * 3  # everyone's class counts


D, C, L = 25, 3, 6  # of the federation whose costs follow
STATISTICS = 8 * (20 * D - 190 + 20 * C + C + 2) + 8 * (D * (D + 1) // 2 + D * C + C + 2)  # of 20 rows, and of 30
FIXED = {"beta": 1.0, "balance": 0.5, "tau": 0.1, "gamma": 1.0, "normalise": "root"}


@pytest.mark.parametrize(
    ("settings", "exchanges", "up", "down"),  # bytes up and down of each client, beyond statistics, echo and primary
    [
        ({}, 3, 8 * (1 + 2 * L + 3) + 8 * 7 * 14 * 9, 16 * L + 8 * (D * 128)),
        ({"sketch": 16}, 3, 8 * (1 + 2 * L + 3) + 8 * 7 * 14 * 9, 16 * L + 8 * (D * 16)),
        ({"sketch": 0}, 3, 8 * (1 + 2 * L + 3) + 8 * 7 * 14 * 9, 16 * L + 8 * (D * (D + 1) // 2)),
        ({"normalise": "row"}, 2, 8 + 8 * 7 * 14 * 9, 8 * (D * 128)),
        ({"normalise": "row", "scope": "client"}, 1, 8, 8 * (D * 128)),
        ({"normalise": "row", "tau": 0.1}, 2, 8 + 8 * 7 * 14, 8 * (D * 128)),
        (FIXED, 1, 8, 0),  # nothing to choose, so no leverage
    ],
)
def test_cost_is_that_of_the_messages(settings, exchanges, up, down):
    (last,) = load_method("apfl", map="random", d_primary=D, **settings).rounds(draw_clients([20, 30], L, C, 0), C, 0)
    assert last.index == exchanges  # moments, statistics, tables
    assert last.bytes_up == STATISTICS + 2 * (2 * ECHO + up)
    assert last.bytes_down == 2 * (8 * (D * C + C) + down)


@pytest.mark.parametrize("kind", ["landmarks", "random"])
def test_single_rows_and_missing_classes(kind):
    features = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    clients = [Shard(features[k : k + 1], torch.tensor([k % 2])) for k in range(5)]
    (last,) = load_method("apfl", map=kind).rounds(clients, 4, 0)
    assert all(bool(torch.isfinite(model.scores(features)).all()) for model in last.models)


@pytest.mark.parametrize(
    ("n", "features", "width"),
    [(1, 6, 256), (300, 64, 256), (1300, 64, 1024), (8000, 1280, 8192), (10**7, 1280, 8192), (300, 1280, 2048)],
)
def test_default_width_follows_the_rows_or_else_the_features(n, features, width):
    assert width_for(n, features) == width


@pytest.mark.parametrize("kind", ["landmarks", "random"])
def test_a_width_that_does_not_fit_is_refused_with_one_that_does(monkeypatch, kind):
    monkeypatch.setattr(machine, "available", lambda device: 10**9)
    clients = draw_clients([20, 30], 6, 3, 0)
    method = load_method("apfl", map=kind, d_primary=16384, normalise="row")
    with pytest.raises(InputError, match=r"needs about [78]\.\d GB and 1\.0 GB are free") as refused:
        list(method.rounds(clients, 3, 0))
    widest = int(str(refused.value).rsplit("=", 1)[1])
    n = 100 if kind == "landmarks" else 50  # rows on landmarks are float64
    assert memory.of_run(widest, n, 1) <= 10**9 < memory.of_run(2 * widest, n, 1)


def test_free_memory_is_what_the_system_says(monkeypatch, tmp_path):
    listing = tmp_path / "meminfo"
    monkeypatch.setattr(machine, "Path", {"/proc/meminfo": listing}.__getitem__)
    assert machine.available(torch.device("cpu")) is None  # no such file, as on a Mac
    listing.write_text("MemTotal:  9000 kB\nMemFree:  50 kB\n")
    assert machine.available(torch.device("cpu")) is None
    listing.write_text("MemTotal:  9000 kB\nMemFree:  50 kB\nMemAvailable:    7000 kB\nCached:  1 kB\n")
    assert machine.available(torch.device("cpu")) == 7000 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the listing is Linux's")
def test_free_memory_is_known_on_linux():
    have = machine.available(torch.device("cpu"))
    assert have is not None
    assert 10**6 < have <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def decades_of(*scores):
    """A curve by quarters of a decade."""
    return Path([10 ** (step / 4) for step in range(len(scores))], list(scores), 100.0)


@pytest.mark.parametrize(
    ("scores", "lowest", "chosen"),
    [
        ((9, 1.10, 1.02, 1.00, 1.01, 1.1), 3, 2),  # within 3 % of the lowest: a quarter of a decade less
        ((9, 1.10, 1.04, 1.00, 1.01, 1.1), 3, 3),  # 4 % is too much
        ((9, 1.02, 1.04, 1.00, 1.01, 1.1), 3, 3),  # the way to a good point must not lead over a worse one
        ((1.1, 1.01, 1.01, 1.00, 1.01, 1.1), 3, 1),  # half a decade, and no further:
        ((1.0, 1.01, 1.01, 1.01, 0.99, 1.1), 4, 2),
        ((1.00, 1.02, 1.029, 1.04, 1.2), 0, 2),  # nothing smaller bears the lowest out: the largest within 3 %
        ((math.inf, math.inf, 1.00, 1.02, 1.04), 2, 3),  # points that are not admitted do not either
        ((0.1, 9, 1.02, 1.00, 1.01, 1.1), 3, 2),  # a minimum behind an ascent is not trusted
        ((1.0, 1.24, 1.00, 1.2, 1.1), 2, 2),  # 24 % is no ascent, and of equal points the larger gamma counts
        ((0.99, 1.25, 1.00, 1.1), 0, 2),  # and neither is 25 %
        ((9, 1.10, 1.03, 1.00, 1.01, 1.1), 3, 2),  # 3 % is within 3 %
        ((1.0,), 0, 0),
        ((math.inf, math.inf), 1, 1),
    ],
)
def test_gamma_is_the_smallest_within_three_percent_and_half_a_decade(scores, lowest, chosen):
    path = decades_of(*scores)
    assert path.gammas.index(path.lowest) == lowest
    assert path.gammas.index(path.chosen) == chosen


def test_gamma_keeps_some_ridge_where_the_curve_is_flat():
    """Many rows for each column: every small gamma scores alike, and none further than half a decade is taken."""
    path = choose_gamma(statistics(*rows(3000, 5, 3, 0)))
    assert path.lowest / 10**0.51 <= path.chosen <= path.lowest


@pytest.mark.parametrize("n", [60, 300])
def test_the_curve_has_every_decade_and_quarters_of_one_around_the_lowest(n):
    stats = statistics(*rows(n, 20, 3, 0))
    path = choose_gamma(stats)
    unit = float(stats.autocorrelation.trace()) / n  # the mean squared length of a row
    decades = np.log10(np.array(path.gammas) / unit).round(9).tolist()
    assert decades == sorted(set(decades))
    assert set(range(-6, 3)) <= set(decades)
    assert (decades[0], decades[-1]) == (-6, 2)
    at = path.gammas.index(path.lowest)
    assert decades[at] - decades[at - 1] == 0.25
    assert at == len(decades) - 1 or decades[at + 1] - decades[at] == 0.25
    # By halves of a decade first, then by quarters, with more points on the side that may be chosen.
    half = min((i for i, decade in enumerate(decades) if 2 * decade % 1 == 0), key=lambda i: path.scores[i])
    around = [decade - decades[half] for decade in decades if 4 * decade % 2 == 1]
    assert around == [step for step in (-0.75, -0.25, 0.25) if decades[half] + step <= 2]
    assert len(decades) - len(around) <= 9 + 2


def test_a_sketch_that_overshoots_does_not_flip_a_groups_residuals():
    phi, y = rows(80, 70, 3, 0)
    factor = factorise(statistics(phi, y), 0.05)
    sketch = leverage_sketch(factor, 16, seed=0)
    groups = torch.arange(80) // 40
    residual = y - phi @ torch.cholesky_solve(phi.T @ y, factor)
    left = LeftOut(hat_basis(phi), phi @ sketch, residual, groups)
    assert left.clipped > 0
    for g in (groups == 0, groups == 1):
        # (I - C_gg)^-1 only ever enlarges: no residual may turn against itself.
        assert float((left.primary[g] * residual[g]).sum()) > float(residual[g].square().sum())


def test_left_out_accuracy_is_that_of_the_settings_in_force():
    settings = {"map": "random", "d_primary": 128}
    (own,) = load_method("apfl", **settings, scope="client").rounds(skewed(), 4, 0)
    (all_,) = load_method("apfl", **settings).rounds(skewed(), 4, 0)
    # Each picks the best of its own table.
    assert own.chosen["left_out_accuracy"] >= all_.chosen["left_out_accuracy"]
    assert 0.5 < own.chosen["left_out_accuracy"] <= 1


@pytest.mark.parametrize(("key", "value"), [("refinement", "cross-fitted"), ("scope", "shrunk")])
def test_removed_options_say_what_is_used_instead(key, value):
    for make in (APFL, lambda **given: load_method("apfl", **given)):
        with pytest.raises(InputError, match=r"was removed.*(leave the setting out|Use 'federation')"):
            make(**{key: value})
    assert load_method("apfl", refinement="in-sample") == APFL()


def test_a_sketch_as_good_as_the_factor_gives_its_table():
    """Left-out hits through a sketch are those of exact leverage if Omega Omega' is the identity."""
    phi, y = rows(60, 12, 3, 0)
    psi, _ = rows(20, 9, 3, 1)
    primary = solve_primary(statistics(phi, y), 0.8)
    exact = primary.with_leverage(0, 0)
    roots = torch.linalg.solve_triangular(primary.factor.T, torch.eye(12, dtype=torch.float64), upper=True)
    sketched = replace(exact, sketch=roots, factor=None)
    own = Rows(phi[:20], psi, y[:20].argmax(1), groups=torch.arange(20) // 2)
    tried = Grid([0.3, 3.0], [0.0, 0.5, 1.0], [0.0, 0.1])
    tables = [leave_out(own, shared, 0.03, tried).table for shared in (exact, sketched)]
    assert torch.equal(*tables)
    assert len(torch.unique(tables[0])) > 1


def test_rows_that_the_primary_has_not_seen_count_to_everyone():
    phi, y = rows(30, 5, 3, 0)
    late = Rows(phi[:4], phi[:4], torch.tensor([0, 0, 2, 2]), seen=torch.tensor([True, True, False, False]))
    shared = solve_primary(statistics(phi, y), 1.0).with_leverage(0, 0)
    own, everyone = shared.counts(late)
    assert own.tolist() == [2, 0, 2]
    assert (everyone - y.sum(0)).tolist() == [0, 0, 2]
    # And they have no leverage in it.
    known = shared.whitened(replace(late, seen=None))
    assert torch.equal(shared.whitened(late), torch.cat([known[:2], 0 * known[2:]]))
    assert known[2:].any()


def test_left_out_scores_are_those_of_leaving_out():
    """The scores that are kept for the temperatures give the table back, by counting."""
    phi, y = rows(40, 8, 3, 0)
    own = Rows(phi[:15], rows(15, 6, 3, 1)[0], y[:15].argmax(1))
    tried = Grid([0.3, 3.0], [0.0, 0.7], [0.0, 0.2])
    left = leave_out(own, solve_primary(statistics(phi, y), 0.5).with_leverage(0, 0), 0.03, tried, keep_scores=True)
    for b, beta in enumerate(tried.betas):
        for k, balance in enumerate(tried.balances):
            for t, tau in enumerate(tried.taus):
                right = (left.scores.at((beta, balance, tau)).argmax(1) == own.labels).sum()
                assert int(right) == int(left.table[b, k, t])
    assert len(torch.unique(left.table)) > 2
