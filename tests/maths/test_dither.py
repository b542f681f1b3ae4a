"""The numbers that integers are rounded by: uniform, independent, and the same however they are drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from apfl.maths.dither import Dither, dither, uniform

CPU = torch.device("cpu")


def words(key: int, n: int) -> list[int]:
    """SplitMix64 in Python's own integers; shifts are those of signed numbers but the last, as the docstring says."""
    found, mask = [], 2**64 - 1

    def signed(z: int) -> int:
        return z - 2**64 if z >> 63 else z

    for i in range(1, n + 1):
        z = (key + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (signed(z) >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (signed(z) >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_numbers_are_those_of_the_law(key):
    lanes = [(word >> 16 * lane) & 0xFFFF for word in words(key, 5) for lane in range(4)]
    expected = [((lane ^ 0x8000) + 0.5) / 2**16 for lane in lanes]  # lanes are read as signed
    assert Dither([key], CPU)(4, 5).flatten().tolist() == expected


def test_pieces_of_any_size_give_the_same_numbers():
    whole, parts = dither(3, "statistics", CPU), dither(3, "statistics", CPU)
    pieces = [parts(*shape).flatten() for shape in ((1, 1), (2, 3), (1, 2**17 + 1), (5, 7))]
    assert torch.equal(torch.cat(pieces), whole(1, sum(map(len, pieces)))[0])


def test_clients_together_have_their_own_numbers():
    own = [dither(seed, "statistics", CPU) for seed in range(3)]
    together = Dither.together(own)(6, 7)
    assert all(torch.equal(part, each(6, 7)) for part, each in zip(together, own, strict=True))


def test_no_two_messages_share_numbers():
    drawn = {(s, p): tuple(dither(s, p, CPU)(1, 8)[0].tolist()) for s in (0, 1) for p in ("", "spread", "pilot root")}
    assert len(set(drawn.values())) == len(drawn)


@pytest.mark.parametrize("seed", [0, 1])
def test_numbers_are_uniform_and_uncorrelated(seed):
    n = 2**18
    drawn = uniform(seed, CPU)(1, n)[0].double().numpy()
    assert 0 < drawn.min() <= drawn.max() < 1
    counts = np.bincount((drawn * 256).astype(int), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4
    spectrum = np.abs(np.fft.rfft(drawn - 0.5))[1:] ** 2 / (n / 12)  # of white noise: exponential with mean 1
    assert stats.kstest(spectrum, "expon").pvalue > 1e-4
