"""Statistics as integers: their range, their dithers, and the bound on what rounding does to a sum."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from apfl.maths.dither import dither, uniform
from apfl.maths.integers import (
    FAILS,
    HIDDEN,
    IN_HALF,
    ROOM,
    Encoding,
    Rounding,
    _Halves,
    _in_order,
    _Known,
    _Products,
    add_integers,
    bits_for,
    products_in,
    round_statistics,
    spectral_bound,
)  # fmt: skip
from apfl.maths.leaveout import ECHO
from apfl.maths.ridge import statistics

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32])
def test_the_largest_integer_is_that_of_its_bits(kind):
    assert Rounding(np.iinfo(kind).bits, 1.0).largest == np.iinfo(kind).max


@pytest.mark.parametrize(("n_clients", "width"), [(1, 1), (1, 64), (50, 1024), (1000, 4096)])
def test_the_bound_is_where_the_tail_of_bernsteins_inequality_is_small(n_clients, width):
    """2 d exp(-t^2 / 2 / (K d step^2 / 4 + step t / 3)) is FAILS at the smallest t that would do, by root finding."""
    rounding = Rounding(16, 30.0)
    variance = n_clients * width * rounding.step**2 / 4

    def too_likely(t: float) -> float:
        return math.log(2 * width) - t**2 / 2 / (variance + rounding.step * t / 3) - math.log(FAILS)

    smallest = brentq(too_likely, 1e-3 * rounding.step, 1e6 * rounding.step)
    # The sum of two roots instead of the root of a sum: never below, and at most (2 + 2 sqrt 2) / 4 = 1.21 times it.
    assert smallest <= spectral_bound(rounding, n_clients, width) <= 1.21 * smallest


def test_every_entry_has_a_dither_of_its_own():
    """Equal entries halfway between two integers go both ways: beside the diagonal, on it, and in Phi'Y."""
    rounding, d = Rounding(16, 30.0), 40
    made = statistics(torch.eye(d), torch.eye(d))
    half = torch.full((d, d), 100.5, dtype=torch.float64)
    symmetric = (half * rounding.step).fill_diagonal_(100.5 * rounding.diagonal.step)
    made = replace(made, autocorrelation=symmetric, crosscorrelation=half * rounding.step)
    rounded, outside = round_statistics(made, torch.ones(d), rounding, uniform(0, CPU))
    assert outside == 0
    off = ~torch.eye(d, dtype=torch.bool)
    for entries, step in (
        (rounded.autocorrelation[off], rounding.step),
        (rounded.autocorrelation.diagonal(), rounding.diagonal.step),
        (rounded.crosscorrelation, rounding.step),
    ):
        assert set((entries / step).round().flatten().tolist()) == {100.0, 101.0}


@pytest.mark.parametrize(("sizes", "d"), [([300] * 4, 64), ([100] * 20, 96), ([900, 50, 50], 200)])
def test_the_chosen_bits_keep_rounding_below_the_smallest_eigenvalue(sizes, d):
    """For rows as they are expected: independent columns of mean square one."""
    rng, n = np.random.default_rng(0), sum(sizes)
    parts = [rng.standard_normal((size, d)) for size in sizes]
    rows = np.concatenate(parts)
    smallest = np.linalg.eigvalsh(rows.T @ rows)[0]

    def error(bits: int) -> float:
        step, total = ROOM * max(sizes) / (2 ** (bits - 1) - 1), np.zeros((d, d))
        for part in parts:
            lower = np.tril(np.floor(part.T @ part / step + rng.random((d, d))) * step - part.T @ part)
            total += lower + np.tril(lower, -1).T
        return float(np.linalg.norm(total, 2))

    bits = bits_for(n, len(sizes), max(sizes), d)
    # The norm and the eigenvalue are those of large matrices; of these they differ by a fifth.
    assert error(bits) < 1.2 * HIDDEN * smallest
    assert error(bits - 2) > HIDDEN * smallest / 1.2


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("width", "bits"), [(7, 12), (600, 12), (40, 18)])
def test_several_clients_at_once_have_the_integers_of_each(width, bits, halves, monkeypatch):
    """Rows are small integers, so that products are exact in either precision and no sum depends on its order."""
    monkeypatch.setattr("apfl.maths.integers.multiplies_halves", lambda device: halves)
    rng, c = np.random.default_rng(0), 3
    sizes = [5, 9, 7]
    phis = [torch.from_numpy(rng.integers(-2, 3, (n, width)).astype(np.float32)) for n in sizes]
    targets = [torch.eye(c, dtype=torch.float64)[torch.from_numpy(rng.integers(c, size=n))] for n in sizes]
    repeats = [(k, torch.full((ECHO,), k)) for k in range(3)]
    encoding = Encoding(Rounding.for_rows(bits, 9), torch.ones(width), c)
    draws = [dither(k, "statistics", CPU) for k in range(3)]
    together, outside = encoding.encode_each(phis, targets, draws, repeats)
    assert outside == [0, 0, 0]
    for k, vector in enumerate(together):
        own, _ = encoding.encode_rows(phis[k], targets[k], dither(k, "statistics", CPU), repeats[k])
        assert torch.equal(vector.long(), own)
    matrices = torch.randn(2, width, width)
    pieces = [values.flatten(-2) for _, values in encoding._below(_Known(matrices))]
    whole = _in_order((rows, _Known(matrices).tile(rows)) for rows, _, _ in encoding._blocks)  # as on a GPU
    assert torch.equal(whole[:, 0], torch.cat(pieces, -1))


def test_a_client_outside_the_range_is_encoded_as_if_it_were_alone():
    phis = [torch.full((4, 6), 0.4), torch.full((4, 6), 30.0)]
    targets = [torch.ones(4, 1, dtype=torch.float64)] * 2
    encoding = Encoding(Rounding.for_rows(12, 4), torch.ones(6), 1)
    draws = [dither(k, "statistics", CPU) for k in range(2)]
    together, outside = encoding.encode_each(phis, targets, draws, [(0, None)] * 2)
    alone = [
        encoding.encode_rows(phi, y, dither(k, "statistics", CPU), (0, None))
        for k, (phi, y) in enumerate(zip(phis, targets, strict=True))
    ]
    assert outside == [saturated for _, saturated in alone] == [0, 24]
    assert all(torch.equal(one, vector) for one, (vector, _) in zip(together, alone, strict=True))


@pytest.mark.parametrize("bits", [10, IN_HALF])
def test_products_in_bfloat16_are_off_by_a_small_part_of_a_step(bits):
    """Of rows like those that travel, with correlations as large as any seen: a hundredth of N to a quarter."""
    n, d = 800, 700  # more columns than a block
    rng = np.random.default_rng(0)
    common = rng.standard_normal((n, 4)) @ rng.standard_normal((4, d)) / 4
    rows = torch.from_numpy(rng.standard_normal((n, d)) + common).float()
    step = Rounding.for_rows(bits, n).step
    exact = rows.double().T @ rows.double()
    off = exact - torch.diag(exact.diagonal())
    assert 0.2 * n < off.abs().max() < n  # so the largest error is looked at
    coarse, fine = _Halves.of([rows]), _Products([rows])
    for start, stop in ((0, 512), (512, d)):
        own = slice(start, stop)
        below = torch.ones(stop - start, stop).tril(start - 1).bool()  # the diagonal has its own
        error = ((coarse.tile(own) - exact[own, :stop]) / step)[below]
        largest = float(off.abs().max()) / n / 0.25  # the docs' numbers are those of a quarter
        assert error.square().mean().sqrt() < (0.04 if bits == 10 else 0.15) * largest
        assert abs(error.mean()) < 0.005  # no entry drifts: a step is rounded to by 0.4
        assert ((fine.tile(own) - exact[own, :stop]) / step).abs().max() < 1e-3
    torch.testing.assert_close(coarse.diagonal, fine.diagonal, rtol=0, atol=0)


def test_bfloat16_is_for_coarse_integers_of_single_rows_alone(monkeypatch):
    rows = torch.zeros(2, 3)
    monkeypatch.setattr("apfl.maths.integers.multiplies_halves", lambda device: True)
    assert products_in(rows, IN_HALF) == torch.bfloat16
    assert products_in(rows, IN_HALF + 1) == torch.float32
    assert products_in(rows.double(), IN_HALF) == torch.float64
    monkeypatch.setattr("apfl.maths.integers.multiplies_halves", lambda device: False)
    assert products_in(rows, IN_HALF) == torch.float32


def test_sums_of_integers_pass_32_bits():
    total, vector = torch.zeros(3, dtype=torch.int64), torch.tensor([2**31 - 1, -(2**31) + 1, 5], dtype=torch.int32)
    for _ in range(3):
        add_integers(total, vector)
    assert total.tolist() == [3 * (2**31 - 1), -3 * (2**31 - 1), 15]
