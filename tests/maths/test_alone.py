"""Going alone, by actually leaving rows out; and when it is called better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from apfl.maths.alone import Comparison, compare, go_alone
from apfl.maths.leaveout import fit_refinement
from apfl.maths.personalise import Rows, Shared, refine
from apfl.maths.ridge import factorise, one_hot, solve, statistics


def draw(n: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=n)
    rows = np.random.default_rng(9).normal(size=(3, d))[labels] + 1.5 * rng.normal(size=(n, d))
    return torch.from_numpy(rows), torch.from_numpy(labels)


@pytest.mark.parametrize("n", [12, 40])  # fewer and more rows than columns
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_right_alone_are_those_of_refits_without_them(n, grouped):
    psi, labels = draw(n, 20, 1)
    groups = torch.arange(n) // 3 if grouped else None
    found = go_alone(psi, labels, 3, (groups, None))
    kinds = torch.arange(n) if groups is None else groups
    for row in range(n):
        rest = kinds != kinds[row]
        refit = fit_refinement(psi[rest], one_hot(labels[rest], 3), found.beta)
        assert bool((psi[row] @ refit).argmax() == labels[row]) == bool(found.right[row])
    torch.testing.assert_close(found.weights, fit_refinement(psi, one_hot(labels, 3), found.beta))


def test_rows_right_together_are_those_of_refits_without_them():
    """With exact leverage, of a primary that others' rows shape too."""
    phi, labels = draw(30, 8, 2)
    psi, _ = draw(30, 12, 2)
    others, their_labels = draw(50, 8, 3)
    total = statistics(torch.cat([phi, others]), one_hot(torch.cat([labels, their_labels]), 3))
    shared = Shared(solve(total, 1.0), total.class_counts, factor=factorise(total, 1.0))
    setting, alone = (2.0, 0.7, 0.0), go_alone(psi, labels, 3, (None, None))
    found = compare(Rows(phi, psi, labels), shared, setting, 0.03, alone)
    right = []
    for row in range(30):
        rest = torch.arange(30) != row
        without = statistics(torch.cat([phi[rest], others]), one_hot(torch.cat([labels[rest], their_labels]), 3))
        primary = Shared(solve(without, 1.0), without.class_counts)
        own = refine(Rows(phi[rest], psi[rest], labels[rest]), primary, setting, 0.03)
        scores = phi[row] @ primary.weights + own.balance * psi[row] @ own.refinement
        right.append(bool(scores.argmax() == labels[row]))
    assert (found.n_rows, found.n_unjudged, found.together) == (30, 0, sum(right))
    assert found.alone == int(alone.right.sum())
    assert found.discordant == sum(a != b for a, b in zip(right, alone.right.tolist(), strict=True))


def test_leverages_come_from_the_sketch_or_the_factor_or_are_none():
    """Without any, rows leave the refinement alone: the primary stays as it is."""
    phi, labels = draw(60, 8, 2)
    psi, _ = draw(60, 12, 2)
    total = statistics(phi, one_hot(labels, 3))
    plain = Shared(solve(total, 1.0), total.class_counts)
    factor = factorise(total, 1.0)
    roots = torch.linalg.solve_triangular(factor.T, torch.eye(8, dtype=torch.float64), upper=True)
    setting, alone = (2.0, 0.7, 0.0), go_alone(psi, labels, 3, (None, None))
    exact, sketched, none = (
        compare(Rows(phi, psi, labels), replace(plain, **known), setting, 0.03, alone)
        for known in ({"factor": factor}, {"sketch": roots}, {})
    )
    assert exact == sketched  # a sketch that is as good as the factor
    right = 0
    for row in range(60):
        rest = torch.arange(60) != row
        own = refine(Rows(phi[rest], psi[rest], labels[rest]), plain, setting, 0.03)
        right += int((phi[row] @ plain.weights + 0.7 * psi[row] @ own.refinement).argmax() == labels[row])
    assert (none.n_rows, none.together) == (60, right)
    assert none.together > exact.together  # it flatters the primary


@pytest.mark.parametrize("n", [1, 2])
def test_one_row_or_two_and_rows_of_zeros_are_no_error(n):
    labels = torch.zeros(n, dtype=torch.int64)
    assert go_alone(torch.zeros(n, 5), labels, 3, (None, None)).weights.abs().sum() == 0
    assert go_alone(torch.ones(n, 5), labels, 3, (None, None)).weights.shape == (5, 3)


@pytest.mark.parametrize(
    ("n_rows", "unjudged", "together", "alone", "discordant", "without"),
    [
        (60, 0, 41, 44, 7, True),  # few rows: more than two lost
        (60, 0, 42, 44, 6, False),
        (249, 0, 230, 232, 26, False),
        (249, 0, 229, 232, 25, True),
        (250, 0, 232, 232, 26, True),  # enough rows: three quarters of a standard error of 5.1
        (250, 0, 235, 232, 25, True),
        (250, 0, 236, 232, 26, False),
        (150, 100, 142, 142, 26, True),  # rows that cannot be judged are rows, too
        (10_000, 0, 9028, 9000, 1600, True),
        (10_000, 0, 9030, 9000, 1600, False),
        (250, 0, 240, 240, 0, False),  # the same predictions
        (250, 0, 240, 200, 40, False),
    ],
)
def test_when_a_client_goes_without_the_primary(n_rows, unjudged, together, alone, discordant, without):
    assert Comparison(n_rows, unjudged, together, alone, discordant).goes_alone is without


def test_most_rows_unjudged_is_blind():
    assert Comparison(10, 11, 9, 9, 0).blind
    assert not Comparison(11, 11, 9, 9, 0).blind
