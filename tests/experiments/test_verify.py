"""`verify` on landmarks and integers; `tests/cli` has it on random maps."""

from __future__ import annotations

import math

import pytest
import torch

from apfl.errors import InputError
from apfl.experiments.verify import primary_bound, verify
from apfl.maths.dither import uniform
from apfl.maths.integers import Rounding, round_statistics
from apfl.maths.landmarks import draw_points, landmark_map, spread
from apfl.maths.ridge import one_hot, solve, statistics, total
from tests.commands import here as apfl
from tests.conftest import draw_clients

CPU = torch.device("cpu")
C, L = 3, 6


def clients():
    return draw_clients([40, 30, 50], L, C, 0)


def test_the_theorems_hold_on_landmarks():
    checks = list(verify(clients(), C, width=32, map="landmarks"))
    assert len(checks) == 5
    assert all(check.holds and check.tolerance <= 1e-6 for check in checks)


def test_integers_hold_to_a_bound_that_says_something_and_sums_stay_exact():
    checks = list(verify(clients(), C, width=32, map="landmarks", bits=20))
    assert len(checks) == 9
    assert all(check.holds for check in checks)
    primary, moved, left, choices = checks[5:]
    assert 0 < primary.difference < primary.tolerance < 0.5
    assert moved.tolerance == 2 * primary.tolerance
    assert left.tolerance == 1e-9
    assert choices.statement == "Integers: choices are those of exact sums"


def test_too_few_bits_leave_no_bound_and_move_choices_and_both_are_told():
    shards = draw_clients([60] * 8, 8, C, 10)
    checks = list(verify(shards, C, width=200, map="landmarks", bits=8))
    assert all(check.holds for check in checks)
    assert math.isinf(checks[5].tolerance)
    assert "none for so small a gamma" in checks[5].statement
    assert checks[-1].statement.startswith("Integers: choices moved: ")
    assert checks[-1].difference >= 1


def test_the_error_of_the_primary_stays_below_its_bound_and_both_halve_with_a_bit():
    shards, gamma = clients(), 1.0
    everyone = torch.cat([shard.features.double() for shard in shards])
    feature_map = landmark_map(draw_points(32, 0, spread(everyone, full=True)))
    columns = feature_map.mean_squares(draw_points(500, 1, spread(everyone, full=True)))
    parts = [statistics(feature_map(shard.features), one_hot(shard.labels, C)) for shard in shards]
    exact, scale = total(parts), feature_map.basis.dense * columns.sqrt()
    primary = scale.T @ solve(exact, gamma)
    sizes = {}
    for bits in (14, 16):
        rounding = Rounding.for_rows(bits, 50)
        bound = primary_bound(exact, scale, rounding, 3, gamma)
        errors = []
        for seed in range(30):
            draw = uniform(seed, CPU)
            summed = total(round_statistics(part, columns, rounding, draw, feature_map.basis)[0] for part in parts)
            error = torch.linalg.matrix_norm(scale.T @ solve(summed, gamma) - primary, 2)
            errors.append(float(error / torch.linalg.matrix_norm(primary, 2)))
        assert max(errors) < bound
        sizes[bits] = (bound, sum(errors) / 30)
    assert sizes[14][0] == pytest.approx(4 * sizes[16][0], rel=0.1)  # but for |F| beside the smallest eigenvalue
    assert sizes[14][1] == pytest.approx(4 * sizes[16][1], rel=0.2)  # means of 30 draws


def test_integers_need_landmarks(capsys):
    with pytest.raises(InputError, match="bits=16 with map='random'"):
        next(verify(clients(), C, bits=16))
    assert apfl("verify", "--map", "landmark") == 2
    assert "did you mean 'landmarks'" in capsys.readouterr().err
    assert apfl("verify", "--map", "landmarks", "--bits", "7") == 2
    assert "0 or from 8 to 32" in capsys.readouterr().err


def test_the_command_speaks_landmarks(capsys):
    assert apfl("verify", "--width", "64", "--map", "landmarks", "--bits", "20") == 0
    out = capsys.readouterr().out
    assert "Integers" in out
    assert "NO" not in out
