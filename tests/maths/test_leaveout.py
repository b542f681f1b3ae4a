"""Rows behind a sketched leverage, and systems that have no solution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from apfl.errors import InputError
from apfl.maths.leaveout import LeftOut, fit_refinement, hat_basis
from apfl.maths.personalise import Choice, Rows, leave_out, solve_primary
from apfl.maths.ridge import accumulate, one_hot, solve, statistics
from tests.maths.test_ridge import augmented_lstsq, rows


@pytest.mark.parametrize("sketched", [True, False])
def test_noise_is_what_a_second_dose_of_the_sketchs_spread_does_to_hits(sketched):
    """Eight columns, so a dose of sqrt(2 / 8): a leverage of 0.4 becomes 0.6 or 0.2.

    With residuals (a, -a) a row is right if a / (1 - q) < 1/2: with a = 0.25 up to q = 0.5, with a = 0.35 to q = 0.3.
    """
    sizes = torch.tensor([0.25, 0.25, 0.25, 0.35, 0.25, 0.25], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    signs = torch.where(labels == 0, 1.0, -1.0)
    residual = torch.stack([signs * sizes, -signs * sizes], 1)
    whitened = torch.zeros(6, 8, dtype=torch.float64)
    whitened[:, 2] = 0.4**0.5
    whitened[4, 2] = 0.1  # too little for its dose to matter
    copies = torch.arange(6) == 5
    left = LeftOut(hat_basis(torch.eye(6)), whitened, residual, sketched=sketched, copies=copies)
    # Three rows are right with one of the two doses only, and right without; one is right with one, and wrong without.
    assert left.noise(labels) == (-3 / 2 + 1 / 2 if sketched else 0)


@pytest.mark.parametrize(("n", "d"), [(9, 4), (4, 9), (5, 5)])
def test_a_refinement_is_least_squares_with_a_ridge(n, d):
    psi, y = rows(n, d, 3, 0)
    torch.testing.assert_close(fit_refinement(psi, y, 0.3), augmented_lstsq(psi, y, 0.3), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("n", "d"), [(9, 4), (4, 9)])
def test_a_refinement_that_has_no_solution_is_refused_with_a_remedy(n, d):
    psi, y = rows(n, d, 3, 0)
    for ridge in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="must be greater than 0"):
            fit_refinement(psi, y, ridge)
    with pytest.raises(InputError, match=r"ridge 1e-30 cannot be solved: use a larger ridge"):
        fit_refinement(1e8 * torch.ones(n, d), y, 1e-30)
    for broken in (psi, y):
        for value in (float("nan"), float("inf")):
            given = [part.clone() if part is broken else part for part in (psi, y)]
            given[0 if broken is psi else 1][1, 2] = value
            with pytest.raises(InputError, match="contain NaN or infinity"):
                fit_refinement(*given, 1.0)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("rank", [6, 40])
@pytest.mark.parametrize(("n", "d"), [(90, 40), (40, 90), (40, 40)])
def test_rows_in_single_precision_are_left_out_as_in_double(n, d, rank, clients):
    """With every ridge that is admitted, also if most directions have no rows; the refinement itself is exact."""
    shape = (clients, n) if clients > 1 else (n,)
    left, right, v, e = (torch.randn(*size, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
                         for at, size in enumerate([(*shape, rank), (rank, d), (*shape, 4), (*shape, 3)]))  # fmt: skip
    psi = (left @ right + 3 * torch.ones(d)).float()
    longest = float(psi.double().square().sum((-2, -1)).max())
    betas = [32 * torch.finfo(torch.float32).eps * longest * 1.01 * each for each in (1, 10, 1000)]
    rounded, exact = hat_basis(psi, betas[0]), hat_basis(psi.double())
    assert rounded.basis.dtype == torch.float32
    for one, other in zip(rounded.parts(betas, e, v), exact.parts(betas, e, v), strict=True):
        # Eigenvalues are known to a few eps of the largest; the least ridge is 32 eps of their sum.
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02 * float(other.abs().max()))
    fitted = fit_refinement(psi, e, betas[1])
    torch.testing.assert_close(rounded.fit(psi, e, betas[1]), fitted, rtol=1e-9, atol=1e-12)


def test_a_small_ridge_is_not_left_to_single_precision():
    psi = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    for least in (0.0, 1e-6):
        assert hat_basis(psi, least).basis.dtype == torch.float64
    assert hat_basis(psi.double(), 1.0).basis.dtype == torch.float64


@pytest.mark.parametrize("sketch", [0, 20_000])
def test_rows_at_two_clients_are_left_out_with_their_copies(sketch):
    """Nobody sees the copies, but the sums show that there are two of each row: the scores are those without both."""
    rng, gamma, beta = np.random.default_rng(0), 3.0, 1.0
    phi, labels = torch.from_numpy(rng.normal(size=(60, 20))), torch.from_numpy(rng.integers(3, size=60))
    y = one_hot(labels, 3)
    primary = replace(solve_primary(accumulate([(phi, y), (phi, y)]), gamma), distinct_rows=60.0)
    tried = Choice(beta, 1.0, 0.0, "federation", 0.03).grid(1.0)
    found = leave_out(Rows(phi, phi, labels), primary.with_leverage(sketch, 0), 0.03, tried, keep_scores=True)
    assert found.scores is not None
    kept = torch.arange(60) != 7
    without = solve(accumulate([(phi[kept], y[kept])] * 2), gamma)
    refit = fit_refinement(phi[kept], y[kept] - phi[kept] @ without, beta)
    tolerance = 0.02 if sketch else 1e-9  # a sketch of m columns knows a leverage to sqrt(2 / m) of itself
    torch.testing.assert_close(found.scores.alone[7], phi[7] @ without, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.scores.refinement[beta][7], phi[7] @ refit, atol=tolerance, rtol=0)


def test_rows_of_one_client_each_have_no_copies_elsewhere():
    rng = np.random.default_rng(0)
    phi, labels = torch.from_numpy(rng.normal(size=(60, 20))), torch.from_numpy(rng.integers(3, size=60))
    assert solve_primary(statistics(phi, one_hot(labels, 3)), "auto").copies_of_a_row == 1
