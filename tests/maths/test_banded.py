"""Band form of a symmetric matrix: what it says of shifted systems is what the matrix itself says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.maths import banded as room
from apfl.maths.banded import Dense, banded
from apfl.maths.triangular import inverse
from tests.maths.test_ridge import rows


def dense(matrix: torch.Tensor, right: torch.Tensor, shift: float) -> tuple[float, float, float]:
    """trace, fitted, norm by the inverse itself."""
    inverse = torch.linalg.inv(matrix + shift * torch.eye(len(matrix), dtype=torch.float64))
    solution = inverse @ right
    return float(inverse.trace()), float((solution * right).sum()), float(solution.square().sum())


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 4, 7, 64]), st.integers(0, 99))
def test_a_shifted_system_in_band_form_is_the_system(d, panel, tile, seed):
    phi, y = rows(60, d, 3, seed)
    matrix, right = phi.T @ phi, phi.T @ y
    before, room.TILE = room.TILE, tile
    try:
        band = banded(matrix, right, panel)
    finally:
        room.TILE = before
    for shift in (0.1, 10.0):
        for form in (band, Dense(matrix, right)):
            found = form.shifted(shift)
            assert found is not None
            assert (found.trace, found.fitted, found.norm) == pytest.approx(dense(matrix, right, shift), rel=1e-9)


@given(st.integers(1, 40), st.integers(0, 99))
def test_many_shifts_at_once_are_one_after_another(d, seed):
    phi, y = rows(30, d, 3, seed)
    system = Dense(phi.T @ phi - 2 * torch.eye(d, dtype=torch.float64), phi.T @ y)
    shifts = [1.0, 2.5, 4.0, 40.0]
    for found, shift in zip(system.shifted_each(shifts, [each / 2 for each in shifts]), shifts, strict=True):
        one = system.shifted(shift) if system.definite(shift / 2) else None
        assert (found is None) == (one is None)
        if found is not None and one is not None:
            assert (found.trace, found.fitted, found.norm) == pytest.approx((one.trace, one.fitted, one.norm), rel=1e-9)


@pytest.mark.parametrize("n", [1, 63, 128, 129, 300])
def test_the_inverse_of_triangles_by_halves(n):
    lower = torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).tril()
    lower.diagonal(dim1=-2, dim2=-1).abs_().add_(n**0.5)
    found = inverse(lower)
    torch.testing.assert_close(found, torch.linalg.inv(lower), rtol=1e-9, atol=1e-12)
    assert torch.equal(found, found.tril())


def test_the_band_has_the_eigenvalues_of_the_matrix():
    phi, y = rows(50, 23, 3, 0)
    band = banded(phi.T @ phi, phi.T @ y, 5)
    full = torch.block_diag(*band.diagonal)
    for at, block in enumerate(band.below):
        start, stop = 5 * (at + 1), 5 * (at + 1) + len(block)
        full[start:stop, start - 5 : start], full[start - 5 : start, start:stop] = block, block.T
    expected = torch.linalg.eigvalsh(phi.T @ phi)
    torch.testing.assert_close(torch.linalg.eigvalsh(full), expected, rtol=1e-10, atol=1e-10)


@given(st.floats(-3, 3), st.integers(0, 99))
def test_definite_is_whether_the_lowest_eigenvalue_is_positive(shift, seed):
    phi, y = rows(30, 12, 3, seed)
    matrix = phi.T @ phi - 4 * torch.eye(12, dtype=torch.float64)
    lowest = float(torch.linalg.eigvalsh(matrix)[0]) + shift
    if abs(lowest) > 1e-6:
        for form in (banded(matrix, phi.T @ y, 4), Dense(matrix, phi.T @ y)):
            assert form.definite(shift) == (lowest > 0)
            assert (form.shifted(shift) is not None) == (lowest > 0)


@pytest.mark.parametrize("matrix", [torch.zeros(9, 9), torch.diag(torch.arange(1.0, 10.0)), torch.ones(9, 9)])
def test_columns_that_are_in_band_form_already(matrix):
    """Reflections that are the identity, and columns that depend on each other."""
    right = torch.eye(9, 2, dtype=torch.float64)
    found = banded(matrix.double(), right, 2).shifted(0.5)
    assert found is not None
    assert (found.trace, found.fitted, found.norm) == pytest.approx(dense(matrix.double(), right, 0.5), rel=1e-9)


def test_what_is_given_stays_as_it_is():
    phi, y = rows(30, 12, 3, 0)
    matrix, right = phi.T @ phi, phi.T @ y
    copies = matrix.clone(), right.clone()
    banded(matrix, right, 4)
    Dense(matrix, right).shifted(1.0)
    assert torch.equal(matrix, copies[0])
    assert torch.equal(right, copies[1])
