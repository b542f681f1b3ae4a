"""The landmark map about a public mean."""

from __future__ import annotations

import torch

from apfl.maths.centred import centred, within
from apfl.maths.landmarks import draw_points, landmark_map, no_spread

SPREAD = no_spread(6)


def toy():
    drawn = landmark_map(draw_points(32, 0, SPREAD))
    points = draw_points(500, 1, SPREAD)
    return drawn, points, centred(drawn, points)


def test_synthetic_points_have_mean_zero_and_median_length_one():
    _, points, mapped = toy()
    phi = mapped(points)
    assert float(phi.mean(0).abs().max()) < 1e-12
    shorter = int((phi.norm(dim=1) < 1).sum())
    assert abs(shorter - 250) <= 1


def test_a_folded_matrix_gives_the_same_scores():
    drawn, _, mapped = toy()
    rows = draw_points(20, 2, SPREAD)
    weights = torch.randn(drawn.width, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix, offset = mapped.fold(weights)
    # L^-1 amplifies rounding a thousandfold at most.
    assert torch.allclose(drawn.kernel(rows) @ matrix + offset, mapped(rows) @ weights, atol=1e-8)


def test_rows_are_brought_back_to_one_and_short_ones_stay():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(within(rows), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64))


def test_points_that_are_all_alike_divide_by_nothing():
    drawn, points, _ = toy()
    same = centred(drawn, points[:1].repeat(5, 1))
    assert bool(torch.isfinite(same(points)).all())
