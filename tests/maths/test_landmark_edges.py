"""Landmarks at the edges of rounding: opposite rows, columns without values, and nobody's rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from apfl.maths.landmarks import draw_points, kernel, landmark_map, no_spread, spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opposite_rows_have_nothing_in_common_whatever_rounding_makes_of_their_cosine(dtype):
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(400, 7))).to(dtype)
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert bool(((rows @ -rows.T).diagonal() < -1).any())  # else this tests nothing
    values = kernel(rows, -rows).diagonal()
    assert float(values.abs().max()) < torch.finfo(dtype).eps ** 0.5  # NaN is not less


def test_a_column_without_values_stays_without():
    points = draw_points(20, 0, no_spread(4))
    points[:, 1] = 0
    landmarks = landmark_map(points).landmarks
    assert bool(landmarks.isfinite().all())
    assert not landmarks[:, 1].any()
    assert landmarks[:, 0].any()


def test_free_landmarks_have_mean_0_and_variance_1():
    points = draw_points(20_000, 0, no_spread(3))
    # Standard errors of 20,000 draws: 0.007 of a mean, 0.005 of a standard deviation.
    torch.testing.assert_close(points.mean(0), torch.zeros(3, dtype=torch.float64), atol=0.03, rtol=0)
    torch.testing.assert_close(points.std(0), torch.ones(3, dtype=torch.float64), atol=0.03, rtol=0)


def test_landmarks_are_the_points_to_a_127th_of_each_column():
    points = draw_points(12, 0, no_spread(4)) * torch.tensor([1.0, 5.0, 0.2, 2.0])
    feature_map = landmark_map(points)
    assert feature_map.width == 12  # none is left out
    rounded = feature_map.points * feature_map.scale.double()
    # Half a step of 1/127 of the column's largest, and float32 scales.
    assert bool(((rounded - points).abs() <= points.abs().amax(0) * (0.5 / 127 + 1e-6)).all())
    expected = rounded / rounded.norm(dim=1, keepdim=True)
    torch.testing.assert_close(feature_map.landmarks, expected, atol=1e-12, rtol=0)


def test_moments_of_parts_are_those_of_the_union():
    rows = draw_points(50, 0, no_spread(4)) + 1
    for full in (True, False):
        parts, whole = spread(rows[:20], full=full) + spread(rows[20:], full=full), spread(rows, full=full)
        assert parts.n_samples == whole.n_samples == 50
        torch.testing.assert_close(parts.sums, whole.sums, atol=0, rtol=1e-12)
        torch.testing.assert_close(parts.products, whole.products, atol=1e-12, rtol=1e-12)
