"""How much noise an epsilon asks for, by a second route."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from apfl.errors import InputError
from apfl.maths import privacy
from apfl.maths.privacy import epsilon_spent, most_advantage, noise_multiplier

NEEDS = "needs the privacy extra: pip install 'apfl[privacy]'"


def delta_of_concentrated(rho: float, epsilon: float) -> float:
    """Of rho-zCDP: Canonne, Kamath and Steinke (2020), Corollary 13."""

    def log_delta(order: float) -> float:
        return (order - 1) * (order * rho - epsilon) + order * math.log1p(-1 / order) - math.log(order - 1)

    return math.exp(minimize_scalar(log_delta, bounds=(1 + 1e-6, 1e4), method="bounded").fun)


def multiplier_of_gaussian(epsilon: float, delta: float) -> float:
    """The least for continuous noise: Balle and Wang (2018), Theorem 8."""

    def too_much(z: float) -> float:
        reached = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
        return reached - delta

    return brentq(too_much, 1e-2, 1e3)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (4.0, 1e-5), (8.0, 1e-7)])
def test_the_account_is_that_of_concentrated_differential_privacy(epsilon, delta):
    pytest.importorskip("dp_accounting", reason=NEEDS)
    z = noise_multiplier(epsilon, delta)
    assert epsilon_spent(z, delta) <= epsilon
    by_hand = brentq(lambda each: delta_of_concentrated(0.5 / each**2, epsilon) - delta, 1e-2, 1e3)
    assert by_hand <= z * (1 + 1e-5) <= 1.005 * by_hand  # the accountant knows some orders alone, so it is cautious
    assert multiplier_of_gaussian(epsilon, delta) < z < 1.12 * multiplier_of_gaussian(epsilon, delta)


def test_the_account_is_that_of_dp_accounting():
    dp = pytest.importorskip("dp_accounting", reason=NEEDS)
    for z, releases in ((0.7, 1), (3.0, 1), (3.0, 5)):
        accountant = dp.rdp.RdpAccountant()
        for _ in range(releases):
            accountant.compose(dp.GaussianDpEvent(z))
        # Each takes the best of the orders that it tries, and these differ.
        assert epsilon_spent(z, 1e-5, releases) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_less_epsilon_less_delta_and_more_releases_need_more_noise():
    pytest.importorskip("dp_accounting", reason=NEEDS)
    by_epsilon = [noise_multiplier(epsilon, 1e-5) for epsilon in (0.5, 1.0, 2.0, 8.0)]
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    assert noise_multiplier(1.0, 1e-6) > noise_multiplier(1.0, 1e-5)
    # Variances add up; the search ends within 1e-6.
    assert noise_multiplier(1.0, 1e-5, 4) == pytest.approx(2 * noise_multiplier(1.0, 1e-5), rel=1e-5)


def test_an_epsilon_that_no_noise_gives_is_refused():
    pytest.importorskip("dp_accounting", reason=NEEDS)
    with pytest.raises(InputError, match=r"epsilon=1e-05 with delta=1e-12 given: no noise between .* is usual"):
        noise_multiplier(1e-5, 1e-12)


def test_no_membership_attack_on_gaussian_noise_passes_the_most():
    """Total variation of two Gaussians one apart, against what their epsilon allows for any delta."""
    for z in (0.5, 1.0, 4.0):
        best = 2 * norm.cdf(0.5 / z) - 1
        for epsilon in np.linspace(0.01, 10, 50):
            delta = norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
            assert best <= most_advantage(epsilon, delta) + 1e-12


def test_the_most_is_reached_by_randomised_response():
    for epsilon in (0.0, 1.0, 3.0):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert most_advantage(epsilon, 0.0) == pytest.approx(2 * right - 1, abs=1e-12)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy.noise_multiplier.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'apfl\[privacy\]'"):
        noise_multiplier(1.0, 1e-5)
