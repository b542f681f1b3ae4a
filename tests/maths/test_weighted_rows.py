"""Rows with weights: sums, left-out scores and hits, beside refitting and beside rows given twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from apfl import InputError
from apfl.maths.gcv import choose_gamma, feature_energy
from apfl.maths.hits import Grid, hits
from apfl.maths.refine import Rows, Shared, leave_out, leave_out_each, left_out_of, refine, stacked, weighted
from apfl.maths.ridge import factorise, one_hot, statistics, total, weighted_statistics

GAMMA, SETTING, C = 0.7, (0.9, 0.6, 0.0), 3


def client(seed: int, n: int = 14) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """phi, psi, labels, weights."""
    rng = np.random.default_rng(seed)
    phi, psi = (torch.from_numpy(rng.normal(size=(n, d))) for d in (5, 4))
    return phi, psi, torch.from_numpy(rng.integers(0, C, n)), torch.from_numpy(rng.uniform(0.2, 3, n))


def summed(clients):
    return total(weighted_statistics(phi, one_hot(labels, C), w) for phi, _, labels, w in clients)


def shared_of(stats) -> Shared:
    factor = factorise(stats, GAMMA)
    return Shared(torch.cholesky_solve(stats.crosscorrelation, factor), stats.class_counts, factor=factor)


def rows_of(phi: Tensor, psi: Tensor, labels: Tensor, weights: Tensor, **more) -> Rows:
    return weighted(Rows(phi, psi, labels), weights, **more)


def test_sums_are_those_of_the_augmented_least_squares_problem_and_of_rows_given_twice():
    phi, _, labels, weights = client(0)
    y, root = one_hot(labels, C), weights.sqrt()[:, None]
    stats = weighted_statistics(phi, y, weights)
    system = torch.cat([root * phi, GAMMA**0.5 * torch.eye(5).double()])
    expected = torch.linalg.lstsq(system, torch.cat([root * y, torch.zeros(5, C).double()])).solution
    torch.testing.assert_close(shared_of(stats).weights, expected, atol=1e-10, rtol=0)
    whole = torch.arange(len(labels)) % 3 + 1
    twice, once = (statistics(phi.repeat_interleave(whole, 0), y.repeat_interleave(whole, 0)),
                   weighted_statistics(phi, y, whole.double()))  # fmt: skip
    for name in ("autocorrelation", "crosscorrelation", "class_counts"):
        torch.testing.assert_close(getattr(once, name), getattr(twice, name), atol=1e-10, rtol=0)
    assert (once.weight, once.n_samples, once.target_energy) == (twice.n_samples, len(labels), twice.target_energy)
    assert feature_energy(once) == pytest.approx(feature_energy(twice), rel=1e-12)
    assert (once + once - once).surplus == once.surplus


def test_gamma_does_not_depend_on_the_unit_of_the_weights():
    phi, _, labels, weights = client(0, 60)
    one, other = (choose_gamma(weighted_statistics(phi, one_hot(labels, C), w)) for w in (weights, 1e-3 * weights))
    assert other.chosen == pytest.approx(1e-3 * one.chosen, rel=1e-9)


@pytest.mark.parametrize("together", [False, True])
def test_left_out_scores_of_weighted_rows_are_those_of_refitting(together):
    clients = [client(0), client(1)]
    phi, psi, labels, weights = clients[1]
    groups = torch.arange(len(labels)) // 2 if together else None
    rows = weighted(Rows(phi, psi, labels, groups), weights)
    beta, balance, _ = SETTING
    found = leave_out(rows, shared_of(summed(clients)), 0.03, Grid([beta], [balance], [0.0]), keep_scores=True).scores
    for row in (0, 5, 13):
        rest = torch.arange(len(labels)) != row if groups is None else groups != groups[row]
        kept = tuple(each[rest] for each in clients[1])
        shared = shared_of(summed([clients[0], kept]))
        own = refine(rows_of(*kept), shared, SETTING, 0.03)
        expected = phi[row] @ shared.weights + balance * psi[row] @ own.refinement
        torch.testing.assert_close(found.at(SETTING)[row], expected, atol=1e-8, rtol=0)


def test_weights_of_one_change_nothing_and_stacked_clients_are_single_ones():
    ones = [(*client(seed, n)[:3], torch.ones(n, dtype=torch.float64)) for seed, n in ((0, 14), (1, 9))]
    shared, tried = shared_of(summed(ones)), Grid([0.5, 2.0], [0.0, 0.5, 1.0], [0.0, 0.1])
    for phi, psi, labels, w in ones:
        plain = leave_out(Rows(phi, psi, labels), shared, 0.03, tried).table
        assert torch.equal(leave_out(rows_of(phi, psi, labels, w), shared, 0.03, tried).table, plain)
    heavy = [client(0, 14), client(1, 9)]
    shared = shared_of(summed(heavy))
    rows = [rows_of(*each, importance=each[3]) for each in heavy]
    for own, both in zip(rows, leave_out_each(stacked(rows), shared, 0.03, tried), strict=True):
        torch.testing.assert_close(leave_out(own, shared, 0.03, tried).table, both.table, atol=1e-8, rtol=0)


def test_hits_count_as_much_as_rows_are_important():
    clients = [client(0), client(1)]
    shared, tried = shared_of(summed(clients)), Grid([0.5], [0.0, 0.7], [0.0, 0.2])
    phi, psi, labels, weights = clients[0]
    importance = torch.linspace(0.1, 2, len(labels), dtype=torch.float64)
    rows = rows_of(phi, psi, labels, weights, importance=importance)
    kept = leave_out(rows, shared, 0.03, tried, keep_scores=True)
    for at, balance in enumerate(tried.balances):
        for place, tau in enumerate(tried.taus):
            right = kept.scores.at((0.5, balance, tau)).argmax(1) == labels
            assert float(kept.table[0, at, place]) == pytest.approx(float(importance[right].sum()), abs=1e-8)
    counts = shared.counts(rows)
    assert hits(left_out_of(rows_of(*clients[0]), shared), labels, *counts, 0.03, tried).dtype == torch.int64


@pytest.mark.parametrize("bad", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0]])
def test_weights_that_are_none_are_refused(bad):
    with pytest.raises(InputError, match="give each row one above 0"):
        weighted_statistics(torch.ones(2, 1), one_hot(torch.tensor([0, 1]), 2), torch.tensor(bad))
