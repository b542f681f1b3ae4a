"""The random maps: the same everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from apfl.errors import InputError
from apfl.maths import maps
from apfl.maths.maps import ACTIVATIONS, FeatureMap, random_map, raw_map
from apfl.maths.normalise import (
    Normaliser,
    _check_sizes,
    _surely_alike,
    check_features,
    moments,
    normaliser,
    resolve,
)  # fmt: skip


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


def test_rows_in_units_of_their_own_are_told_by_their_directions():
    """A table whose rows differ in size by orders of magnitude: beside the largest, `columns` would leave nothing."""
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(200, 8)))
    table[3] = 0  # a row of zeros has no size
    sizes = torch.from_numpy(np.exp(rng.normal(scale=2, size=(200, 1))))
    own = moments(table * sizes)
    logs = (table * sizes)[torch.arange(200) != 3].abs().log().mean(1)
    assert own.variance_of_sizes == pytest.approx(float(logs.var(correction=0)), rel=1e-9)
    assert resolve("auto", moments(table)) == "columns"
    assert resolve("auto", own) == "row"
    halves = moments((table * sizes)[:90]) + moments((table * sizes)[90:])
    assert halves.variance_of_sizes == pytest.approx(own.variance_of_sizes, rel=1e-9)
    # One column of many sizes is no reason: the others still say how large a row is.
    table[:, 0] *= sizes[:, 0]
    assert resolve("auto", moments(table)) == "columns"


def test_standardise_from_added_moments_is_standardising_the_union():
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(3, 2, size=(n, 4))) for n in (5, 9))
    a[:, 3] = b[:, 3] = 8.0  # a constant column is centred and left unscaled
    union = torch.cat([a, b])
    scaled = normaliser("standardise", moments(a) + moments(b))(union)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    expected = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(scaled.std(0, correction=0), expected, atol=1e-9, rtol=0)
    both = moments(a) + moments(b)
    back = both - moments(b)
    assert (both.n_samples, back.n_samples) == (14, 5)
    for part in ("sums", "squares", "sizes"):
        torch.testing.assert_close(getattr(both, part), getattr(moments(union), part), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(getattr(back, part), getattr(moments(a), part), rtol=1e-12, atol=1e-12)
    with pytest.raises(InputError, match="moments"):
        normaliser("standardise")
    with pytest.raises(InputError, match="did you mean 'row'"):
        normaliser("rows")


def test_a_normaliser_is_for_features_of_its_own_width():
    own = normaliser("standardise", moments(torch.randn(9, 4, generator=torch.Generator().manual_seed(0))))
    with pytest.raises(InputError, match=r"shape \(2, 5\) given; this model was made for \(n, 4\)"):
        own(torch.zeros(2, 5))
    for lacking in (
        Normaliser("standardise"),
        Normaliser("standardise", own.mean),
        Normaliser("columns", None, own.std),
    ):
        with pytest.raises(InputError, match="no mean and std"):
            lacking(torch.zeros(2, 4))
    assert [Normaliser(how).width(4) for how in ("row", "root", "standardise", "columns")] == [4, 4, 4, 5]


def test_many_columns_of_like_scales_share_one():
    """How much one of them varies may be what matters; a table's columns have units, so each has its own scale."""
    rng = np.random.default_rng(0)
    like = torch.from_numpy(rng.normal(size=(60, 40)) * rng.uniform(1, 3, 40))
    like[:, 7] = 2.0  # constant
    own = like.std(0, correction=0)
    varying = torch.arange(40) != 7
    shared = own.square().mean().sqrt().expand(40)
    for rows, expected in ((like, shared), (like[:, :10], own[:10])):
        found = normaliser("columns", moments(rows)).std
        torch.testing.assert_close(found[varying[: len(found)]], expected[varying[: len(found)]])
        assert float(found[7]) == 1.0  # left as it is
    like[:, 3] *= 1000
    torch.testing.assert_close(normaliser("columns", moments(like)).std[varying], like.std(0, correction=0)[varying])


def test_rows_too_large_for_the_others_are_named_with_their_client():
    ones = torch.ones(3, 2)
    for how, large in (("none", [1.0, 1e9]), ("standardise", [1e9, 1e9]), ("columns", [-1e9, -1e9])):
        rows = torch.tensor([[1.0, 1.0], large])
        with pytest.raises(InputError, match=r"^row 1 of client 1 .* entries of 1e\+09, the median row of 1:"):
            check_features(how, [ones, rows])
        with pytest.raises(InputError, match=r"^row 1 \(counted"):
            check_features(how, [torch.cat([rows, ones])])
        check_features(how, [ones, rows / torch.tensor([[1.0], [100.0]])])  # 1e7 is still seen beside 1
        check_features(how, [0 * ones, torch.zeros(0, 2)])  # nothing to compare
        check_features(how, [0 * ones, 0 * ones, ones])  # the median of rows that have a size


def test_a_column_is_constant_by_the_rounding_of_its_own_size():
    rows = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:, 0] = 123456.7
    rows[:, 1] *= 1e-9
    std = normaliser("standardise", moments(rows)).std
    torch.testing.assert_close(std[1:], rows.std(0, correction=0)[1:])
    assert float(std[0]) == 1.0


@pytest.mark.parametrize(
    "made",
    [
        random_map(5, 7, "tanh", seed=3),
        random_map(5, 7, "cosine", seed=4, scale=0.7, intercept=True),
        raw_map(5),
        raw_map(5, intercept=True),
    ],
)
def test_a_map_is_drawn_again_from_its_spec(made):
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    again = FeatureMap.from_spec(made.spec())
    assert torch.equal(again(rows.clone()), made(rows.clone()))
    assert (again.spec(), again.width) == (made.spec(), made(rows.clone()).shape[1])


def test_a_map_that_comes_out_differently_is_refused():
    spec = random_map(5, 7, seed=3).spec()
    other = random_map(5, 7, seed=4).spec()["fingerprint"]
    with pytest.raises(InputError, match=rf"{spec['fingerprint'][:12]}, expected {other[:12]}\)"):
        FeatureMap.from_spec(spec | {"fingerprint": other})


def test_a_map_is_for_features_of_its_own_width():
    for features in (torch.zeros(2, 6), torch.zeros(2, 4), torch.zeros(5), torch.zeros(1, 2, 5)):
        for made in (random_map(5, 7), raw_map(5)):
            with pytest.raises(InputError, match=r"this model was made for \(n, 5\)"):
                made(features)


def test_a_map_is_converted_once_for_many_rows():
    made, rows = random_map(5, 7), torch.ones(2, 5, dtype=torch.float64)
    like = made.like(rows)
    assert like.matrix.dtype == torch.float64
    assert torch.equal(like(rows), made(rows))
    assert raw_map(5).like(rows).matrix is None


def test_defaults_and_the_smallest_map():
    assert random_map(5, 7).fingerprint == random_map(5, 7, "relu", 0, intercept=False).fingerprint
    assert random_map(5, 7, "cosine").scale == 0.2
    assert raw_map(5).width == 5
    assert random_map(1, 1).matrix.shape == (1, 1)


def test_a_map_that_does_not_fit_is_refused_before_it_is_drawn(monkeypatch):
    for have in (4 * 5 * 7, None):
        monkeypatch.setattr(maps, "available", lambda device, have=have: have)
        assert random_map(5, 7).width == 7
    monkeypatch.setattr(maps, "available", lambda device: 4 * 10_000 * 50_000 - 1)
    with pytest.raises(InputError, match="a map from 10000 to 50000 features takes 2 GB; use"):
        random_map(10_000, 50_000)


def test_the_smallest_word_is_no_infinity(monkeypatch):
    """A uniform number of 0, or below, has no normal quantile."""

    class Zeros:
        def random(self, n: int) -> np.ndarray:
            return np.zeros(n)

    monkeypatch.setattr(np.random, "Generator", lambda bits: Zeros())
    assert maps._uniform(0, 0, 2).tolist() == [2**-54, 2**-54]


@pytest.mark.parametrize(("seed", "start"), [(0, 0), (7, 5), (2**40, 123_457)])
def test_numbers_are_the_upper_bits_of_raw_words(seed, start):
    counter, skipped = divmod(start, 4)
    words = np.random.Philox(key=seed, counter=counter).random_raw(skipped + 999)[skipped:]
    assert np.array_equal(maps._uniform(seed, start, 999), ((words >> np.uint64(11)).astype(float) + 0.5) / 2**53)


@pytest.mark.parametrize("block", [1, 3, 8, 62, 63, 64])
def test_blocks_are_parts_of_one_stream(monkeypatch, block):
    whole = random_map(7, 9, "cosine", seed=3)
    monkeypatch.setattr(maps, "_DRAWN", block)
    assert random_map(7, 9, "cosine", seed=3).fingerprint == whole.fingerprint


def test_a_map_says_what_it_is():
    assert repr(random_map(6, 20, "relu", 3)) == "FeatureMap(6 -> 20, relu, seed 3)"
    assert repr(raw_map(6)) == "FeatureMap(6 -> 6, the features as they are)"


@given(st.integers(0, 2**20), st.integers(1, 3), st.floats(-9, 2), st.floats(0, 1), st.floats(0, 0.6))
def test_a_quick_look_at_sizes_passes_no_row_that_medians_refuse(seed, n_clients, decades, small, zeros):
    """Some rows are smaller by these decades, and some entries are zero."""
    rng = np.random.default_rng(seed)
    clients = []
    for _ in range(n_clients):
        sizes = np.where(rng.random((6, 1)) < small, 10.0**decades, 1.0)
        kept = rng.random((6, 5)) >= zeros
        clients.append(torch.from_numpy(sizes * rng.uniform(0.5, 1.5, (6, 5)) * kept))
    if _surely_alike(clients):
        _check_sizes([rows.abs().median(1).values for rows in clients])  # raises if a row drowns the others


def test_the_quick_look_settles_usual_features():
    assert _surely_alike([torch.rand(20, 8), torch.rand(3, 8)])
    assert not _surely_alike([torch.rand(20, 8) * 1e-9, torch.full((3, 8), 1e3)])
