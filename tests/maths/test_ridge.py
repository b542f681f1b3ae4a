"""Statistics and their solution, against other routes to the same numbers."""

from __future__ import annotations

import tracemalloc
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
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
def test_gram_is_the_lower_triangle_of_the_smaller_product(n, d):
    phi, _ = rows(n, d, 2, 0)
    expected = phi @ phi.T if n < d else phi.T @ phi
    torch.testing.assert_close(gram(phi).tril(), expected.tril(), rtol=1e-12, atol=1e-12)


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


@pytest.mark.gpu
def test_cuda_gives_the_same_statistics():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    phi, y = rows(300, 2500, 5, 0)
    on_gpu = statistics(phi.cuda(), y.cuda())
    torch.testing.assert_close(on_gpu.autocorrelation.cpu(), statistics(phi, y).autocorrelation, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(solve(on_gpu, 1.0).cpu(), solve(statistics(phi, y), 1.0), rtol=1e-9, atol=1e-11)
