"""Statistics and their solution, against other routes to the same numbers."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths import ridge
from apfl.maths.ridge import Statistics, accumulate, gram, one_hot, solve, statistics, total

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def rows(n: int, d: int, c: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    phi = torch.from_numpy(rng.normal(size=(n, d)))
    return phi, one_hot(torch.from_numpy(rng.integers(c, size=n)), c)


def augmented_lstsq(phi: torch.Tensor, y: torch.Tensor, ridge: float) -> torch.Tensor:
    """Ridge as plain least squares on rows with sqrt(ridge) I below them; no normal equations."""
    below = ridge**0.5 * torch.eye(phi.shape[1], dtype=torch.float64)
    right = torch.cat([y, torch.zeros(phi.shape[1], y.shape[1], dtype=torch.float64)])
    solution = np.linalg.lstsq(torch.cat([phi, below]).numpy(), right.numpy(), rcond=None)[0]
    return torch.from_numpy(solution)


@given(sizes, st.integers(1, 50), st.integers(1, 5), st.sampled_from([0.1, 1.0, 100.0]), st.integers(0, 99))
def test_theorem_1_sum_of_statistics_is_central_ridge(ns, d, c, ridge, seed):
    parts = [rows(n, d, c, seed + 7 * k) for k, n in enumerate(ns)]
    primary = solve(total(statistics(phi, y) for phi, y in parts), ridge)
    central = augmented_lstsq(torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts]), ridge)
    torch.testing.assert_close(primary, central, rtol=1e-9, atol=1e-11)


@given(sizes, st.integers(0, 99))
def test_a_client_that_left_never_was(ns, seed):
    parts = [statistics(*rows(n, 12, 3, seed + k)) for k, n in enumerate([5, *ns])]
    left = total(parts) - parts[-1]
    never = total(parts[:-1])
    torch.testing.assert_close(solve(left, 1.0), solve(never, 1.0), rtol=1e-9, atol=1e-11)
    assert (left.n_samples, left.target_energy) == (never.n_samples, never.target_energy)
    assert torch.equal(left.class_counts, never.class_counts)


def test_order_and_grouping_do_not_matter():
    parts = [statistics(*rows(n, 9, 3, n)) for n in (1, 4, 20, 7)]
    expected = solve(total(parts), 0.5)
    for order in permutations(parts):
        torch.testing.assert_close(solve(total(order), 0.5), expected, rtol=1e-9, atol=1e-12)
    pairs = (parts[0] + parts[1]) + (parts[2] + parts[3])
    torch.testing.assert_close(solve(pairs, 0.5), expected, rtol=1e-9, atol=1e-12)


def test_rows_twice_is_half_the_ridge():
    stats = statistics(*rows(30, 8, 3, 0))
    torch.testing.assert_close(solve(stats + stats, 2.0), solve(stats, 1.0), rtol=1e-9, atol=1e-12)


@given(st.integers(1, 70), st.integers(1, 30), st.integers(1, 25), st.integers(0, 99))
def test_a_stream_of_batches_gives_the_same_statistics(n, d, batch, seed):
    phi, y = rows(n, d, 4, seed)
    streamed = accumulate(zip(phi.split(batch), y.split(batch), strict=True))
    whole = statistics(phi, y)
    torch.testing.assert_close(streamed.autocorrelation, whole.autocorrelation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(streamed.crosscorrelation, whole.crosscorrelation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.autocorrelation, phi.T @ phi, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.crosscorrelation, phi.T @ y, rtol=1e-12, atol=1e-12)
    assert streamed.n_samples == n == int(streamed.class_counts.sum()) == streamed.target_energy


def test_wide_statistics_are_mirrored_across_blocks():
    phi, y = rows(5, 2500, 2, 0)  # more than two blocks of the triangle
    stats = statistics(phi, y)
    assert torch.equal(stats.autocorrelation, stats.autocorrelation.T)
    torch.testing.assert_close(stats.autocorrelation, phi.T @ phi, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n", "d"), [(3, 8), (8, 3), (5, 5)])
def test_gram_is_the_smaller_product(n, d):
    phi, _ = rows(n, d, 2, 0)
    expected = phi @ phi.T if n < d else phi.T @ phi
    torch.testing.assert_close(gram(phi), expected, rtol=1e-12, atol=1e-12)


def test_memory_does_not_grow_with_streamed_rows():
    def peak(n_batches: int) -> int:
        rng = np.random.default_rng(0)
        y = one_hot(torch.zeros(500, dtype=torch.long), 2)
        batches = ((torch.from_numpy(rng.normal(size=(500, 64))), y) for _ in range(n_batches))
        tracemalloc.start()
        accumulate(batches)
        reached = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return reached

    peak(2)  # first-call allocations
    # One batch is 256 kB: eighteen more of them held would be 4.6 MB.
    assert peak(20) < peak(2) + 256_000


def test_inputs_are_left_alone():
    phi, y = rows(20, 6, 3, 0)
    before = phi.clone(), y.clone()
    stats = statistics(phi, y)
    matrix = stats.autocorrelation.clone()
    solve(total([stats, stats]), 1.0)
    assert torch.equal(phi, before[0])
    assert torch.equal(y, before[1])
    assert torch.equal(stats.autocorrelation, matrix)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_features_are_refused(value):
    phi, y = rows(10, 4, 2, 0)
    phi[3, 2] = value
    with pytest.raises(InputError, match="NaN or infinity"):
        statistics(phi, y)


def test_singular_and_non_finite_systems_are_refused_with_a_remedy():
    phi, y = rows(3, 10, 2, 0)
    with pytest.raises(InputError, match="use a larger ridge"):
        solve(statistics(torch.zeros_like(phi), y), 0.0)
    with pytest.raises(InputError, match="0 or more"):
        solve(statistics(phi, y), -1.0)
    good = statistics(phi, y)
    matrix = good.autocorrelation.clone()
    matrix[0, 0] = float("nan")
    bad = Statistics(matrix, good.crosscorrelation, good.class_counts, good.n_samples, good.target_energy)
    with pytest.raises(InputError, match="NaN"):
        solve(bad, 1.0)


def test_statistics_that_contradict_themselves_are_refused():
    small, large = statistics(*rows(3, 4, 2, 0)), statistics(*rows(9, 4, 2, 1))
    with pytest.raises(InputError, match="contradict"):
        small - large
    with pytest.raises(InputError, match="cannot be combined"):
        small + statistics(*rows(3, 5, 2, 0))
    with pytest.raises(InputError, match="fit together"):
        Statistics(torch.eye(3), torch.zeros(4, 2), torch.zeros(2), 0, 0.0)
    with pytest.raises(InputError, match="same n, at least 1"):
        statistics(torch.zeros(0, 3), torch.zeros(0, 2))
    with pytest.raises(InputError, match="allowed are 0 to 1"):
        one_hot(torch.tensor([0, 2]), 2)
    with pytest.raises(InputError, match="at least one"):
        total([])
    with pytest.raises(InputError, match="at least one batch"):
        accumulate([])


def test_copies_and_echoes_add_up_unless_one_is_not_known():
    plain = statistics(*rows(5, 4, 2, 0))
    one, two = (replace(plain, n_copies=k, echo=torch.tensor([k, 1])) for k in (1, 2))
    for both in (total([one, two]), one + two):
        assert (both.n_copies, both.echo.tolist()) == (3, [3, 2])
    assert ((one + two) - two).echo.tolist() == [1, 1]
    for pair in ([one, plain], [plain, one]):
        assert total(pair).echo is None
        assert (pair[0] + pair[1]).echo is None


@pytest.mark.parametrize(
    ("counts", "n", "energy", "copies", "fits"),
    [
        ([1.0, 2.0], 3, 3.0, 0, True),
        ([1.0, 2.0], 3, 1.8, 3, True),  # smoothed targets have less energy; all rows may be copies
        ([0.0, 0.0], 0, 0.0, 0, True),  # nothing is left
        ([-1e-8, 3.0], 3, 3.0, 0, True),  # rounding of a difference
        ([1.0, 2.0], 3, -1e-7, 0, True),
        ([0.0, 0.0], 0, -1e-7, 0, True),
        ([1.0, 2.0], 3, 3 + 1e-7, 0, True),
        ([1e-7, 0.0], 0, 0.0, 0, True),
        ([-1e-4, 3 + 1e-4], 3, 3.0, 0, False),
        ([1.0, 2.1], 3, 3.0, 0, False),
        ([1.0, 1.9], 3, 3.0, 0, False),
        ([1e-4, 0.0], 0, 0.0, 0, False),
        ([0.0, 0.0], -1, 0.0, 0, False),
        ([1.0, 2.0], 3, 3.0, 4, False),
        ([1.0, 2.0], 3, 3.0, -1, False),
        ([1.0, 2.0], 3, 3.1, 0, False),
        ([1.0, 2.0], 3, -0.1, 0, False),
    ],
)  # fmt: skip
def test_statistics_forgive_rounding_and_nothing_else(counts, n, energy, copies, fits):
    given = torch.eye(4), torch.zeros(4, 2), torch.tensor(counts, dtype=torch.float64), n, energy, copies
    if fits:
        assert Statistics(*given).n_samples == n
        return
    with pytest.raises(InputError, match="contradict"):
        Statistics(*given)


@pytest.mark.parametrize(("matrix", "counts"), [((3, 4), 2), ((4, 3), 2), ((4, 4), 3)])
def test_each_part_of_statistics_must_fit(matrix, counts):
    with pytest.raises(InputError, match="fit together"):
        Statistics(torch.zeros(matrix), torch.zeros(4, 2), torch.zeros(counts), 0, 0.0)


@pytest.mark.parametrize(
    ("phi", "targets"), [((4,), (4, 2)), ((4, 3), (4,)), ((4, 3), (5, 2)), ((5, 3), (4, 2)), ((0, 3), (0, 2))]
)
def test_rows_and_targets_must_fit(phi, targets):
    with pytest.raises(InputError, match="same n, at least 1"):
        statistics(torch.zeros(phi), torch.zeros(targets))


@pytest.mark.parametrize(("d", "c"), [(5, 2), (4, 3)])
def test_a_batch_of_another_size_is_refused(d, c):
    with pytest.raises(InputError, match="all must agree"):
        accumulate([rows(3, 4, 2, 0), rows(3, d, c, 1)])


@pytest.mark.parametrize("labels", [[-1, 0], [0, 2], [-1, 2]])
def test_labels_outside_the_classes_are_refused(labels):
    with pytest.raises(InputError, match="allowed are 0 to 1"):
        one_hot(torch.tensor(labels), 2)


@pytest.mark.parametrize("at_a_time", [4, ridge._ROWS])
def test_single_precision_is_added_up_in_double(monkeypatch, at_a_time):
    """In parts, so that a large matrix is never held twice; a sum in single precision would be off by 1e-7."""
    monkeypatch.setattr(ridge, "_ROWS", at_a_time)
    phi, y = rows(11, 3, 2, 0)
    stats = statistics(phi.float(), y.float())
    expected = phi.float().double()
    torch.testing.assert_close(stats.autocorrelation, expected.T @ expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(stats.crosscorrelation, expected.T @ y, rtol=1e-13, atol=1e-13)
    assert (stats.n_samples, stats.target_energy, stats.class_counts.tolist()) == (11, 11.0, y.sum(0).tolist())


def test_a_nan_among_targets_is_refused_by_solve():
    good = statistics(*rows(5, 3, 2, 0))
    cross = good.crosscorrelation.clone()
    cross[1, 1] = float("nan")
    with pytest.raises(InputError, match="leave it out"):
        solve(Statistics(good.autocorrelation, cross, good.class_counts, 5, 5.0), 1.0)


def test_no_ridge_is_allowed_if_the_rows_suffice():
    phi, y = rows(9, 4, 2, 0)
    torch.testing.assert_close(solve(statistics(phi, y), 0.0), augmented_lstsq(phi, y, 0.0), rtol=1e-9, atol=1e-11)


@pytest.mark.gpu
def test_cuda_gives_the_same_statistics():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    phi, y = rows(300, 2500, 5, 0)
    on_gpu = statistics(phi.cuda(), y.cuda())
    torch.testing.assert_close(on_gpu.autocorrelation.cpu(), statistics(phi, y).autocorrelation, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(solve(on_gpu, 1.0).cpu(), solve(statistics(phi, y), 1.0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("wide", [0, 2048], ids=["in place", "product and sum"])
@pytest.mark.parametrize("columns", [False, True], ids=["row-major", "column-major"])
def test_sums_are_the_same_whatever_adds_them_and_however_rows_lie_in_memory(monkeypatch, wide, columns):
    monkeypatch.setattr(ridge, "_WIDE", wide)
    phi, y = rows(40, 7, 3, 0)
    laid = phi.T.contiguous().T if columns else phi
    summed = accumulate([(laid[:15], y[:15]), (laid, y)])  # a part, whose columns do not follow each other, and all
    expected = phi[:15].T @ phi[:15] + phi.T @ phi
    torch.testing.assert_close(summed.autocorrelation, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(summed.crosscorrelation, phi[:15].T @ y[:15] + phi.T @ y, rtol=1e-12, atol=1e-12)
