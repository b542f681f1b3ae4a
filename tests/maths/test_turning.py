"""Undoing a factor by blocks, and the coordinates in which statistics travel, against the matrices themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.maths import triangular
from apfl.maths import turning as room
from apfl.maths.landmarks import landmark_map
from apfl.maths.triangular import Lower
from apfl.maths.turning import Turning, turning


def factor(d: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(d, 2 * d, generator=generator, dtype=torch.float64)
    return torch.linalg.cholesky(root @ root.T / d)


@given(st.integers(1, 30), st.sampled_from([1, 4, 7, 512]), st.integers(0, 99))
def test_a_factor_is_undone_in_any_blocks_and_either_precision(d, block, seed):
    lower, rows = factor(d, seed), torch.randn(5, d, dtype=torch.float64)
    expected = rows @ torch.linalg.inv(lower).T
    before, triangular._BLOCK = triangular._BLOCK, block
    try:
        torch.testing.assert_close(Lower(lower).undo(rows), expected, rtol=1e-9, atol=1e-9)
        single = Lower(lower).undo(rows.float())
        by_blocks = torch.cat([Lower(lower).undo(rows.to(torch.float32)[:2]), Lower(lower).undo(rows.float()[2:])])
    finally:
        triangular._BLOCK = before
    assert single.dtype == torch.float32
    # 30 columns of a factor with a condition of at most a hundred or so.
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_blocks, single, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("d", "leading"), [(12, 4), (12, 12), (12, 40), (13, 1), (1, 1)])
def test_turning_is_what_its_matrix_does(monkeypatch, d, leading):
    monkeypatch.setattr(room, "LEADING", leading)
    lower = factor(d, 0)
    made = turning(lower)
    assert made.r == min(d, max(leading, d // 5))
    dense, rows = made.dense, torch.randn(5, d, dtype=torch.float64)
    symmetric, columns = rows.T @ rows, torch.randn(d, 3, dtype=torch.float64)
    inverse = torch.linalg.inv(dense)
    torch.testing.assert_close(made.turn(rows), rows @ inverse.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(made.turn_sums(symmetric), inverse @ symmetric @ inverse.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(made.back(columns), dense @ columns)
    torch.testing.assert_close(made.sums_back(symmetric), dense @ symmetric @ dense.T)
    assert torch.equal(made.sums_back(symmetric), made.sums_back(symmetric).T)
    torch.testing.assert_close(made.gram, dense.T @ dense)
    assert made.turn(rows.float()).dtype == torch.float32


def test_leading_columns_correlate_with_none_at_the_landmarks(monkeypatch):
    """With all columns leading T is white there; with some, these are, and the others owe them nothing."""
    drawn = landmark_map(torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    phi = drawn(drawn.landmarks)
    for leading in (40, 10):
        monkeypatch.setattr(room, "LEADING", leading)
        turned = turning(drawn._factor).turn(phi)
        r = min(leading, 40) if leading == 40 else max(10, 40 // 5)
        moments = turned.T @ turned / len(phi)
        # K_VV has a jitter of 1e-6 that the landmarks themselves have not, and eigenvalues down to 1e-3.
        torch.testing.assert_close(moments[:r, :r], torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-2)
        torch.testing.assert_close(moments[:r, r:], torch.zeros(r, 40 - r, dtype=torch.float64), rtol=0, atol=1e-2)


def test_a_turning_of_one_column_is_a_scale():
    assert torch.equal(
        Turning(torch.tensor([[2.0]]).double()).turn(torch.tensor([[3.0]]).double()), torch.tensor([[1.5]]).double()
    )
