"""Moments of rows of any size as integers: what comes back, what is cut back, what is refused."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths.integers import uniform
from apfl.maths.moments_encoding import BUCKETS, MomentsEncoding, largest_buckets
from apfl.maths.normalise import moments, normaliser

SETS = ("none", "root", "row")


def encoded(features: torch.Tensor, buckets: torch.Tensor, n_rows: int, seed: int = 0, flags: int = 0):
    encoding = MomentsEncoding(n_rows, buckets, SETS, flags)
    own = {of: moments(features, of) for of in SETS}
    return encoding, encoding.encode(own, torch.ones(flags), uniform(seed, torch.device("cpu")))


def rows(scales: list[float], n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, len(scales), generator=generator, dtype=torch.float64) * torch.tensor(scales).double()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 99))
def test_the_sum_of_vectors_has_the_moments_of_all_rows(exponents, n_clients, seed):
    """Against moments of all rows at once: columns of any scale, to the bits that integers have."""
    sites = [rows([2.0**e for e in exponents], 5 + k, seed + k) for k in range(n_clients)]
    buckets = torch.stack([largest_buckets(own) for own in sites]).amax(0)
    vectors = [encoded(own, buckets, 5 + n_clients, seed=k)[1] for k, own in enumerate(sites)]
    encoding, _ = encoded(sites[0], buckets, 5 + n_clients)
    told, together = encoding.decode(reduce(add, vectors), n_clients), torch.cat(sites)
    for of in SETS:
        expected = moments(together, of)
        largest = together.abs().amax(0) if of == "none" else together.new_full((len(exponents),), 3.0)
        assert told[of].n_samples == expected.n_samples
        # Up to sixteen times the largest entry squared fit into 2^47 steps, and up to ten rows into one site's.
        error = 16 * n_clients * (5 + n_clients) * 2.0**-46
        assert bool(((told[of].sums - expected.sums).abs() <= error * largest).all())
        assert bool(((told[of].squares - expected.squares).abs() <= 100 * error * largest.square()).all())
    np.testing.assert_allclose(told["none"].sizes, moments(together).sizes, rtol=0, atol=1e-6)  # of logs up to 768


def test_no_entry_passes_its_range_and_no_range_is_sixteen_times_too_large():
    features = torch.tensor([[2.0**e for e in range(-70, 70)]], dtype=torch.float64)
    buckets = largest_buckets(features)
    most = torch.ldexp(torch.ones(140, dtype=torch.float64), 2 * buckets - 64)
    inside = buckets < BUCKETS - 1
    assert bool((features[0] <= most)[inside].all())
    assert bool((most < 16 * features[0])[inside & (buckets > 0)].all())
    assert largest_buckets(torch.zeros(0, 2)).tolist() == [-1, -1]
    assert largest_buckets(torch.tensor([[0.0, -4.0]])).tolist() == [-1, 34]


def test_what_is_beyond_the_agreed_range_is_cut_back_and_counted():
    features = torch.full((10, 2), 3.0, dtype=torch.float64)
    agreed = largest_buckets(features)
    (encoding, vector), (_, cut) = encoded(features, agreed, 10), encoded(1000 * features, agreed, 10)
    saturated = encoding.layout.places["saturated"]
    assert (int(vector[saturated]), int(cut[saturated])) == (0, 4)
    encoding.layout.check(cut.numpy())


def test_constant_columns_stay_constant_and_columns_far_from_zero_keep_their_spread():
    """Rounding must not turn a constant into noise that is then scaled up."""
    features = torch.cat([rows([1.0, 1e-3], 40, 1), torch.full((40, 1), 12345.678).double()], 1)
    features[:, 1] += 50.0
    encoding, vector = encoded(features, largest_buckets(features), 64)
    told, expected = encoding.decode(vector, 1)["none"], moments(features)
    made, wanted = (normaliser("standardise", each) for each in (told, expected))
    np.testing.assert_allclose(made.std, wanted.std, rtol=1e-4)  # std 1e-3 beside 50: 4e-10 of the square
    assert made.std[2] == wanted.std[2] == 1.0


@pytest.mark.parametrize(
    ("part", "value"), [("none squares", -(2**45)), ("root squares", 2**46), ("n_samples", -19), ("row sums", 2**46)]
)
def test_moments_that_no_rows_have_are_refused(part, value):
    features = rows([1.0, 5.0], 20, 3)
    encoding, vector = encoded(features, largest_buckets(features), 20)
    encoding.decode(vector, 1)
    vector[encoding.layout.places[part]] += value
    with pytest.raises(InputError, match="moments that"):
        encoding.decode(vector, 1)
