"""The weight on the primary: E = Y - w Phi G, from going alone (0) to the paper's (1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.maths.dither import uniform
from apfl.maths.hits import Grid
from apfl.maths.integers import Rounding, round_statistics
from apfl.maths.landmarks import draw_points, landmark_map, spread
from apfl.maths.leaveout import fit_refinement
from apfl.maths.personalise import Plan, Rows, Shared, leave_out, own_weight, refine
from apfl.maths.ridge import Statistics, factorise, one_hot, solve, statistics
from apfl.methods import Round, load_method
from tests.conftest import draw_clients

CPU = torch.device("cpu")
C, L, D = 3, 6, 24
SETTING = (0.7, 0.6, 0.05)  # beta, balance, tau
FIXED = {"gamma": 0.5, "beta": 0.7, "d_primary": D, "map": "landmarks", "bits": 0, "normalise": "row"}


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(C, size=n)
    rows = np.random.default_rng(9).normal(size=(C, L))[labels] + rng.normal(size=(n, L))
    return torch.from_numpy(rows), torch.from_numpy(labels)


def ridge(phi: Tensor, targets: Tensor, beta: float) -> Tensor:
    """By another route: least squares on the rows with sqrt(beta) I below them."""
    d = phi.shape[1]
    below = torch.cat([phi, beta**0.5 * torch.eye(d, dtype=phi.dtype)])
    return torch.linalg.lstsq(below, torch.cat([targets, targets.new_zeros(d, C)]), driver="gelsd").solution


def landmarks() -> tuple[Tensor, Tensor, Statistics, Tensor]:
    """One client's phi and labels, everyone's statistics as integers, and the others' class counts."""
    z, labels = draw(40, 1)
    others, theirs = draw(60, 2)
    feature_map = landmark_map(draw_points(D, 0, spread(torch.cat([z, others]), full=True)))
    columns = feature_map.mean_squares(draw_points(500, 1, spread(z, full=True)))
    parts = [statistics(feature_map(rows), one_hot(y, C)) for rows, y in ((z, labels), (others, theirs))]
    rounded = [round_statistics(part, columns, Rounding.for_rows(16, 60), uniform(k, CPU))[0] for k, part in
               enumerate(parts)]  # fmt: skip
    return feature_map(z), labels, rounded[0] + rounded[1], parts[0].class_counts


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("grouped", [False, True])
def test_left_out_scores_are_those_of_refits_without_the_rows(weight, grouped):
    """On landmarks, from sums of integers: of these a row's own contribution leaves as it was before it was rounded."""
    phi, labels, total, counts = landmarks()
    y, gamma, (beta, balance, tau) = one_hot(labels, C), 0.5, SETTING
    groups = torch.arange(40) // 3 if grouped else None
    shared = Shared(solve(total, gamma), total.class_counts, factor=factorise(total, gamma))
    rows = Rows(phi, phi, labels, groups)
    left_out = leave_out(rows, shared, 0.03, Grid([beta], [balance], [tau]), weights=(weight,), keep_scores=True)
    scores = left_out.scores.at(SETTING, weight)
    kinds = torch.arange(40) if groups is None else groups
    hits = 0
    for row in range(40):
        gone = kinds == kinds[row]
        without = total - statistics(phi[gone], y[gone])
        primary = torch.linalg.solve(
            without.autocorrelation + gamma * torch.eye(D, dtype=phi.dtype), without.crosscorrelation
        )
        own = ridge(phi[~gone], y[~gone] - weight * phi[~gone] @ primary, beta)
        left, everyone = counts - y[gone].sum(0), total.class_counts - y[gone].sum(0)
        prior = torch.log(left + max(0.03, 1 / float(left.sum()))) - torch.log(everyone + 0.03)
        expected = phi[row] @ (weight * primary + balance * own) + tau * prior
        torch.testing.assert_close(scores[row], expected, atol=1e-8, rtol=0)
        hits += int(expected.argmax() == labels[row])
    assert int(left_out.table) == hits


def test_a_whole_weight_is_the_paper_and_none_is_a_local_fit():
    phi, labels, total, _ = landmarks()
    shared = Shared(solve(total, 0.5), total.class_counts)
    rows = Rows(phi, phi, labels)
    whole, none = (refine(rows, shared, SETTING, 0.03, weight) for weight in (1.0, 0.0))
    torch.testing.assert_close(whole.refinement, refine(rows, shared, SETTING, 0.03).refinement, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(none.refinement, ridge(phi, one_hot(labels, C), SETTING[0]), atol=1e-9, rtol=0)
    assert torch.equal(none.prior, whole.prior)


@pytest.mark.parametrize("kind", ["landmarks", "random"])
def test_the_method_with_a_weight(kind):
    """Scores are linear in the weight if the rest is fixed: a half is the mean of going alone and the whole."""
    clients = draw_clients([40, 30], L, C, 0)
    settings = {**FIXED, "map": kind, "balance": 0.6, "tau": 0.0}
    made = {w: next(load_method("apfl", **settings, weight=w).rounds(clients, C, 0)) for w in (0.0, 0.5, 1.0)}
    x = clients[1].features
    none, half, whole = (made[w].models[1].scores(x) for w in (0.0, 0.5, 1.0))
    # Random maps of float32 features compute in float32.
    torch.testing.assert_close(half, (none + whole) / 2, atol=1e-9 if kind == "landmarks" else 1e-6, rtol=0)
    if kind == "random":
        default = next(load_method("apfl", **settings).rounds(clients, C, 0)).models[1].scores(x)
        torch.testing.assert_close(whole, default, rtol=0, atol=1e-12)  # the place in memory decides the last bit
    if kind == "landmarks":
        streams = load_method("apfl", **settings).streams(clients, C, 0)
        phi = streams.phis[1]
        torch.testing.assert_close(none, 0.6 * phi @ ridge(phi, one_hot(clients[1].labels, C), 0.7), atol=1e-8, rtol=0)
    assert made[0.5].chosen["weight"] == 0.5
    assert "weight" not in made[1.0].chosen


def test_the_prior_alone_is_no_model():
    """It would be right about every left-out row of a client alone: its own class has a row fewer than everyone's."""
    (last,) = load_method("apfl", d_primary=32, normalise="row", bits=0).rounds([Shard(*draw(30, 3))], C, 0)
    phi, labels, total, _ = landmarks()
    shared = Shared(solve(total, 0.5), total.class_counts, factor=factorise(total, 0.5))
    tried = Grid([0.7], [0.0, 0.6], [0.0, 0.5])
    tables = leave_out(Rows(phi, phi, labels), shared, 0.03, tried, weights=(1.0, 0.0)).tables
    assert int(tables[0.0][0, 0].max()) == 0 < int(tables[0.0][0, 1].min())
    assert int(tables[1.0][0, 0].min()) > 0
    assert not (last.chosen["weight"] == 0 and last.chosen["balance"] == 0)


# ---------------------------------------------------------------------------------------------------- the choice


MANY = 8  # classes, of which a client alone has few rows


def many(n: int, seed: int, *, odd: bool = False) -> Shard:
    """Rows of many classes; at an odd client their labels mean something else."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(MANY, size=n)
    rows = np.random.default_rng(9).normal(size=(MANY, 16))[labels] + 1.2 * rng.normal(size=(n, 16))
    return Shard(torch.from_numpy(rows).float(), torch.from_numpy((labels + 3) % MANY if odd else labels))


def natural(odd: int | None, n: int = 60, k: int = 20) -> list[Shard]:
    """Clients alike, but for an odd one."""
    return [many(n, 100 + client, odd=client == odd) for client in range(k)]


def accuracy(last: Round, k: int, *, odd: bool) -> float:
    test = many(1000, 7, odd=odd)
    return float((last.models[k].scores(test.features).argmax(1) == test.labels).double().mean())


def test_an_odd_client_goes_its_own_way_and_the_others_stay():
    clients = natural(odd=2)
    settings = {"d_primary": 64, "map": "landmarks", "normalise": "row"}
    (free,) = load_method("apfl", **settings).rounds(clients, MANY, 0)  # the default
    (bound,) = load_method("apfl", **settings, weight=1.0).rounds(clients, MANY, 0)
    weights = free.chosen["weight_per_client"]
    assert weights[2] == 0
    assert weights[:2] + weights[3:] == [1.0] * 19
    assert free.chosen["weight"] == 1
    assert accuracy(free, 2, odd=True) > accuracy(bound, 2, odd=True) + 0.1
    assert accuracy(free, 0, odd=False) == accuracy(bound, 0, odd=False)


def test_without_an_odd_one_everyone_keeps_the_whole_primary():
    method = load_method("apfl", d_primary=64, map="landmarks", normalise="row")
    (free,) = method.rounds(natural(odd=None), MANY, 0)
    (bound,) = replace(method, weight=1.0).rounds(natural(odd=None), MANY, 0)
    assert free.chosen["weight"] == 1
    assert "weight_per_client" not in free.chosen
    assert free.chosen["left_out_accuracy"] == bound.chosen["left_out_accuracy"]
    for a, b in zip(free.models, bound.models, strict=True):
        torch.testing.assert_close(a.weights, b.weights, rtol=1e-9, atol=1e-9)


def test_a_client_of_few_rows_stays_with_the_federation():
    """Of 40 clients like the others, with 30 rows each, hardly any is misled by its few rows."""
    z, labels = draw(600, 1)
    feature_map = landmark_map(draw_points(D, 0, spread(z, full=True)))
    total = statistics(feature_map(z), one_hot(labels, C))
    shared = Shared(solve(total, 0.5), total.class_counts, factor=factorise(total, 0.5))
    plan = Plan({1.0: (0.7, 0.3, 0.0), 0.5: (0.7, 0.6, 0.0), 0.0: (0.7, 1.0, 0.0)}, 1.0)
    phi = feature_map(z)
    taken = [own_weight(Rows(phi[at : at + 15], phi[at : at + 15], labels[at : at + 15]), shared, plan, 0.03)
             for at in range(0, 600, 15)]  # fmt: skip
    assert taken.count(1.0) >= 39


def test_a_weight_to_choose_costs_a_table_for_each_and_late_clients_take_the_federations():
    clients = draw_clients([40] * 6, L, C, 0)
    (one,) = load_method("apfl", **FIXED, weight=1.0).rounds(clients, C, 0)
    (two,) = load_method("apfl", **FIXED, weight="auto").rounds(clients, C, 0)
    assert two.bytes_up - one.bytes_up == 6 * 8 * 14 * 9  # beta is fixed
    assert (two.bytes_down, two.index) == (one.bytes_down, one.index)
    (half,) = load_method("apfl", **FIXED, balance=0.5, tau=0.0, weight=0.5).rounds(clients, C, 0)
    late = draw(50, 55)
    (model,) = half.admit([Shard(late[0], late[1])])  # in double precision, as the tolerance asks
    made = load_method("apfl", **FIXED).streams(clients, C, 0)
    phi = made.primary_map(made.normalise(late[0]))
    primary = solve(made.stats, 0.5)
    own = fit_refinement(phi, one_hot(late[1], C) - 0.5 * phi @ primary, 0.7)
    torch.testing.assert_close(model.scores(late[0]), phi @ (0.5 * primary + 0.5 * own), atol=1e-8, rtol=0)
