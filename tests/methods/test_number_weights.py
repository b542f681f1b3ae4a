"""Weights of rows in `APFLRegressor`, and in `APFLClassifier` with several labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import make_friedman1, make_multilabel_classification
from sklearn.linear_model import Ridge
from sklearn.metrics import f1_score
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data

from apfl import APFLClassifier, APFLRegressor, InputError
from apfl.data.federation import Shard
from apfl.maths.landmarks import spread
from apfl.maths.normalise import moments
from apfl.maths.regression import choose, number_statistics, shares, solve, squared
from apfl.maths.ridge import total
from apfl.maths.ridge_cv import plain_ridge
from apfl.methods._number_rounds import number_round
from apfl.methods._numbers import (
    Asked,
    NumberRows,
    _block,
    _plain,
    evened,
    fit_numbers,
    labelled,
    own_ridge,
    thresholds_of,
)

GIVEN = {"map": "linear", "gamma": 2.0, "beta": 3.0, "weight": 1.0, "balance": 0.5}
SETTINGS = [GIVEN, GIVEN | {"map": "landmarks", "width": 24}, GIVEN | {"map": "both", "width": 24}]  # nothing is chosen


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, y = make_friedman1(120, n_features=6, noise=1.0, random_state=0)
    Y = np.column_stack([y, y[::-1] + X[:, 0]])
    site = np.array(["north", "south"])[np.arange(120) % 2]
    return 3 + 2 * X, Y, site, np.random.default_rng(0).integers(0, 4, 120)


@pytest.mark.parametrize("settings", SETTINGS)
def test_scikit_learns_equivalence_of_weights_and_repeated_rows_holds(settings):
    class Renamed(APFLRegressor):
        def fit(self, X, y, sample_weight=None):
            return super().fit(X, y, weights=sample_weight)

    check_sample_weight_equivalence_on_dense_data("APFLRegressor", Renamed(**settings))


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_row_of_weight_two_is_a_row_given_twice_and_one_without_weight_is_absent(rows, settings):
    X, Y, site, weights = rows
    twice = np.repeat(np.arange(120), weights)
    one = APFLRegressor(**settings).fit(X, Y, site, weights=weights)
    other = APFLRegressor(**settings).fit(X[twice], Y[twice], site[twice])
    blind = APFLRegressor(**settings).fit(X, Y, site)
    atol = 1e-9 if settings["map"] == "linear" else 1e-6  # landmarks amplify the rounding of moments
    np.testing.assert_allclose(one.predict(X, site), other.predict(X, site), atol=atol)
    assert abs(one.predict(X, site) - blind.predict(X, site)).max() > 0.1


@pytest.mark.parametrize("kind", ["linear", "landmarks", "both"])
def test_sums_of_weighted_rows_are_those_of_repeated_rows(rows, kind):
    X, Y, site, weights = rows
    asked = Asked((kind,), 24, gamma=0.7, weight=0.8, beta=0.3, balance=0.9)
    clients, repeated = [], []
    for name in ("north", "south"):
        own = (site == name) & (weights > 0)
        given, times = [torch.from_numpy(each[own]) for each in (X, Y)], torch.from_numpy(weights[own])
        clients.append(NumberRows(*given, weights=times.double()))
        repeated.append(NumberRows(*(each.repeat_interleave(times, 0) for each in given)))
    one, other = (fit_numbers(each, asked, 0) for each in (clients, repeated))
    new, atol = torch.from_numpy(X), 1e-9 if kind == "linear" else 1e-6  # landmarks amplify the rounding of moments
    for k in (0, 1):
        found, expected = (
            each.model(own[k], each.own[k]).scores(new) for each, own in ((one, clients), (other, repeated))
        )
        np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.parametrize("full", [False, True])
def test_moments_and_spread_of_weighted_rows_are_those_of_repeated_rows(rows, full):
    X, weights = torch.from_numpy(rows[0]), torch.from_numpy(rows[3]).double()
    twice, relative = X.repeat_interleave(weights.long(), 0), weights / weights.mean()
    one, other = moments(X, weights=relative), moments(twice)
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-12)
    np.testing.assert_allclose(one.variance, other.variance, rtol=1e-9)
    found, expected = spread(X, full=full, weights=relative), spread(twice, full=full)
    for each in ("sums", "products"):
        mean, theirs = getattr(found, each) / found.n_samples, getattr(expected, each) / expected.n_samples
        np.testing.assert_allclose(mean, theirs, rtol=1e-12)


def test_the_primary_is_the_central_weighted_ridge(rows):
    """On features standardised by weighted moments, beside scikit-learn's ridge: a constant column is penalised too."""
    X, Y, site, weights = rows
    weights = weights + 0.25
    model = APFLRegressor(**GIVEN | {"balance": 0.0}).fit(X, Y, site, weights=weights)

    def standard(rows: np.ndarray) -> np.ndarray:
        mean = np.average(rows, axis=0, weights=weights)
        return (rows - mean) / np.sqrt(np.average((rows - mean) ** 2, axis=0, weights=weights))

    phi = np.column_stack([np.ones(120), standard(X) / np.sqrt(6)])
    ridge = Ridge(2.0, fit_intercept=False).fit(phi, standard(Y), sample_weight=weights)
    level, spread = np.average(Y, axis=0, weights=weights), (Y - np.average(Y, axis=0, weights=weights))
    found = (model.predict(X, site) - level) / np.sqrt(np.average(spread**2, axis=0, weights=weights))
    np.testing.assert_allclose(found, ridge.predict(phi), atol=1e-9)


@pytest.mark.parametrize("setting", [(1.0, 0.5, 0.0), (1.0, 0.5, 0.75), (0.0, 2.0, 1.0), (0.4, 0.5, 1.0)])
def test_left_out_errors_are_those_of_refitting_times_the_weight(setting):
    rng = np.random.default_rng(1)
    clients = [
        NumberRows(
            torch.from_numpy(rng.normal(size=(n, 6))), torch.from_numpy(rng.normal(size=(n, 2))),
            weights=torch.from_numpy(rng.exponential(size=n) + 0.1),
        )
        for n in (30, 20)
    ]  # fmt: skip
    parts = [_block(lambda features: features, own) for own in clients]
    summed = total(number_statistics(b.phi, b.targets) for b in parts)
    errors = squared(choose(parts, solve(summed, 0.7), setting).residuals[1][0])
    own, weights = clients[1], clients[1].weights
    weight, beta, balance = setting
    everyone = np.concatenate([each.weights for each in clients])
    for row in (0, 7, 19):
        phi, y = (np.concatenate([getattr(each, name) for each in clients]) for name in ("features", "targets"))
        kept, mine = np.arange(50) != 30 + row, np.arange(20) != row
        shared = Ridge(0.7, fit_intercept=False).fit(phi[kept], y[kept], sample_weight=everyone[kept]).coef_.T
        left = own.targets.numpy() - weight * own.features.numpy() @ shared
        refined = Ridge(beta, fit_intercept=False).fit(
            own.features.numpy()[mine], left[mine], sample_weight=weights.numpy()[mine]
        )
        error = left[row] - balance * own.features.numpy()[row] @ refined.coef_.T
        assert float(errors[row]) == pytest.approx(float(weights[row]) * float(error @ error), abs=1e-8)


def test_a_plain_ridge_with_weights_is_that_of_scikit_learn_and_its_left_out_errors_those_of_refitting():
    rng = np.random.default_rng(3)
    X, y, weights = 5 + rng.normal(size=(40, 5)), rng.normal(size=(40, 2)), rng.exponential(size=40) + 0.1
    mean = np.average(X, axis=0, weights=weights)
    Z = (X - mean) / np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weights))
    given = [torch.from_numpy(each) for each in (X, y)]
    groups = torch.arange(40) // 3
    for ridge in (0.1, 30.0):
        alone, together = (
            plain_ridge(*given, own, [ridge], weights=torch.from_numpy(weights)) for own in (None, groups)
        )
        shares_of_rows = weights / weights.mean()
        expected = Ridge(ridge).fit(Z, y, sample_weight=shares_of_rows).predict(Z)
        np.testing.assert_allclose(X @ alone.weights.numpy() + alone.intercept.numpy(), expected, atol=1e-9)
        for left, kept in ((alone.left_out, np.arange(40) != 4), (together.left_out, np.arange(40) // 3 != 2)):
            refitted = Ridge(ridge).fit(Z[kept], y[kept], sample_weight=shares_of_rows[kept])
            np.testing.assert_allclose(left[~kept], (y - refitted.predict(Z))[~kept], atol=1e-8)


def test_r2_and_thresholds_are_those_of_refitting_and_weighted(rows):
    X, Y, _, weights = rows
    held, weights = (np.median(Y, 0) < Y).astype(float), weights + 0.25
    own = NumberRows(torch.from_numpy(X), torch.from_numpy(held), weights=torch.from_numpy(weights))
    blend = fit_numbers([own], Asked(("linear",), gamma=0.7, weight=1.0, beta=1.0, balance=0.0, labels=True), 0)
    phi = blend.maps[0].phi(own.features).numpy()
    mean = np.average(held, axis=0, weights=weights)
    std = np.sqrt(np.average((held - mean) ** 2, axis=0, weights=weights))
    scores = np.empty_like(held)
    for row in range(120):
        kept = np.arange(120) != row
        ridge = Ridge(0.7, fit_intercept=False).fit(phi[kept], ((held - mean) / std)[kept], sample_weight=weights[kept])
        scores[row] = ridge.predict(phi[row : row + 1])[0]
    assert blend.account["left_out_r2"] == pytest.approx(
        1 - weights @ ((held - mean) / std - scores) ** 2 @ [1, 1] / (weights @ ((held - mean) / std) ** 2 @ [1, 1])
    )
    for label, threshold in enumerate(blend.account["thresholds"]):

        def f1(at: float, label: int = label) -> float:
            return f1_score(held[:, label], (mean + std * scores)[:, label] > at, sample_weight=weights)

        assert f1(threshold) == max(f1(step / 50) for step in range(1, 50))


def test_plain_ridges_of_clients_have_their_weights(rows):
    X, Y, site, weights = rows
    own = [
        NumberRows(*(torch.from_numpy(each[site == name]) for each in (X, Y)),
                   weights=torch.from_numpy(weights[site == name] + 0.25))
        for name in ("north", "south")
    ]  # fmt: skip
    found = _plain(own)
    both = [torch.cat([getattr(each, name) for each in own]) for name in ("features", "targets", "weights")]
    pooled = plain_ridge(*both[:2], weights=both[2])
    np.testing.assert_allclose(found.pooled.weights, pooled.weights, atol=1e-12)
    for each, left, shared in zip(own, found.left_out, torch.split(pooled.left_out, 60), strict=True):
        alone = plain_ridge(each.features, each.targets, weights=each.weights)
        root = each.weights.sqrt()[:, None]
        np.testing.assert_allclose(left, torch.stack([root * shared, root * alone.left_out]), atol=1e-12)
        np.testing.assert_allclose(own_ridge(each, None).weights, alone.weights, atol=1e-12)


@pytest.mark.parametrize("times", [1.0, 7.0, 0.01])
def test_equal_weights_are_no_weights_and_only_ratios_matter(rows, times):
    X, Y, site, weights = rows
    none = APFLRegressor().fit(X, Y, site)
    equal = APFLRegressor().fit(X, Y, site, weights=np.full(120, times))
    np.testing.assert_allclose(equal.predict(X, site), none.predict(X, site), atol=1e-9)
    weighted, scaled = (APFLRegressor().fit(X, Y, site, weights=t * (weights + 0.5)) for t in (1.0, times))
    np.testing.assert_allclose(scaled.predict(X, site), weighted.predict(X, site), atol=1e-9)
    given = APFLRegressor(**GIVEN).fit(X, Y, site, weights=times * (weights + 0.5))
    ridges = {"gamma": 2.0 / times, "beta": 3.0 / times}
    less = APFLRegressor(**GIVEN | ridges).fit(X, Y, site, weights=weights + 0.5)
    np.testing.assert_allclose(given.predict(X, site), less.predict(X, site), atol=1e-9)


def test_a_client_whose_rows_weigh_nothing_is_absent(rows):
    X, Y, site, weights = rows
    with_one = APFLRegressor().fit(X, Y, site, weights=(weights + 1) * (site == "north"))
    assert with_one.clients_ == ["north"]


def test_rows_that_weigh_little_do_not_lead_astray():
    X, y = make_friedman1(400, noise=0.5, random_state=1)
    site, odd, train = np.arange(400) % 2, np.arange(400) % 3 == 0, np.arange(400) < 300
    wrong = np.where(odd, 40 - y, y)

    def r2(weights: np.ndarray) -> float:
        model = APFLRegressor().fit(X[train], wrong[train], site[train], weights=weights[train])
        return model.score(X[~train], y[~train], site[~train])

    blind, aware, without = (r2(np.where(odd, weight, 1.0)) for weight in (1.0, 0.01, 0.0))
    assert aware > blind + 0.2
    assert aware == pytest.approx(without, abs=0.05)


# ------------------------------------------------------------------------------------------------ copies of a row


@pytest.mark.parametrize("weighted", [False, True])
def test_copies_are_left_out_together_and_have_one_voice_with_their_mean_weight(weighted):
    """Three copies of row 4, one of them elsewhere in the table: beside refitting without all three."""
    rng = np.random.default_rng(0)
    X, Y, weights = rng.normal(size=(20, 4)), rng.normal(size=(20, 2)), rng.exponential(size=20) + 0.1
    X[[9, 15]], Y[[9, 15]] = X[4], Y[4]
    given = NumberRows(
        torch.from_numpy(X), torch.from_numpy(Y), weights=torch.from_numpy(weights) if weighted else None
    )
    weights = weights if weighted else np.ones(20)
    own = evened(given)
    block = _block(lambda features: features, own)
    summed = number_statistics(block.phi, block.targets)
    errors = squared(choose([block], solve(summed, 0.7), (1.0, 0.5, 0.0)).residuals[0][0]).numpy()
    assert np.flatnonzero(np.isnan(errors)).tolist() == [9, 15]
    kept = ~np.isin(np.arange(20), [4, 9, 15])
    refitted = Ridge(0.7, fit_intercept=False).fit(X[kept], Y[kept], sample_weight=weights[kept])
    error = Y[4] - refitted.predict(X[4:5])[0]
    assert errors[4] == pytest.approx(weights[[4, 9, 15]].mean() * error @ error, abs=1e-9)
    assert weighted or own is given
    np.testing.assert_allclose(  # all copies are in the sums
        summed.autocorrelation, (weights[:, None] * X).T @ X, atol=1e-9
    )


def test_it_does_not_matter_which_copy_has_the_weight(rows):
    X, Y, site, weights = rows
    X, Y, site = (np.concatenate([each, each[:40]]) for each in (X, Y, site))
    weights = np.concatenate([weights, weights[80:]]) + 0.25
    other = weights.copy()
    other[:40], other[120:] = weights[120:], weights[:40]
    fits = [APFLRegressor().fit(X, Y, site, weights=each) for each in (weights, other)]
    np.testing.assert_allclose(fits[0].predict(X, site), fits[1].predict(X, site), atol=1e-9)


@pytest.mark.parametrize("weights", [None, 1.0, 3.0])
def test_the_estimator_is_the_simulator_if_rows_are_repeated(rows, weights):
    X, Y, site, times = rows
    twice = np.repeat(np.arange(120), times)
    X, Y, site = X[twice], Y[twice], site[twice]
    model = APFLRegressor().fit(X, Y, site, weights=weights)
    shards = [
        Shard(*(torch.from_numpy(each[site == name]) for each in (X, 0 * twice)),
              targets=torch.from_numpy(Y[site == name]), target="regression")
        for name in ("north", "south")
    ]  # fmt: skip
    told = number_round(shards, Asked(), 0)
    for name, found in zip(("north", "south"), told.models, strict=True):
        expected = found.scores(torch.from_numpy(X))
        np.testing.assert_allclose(model.predict(X, [name] * len(X)), expected, atol=1e-9)
    assert told.chosen["left_out_r2"] == pytest.approx(model.chosen_["left_out_r2"], abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_given_often_has_one_voice_in_choices(seed):
    """With eleven voices it cost up to 0.15 of R2 here."""
    rng = np.random.default_rng(seed)
    X, y = make_friedman1(1060, n_features=10, noise=1.0, random_state=seed)
    y = y + rng.standard_t(2, 1060)
    site = rng.integers(0, 3, 1060)
    some, odd = int(rng.integers(60)), int(abs(y[:60] - y[:60].mean()).argmax())
    once, many, strange = (
        APFLRegressor().fit(X[places], y[places], site[places])
        for places in (np.append(np.arange(60), extra).astype(int) for extra in ([], [some] * 10, [odd] * 100))
    )
    before, after = (model.score(X[60:], y[60:], site[60:]) for model in (once, many))
    assert after > before - 0.05
    for model in (many, strange):  # about the mean of all rows, copies included, the odd row adds up to 0.6
        assert model.chosen_["left_out_r2"] < once.chosen_["left_out_r2"] + 0.1


# ------------------------------------------------------------------------------------------------ several labels


@pytest.fixture(scope="module")
def labels() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, Y = make_multilabel_classification(160, 8, n_classes=3, random_state=1)
    X = X + np.random.default_rng(2).normal(size=X.shape)  # counts repeat each other, and would not be copies
    return X, Y, np.arange(160) % 2, np.random.default_rng(0).integers(0, 4, 160)


def test_rows_whose_labels_are_wrong_and_weigh_little_do_not_lead_astray(labels):
    X, Y, site, _ = labels
    odd = np.arange(160) % 3 == 0
    wrong = np.where(odd[:, None], 1 - Y, Y)
    blind, aware = (
        APFLClassifier()
        .fit(X, wrong, clients=site, sample_weight=np.where(odd, weight, 1.0))
        .predict(X[odd], site[odd])
        for weight in (1.0, 0.01)
    )
    assert (aware == Y[odd]).mean() > (blind == Y[odd]).mean() + 0.1


def test_equal_weights_of_labels_are_no_weights_if_rows_are_repeated_too(labels):
    X, Y, site, times = labels
    X, Y, site = (np.repeat(each, times, 0) for each in (X, Y, site))
    none, ones, threes = (
        APFLClassifier().fit(X, Y, clients=site, sample_weight=weights) for weights in (None, np.ones(len(X)), 3.0)
    )
    np.testing.assert_array_equal(ones.decision_function(X, site), none.decision_function(X, site))
    np.testing.assert_allclose(threes.decision_function(X, site), none.decision_function(X, site), atol=1e-9)


def test_thresholds_have_the_highest_weighted_f1():
    rng = np.random.default_rng(0)
    scores, held = rng.random((60, 2)), torch.from_numpy((rng.random((60, 2)) < 0.4).astype(float))
    scores[3] = np.nan
    weights = rng.integers(1, 5, 60)
    twice = np.repeat(np.arange(60), weights)
    told = labelled(torch.from_numpy(scores), held, torch.from_numpy(weights.astype(float)))
    repeated = labelled(torch.from_numpy(scores[twice]), held[twice])
    for one, other in ((told.given, repeated.given), (told.right, repeated.right), (told.held, repeated.held)):
        np.testing.assert_allclose(one, other.double(), atol=1e-9)
    np.testing.assert_array_equal(thresholds_of(told), thresholds_of(repeated))
    little = labelled(torch.from_numpy(scores), held, torch.from_numpy(1e-3 * weights))
    np.testing.assert_array_equal(thresholds_of(little), thresholds_of(told))


def test_errors_that_weigh_are_shared_by_their_ratios():
    errors = torch.rand(2, 50, dtype=torch.float64)
    np.testing.assert_allclose(shares([1000 * errors], 0), shares([errors], 0), atol=1e-9)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1.0, -1.0], "sample weights from -1 to 1 given"),
        ([0.0, 0.0], "not all may be zero"),
        ([1e-20, 1e-20], "mean of 1e-20 given"),
        ([1.0], r"sample weights of shape \(1,\) given for 2 rows"),
        (["a", "b"], "give one number for each row"),
    ],
)
def test_bad_weights_are_refused(weights, reason):
    with pytest.raises(InputError, match=reason):
        APFLRegressor().fit([[0.0, 1.0], [1.0, 0.0]], [0.5, 1.0], weights=weights)
    with pytest.raises(InputError, match=reason):
        APFLClassifier().fit([[0.0, 1.0], [1.0, 0.0]], [[0, 1], [1, 1]], sample_weight=weights)
