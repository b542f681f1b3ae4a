"""Clients and groups through scikit-learn's metadata routing, compared with the same done by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from apfl import APFLClassifier

CLF = APFLClassifier(d_primary=32, gamma=1.0, beta=1.0, balance=0.5, tau=0.1, unknown="error")


@pytest.fixture(scope="module")
def sites() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, labels, clients, and groups of four rows that nearly agree, so that it matters who leaves with whom."""
    X, y = load_digits(return_X_y=True)
    X, y = np.repeat(X[:60], 4, axis=0), np.repeat(y[:60], 4)
    X = X + np.random.default_rng(0).normal(0, 0.1, X.shape)
    groups = np.arange(240) // 4
    return X, y, np.array(["north", "south"])[groups % 2], groups


@pytest.fixture
def routed() -> APFLClassifier:
    with sklearn.config_context(enable_metadata_routing=True):
        yield clone(CLF).set_fit_request(clients=True, groups=True).set_score_request(clients=True)


def by_hand(sites, balance: float = 0.5) -> list[tuple[APFLClassifier, float]]:
    """Each fold's classifier and its score."""
    X, y, clients, groups = sites
    found = []
    for train, test in GroupKFold(3).split(X, y, groups):
        scaler = MinMaxScaler().fit(X[train])
        clf = clone(CLF).set_params(balance=balance)
        clf.fit(scaler.transform(X[train]), y[train], clients=clients[train], groups=groups[train])
        found.append((clf, clf.score(scaler.transform(X[test]), y[test], clients=clients[test])))
    return found


def test_cross_validate_through_a_pipeline(sites, routed):
    X, y, clients, groups = sites
    pipe, given = make_pipeline(MinMaxScaler(), routed), {"clients": clients, "groups": groups}
    found = cross_validate(pipe, X, y, cv=GroupKFold(3), params=given, return_estimator=True)
    expected = by_hand(sites)
    assert found["test_score"].tolist() == [score for _, score in expected]
    for pipeline, (clf, _) in zip(found["estimator"], expected, strict=True):
        assert pipeline[-1].clients_ == clf.clients_
        temperatures = [each.model("north").temperature for each in (pipeline[-1], clf)]
        assert temperatures[0] == pytest.approx(temperatures[1], rel=1e-9)  # left-out rows leave with their groups
    blind = clone(CLF).fit(MinMaxScaler().fit_transform(X), y, clients=clients)
    aware = clone(CLF).fit(MinMaxScaler().fit_transform(X), y, clients=clients, groups=groups)
    assert blind.model("north").temperature != pytest.approx(aware.model("north").temperature, rel=0.01)


def test_grid_search_through_a_pipeline(sites, routed):
    X, y, clients, groups = sites
    pipe, tried = make_pipeline(MinMaxScaler(), routed), {"apflclassifier__balance": [0.0, 0.5]}
    search = GridSearchCV(pipe, tried, cv=GroupKFold(3)).fit(X, y, clients=clients, groups=groups)
    by_hands = [np.mean([score for _, score in by_hand(sites, balance)]) for balance in (0.0, 0.5)]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], by_hands, rtol=1e-12)
    assert search.score(X, y, clients=clients) == search.best_estimator_.score(X, y, clients=clients)


def test_prediction_routes_clients_too(sites, routed):
    X, y, clients, groups = sites
    clf = routed.set_predict_request(clients=True).set_predict_proba_request(clients=True)
    pipe = make_pipeline(MinMaxScaler(), clf).fit(X, y, clients=clients, groups=groups)
    rows = MinMaxScaler().fit_transform(X)
    for which in ("predict", "predict_proba"):
        expected = getattr(pipe[-1], which)(rows, clients)
        np.testing.assert_array_equal(getattr(pipe, which)(X, clients=clients), expected)


def test_calibration_routes_to_fit_alone_so_its_shared_scores_are_not_silent(sites, routed):
    """scikit-learn predicts without metadata there: a column of clients is the way (test_clients.py)."""
    X, y, clients, _ = sites
    clf = clone(CLF).set_params(unknown="warn").set_fit_request(clients=True, groups=False)
    with pytest.warns(UserWarning, match="no client is named; have: .*The shared stream answers for these rows"):
        CalibratedClassifierCV(clf, cv=3).fit(X, y, clients=clients)
    with pytest.raises(ValueError, match="no client is named"):
        CalibratedClassifierCV(clf.set_params(unknown="error"), cv=3).fit(X, y, clients=clients)
