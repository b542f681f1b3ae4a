"""The attacks of examples/class_sums.py and examples/membership.py: the danger is real, and noise keeps its promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from apfl import random_map
from apfl.maths.privacy import most_advantage

EXAMPLES = Path(__file__).parents[2] / "examples"
sums = runpy.run_path(str(EXAMPLES / "class_sums.py"))
membership = runpy.run_path(str(EXAMPLES / "membership.py"))
advantage = membership["advantage"]
BY_CHANCE = 0.2  # of two samples of 200 to 300 the largest difference of rates, once in a thousand draws


@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_the_rows_of_a_small_class_come_back_from_its_sum(n):
    phi, rows = random_map(64, 1024, activation="hardswish", seed=0), sums["class_rows"](n, label=3)
    found = sums["recover"](phi, phi(rows).sum(0), n)
    assert sums["recovered"](found, rows) == n
    assert sums["recovered"](found, sums["class_rows"](n, label=4)) == 0


def test_no_row_comes_back_if_the_sum_has_fewer_numbers_than_the_rows():
    phi, rows = random_map(64, 100, activation="hardswish", seed=0), sums["class_rows"](3, label=3)
    found = sums["recover"](phi, phi(rows).sum(0), 3, batches=1)
    assert sums["recovered"](found, rows) == 0


def test_the_advantage_is_that_of_the_best_threshold():
    assert advantage(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1.0
    assert advantage(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 0.0
    assert advantage(np.array([0.0, 2.0]), np.array([1.0, 3.0])) == 0.0
    assert advantage(np.array([1.0, 3.0]), np.array([0.0, 2.0])) == 0.5


def test_a_primary_without_noise_tells_who_was_in_it():
    phi, labels = membership["digits"]()
    assert membership["with_the_primary"](phi, labels, None, np.random.default_rng(0), draws=1) > 2 * BY_CHANCE


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_with_noise_no_attacker_passes_what_epsilon_allows(epsilon):
    pytest.importorskip("dp_accounting", reason="needs the privacy extra: pip install 'apfl[privacy]'")
    (phi, labels), rng = membership["digits"](), np.random.default_rng(0)
    allowed = most_advantage(epsilon, membership["DELTA"])
    known = membership["with_all_other_rows"](phi[:, :64], labels, epsilon, rng)
    seen = membership["with_the_primary"](phi, labels, epsilon, rng, draws=1)
    assert seen < BY_CHANCE  # the primary alone tells nothing more
    assert known <= allowed
    assert known > (0.0 if epsilon < 2 else 0.15)  # the sums with all other rows do, if there is little noise


def test_rows_of_a_member_are_those_of_the_sums():
    """The attacker who has all other rows is left with the row's own vector."""
    phi, labels = membership["digits"]()
    encoding = membership["ENCODING"]
    rest = encoding.encode(phi[:5], labels[:5])[0] - encoding.encode(phi[1:5], labels[1:5])[0]
    assert torch.equal(rest, encoding.encode(phi[:1], labels[:1])[0])
