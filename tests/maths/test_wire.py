"""What travels, and the paper's recursion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths.ridge import solve, statistics, total
from apfl.maths.wire import (
    factor_bytes,
    factor_message,
    fold,
    from_message,
    message,
    message_bytes,
    nbytes,
    pack,
    statistics_from_upload,
    unpack,
    upload,
)
from tests.maths.test_ridge import rows


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 25), st.integers(0, 99))
def test_the_papers_recursion_is_the_sum(ns, d, seed):
    parts = [statistics(*rows(n, d, 3, seed + k)) for k, n in enumerate(ns)]
    folded = fold([upload(part, 1.0) for part in parts], 1.0)
    # Each of up to six folds multiplies rounding by a condition number of up to 1e2 here.
    torch.testing.assert_close(folded, solve(total(parts), 1.0), rtol=1e-8, atol=1e-9)


@given(st.integers(1, 20), st.integers(1, 15), st.integers(0, 99))
def test_an_upload_gives_the_statistics_away(n, d, seed):
    stats = statistics(*rows(n, d, 3, seed))
    seen = statistics_from_upload(upload(stats, 2.0), 2.0, stats.class_counts)
    torch.testing.assert_close(seen.autocorrelation, stats.autocorrelation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen.crosscorrelation, stats.crosscorrelation, rtol=1e-9, atol=1e-10)
    assert (seen.n_samples, seen.target_energy) == (stats.n_samples, stats.target_energy)


@given(st.integers(1, 40))
def test_packing_round_trips(d):
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    symmetric = a + a.T
    assert len(pack(symmetric)) == d * (d + 1) // 2
    assert torch.equal(unpack(pack(symmetric)), symmetric)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("d", "c"), [(1, 1), (7, 3), (40, 11)])
def test_byte_counts_equal_what_is_sent(d, c, dtype):
    stats = statistics(*rows(9, d, c, 0))
    sent = message(stats, dtype)
    assert nbytes(sent) == message_bytes(d, c, dtype) == sum(len(t.numpy().tobytes()) for t in sent.values())
    received = from_message(sent)
    if dtype == torch.float64:
        assert torch.equal(received.autocorrelation, stats.autocorrelation)
        assert torch.equal(received.crosscorrelation, stats.crosscorrelation)
    else:  # float32 keeps 24 bits
        torch.testing.assert_close(received.autocorrelation, stats.autocorrelation, rtol=1e-6, atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 25), st.integers(0, 99))
def test_the_factor_says_what_the_statistics_say(n, d, seed):
    phi, y = rows(n, d, 3, seed)
    sent = factor_message(phi, y)
    stats, plain = from_message(sent), statistics(phi, y)
    torch.testing.assert_close(stats.autocorrelation, plain.autocorrelation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.crosscorrelation, plain.crosscorrelation, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.autocorrelation, stats.autocorrelation.T)
    assert (stats.n_samples, stats.target_energy) == (plain.n_samples, plain.target_energy)
    assert nbytes(sent) == factor_bytes(n, d, 3)
    if n < d:
        assert factor_bytes(n, d, 3) < message_bytes(d, 3)


@given(st.integers(2, 20), st.integers(0, 99))
def test_the_factor_tells_no_more_than_the_statistics(n, seed):
    """The order of the rows, which the statistics hide, is not in it: turned about, the rows give the same message."""
    phi, y = rows(n, 25, 3, seed)
    sent, turned = factor_message(phi, y), factor_message(phi.flip(0), y.flip(0))
    for name in sent:
        # R is unique up to signs, and solves with it: rounding grows with the condition number, up to 1e4 here.
        torch.testing.assert_close(turned[name], sent[name], rtol=1e-9, atol=1e-9)


def test_messages_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match="triangle"):
        unpack(torch.zeros(4))
    sent = message(statistics(*rows(9, 4, 2, 0)))
    with pytest.raises(InputError, match="lacks 'class_counts'"):
        from_message({name: tensor for name, tensor in sent.items() if name != "class_counts"})
    with pytest.raises(InputError, match="contradict"):
        from_message(sent | {"n_samples": torch.tensor(3)})
    factored = factor_message(*rows(3, 5, 2, 0))
    with pytest.raises(InputError, match="trapezoid"):
        from_message(factored | {"factor": factored["factor"][:-1]})
    with pytest.raises(InputError, match="at least one"):
        fold([], 1.0)
