"""The pilot that chooses the normalisation of `apfl` on landmarks, and the normalisation that only it takes."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.hits import prefer
from apfl.maths.normalise import described, moments, normaliser, resolve
from apfl.maths.pilot import CANDIDATES, WIDTH, candidate, describe, pilot_points, pilot_rows
from apfl.methods import load_method
from tests.conftest import draw_clients

C, L = 3, 6


def rows(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).gamma(1.5, size=(n, width)))


# ------------------------------------------------------------------------------------------------ centred rows


def test_centred_rows_are_roots_at_one_length_about_their_mean_with_a_constant():
    z = rows(50, 5)
    root = z.sqrt()
    root = root * math.sqrt(5) / root.norm(dim=1, keepdim=True)
    shifted = (root - root.mean(0)) / root.var(0, correction=0).mean().sqrt()
    expected = torch.cat([shifted, torch.full((50, 1), math.sqrt(5.0), dtype=torch.float64)], 1)
    expected = expected * math.sqrt(6) / expected.norm(dim=1, keepdim=True)
    parts = (described("centred", part) for part in (z[:20], z[20:]))
    scaling = normaliser("centred", reduce(add, parts))
    torch.testing.assert_close(scaling(z), expected)
    assert scaling.width(5) == 6
    assert scaling(z.float()).dtype == torch.float32


def test_moments_of_other_rows_are_refused():
    z = rows(50, 5)
    for how, of in (("centred", moments(z)), ("columns", moments(z, "root"))):
        with pytest.raises(InputError, match=f"normalise='{how}' with moments of rows at"):
            normaliser(how, of)


# -------------------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("how", CANDIDATES)
def test_points_are_like_rows_as_far_as_single_columns_tell(how):
    """For 8,000 rows and points: of a standard deviation of 1 the mean is known to 0.01, so 0.08 is far from chance."""
    z = rows(8000, 4) * torch.tensor([1.0, 2.0, 5.0, 0.5])
    shared = describe(z[:3000]) + describe(z[3000:])
    scaling = shared.normalisers[how]
    points = pilot_points(scaling, shared, 8000, 0)
    own = scaling(z)
    if how in ("columns", "centred"):  # rows before they are brought to one length: the constant is sqrt(l) again
        own = own * (2 / own[:, -1:])
    torch.testing.assert_close(points.mean(0), own.mean(0), atol=0.08, rtol=0)
    torch.testing.assert_close(points.std(0), own.std(0), atol=0.08, rtol=0)
    assert torch.equal(points, pilot_points(scaling, shared, 8000, 0))
    assert not torch.equal(points, pilot_points(scaling, shared, 8000, 1))


def test_rows_of_very_different_sizes_do_not_hide_the_side_of_zero():
    rng = np.random.default_rng(0)
    z, sizes = rows(500, 64), torch.from_numpy(np.exp(rng.standard_t(2, (500, 1)).clip(-8, 8)))
    assert resolve("auto", moments(z * sizes)) == "row"
    assert describe(z * sizes).usual == describe(z).usual == resolve("auto", moments(z)) == "root"
    assert describe((z - z.mean(0)) * sizes).usual == "row"
    assert describe(z[:, :5]).usual == "columns"


def test_the_pilots_map_is_narrow():
    for n, width in ((40, 40), (900, WIDTH)):
        shared = describe(rows(n, 30))
        assert candidate(shared.normalisers["root"], shared, 0).feature_map.width == width


@pytest.mark.parametrize(
    ("hits", "chosen"),
    [
        ({"root": 900, "row": 911}, "root"),  # 100 misses: 10 is one standard error
        ({"root": 900, "row": 912}, "row"),
        ({"root": 900, "row": 912, "centred": 913}, "centred"),
        ({"root": 900, "row": 800}, "root"),
        ({"root": 1000, "row": 1000}, "root"),
        ({"row": 999, "root": 1000}, "root"),
    ],
)
def test_another_candidate_must_be_clearly_better_than_the_usual_one(hits, chosen):
    assert prefer(hits, 1000, "root") == chosen


# -------------------------------------------------------------------------------------------------- the method


def told_by_length(n: int, seed: int) -> Shard:
    """Signed features, 64 of them, whose length alone says the class: at one length nothing is left."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    features = rng.normal(size=(n, 64)) * (1 + labels[:, None])
    return Shard(torch.from_numpy(features).float(), torch.from_numpy(labels))


def test_the_pilot_sees_what_the_moments_do_not():
    clients = [told_by_length(150, k) for k in range(4)]
    (last,) = load_method("apfl", map="landmarks", d_primary=128).rounds(clients, 2, 0)
    (usual,) = load_method("apfl", map="landmarks", d_primary=128, normalise="row").rounds(clients, 2, 0)
    account = last.chosen["pilot"]
    assert account["usual"] == "row"
    assert last.chosen["normalise"] == "columns" == max(account["hits"], key=account["hits"].get)
    assert set(account["hits"]) == set(account["width"]) == set(CANDIDATES)
    assert account["rows"] == 600
    test = told_by_length(300, 99)

    def accuracy(model) -> float:
        return float((model.scores(test.features).argmax(1) == test.labels).double().mean())

    assert accuracy(last.models[0]) > 0.9 > 0.7 > accuracy(usual.models[0])


@pytest.mark.parametrize("bits", [0, 16])
def test_after_the_pilot_it_is_the_method_with_that_normalisation_and_two_exchanges_more(bits):
    clients = draw_clients([40, 30], L, C, 0)
    fixed = {"map": "landmarks", "d_primary": 30, "bits": bits, "sketch": 20}
    (auto,) = load_method("apfl", **fixed).rounds(clients, C, 0)
    how = auto.chosen["normalise"]
    (given,) = load_method("apfl", **fixed, normalise=how).rounds(clients, C, 0)
    assert "pilot" not in given.chosen
    for a, b in zip(auto.models, given.models, strict=True):
        # The same sums in other memory: BLAS rounds by where a matrix happens to begin.
        torch.testing.assert_close(a.scores(clients[0].features), b.scores(clients[0].features), rtol=1e-9, atol=1e-9)
    asked_for = how in ("columns", "centred")  # then its moments are exchanged in any case
    assert auto.index == given.index + 2 + (not asked_for)
    up, down, most = 2 * (2 * 16 * L + (0 if asked_for else 16 * L + 24)), 3 * 16 * L + 8 * C, 0
    for d in auto.chosen["pilot"]["width"].values():
        up += 2 * 8 * 7 * 14 * 9
        for n in () if bits else map(len, clients):  # with fewer rows than columns the QR factor
            up += 8 * (sum(d - i for i in range(min(n, d))) + min(n, d) * C + C + 2)
        most += math.ceil(12 * d * (d - 1) / 16) + 2 * d * C + 4 * (d + C + 2) + 2**14 // 8  # of integers, and no echo
        down += (2 if bits else 8) * (d * C + 20 * d) + (4 * (C + 20) if bits else 0) + 70  # and which landmarks
    integers = auto.bytes_up - given.bytes_up - up
    assert most < integers < 2 * most if bits else integers == 0  # squeezed, but not by half; two clients
    assert auto.bytes_down - given.bytes_down == 2 * down


def test_of_many_rows_every_client_sends_the_same_share_to_the_pilot(monkeypatch):
    monkeypatch.setattr("apfl.maths.pilot.MOST_ROWS", 50)
    own, other = pilot_rows(80, 200, 0), pilot_rows(80, 200, 1)
    assert len(own) == len(own.unique()) == 20
    assert torch.equal(own, own.sort().values)
    assert not torch.equal(own, other)
    assert torch.equal(own, pilot_rows(80, 200, 0))
    assert (len(pilot_rows(1, 200, 0)), len(pilot_rows(50, 50, 0))) == (1, 50)
    clients = [told_by_length(n, n) for n in (80, 120)]
    (last,) = load_method("apfl", map="landmarks", d_primary=40).rounds(clients, 2, 0)
    assert last.chosen["pilot"]["rows"] == 50
    assert set(last.chosen["pilot"]["width"].values()) <= set(range(51))


def test_a_row_that_drowns_the_others_leaves_candidates_that_bear_it():
    clients = draw_clients([40, 30], L, C, 0)
    clients[1].features[3] = 1e12
    (last,) = load_method("apfl", map="landmarks", d_primary=30).rounds(clients, C, 0)
    assert "columns" not in last.chosen["pilot"]["hits"]
    assert last.chosen["normalise"] != "columns"
