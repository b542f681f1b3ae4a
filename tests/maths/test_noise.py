"""Integer noise: its distribution, what one row can change, and what is made of the noisy sums."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as distributions

from apfl.maths.noise import (
    SENSITIVITY,
    IntegerRows,
    discrete_gaussian,
    gamma_for,
    shrunk,
    sums_excess,
)  # fmt: skip
from apfl.maths.ridge import Statistics, one_hot, statistics

BY_CHANCE = 1e-3  # of a p-value; seeds are fixed


def p_of_chi_square(drawn: np.ndarray, sigma: float) -> float:
    """Against exp(-x^2 / (2 sigma^2)) over its own sum; entries that are rarer than five draws count together."""
    far = math.ceil(12 * sigma) + 2
    places = np.arange(-far, far + 1)
    chance = np.exp(-(places**2) / (2 * sigma**2))
    expected = len(drawn) * chance / chance.sum()
    assert np.abs(drawn).max() <= far
    observed = np.bincount(drawn + far, minlength=len(places))
    often = expected >= 5
    counts = [np.append(each[often], each[~often].sum()) for each in (observed, expected)]
    return float(distributions.chisquare(*counts).pvalue)


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 2.5, 30.2])
def test_the_noise_is_a_discrete_gaussian(sigma):
    assert p_of_chi_square(discrete_gaussian(sigma, 200_000, np.random.default_rng(1)), sigma) > BY_CHANCE


def test_the_test_of_the_distribution_notices_another_one():
    rounded = np.random.default_rng(1).normal(0, 0.7, 200_000).round().astype(int)  # a Gaussian, rounded
    assert p_of_chi_square(rounded, 0.7) < BY_CHANCE
    assert p_of_chi_square(discrete_gaussian(2.6, 200_000, np.random.default_rng(1)), 2.5) < BY_CHANCE


def test_wide_noise_is_gaussian_with_its_variance():
    sigma = 5.1e6
    drawn = discrete_gaussian(sigma, 200_000, np.random.default_rng(2))
    assert drawn.var() == pytest.approx(sigma**2, rel=0.05)  # its standard error is 0.3 %
    assert abs(drawn.mean()) < 4 * sigma / math.sqrt(len(drawn))
    assert distributions.kstest(drawn / sigma, "norm").pvalue > BY_CHANCE


def test_draws_are_as_many_as_asked_for_and_follow_from_the_generator():
    for size in (0, 1, 7, 1_500_000):
        assert discrete_gaussian(3.0, size, np.random.default_rng(0)).shape == (size,)
    first, again, other = (discrete_gaussian(3.0, 50, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert not (first == other).all()


def test_a_sum_of_shares_is_as_good_as_one_draw():
    rng = np.random.default_rng(3)
    summed = sum(discrete_gaussian(3.0, 200_000, rng) for _ in range(4))
    assert p_of_chi_square(summed, 6.0) > BY_CHANCE


def test_the_excess_of_a_sum():
    assert sums_excess(0.5, 1) == 0
    assert sums_excess(0.5, 2) == pytest.approx(10 * math.exp(-(math.pi**2) / 4), rel=1e-12)
    assert sums_excess(0.5, 3) - sums_excess(0.5, 2) == pytest.approx(10 * math.exp(-(math.pi**2) / 3), rel=1e-12)
    assert sums_excess(3.0, 1000) < 1e-35


def weighted(encoding: IntegerRows, change: np.ndarray) -> Fraction:
    """The sum of squares of a change, each entry over the size of its noise with sigma = 1; exact."""
    per_unit = {"below": Fraction(1), "diagonal": Fraction(1, 2), "cross": Fraction(1), "class_counts": Fraction(1, 16)}
    total = Fraction(0)
    for name, where in encoding.layout.places.items():
        squares = sum(int(entry) ** 2 for entry in change[where])
        total += per_unit[name] * squares / encoding.units[name] ** 2
    return total


def test_the_weights_of_the_law_are_those_of_the_noise():
    encoding = IntegerRows(3, 2, 32)
    for name, where in encoding.layout.places.items():
        one = np.zeros(encoding.layout.size, int)
        one[where.start] = 1
        assert float(weighted(encoding, one)) == pytest.approx(encoding.sizes(1.0)[name] ** -2, rel=1e-12)


@given(
    seed=st.integers(0, 2**32),
    d=st.sampled_from([1, 2, 7, 40]),
    bits=st.sampled_from([24, 27, 32]),
    n=st.integers(1, 30),
    length=st.sampled_from([0.0, 0.3, 1.0, 1 + 1e-12, 50.0]),
    spiky=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_one_row_more_changes_no_more_than_the_bound(seed, d, bits, n, length, spiky):
    """Whatever the other rows are, and even if the caller's row is longer than it may be."""
    rng = torch.Generator().manual_seed(seed)
    phi = torch.nn.functional.normalize(torch.randn(n + 1, d, generator=rng, dtype=torch.float64))
    if spiky:
        phi[-1] = torch.nn.functional.one_hot(torch.tensor(seed % d), d).double()
    phi[-1] *= length
    labels = torch.randint(0, 3, (n + 1,), generator=rng)
    encoding = IntegerRows(d, 3, bits)
    more, fewer = encoding.encode(phi, labels)[0], encoding.encode(phi[:-1], labels[:-1])[0]
    assert weighted(encoding, (more - fewer).numpy()) <= Fraction(SENSITIVITY) ** 2


def test_the_bound_is_not_larger_than_it_must_be():
    encoding = IntegerRows(1, 1, 32)
    vector, _ = encoding.encode(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    assert float(weighted(encoding, vector.numpy())) > 0.99 * SENSITIVITY**2


def test_a_vector_that_is_cut_to_its_range_keeps_the_bound():
    encoding, phi = IntegerRows(2, 2, 24), torch.tensor([[1.0, 0.0]]).repeat(2100, 1)
    labels = torch.zeros(len(phi), dtype=torch.long)
    (all_rows, cut), (one_less, _) = encoding.encode(phi, labels), encoding.encode(phi[1:], labels[1:])
    assert cut == 1
    assert int(all_rows.abs().max()) == 2**23 - 1
    assert weighted(encoding, (all_rows - one_less).numpy()) <= Fraction(SENSITIVITY) ** 2
    _, cut = encoding.encode(phi[:1000], labels[:1000])
    assert cut == 0


@pytest.mark.parametrize("bits", [24, 32])
def test_integers_tell_the_statistics(bits):
    rng = torch.Generator().manual_seed(0)
    phi = 0.9 * torch.nn.functional.normalize(torch.randn(200, 30, generator=rng, dtype=torch.float64))
    labels = torch.randint(0, 5, (200,), generator=rng)
    encoding, exact = IntegerRows(30, 5, bits), statistics(phi, one_hot(labels, 5))
    told = encoding.decode(sum(encoding.encode(phi[part::3], labels[part::3])[0] for part in range(3)))
    # Each entry of a row is off by 0.3 of 2^-f, and the errors of 200 rows, or of 40 in a class, add like noise.
    room = 8 * 2.0**-encoding.f
    assert torch.allclose(told.autocorrelation, exact.autocorrelation, rtol=0, atol=room)
    assert torch.allclose(told.crosscorrelation, exact.crosscorrelation, rtol=0, atol=room)
    assert told.class_counts.tolist() == exact.class_counts.tolist()
    assert told.n_samples == 200


def test_every_part_has_noise_of_its_size():
    encoding = IntegerRows(200, 40, 24)
    noise, sizes = encoding.noise(0.8, np.random.default_rng(4)).double(), encoding.sizes(0.8)
    assert sizes["diagonal"] == pytest.approx(math.sqrt(2) * sizes["below"], rel=1e-12)
    for name, where in encoding.layout.places.items():
        few = 4 / math.sqrt(2 * (where.stop - where.start))  # four standard errors of a standard deviation
        assert float(noise[where].std()) == pytest.approx(sizes[name], rel=max(0.05, few)), name


def test_counts_under_noise_are_whole_and_never_negative():
    encoding = IntegerRows(1, 3, 24)
    vector = torch.zeros(encoding.layout.size, dtype=torch.int64)
    vector[encoding.layout.places["class_counts"]] = torch.tensor([-500, 64 * 7 + 3, 64 * 2 - 3])
    told = encoding.decode(vector)
    assert told.class_counts.tolist() == [0, 7, 2]
    assert told.n_samples == 9
    assert encoding.decode(-vector.abs()).n_samples == 1  # nothing is left: one row, so that a model can be made


def noisy_statistics(sigma: float, seed: int, d: int = 400, n: int = 20_000) -> tuple[torch.Tensor, Statistics]:
    """Phi'Phi of n rows of mean length one with a spectrum that decays, and the statistics with noise in them."""
    rng = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64))[0]
    spectrum = torch.arange(1, d + 1, dtype=torch.float64) ** -1.2
    exact = (turn * (n * spectrum / spectrum.sum())) @ turn.T
    noise = torch.randn(d, d, generator=rng, dtype=torch.float64)
    noise = sigma * (noise + noise.T) / math.sqrt(2)  # sigma off the diagonal, sqrt 2 sigma on it
    labels = torch.zeros(d, 1, dtype=torch.float64)
    return exact, Statistics(exact + noise, labels, torch.tensor([n]), n, float(n))


@pytest.mark.parametrize("sigma", [0.8, 1.4, 5.0])
def test_eigenvalues_become_what_the_exact_matrix_has_along_the_noisy_eigenvectors(sigma):
    """Along each of them by itself that is not known; over the twenty nearest ones it is, to some per cent."""
    off = []
    for seed in range(4):
        exact, noisy = noisy_statistics(sigma, seed)
        made = shrunk(noisy, sigma)
        _, vectors = torch.linalg.eigh(noisy.autocorrelation)
        truth, told = (
            (vectors * (each @ vectors)).sum(0).view(20, 20).mean(1) for each in (exact, made.autocorrelation)
        )
        off.append(told - truth)
        turned = vectors.T @ made.autocorrelation @ vectors
        np.testing.assert_allclose(turned, turned.diagonal().diag(), atol=1e-9 * float(told.max()))
        assert float(made.autocorrelation.trace()) == pytest.approx(noisy.n_samples, rel=1e-9)
        assert float(torch.linalg.eigvalsh(made.autocorrelation).min()) > -1e-9 * float(told.max())
    norm = 2 * sigma * math.sqrt(400)  # of the noise
    assert float(torch.stack(off).mean(0).abs().max()) < 0.1 * norm  # at the lower end, by the smoothing


def test_the_error_is_a_quarter_less_than_with_negative_eigenvalues_cut():
    for seed in range(4):
        exact, noisy = noisy_statistics(1.4, seed)
        values, vectors = torch.linalg.eigh(noisy.autocorrelation)
        cut = (vectors * values.clamp_min(0)) @ vectors.T
        errors = [float((each - exact).norm()) for each in (shrunk(noisy, 1.4).autocorrelation, cut)]
        assert errors[0] < 0.75 * errors[1]


def test_without_noise_little_moves():
    exact, _ = noisy_statistics(1.0, 0)
    made = shrunk(Statistics(exact, torch.zeros(400, 1).double(), torch.tensor([20_000]), 20_000, 2e4), 1e-9)
    np.testing.assert_allclose(made.autocorrelation.numpy(), exact.numpy(), atol=1e-6)


def test_gamma_is_three_eighths_of_the_noise():
    encoding = IntegerRows(400, 2, 24)
    noise = encoding.decode(encoding.noise(2.0, np.random.default_rng(5))).autocorrelation
    norm = float(torch.linalg.matrix_norm(noise, 2))
    # The norm of one draw is that close to its limit.
    assert gamma_for(2.0, 400) == pytest.approx(3 * norm / 8, rel=0.03)
