"""How statistics travel, and what every message weighs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths.ridge import statistics
from apfl.maths.wire import (
    factor_message,
    form_for,
    from_message,
    message,
    nbytes,
    pack,
    statistics_bytes,
    statistics_shapes,
    unpack,
)
from tests.maths.test_ridge import rows


@given(st.integers(1, 40))
def test_packing_round_trips(d):
    a = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    symmetric = a + a.T
    assert len(pack(symmetric)) == d * (d + 1) // 2
    assert torch.equal(unpack(pack(symmetric)), symmetric)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "d", "c"), [(1, 1, 1), (9, 7, 3), (40, 40, 11), (39, 40, 11), (3, 40, 2), (1, 9, 4)])
def test_byte_counts_equal_what_is_sent(n, d, c, dtype):
    """The triangle from n = d on, and the smaller factor below; both of the shapes and the size that are announced."""
    phi, y = rows(n, d, c, 0)
    forms = {"triangle": message(statistics(phi, y), dtype), "factor": factor_message(phi, y, dtype)}
    for form, sent in forms.items():
        large = {name: tuple(sent[name].shape) for name in sent if sent[name].dtype == dtype and sent[name].dim()}
        assert {name: large[name] for name in large if name != "class_counts"} == statistics_shapes(form, n, d, c)
    sizes = {form: sum(len(t.numpy().tobytes()) for t in sent.values()) for form, sent in forms.items()}
    assert form_for(n, d) == ("triangle" if n >= d else "factor")
    assert statistics_bytes(n, d, c, dtype) == sizes[form_for(n, d)] == min(sizes.values())
    assert (sizes["factor"] < sizes["triangle"]) == (n < d)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("d", "c"), [(1, 1), (7, 3), (40, 11)])
def test_a_message_gives_the_statistics_back(d, c, dtype):
    stats = statistics(*rows(9, d, c, 0))
    received = from_message(message(stats, dtype))
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
    assert nbytes(sent) == statistics_bytes(n, d, 3)


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
