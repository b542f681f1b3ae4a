"""The same numbers as numpy draws, bit by bit: landmarks of a GPU are those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.maths import philox
from apfl.maths.maps import normals


def drawn_by_numpy(seed: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed, counter=0)).random(n)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 700), st.sampled_from([4, 64, 2**24]))
def test_numbers_are_those_of_numpy(seed, n, at_once):
    usual, philox.AT_ONCE = philox.AT_ONCE, at_once  # pieces change nothing
    try:
        made = philox.uniform_from_philox(seed, n, torch.device("cpu"))
    finally:
        philox.AT_ONCE = usual
    assert made.dtype == torch.float64
    assert np.array_equal(made.numpy(), drawn_by_numpy(seed, n))


def test_many_numbers_are_those_of_numpy():
    """Products of 128 bits carry in all their places only if many are made."""
    made = philox.uniform_from_philox(11, 1_000_001, torch.device("cpu"))
    assert np.array_equal(made.numpy(), drawn_by_numpy(11, 1_000_001))


@pytest.mark.gpu
def test_a_gpu_draws_what_a_cpu_draws():
    device = torch.device("cuda")
    made = philox.uniform_from_philox(5, 100_003, device)
    assert np.array_equal(made.cpu().numpy(), drawn_by_numpy(5, 100_003))
    # Two functions for the inverse of the normal distribution; each is good to a few units in the last place.
    assert torch.allclose(normals(3, 300, 70, device=device).cpu(), normals(3, 300, 70), rtol=1e-13, atol=1e-15)
