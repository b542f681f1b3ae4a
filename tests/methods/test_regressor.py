"""One regression for each client: its laws, and that it is no worse than ridges that people would use."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3, make_regression
from sklearn.linear_model import Ridge, RidgeCV
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from apfl import APFLRegressor, InputError
from apfl.maths.regression import DECADES, GAMMAS, Block, choose, fit_client, number_statistics, shares, solve, squared
from apfl.maths.ridge import total
from apfl.maths.ridge_cv import plain_ridge


@parametrize_with_checks([APFLRegressor()])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def blocks(sizes: tuple[int, ...] = (30, 20, 25), d: int = 6, t: int = 2) -> list[Block]:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(d, t))
    made = []
    for n in sizes:
        phi = torch.from_numpy(rng.normal(size=(n, d)))
        own = truth + 0.3 * rng.normal(size=(d, t))
        made.append(Block(phi, phi @ torch.from_numpy(own) + torch.from_numpy(rng.normal(size=(n, t)))))
    return made


def test_the_primary_is_the_central_ridge_however_rows_are_spread():
    parts = blocks()
    phi, y = torch.cat([b.phi for b in parts]), torch.cat([b.targets for b in parts])
    apart = solve(total(number_statistics(b.phi, b.targets) for b in parts), 0.7).weights
    expected = Ridge(alpha=0.7, fit_intercept=False).fit(phi.numpy(), y.numpy()).coef_.T
    np.testing.assert_allclose(apart.numpy(), expected, atol=1e-9)
    merged = solve(number_statistics(phi[:50], y[:50]) + number_statistics(phi[50:], y[50:]), 0.7).weights
    torch.testing.assert_close(merged, apart, atol=1e-9, rtol=0)


@pytest.mark.parametrize("setting", [(1.0, 0.5, 0.0), (1.0, 0.5, 0.75), (0.0, 2.0, 1.0), (0.4, 0.5, 1.0)])
def test_left_out_errors_are_those_of_refitting(setting):
    parts, gamma = blocks(), 0.7
    summed = total(number_statistics(b.phi, b.targets) for b in parts)
    errors = squared(choose(parts, solve(summed, gamma), setting).residuals[1][0])
    own = parts[1]
    for row in (0, 7, 19):
        rest = torch.arange(len(own.phi)) != row
        kept = Block(own.phi[rest], own.targets[rest])
        primary = solve(summed - number_statistics(own.phi[row : row + 1], own.targets[row : row + 1]), gamma)
        error = own.targets[row] - own.phi[row] @ fit_client(kept, primary, setting)
        assert float(errors[row]) == pytest.approx(float(error.square().sum()), abs=1e-8)


def test_the_ridges_have_the_highest_marginal_likelihood():
    """Beside the density of a normal vector with the dense covariance, its variance at its best for each ridge."""
    parts = blocks(t=1)

    def density(phi: np.ndarray, y: np.ndarray, ridge: float) -> float:
        shape = phi @ phi.T / ridge + np.eye(len(y))
        variance = float(y @ np.linalg.solve(shape, y)) / len(y)
        return float(multivariate_normal(cov=variance * shape).logpdf(y))

    # Below decades of -5 the dense covariance is singular to float64.
    phi, y = (torch.cat(list(each)).numpy() for each in zip(*((b.phi, b.targets[:, 0]) for b in parts), strict=True))
    primary = solve(total(number_statistics(b.phi, b.targets) for b in parts), None)
    assert primary.gamma == max(
        (primary.unit * 10**decade for decade in GAMMAS if decade > -5), key=lambda g: density(phi, y, g)
    )
    beta = choose(parts, primary, (0.0, None, None)).settings[0][1]
    apart = block_diag(*(b.phi.numpy() for b in parts))
    assert beta == max(
        (primary.unit * 10**decade for decade in DECADES if decade > -5), key=lambda b: density(apart, y, b)
    )


def test_models_that_rows_cannot_tell_apart_share_and_a_clearly_better_one_takes_all():
    errors = torch.from_numpy(np.random.default_rng(0).chisquare(1, 200))
    alike = shares([torch.stack([errors, errors])], seed=0)
    torch.testing.assert_close(alike, torch.full((2,), 0.5, dtype=torch.float64))
    assert float(shares([torch.stack([errors, 2 * errors])], seed=0)[0]) > 0.999
    torch.testing.assert_close(  # halves at two clients; bootstraps of 200 rows in the same order
        shares([torch.stack([errors, errors.flip(0)])[:, :100], torch.stack([errors, errors.flip(0)])[:, 100:]], 0),
        shares([torch.stack([errors, errors.flip(0)])], 0), atol=0.1, rtol=0,  # other draws: 400 of them
    )  # fmt: skip
    few = shares([torch.stack([errors[:5], 1.5 * errors[:5]])], seed=0)
    assert 0.5 < float(few[0]) < 0.9


def test_the_average_is_that_of_the_models_by_their_shares():
    X, y = make_friedman1(150, noise=2.0, random_state=3)
    site = np.arange(150) % 2
    model = APFLRegressor().fit(X, y, clients=site)
    expected, kept = 0.0, [one for one in model.chosen_["models"] if one["share"]]
    assert len(kept) > 1
    for one in kept:
        if one["map"].startswith("plain"):
            expected = expected + one["share"] * plain(X, y, site, alone=one["weight"] == 0)
            continue
        settings = {key: one[key] for key in ("map", "gamma", "weight", "beta", "balance")}
        expected = expected + one["share"] * APFLRegressor(**settings).fit(X, y, clients=site).predict(X, site)
    assert model.chosen_["alone"] == []
    np.testing.assert_allclose(model.predict(X, site), expected, rtol=1e-9)


def plain(X, y, site, *, alone: bool) -> np.ndarray:
    """scikit-learn's ridge over everyone's rows or the client's own."""
    found = np.zeros(len(y))
    for k in np.unique(site):
        own, where = (site == k if alone else site >= 0), site == k
        model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))
        found[where] = model.fit(X[own], y[own]).predict(X[where])
    return found


@pytest.mark.parametrize(("n", "d"), [(60, 5), (30, 40)])
def test_a_plain_ridge_is_that_of_scikit_learn_and_its_left_out_errors_those_of_refitting(n, d):
    rng = np.random.default_rng(n)
    X = 5 + rng.normal(size=(n, d)) * np.logspace(-2, 2, d)
    y = X[:, :1] / X[:, :1].std() + rng.normal(size=(n, 2))
    found = plain_ridge(torch.from_numpy(X), torch.from_numpy(y))
    expected = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))).fit(X, y)
    assert found.ridge == pytest.approx(expected[-1].alpha_)
    np.testing.assert_allclose(X @ found.weights.numpy() + found.intercept.numpy(), expected.predict(X), rtol=1e-9)
    groups = torch.arange(n) // 3
    together = plain_ridge(torch.from_numpy(X), torch.from_numpy(y), groups, [found.ridge]).left_out
    Z = StandardScaler().fit_transform(X)  # of all rows, as in scikit-learn's own choice
    for rows, left in ((np.arange(n) == 4, found.left_out), (np.arange(n) // 3 == 2, together)):
        ridge = Ridge(found.ridge).fit(Z[~rows], y[~rows])
        np.testing.assert_allclose(left[rows], y[rows] - ridge.predict(Z[rows]), atol=1e-8)


def test_what_weighs_before_any_row_is_seen_multiplies_likelihoods():
    errors = [torch.rand(2, 30, dtype=torch.float64)]
    alike = [torch.stack([errors[0][0], errors[0][0]])]
    np.testing.assert_allclose(shares(alike, 0, torch.tensor([3.0, 1.0])), [0.75, 0.25], atol=1e-9)
    np.testing.assert_allclose(shares(errors, 0, torch.tensor([2.0, 2.0])), shares(errors, 0), atol=1e-9)
    none = [torch.full((2, 3), torch.nan, dtype=torch.float64)]
    np.testing.assert_allclose(shares(none, 0, torch.tensor([3.0, 1.0])), [0.75, 0.25])


def rmse(model, X, y, site, test) -> float:
    return math.sqrt(
        np.square(model.fit(X[~test], y[~test], clients=site[~test]).predict(X[test], site[test]) - y[test]).mean()
    )


def rivals(X, y, site, test) -> float:
    """The better of pooled and per-client ridge regression."""

    def ridge(train, where):
        model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13)))
        return np.square(model.fit(X[train], y[train]).predict(X[where]) - y[where])

    alone = [ridge(~test & (site == k), test & (site == k)) for k in np.unique(site)]
    return math.sqrt(min(ridge(~test, test).mean(), np.concatenate(alone).mean()))


DATA = {
    "diabetes": lambda: load_diabetes(return_X_y=True),
    "friedman 1": lambda: make_friedman1(300, noise=1.0, random_state=0),
    "friedman 2": lambda: make_friedman2(300, noise=50.0, random_state=0),
    "friedman 3": lambda: make_friedman3(300, noise=0.1, random_state=0),
    "linear": lambda: make_regression(300, 20, noise=10.0, random_state=0),
    "linear without noise": lambda: make_regression(300, 20, noise=0.0, random_state=0),
    "more features than rows": lambda: make_regression(120, 200, noise=10.0, random_state=0),
}


@pytest.mark.parametrize("name", DATA)
def test_it_is_no_worse_than_the_better_of_pooled_and_per_client_ridges(name):
    X, y = DATA[name]()
    site = np.digitize(X[:, 0], np.quantile(X[:, 0], [0.25, 0.5, 0.75]))  # clients by a column
    test = np.random.default_rng(0).random(len(y)) < 0.25
    assert rmse(APFLRegressor(), X, y, site, test) <= 1.01 * rivals(X, y, site, test)


def test_sites_that_differ_in_everything_go_alone_and_a_level_of_ones_own_is_learnt():
    X, y = make_friedman1(600, noise=0.5, random_state=0)
    site, test = np.arange(600) % 3, np.random.default_rng(0).random(600) < 0.25
    odd = np.where(site == 2, -y, y)
    model = APFLRegressor().fit(X[~test], odd[~test], clients=site[~test])
    assert model.chosen_["weight"] == 0 or 2 in model.chosen_["alone"] or model.chosen_["balance"] > 0.5
    own = test & (site == 2)
    assert model.score(X[own], odd[own], clients=site[own]) > 0.7
    shifted = y + 10 * site
    pooled = APFLRegressor().fit(X[~test], shifted[~test])
    assert rmse(APFLRegressor(), X, shifted, site, test) < 0.5 * np.sqrt(
        np.square(pooled.predict(X[test]) - shifted[test]).mean()
    )


def test_one_row_at_two_sites_changes_nothing_much():
    X, y = make_regression(60, 100, noise=20.0, random_state=1)
    site = np.arange(60) % 2
    before = APFLRegressor(map="linear").fit(X, y, clients=site)
    twice = APFLRegressor(map="linear").fit(np.vstack([X, X[:1]]), np.append(y, y[0]), clients=np.append(site, 1))
    assert 0.1 < twice.chosen_["gamma"] / before.chosen_["gamma"] < 10  # it does not fall to the edge of its grid
    new = np.random.default_rng(0).normal(size=(200, 100))
    assert np.corrcoef(before.predict(new, 0), twice.predict(new, 0))[0, 1] > 0.97


def test_columns_clients_and_several_targets():
    X, y = make_regression(90, 4, n_targets=2, noise=5.0, random_state=0)
    site = np.array(["north", "south", "west"])[np.arange(90) % 3]
    table = np.column_stack([X.astype(object), site])
    model = APFLRegressor(client_column=-1).fit(table, y)
    assert model.predict(table).shape == (90, 2)
    assert model.clients_ == ["north", "south", "west"]
    assert cross_val_score(APFLRegressor(client_column=-1), table, y, cv=3).mean() > 0.9
    plain = APFLRegressor().fit(X, y, clients=site)
    np.testing.assert_allclose(plain.predict(X, site), model.predict(table), rtol=1e-9)
    with pytest.warns(UserWarning, match="no client 'nroth' \\(did you mean 'north'"):
        plain.predict(X[:2], "nroth")
    chosen = plain.chosen_
    assert chosen["map"] in ("linear", "plain, pooled")
    assert 0.9 < chosen["left_out_r2"] < 1


def test_rows_of_a_group_are_left_out_together():
    rng = np.random.default_rng(0)
    X, y = np.repeat(rng.normal(size=(40, 5)), 3, axis=0), np.repeat(rng.normal(size=40), 3)
    X = X + 1e-3 * rng.normal(size=X.shape)
    blind = APFLRegressor(map="landmarks").fit(X, y).chosen_["left_out_r2"]
    aware = APFLRegressor(map="landmarks").fit(X, y, groups=np.arange(120) // 3).chosen_["left_out_r2"]
    assert aware < 0.3 < 0.9 < blind


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"map": "linea"}, "did you mean 'linear'"),
        ({"width": 0}, "width=0 given; allowed: 'auto', or a whole number of landmarks"),
        ({"gamma": 0.0}, "gamma=0.0 given; allowed: 'auto', or a number above 0"),
        ({"balance": -1}, "balance=-1 given; allowed: 'auto', or a number from 0 on"),
        ({"beta": "1"}, "beta='1' given"),
    ],
)
def test_bad_settings_are_refused(settings, reason):
    with pytest.raises(InputError, match=reason):
        APFLRegressor(**settings).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])


def test_missing_targets_are_refused():
    with pytest.raises(InputError, match=r"1 of 3 targets is missing \(row 1"):
        APFLRegressor().fit([[0.0], [1.0], [2.0]], [0.0, float("nan"), 2.0])
