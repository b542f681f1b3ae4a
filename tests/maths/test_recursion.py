"""The paper's upload and its recursion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths.recursion import fold, statistics_from_upload, upload
from apfl.maths.ridge import solve, statistics, total
from apfl.maths.wire import nbytes
from tests.maths.test_ridge import rows


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 25),
    st.sampled_from([0.7, 1.0, 3.0]),
    st.integers(0, 99),
)
def test_the_papers_recursion_is_the_sum(ns, d, gamma, seed):
    parts = [statistics(*rows(n, d, 3, seed + k)) for k, n in enumerate(ns)]
    folded = fold([upload(part, gamma) for part in parts], gamma)
    # Each of up to six folds multiplies rounding by a condition number of up to 1e2 here.
    torch.testing.assert_close(folded, solve(total(parts), gamma), rtol=1e-8, atol=1e-9)


@given(st.integers(1, 20), st.integers(1, 15), st.integers(0, 99))
def test_an_upload_gives_the_statistics_away(n, d, seed):
    stats = statistics(*rows(n, d, 3, seed))
    seen = statistics_from_upload(upload(stats, 2.0), 2.0, stats.class_counts)
    torch.testing.assert_close(seen.autocorrelation, stats.autocorrelation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen.crosscorrelation, stats.crosscorrelation, rtol=1e-9, atol=1e-10)
    assert (seen.n_samples, seen.target_energy) == (stats.n_samples, stats.target_energy)


def test_nothing_to_fold_is_refused():
    with pytest.raises(InputError, match="at least one"):
        fold([], 1.0)


@pytest.mark.parametrize(("n_rounds", "lower"), [(20, 0.5927), (200, 0.9593)])
def test_the_papers_bytes_against_rounds_of_a_linear_head(n_rounds, lower):
    """Its Figures 5 and 6: one exchange of A_k and G_k up and G down against a head of l c + c numbers either way."""
    d, width, c = 1024, 768, 100
    sent = upload(statistics(torch.eye(2, d), torch.eye(2, c)), 1.0)
    numbers = (nbytes({"A": sent.regularised, "G": sent.primary}) + nbytes({"G": sent.primary})) / 8
    assert numbers == d**2 + 2 * d * c
    # The paper prints 59.27 % after 20 rounds; from its sizes follows 59.25 %.
    assert 1 - numbers / (2 * n_rounds * (width * c + c)) == pytest.approx(lower, abs=3e-4)
