"""How statistics travel, and what every message weighs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths.landmarks import draw_points, landmark_map, no_spread
from apfl.maths.leaveout import echo
from apfl.maths.normalise import moments, normaliser
from apfl.maths.personalise import solve_primary
from apfl.maths.ridge import statistics
from apfl.maths.wire import (
    ECHO_BYTES,
    Traffic,
    description_bytes,
    factor_message,
    form_for,
    from_columns,
    from_message,
    landmarks_bytes,
    message,
    nbytes,
    pack,
    publication_bytes,
    scaling_bytes,
    statistics_bytes,
    statistics_shapes,
    table_bytes,
    to_columns,
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


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(len(tensor.numpy().tobytes()) for tensor in tensors)


def test_a_description_and_the_scaling_weigh_what_they_hold():
    features = rows(9, 5, 2, 0)[0]
    sums = moments(features)
    n = torch.tensor(sums.n_samples)
    assert description_bytes(5, moments=False) == bytes_of(n)
    assert description_bytes(5, moments=True) == bytes_of(n, sums.sums, sums.squares, sums.sizes)
    assert scaling_bytes(normaliser("row")) == 0
    standardise = normaliser("standardise", sums)
    assert scaling_bytes(standardise) == bytes_of(standardise.mean, standardise.std)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int16])
def test_a_publication_weighs_what_it_holds(dtype):
    def sent(values: torch.Tensor) -> int:
        return bytes_of(*to_columns(values)) if dtype == torch.int16 else bytes_of(values.to(dtype))

    primary = solve_primary(statistics(*rows(30, 7, 3, 0)), 1.0)
    plain = sent(primary.weights) + bytes_of(primary.stats.class_counts)
    assert publication_bytes(7, 3, dtype=dtype) == plain
    assert publication_bytes(7, 3, sketch=4, dtype=dtype) == plain + sent(primary.with_leverage(4, 0).sketch)
    triangle = primary.factor[tuple(torch.tril_indices(7, 7))]
    exact = bytes_of(triangle if dtype == torch.int16 else triangle.to(dtype))
    assert publication_bytes(7, 3, sketch=0, dtype=dtype) == plain + exact


@given(st.integers(1, 30), st.integers(1, 5), st.floats(-30, 30), st.integers(0, 99))
def test_columns_of_16_bits_move_no_score_beyond_the_bound(d, c, size, seed):
    """No score of a row of length 1 by more than sqrt(d) max |column| / 65534, and the scale's own rounding."""
    generator = torch.Generator().manual_seed(seed)
    values = 10**size * torch.randn(d, c, generator=generator, dtype=torch.float64)
    values[:, 0] *= 0 if seed % 5 == 0 else 1
    integers, scale = to_columns(values)
    assert (integers.dtype, scale.dtype, tuple(scale.shape)) == (torch.int16, torch.float32, (c,))
    told = from_columns(integers, scale)
    most = values.abs().amax(0)
    assert bool(((told - values).abs() <= most / 65534 * (1 + 1e-2)).all())
    worst = torch.nn.functional.normalize((told - values).sign(), dim=0)  # the row whose score moves most
    moved = (worst * (told - values)).sum(0).abs()
    assert bool((moved <= math.sqrt(d) * most / 65534 * (1 + 1e-2)).all())
    assert torch.equal(told[:, most == 0], values[:, most == 0])


@pytest.mark.parametrize("n_in", [5, 31, 32, 33])
def test_landmarks_weigh_what_they_hold(n_in):
    drawn = landmark_map(draw_points(9, 0, no_spread(n_in)))
    assert landmarks_bytes(drawn.width, n_in, mean_squares=False) == bytes_of(drawn.packed(), drawn.scale)
    with_units = bytes_of(drawn.packed(), drawn.scale, drawn.mean_squares(drawn.landmarks).float())
    assert landmarks_bytes(drawn.width, n_in, mean_squares=True) == with_units


def test_traffic_adds_up_by_client():
    first = Traffic({"a": [1, 2, 3]}, {"b": 10}, 1)
    both = first + Traffic({"c": [100, 0, 5]}, {"d": 7}, 2)
    assert (both.total_up, both.total_down(3), both.rounds) == (111, 51, 3)
    assert both.account == {"up": {"a": 2, "c": 35}, "down": {"b": 10, "d": 7}, "most": 101 + 17}


def test_echoes_and_tables_weigh_what_they_hold():
    assert bytes_of(echo(torch.eye(3)).to(torch.int16)) == ECHO_BYTES
    assert table_bytes((2, 3, 5)) == bytes_of(torch.zeros(2, 3, 5, dtype=torch.int64))


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
