"""The landmark map and statistics as integers: their laws."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl import load_model
from apfl.errors import InputError
from apfl.federate import Terms
from apfl.maths.dither import uniform
from apfl.maths.integers import (
    Encoding,
    Rounding,
    round_statistics,
    spectral_bound,
)
from apfl.maths.landmarks import (
    JITTER,
    LandmarkMap,
    draw_points,
    kernel,
    landmark_map,
    no_spread,
    spread,
)  # fmt: skip
from apfl.maths.personalise import solve_primary
from apfl.maths.ridge import one_hot, solve, statistics, total
from apfl.methods import load_method
from apfl.methods.apfl import APFL
from tests.conftest import draw_clients

CPU = torch.device("cpu")


def rows(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.3, 1.0, size=(n, width)))


def some_map(d: int = 40, width: int = 9) -> LandmarkMap:
    return landmark_map(draw_points(d, 0, spread(rows(100, width), full=True)))


def test_landmarks_are_orthogonal_in_blocks_and_each_is_a_normal_draw():
    """Turned back by the covariance, every l of them and the rest are orthogonal; lengths are those of normal rows."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((400, 5)) @ rng.standard_normal((5, 5)) + 3)
    drawn = draw_points(5_012, 0, spread(rows, full=True))
    mean, covariance = rows.mean(0), rows.T.cov(correction=0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (drawn - mean).T, upper=False).T
    lengths = white.norm(dim=1)
    for block in torch.split(white / lengths[:, None], 5):
        # A billionth of the variance is added to the covariance.
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)).double(), rtol=0, atol=1e-6)
    assert abs(lengths.square().mean() - 5) < 0.2  # chi-square with 5 degrees: the mean of 5,012 has an error of 0.045
    assert abs(lengths.square().var() - 10) < 1.5
    # Each as if drawn alone: mean and covariance of many are those of the rows, four errors wide.
    assert (white.mean(0).abs() < 4 / math.sqrt(5_012)).all()
    assert ((white.T.cov() - torch.eye(5)).abs() < 4 * math.sqrt(2 / 5_012)).all()
    free = draw_points(7, 0, no_spread(5))
    torch.testing.assert_close(free[:5] @ free[:5].T, torch.diag(free[:5].square().sum(1)), rtol=0, atol=1e-9)
    assert len(free) == 7


@pytest.mark.parametrize(
    ("u", "v", "value"), [([1, 0], [1, 0], 1), ([1, 0], [0, 1], 1 / math.pi), ([1, 0], [-1, 0], 0)]
)
def test_the_kernel_at_angles_that_are_known(u, v, value):
    k = kernel(torch.tensor([u], dtype=torch.float64), torch.tensor([v], dtype=torch.float64))
    assert float(k) == pytest.approx(value, abs=1e-12)


def test_the_kernel_keeps_its_digits_at_small_angles():
    """k = 1 - t^2 / 2 + t^3 / (3 pi) + O(t^4)."""
    t = 1e-4
    k = kernel(torch.tensor([[math.cos(t), math.sin(t)]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)[:1])
    assert 1 - float(k) == pytest.approx(t**2 / 2 - t**3 / (3 * math.pi), rel=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3, 9, 30]), st.floats(-6, 6))
def test_no_row_is_longer_than_one(seed, width, size):
    feature_map = landmark_map(draw_points(60, seed, no_spread(width)))
    phi = feature_map(10**size * rows(20, width, seed + 1))
    assert float(phi.norm(dim=1).max()) <= 1 + 1e-9
    nearest = feature_map(feature_map.landmarks)  # where the bound is reached
    assert float(nearest.norm(dim=1).max()) <= 1 + 1e-9
    assert float(nearest.norm(dim=1).min()) > 0.99


def test_zero_rows_stay_zero_rows_in_both_precisions():
    z = torch.zeros(2, 9)
    z[1] = 1e-30
    for some in (z, z.double()):
        phi = some_map()(some)
        assert not phi[0].any()
        assert phi[1].any() == bool(some[1].any())
        assert bool(torch.isfinite(phi).all())


def test_landmarks_that_others_determine_are_left_out():
    """On a circle few landmarks say everything; the factorisation would fail with more."""
    feature_map = landmark_map(draw_points(800, 0, no_spread(2)))
    assert 20 < feature_map.width < 400
    z = rows(30, 2)
    unit = z / z.norm(dim=1, keepdim=True)
    phi = feature_map(z)
    torch.testing.assert_close(phi @ phi.T, kernel(unit, unit), atol=1e-4, rtol=0)
    assert some_map(40).width == 40


def test_with_the_rows_as_landmarks_the_primary_is_kernel_ridge():
    z, y, gamma = rows(25, 6), one_hot(torch.arange(25) % 3, 3), 0.1
    feature_map = LandmarkMap(z, torch.ones(6, dtype=torch.float64))  # not rounded
    phi = feature_map(z)
    k = kernel(feature_map.landmarks, feature_map.landmarks)
    nystrom = k @ torch.linalg.solve(k + JITTER * torch.eye(25, dtype=torch.float64), k)
    fitted = phi @ solve(statistics(phi, y), gamma)
    expected = nystrom @ torch.linalg.solve(nystrom + gamma * torch.eye(25, dtype=torch.float64), y)
    torch.testing.assert_close(fitted, expected, atol=1e-8, rtol=0)


def test_landmarks_follow_the_rows_and_free_ones_do_not():
    z = rows(4000, 3) * torch.tensor([5.0, 1.0, 0.2])
    for full in (True, False):
        points = draw_points(20_000, 0, spread(z, full=full))
        torch.testing.assert_close(points.mean(0), z.mean(0), atol=0.15, rtol=0)
        torch.testing.assert_close(points.std(0), z.std(0), atol=0.0, rtol=0.05)
    turned = z @ torch.linalg.qr(rows(3, 3)).Q
    points = draw_points(20_000, 0, spread(turned, full=True))
    torch.testing.assert_close(torch.cov(points.T), torch.cov(turned.T), atol=0.5, rtol=0.05)
    halves = spread(z[:1000], full=True) + spread(z[1000:], full=True)
    torch.testing.assert_close(halves.products, spread(z, full=True).products)


# ------------------------------------------------------------------------------------------------------- integers


def parts(n_clients: int = 6) -> tuple[list[object], torch.Tensor]:
    feature_map = some_map()
    own = [feature_map(rows(30, 9, k)) for k in range(n_clients)]
    made = [statistics(phi, one_hot(torch.arange(30) % 3, 3)) for phi in own]
    return made, feature_map(rows(500, 9, 99)).square().mean(0)


def integers_of(stats, columns, rounding):
    size = columns.sqrt()[:, None] * columns.sqrt() * rounding.step
    off = ~torch.eye(len(columns), dtype=torch.bool)
    return (stats.autocorrelation / size)[off]


def test_sums_of_integers_are_equal_in_any_order_and_grouping():
    made, columns = parts()
    rounding = Rounding.for_rows(16, 30)
    rounded = [round_statistics(each, columns, rounding, uniform(k, CPU))[0] for k, each in enumerate(made)]
    whole = integers_of(rounded[0], columns, rounding)
    torch.testing.assert_close(whole, whole.round(), atol=1e-6, rtol=0)
    sums = [
        sum(integers_of(each, columns, rounding).round() for each in order)
        for order in (rounded, rounded[::-1], rounded[3:] + rounded[:3])
    ]
    assert all(torch.equal(sums[0], each) for each in sums)


def test_rounding_is_unbiased_and_stays_below_its_bound():
    made, columns = parts()
    rounding = Rounding.for_rows(12, 30)
    exact = total(made)  # type: ignore[arg-type]
    scale = columns.sqrt()
    errors = []
    for seed in range(200):
        draw = uniform(seed, CPU)
        summed = total(round_statistics(each, columns, rounding, draw)[0] for each in made)
        error = (summed.autocorrelation - exact.autocorrelation) / (scale[:, None] * scale)
        assert torch.equal(error, error.T)
        assert float(torch.linalg.matrix_norm(error, 2)) <= spectral_bound(rounding, len(made), len(columns))
        errors.append(error)
    stacked = torch.stack(errors)
    spread_of_mean = rounding.step * math.sqrt(len(made) / 4 / len(errors))
    assert float(stacked.mean(0).abs().max()) < 6 * spread_of_mean
    off = ~torch.eye(len(columns), dtype=torch.bool)
    # The variance of a rounded number is step^2 f (1 - f), on average over fractions step^2 / 6.
    assert float(stacked.var(0)[off].mean()) == pytest.approx(len(made) * rounding.step**2 / 6, rel=0.05)


def test_more_bits_bring_the_primary_closer():
    made, columns = parts()
    exact = solve(total(made), 0.5)  # type: ignore[arg-type]

    def error(bits: int) -> float:
        rounding = Rounding.for_rows(bits, 30)
        draw = uniform(0, CPU)
        return float(
            (solve(total(round_statistics(each, columns, rounding, draw)[0] for each in made), 0.5) - exact).norm()
        )

    assert error(14) / 8 < error(12) / 2 < error(12)
    assert error(24) < 1e-3 * error(12)


def test_entries_outside_the_range_saturate_and_are_counted():
    made, columns = parts(1)
    _, none = round_statistics(made[0], columns, Rounding.for_rows(16, 30), uniform(0, CPU))
    small = Rounding(16, 0.5)
    clipped, some = round_statistics(made[0], columns, small, uniform(0, CPU))
    assert none == 0
    scaled = (made[0].autocorrelation / (columns.sqrt()[:, None] * columns.sqrt())).tril(-1)
    cross = made[0].crosscorrelation / columns.sqrt()[:, None]
    diagonal = made[0].autocorrelation.diagonal() / columns
    expected = sum(int((each.abs() > most).sum()) for each, most in ((scaled, 0.5), (cross, 0.5), (diagonal, 32.0)))
    assert some == pytest.approx(expected, abs=3)  # those at the edge may go either way
    assert float((clipped.crosscorrelation / columns.sqrt()[:, None]).abs().max()) <= 0.5 + 1e-12


def test_rows_that_do_not_fit_are_cut_back_as_little_as_needed():
    """Then all sums fit, and are those of some rows: no entry saturates, and no eigenvalue falls below the rounding."""
    feature_map = some_map()
    columns, y = feature_map(rows(500, 9, 99)).square().mean(0), one_hot(torch.arange(30) % 3, 3)
    encoding = Encoding(Rounding.for_rows(16, 30), columns, 3)
    ordinary = feature_map(rows(30, 9))
    vector, cut = encoding.encode_rows(ordinary, y, uniform(0, CPU), (0, None))
    assert cut == 0
    assert torch.equal(vector, encoding.encode(statistics(ordinary, y), uniform(0, CPU))[0])
    alike = feature_map(feature_map.landmarks[columns.argmin()].repeat(30, 1))
    assert encoding.encode(statistics(alike, y), uniform(0, CPU))[1] > 0
    vector, cut = encoding.encode_rows(alike, y, uniform(0, CPU), (0, None))
    kept = alike.clamp(-2 * columns.sqrt(), 2 * columns.sqrt())
    assert cut == int((kept != alike).sum()) > 0
    told, scale = encoding.decode(vector).autocorrelation, columns.sqrt()
    error = (told - kept.T @ kept) / (scale[:, None] * scale)
    assert float(error.abs().max()) < encoding.rounding.step * (1 + 1e-9)


def wire(n_clients: int = 6, bits: int = 12) -> tuple[Encoding, list[torch.Tensor], torch.Tensor]:
    """An encoding with a basis, some clients' rows, and their targets."""
    feature_map = some_map()
    own = [feature_map(rows(30, 9, k)) for k in range(n_clients)]
    columns = feature_map.mean_squares(rows(500, 9, 99))
    encoding = Encoding(Rounding.for_rows(bits, 30), columns, 3, feature_map.basis)
    return encoding, own, one_hot(torch.arange(30) % 3, 3)


def test_in_its_own_basis_a_map_is_known_equally_well_in_every_direction():
    """The law behind few bits: relative to Phi'Phi itself the error is far smaller than in the coordinates of Phi."""
    z = rows(1200, 12) / torch.arange(1, 13) ** 2 + 1  # directions of very unlike size, as features have
    feature_map, rounding = landmark_map(draw_points(120, 0, spread(z, full=True))), Rounding.for_rows(16, 200)
    own, y = [feature_map(part) for part in z.split(200)], one_hot(torch.arange(200) % 3, 3)
    exact = total(statistics(phi, y) for phi in own)
    points = draw_points(2048, 1, spread(z, full=True))
    turned = Encoding(rounding, feature_map.mean_squares(points), 3, feature_map.basis)
    plain = Encoding(rounding, feature_map(points).square().mean(0), 3)
    root = torch.linalg.cholesky(exact.autocorrelation + 1e-4 * torch.eye(exact.width, dtype=torch.float64))

    def error(how: Encoding) -> float:
        draws = [uniform(k, CPU) for k in range(len(own))]
        vectors = [how.encode_rows(phi, y, draw, (0, None)) for phi, draw in zip(own, draws, strict=True)]
        assert not sum(cut for _, cut in vectors)
        off = how.decode(sum(vector for vector, _ in vectors)).autocorrelation - exact.autocorrelation
        half = torch.linalg.solve_triangular(root, off, upper=False)
        return float(torch.linalg.matrix_norm(torch.linalg.solve_triangular(root, half.T, upper=False), 2))

    assert error(turned) < error(plain) / 8


def test_a_basis_turns_sums_and_rows_alike_and_turns_them_back():
    encoding, own, y = wire(1, bits=32)
    exact = statistics(own[0], y)
    by_rows, _ = encoding.encode_rows(own[0], y, uniform(0, CPU), (0, None))
    by_sums, _ = encoding.encode(exact, uniform(0, CPU))
    assert int((by_rows - by_sums).abs().max()) <= 1  # the last digit of a float, at the edge of an integer
    back = encoding.decode(by_rows)
    # Steps of 32 bits are 6e-8 of the unit of each column.
    torch.testing.assert_close(back.autocorrelation, exact.autocorrelation, atol=1e-5, rtol=0)
    torch.testing.assert_close(back.crosscorrelation, exact.crosscorrelation, atol=1e-5, rtol=0)
    assert torch.equal(back.autocorrelation, back.autocorrelation.T)
    squares = encoding.squares(encoding.told(by_rows).autocorrelation)
    assert squares == pytest.approx(float(own[0].square().sum()), abs=1e-5)


def test_what_rounding_does_to_lengths_stays_below_its_bounds():
    encoding, own, y = wire(1, bits=8)
    exact, allowed = statistics(own[0], y), encoding.length_errors
    squares, sums = [], []
    for seed in range(100):
        told = encoding.told(encoding.encode_rows(own[0], y, uniform(seed, CPU), (0, None))[0])
        squares.append(encoding.squares(told.autocorrelation) - float(exact.autocorrelation.diagonal().sum()))
        sums.append(float((encoding.back(told.crosscorrelation) - exact.crosscorrelation).norm(dim=0).max()))
    assert max(map(abs, squares)) < allowed.squares < 20 * max(map(abs, squares))
    assert max(sums) < allowed.sums < 20 * max(sums)


def test_few_large_entries_do_not_decide_the_bits_of_the_others():
    encoding, own, y = wire(1, bits=16)
    vector, _ = encoding.encode_rows(own[0], y, uniform(0, CPU), (0, None))
    how = encoding.packing(vector)
    assert np.array_equal(how.unpack(how.pack(vector.numpy())), vector.numpy())
    below = vector[encoding.layout.places["below"]].abs()
    largest = int(below.max()).bit_length() + 1
    below[7] = 2**15 - 1
    vector[encoding.layout.places["below"].start + 7] = 2**15 - 1
    assert encoding.packing(vector).bits[0] <= largest < 16
    assert encoding.packing(vector).n_bytes <= how.n_bytes + 2 + 1


# ----------------------------------------------------------------------------------------------------- the method

D, C, L = 30, 3, 6


def test_a_folded_model_is_the_two_streams():
    clients = draw_clients([40, 30], L, C, 0)
    method = load_method("apfl", map="landmarks", bits=0, d_primary=D, normalise="row")
    assert isinstance(method, APFL)
    (last,) = method.rounds(clients, C, 0)
    made_of = method.streams(clients, C, 0)
    beta, balance, tau = (last.chosen[name] for name in ("beta", "balance", "tau"))
    phi = made_of.phis[0]
    y = one_hot(clients[0].labels, C)
    primary = solve(made_of.stats, last.chosen["gamma"])
    own = solve(replace(statistics(phi, y), crosscorrelation=phi.T @ (y - phi @ primary)), beta)
    scores = phi @ primary + balance * (phi @ own)
    if last.models[0].prior is not None:
        scores = scores + last.models[0].prior
    assert tau == 0 or last.models[0].prior is not None
    torch.testing.assert_close(last.models[0].scores(clients[0].features), scores, atol=1e-9, rtol=0)


def test_a_landmark_model_survives_its_file_and_a_damaged_one_is_refused(tmp_path):
    (last,) = load_method("apfl", map="landmarks", d_primary=D, normalise="columns").rounds(
        draw_clients([40, 30], L, C, 0), C, 0
    )
    x = rows(7, L).float()
    last.models[1].save(tmp_path / "m.safetensors")
    back = load_model(tmp_path / "m.safetensors")
    torch.testing.assert_close(back.scores(x), last.models[1].scores(x), rtol=1e-9, atol=1e-9)
    container = last.models[1].container()
    container.tensors["points"] = container.tensors["points"].flip(0)
    with pytest.raises(InputError, match="landmarks are not those"):
        type(last.models[1]).from_container(container)


def test_cost_is_that_of_the_messages():
    fixed = {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.1, "weight": 1.0, "normalise": "row", "d_primary": D}
    clients = draw_clients([40, 30], L, C, 0)
    (plain,) = load_method("apfl", map="random", **fixed).rounds(clients, C, 0)
    (exact,) = load_method("apfl", **fixed, map="landmarks", bits=0).rounds(clients, C, 0)
    (free,) = load_method("apfl", **fixed, map="landmarks", landmarks="free", bits=0).rounds(clients, C, 0)
    (rounded,) = load_method("apfl", **fixed, map="landmarks", bits=16).rounds(clients, C, 0)
    numbers, landmarks = L + L * (L + 1) // 2, D * L + 4 * L  # six columns: a byte for each number
    assert (exact.index, free.index, rounded.index) == (2, 1, 2)
    assert exact.bytes_up == plain.bytes_up + 2 * 8 * numbers
    assert free.bytes_up == plain.bytes_up
    assert exact.bytes_down == free.bytes_down == plain.bytes_down + 2 * landmarks
    assert rounded.bytes_down == exact.bytes_down + 2 * (4 * D - 6 * D * C + 4 * C)  # D; the primary in 16 bits
    assert rounded.chosen["rounding"]["saturated"] == 0
    told = rounded.chosen["bytes"]
    each = (rounded.bytes_up + rounded.bytes_down) / 2
    assert abs(sum(told["up"].values()) + sum(told["down"].values()) - each) <= len(told["up"]) / 2  # means are rounded
    most = 8 * (D * (D + 1) // 2 + D * C + C + 2 + numbers)  # of Phi'Phi, Phi'Y, counts, n and energy; moments
    assert rounded.bytes_up < exact.bytes_up - 2 * most / 2  # `tests/federate` compares them with messages


def test_rounding_makes_no_copies_of_rows():
    """Of an indefinite sum the smallest gamma would fit more than everything, and say that rows repeat each other."""
    method = load_method("apfl", map="landmarks", d_primary=300, normalise="row", bits=8)
    assert isinstance(method, APFL)
    stats = method.streams(draw_clients([60] * 8, 8, C, 0), C, 0).stats
    lowest = float(torch.linalg.eigvalsh(stats.autocorrelation)[0])
    assert lowest < 0
    primary = solve_primary(stats, "auto")
    assert primary.distinct_rows == 480
    assert primary.copies_of_a_row == 1
    assert primary.gamma > -10 * lowest


@pytest.mark.parametrize("eigen_width", [0, 1024])
def test_gamma_rises_until_there_is_a_primary(monkeypatch, eigen_width):
    """A client that claims a million times its rows makes everyone's step as large, and the sum as indefinite."""
    monkeypatch.setattr("apfl.maths.gcv.EIGEN_WIDTH", eigen_width)
    phi = rows(80, 20)
    stats = statistics(phi, one_hot(torch.arange(80) % C, C))
    unit = float(phi.square().sum(1).mean())
    up, down = torch.linalg.qr(rows(20, 2))[0].T  # an error of mean 0 leaves the trace as it is
    error = 3e5 * unit * (torch.outer(up, up) - torch.outer(down, down))
    spoilt = replace(stats, autocorrelation=stats.autocorrelation + error)
    lowest = -float(torch.linalg.eigvalsh(spoilt.autocorrelation)[0])
    primary = solve_primary(spoilt, "auto")
    assert 10 * lowest <= primary.gamma < 1e4 * lowest
    assert bool(torch.isfinite(primary.weights).all())
    with pytest.raises(InputError, match="not positive definite"):
        solve_primary(spoilt, 1.0)


def test_how_the_other_rows_are_spread_does_not_matter():
    """The paper's invariance, with maps and settings fixed and without rounding."""
    a, b, c = draw_clients([30, 20, 25], L, C, 0)
    settings = {
        "gamma": 1.0,
        "beta": 1.0,
        "balance": 0.5,
        "tau": 0.0,
        "weight": 1.0,
        "normalise": "row",
        "d_primary": D,
    }
    method, x = load_method("apfl", **settings, map="landmarks", bits=0), rows(9, L).float()
    (apart,) = method.rounds([a, b, c], C, 0)
    (merged,) = method.rounds([a, c + b], C, 0)
    # Sums in another order differ in their last digit, and a landmark may be rounded to another byte for it.
    torch.testing.assert_close(apart.models[0].scores(x), merged.models[0].scores(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalise", ["row", "columns"])
def test_on_one_map_with_balance_1_it_is_ridge_to_global(normalise):
    clients, x = draw_clients([40, 30], L, C, 0), rows(9, L).float()
    settings = {"gamma": 0.5, "beta": 0.3, "map": "landmarks", "normalise": normalise}
    (apfl,) = load_method("apfl", **settings, bits=0, d_primary=D, balance=1.0, tau=0.0, weight=1.0).rounds(
        clients, C, 3
    )
    (other,) = load_method("ridge_to_global", **settings, d=D).rounds(clients, C, 3)
    for a, b in zip(apfl.models, other.models, strict=True):
        torch.testing.assert_close(a.scores(x), b.scores(x), atol=1e-9, rtol=0)
    assert other.index == apfl.index
    echo_and_n = 2 * (2 * 2**14 + 8 * (normalise == "row"))  # which apfl sends beside, to look for copies
    assert apfl.bytes_up - other.bytes_up == echo_and_n
    assert apfl.bytes_down - other.bytes_down == 2 * 8 * C  # everyone's class counts


def test_the_grid_of_ridge_to_global_follows_the_length_of_rows():
    random, landmarks = (load_method("ridge_to_global", map=kind).grid for kind in ("random", "landmarks"))
    assert random == {"gamma": (1.0, 100.0), "beta": (10.0, 100.0, 1000.0)}
    assert landmarks == {name: tuple(value / 512 for value in values) for name, values in random.items()}


def test_landmarks_from_a_public_file_are_drawn_from_its_rows_and_cost_no_exchange(tmp_path):
    clients = draw_clients([40, 30], L, C, 0)
    public = rows(500, L, 8).float()
    np.savez(tmp_path / "public.npz", features=public.numpy(), labels=np.arange(500) % 4)
    settings = {"d_primary": D, "normalise": "columns", "map": "landmarks", "bits": 0}
    method = load_method("apfl", **settings, landmarks=str(tmp_path / "public.npz"))
    assert isinstance(method, APFL)
    made = method.streams(clients, C, 3)
    expected = landmark_map(draw_points(D, 6, spread(made.normalise(public), full=True)))
    assert torch.equal(made.primary_map.points, expected.points)
    (last,) = method.rounds(clients, C, 3)
    (free,) = load_method("apfl", **settings, landmarks="free").rounds(clients, C, 3)
    assert (last.index, last.bytes_up, last.bytes_down) == (free.index, free.bytes_up, free.bytes_down)
    told = last.chosen["landmarks"]
    assert (told["file"], told["rows"], len(told["sha256"])) == ("public.npz", 500, 64)
    np.savez(tmp_path / "narrow.npz", features=public.numpy()[:, 1:], labels=np.arange(500) % 4)
    with pytest.raises(InputError, match="has 5 features, the clients have 6"):
        load_method("apfl", **settings, landmarks=str(tmp_path / "narrow.npz")).streams(clients, C, 3)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="landmarks=federated given; allowed: federation or free, or a file"):
        load_method("apfl", landmarks="federated")
    with pytest.raises(InputError, match="bits=16 with map='random'"):
        load_method("apfl", map="random", bits=16)
    with pytest.raises(InputError, match=r"bits=0 given.*Leave bits out, or give 8 to 32"):
        Terms("f", method=APFL(map="landmarks", bits=0))
    for setting in ({"d_refinement": 7}, {"intercept": True}, {"activation_primary": "relu"}):
        with pytest.raises(InputError, match=r"with map='landmarks' given: both streams have one map"):
            load_method("apfl", map="landmarks", **setting)
