"""The random maps: the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from apfl.errors import InputError
from apfl.maths.maps import ACTIVATIONS, random_map, raw_map
from apfl.maths.normalise import Normaliser, moments, normaliser


def philox_4x64(key: int, n: int) -> list[int]:
    """Philox 4x64-10 from its definition (Salmon et al. 2011), independent of numpy's implementation."""
    mask, words, counter = 2**64 - 1, [], 0
    while len(words) < n:
        counter += 1  # numpy advances the counter before its first block
        x, k = [counter, 0, 0, 0], [key & mask, key >> 64]
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ k[0], b & mask, (a >> 64) ^ x[3] ^ k[1], a & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        words += x
    return words[:n]


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 + 5])
def test_golden_values_follow_from_the_definition(seed):
    drawn = random_map(7, 9, seed=seed).matrix
    uniform = (np.array([word >> 11 for word in philox_4x64(seed, 63)], dtype=np.float64) + 0.5) / 2**53
    expected = (norm.ppf(uniform) / math.sqrt(7)).astype(np.float32).reshape(7, 9)
    assert np.array_equal(drawn.numpy(), expected)


def test_golden_fingerprint():
    """Pinned: a change here means that no two versions could federate, and that no saved model could be loaded."""
    pinned = "17432331185bb673f8da4f16a94deb606583b78a3217d4a78d6d4cab615f65c2"
    assert random_map(64, 32, "relu", seed=0).fingerprint == pinned


@pytest.mark.parametrize("threads", [1, 4])
def test_matrix_and_offset_follow_from_the_definition_on_any_number_of_threads(threads):
    former = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = random_map(7, 9, "cosine", seed=3)
    finally:
        torch.set_num_threads(former)
    uniform = (np.array([word >> 11 for word in philox_4x64(3, 72)], dtype=np.float64) + 0.5) / 2**53
    matrix = norm.ppf(uniform[:63]).reshape(7, 9) / math.sqrt(7)
    assert np.array_equal(drawn.matrix.numpy(), matrix.astype(np.float32))
    # The offset takes the words that follow the matrix's.
    assert np.array_equal(drawn.offset.numpy(), (2 * math.pi * uniform[63:]).astype(np.float32))


def test_entries_are_standard_normal_over_root_n():
    matrix = random_map(400, 500, seed=1).matrix.double() * 20  # sqrt(400)
    # 200,000 draws: mean and variance within five standard errors.
    assert abs(float(matrix.mean())) < 5 / math.sqrt(matrix.numel())
    assert abs(float(matrix.var()) - 1) < 5 * math.sqrt(2 / matrix.numel())


def test_seeds_and_settings_change_the_fingerprint():
    maps = [
        random_map(6, 5, seed=0), random_map(6, 5, seed=1), random_map(6, 4, seed=0), random_map(6, 5, "tanh", seed=0),
        random_map(6, 5, seed=0, intercept=True), random_map(6, 5, "cosine", seed=0), raw_map(6),
        random_map(6, 5, "cosine", seed=0, scale=0.5),
    ]  # fmt: skip
    assert len({m.fingerprint for m in maps}) == len(maps)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"cosine"}))
def test_activations_are_torchs(name):
    modules = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "gelu": "GELU", "tanh": "Tanh", "sigmoid": "Sigmoid",
               "hardswish": "Hardswish", "softshrink": "Softshrink", "identity": "Identity"}  # fmt: skip
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    feature_map = random_map(5, 8, name, seed=2)
    expected = getattr(torch.nn, modules[name])()(z @ feature_map.matrix.double())
    torch.testing.assert_close(feature_map(z), expected, rtol=1e-12, atol=1e-12)


def test_cosine_and_intercept():
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    feature_map = random_map(5, 8, "cosine", seed=2, scale=0.3, intercept=True)
    inner = torch.cos(0.3 * z @ feature_map.matrix.double() + feature_map.offset.double())
    torch.testing.assert_close(feature_map(z), torch.cat([inner, torch.ones(6, 1)], 1), rtol=1e-12, atol=1e-12)
    assert feature_map.width == 9
    assert 0 <= float(feature_map.offset.min()) <= float(feature_map.offset.max()) < 2 * math.pi + 1e-6


def test_a_map_does_not_touch_its_argument():
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    before = z.clone()
    for feature_map in (random_map(5, 3), raw_map(5)):
        feature_map(z)
        Normaliser("row")(z)
    assert torch.equal(z, before)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="did you mean 'relu'"):
        random_map(3, 3, "rellu")
    with pytest.raises(InputError, match="at least 1"):
        random_map(3, 0)
    with pytest.raises(InputError, match="seed -1"):
        random_map(3, 3, seed=-1)


@pytest.mark.parametrize("how", ["row", "root"])
def test_row_normalisation_gives_every_row_the_same_length(how):
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[2] = 0
    lengths = Normaliser(how)(z).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full((5,), math.sqrt(7), dtype=torch.float64) * (z.norm(dim=1) > 0))


def test_root_keeps_signs_and_takes_square_roots_of_ratios():
    (row,) = Normaliser("root")(torch.tensor([[9.0, -4.0, 0.0, 1.0]], dtype=torch.float64))
    torch.testing.assert_close(row / row[3], torch.tensor([3.0, -2.0, 0.0, 1.0], dtype=torch.float64))


def test_standardise_from_added_moments_is_standardising_the_union():
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(3, 2, size=(n, 4))) for n in (5, 9))
    a[:, 3] = b[:, 3] = 8.0  # a constant column is centred and left unscaled
    union = torch.cat([a, b])
    scaled = normaliser("standardise", moments(a) + moments(b))(union)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    expected = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(scaled.std(0, correction=0), expected, atol=1e-9, rtol=0)
    back = moments(a) + moments(b) - moments(b)
    torch.testing.assert_close(back.sums, moments(a).sums, rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="moments"):
        normaliser("standardise")
    with pytest.raises(InputError, match="did you mean 'row'"):
        normaliser("rows")
