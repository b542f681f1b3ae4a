"""`APFLClassifier` with an indicator matrix: scikit-learn's conventions, clients, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import cross_val_score

from apfl import APFLClassifier, load_model
from apfl.errors import InputError


@pytest.fixture(scope="module")
def rows():
    X, Y = make_multilabel_classification(300, 8, n_classes=3, random_state=1)
    site = np.arange(300) % 2
    Y[site == 1, 0] = 1 - Y[site == 1, 0]  # a site that means the opposite by one label
    return X, Y, site


@pytest.fixture(scope="module")
def fitted(rows):
    X, Y, site = rows
    return APFLClassifier().fit(X[:200], Y[:200], clients=site[:200])


def test_indicators_scores_and_shares_agree(rows, fitted):
    X, Y, site = rows
    found = fitted.predict(X[200:], site[200:])
    assert found.shape == (100, 3)
    scores, shares = (of(X[200:], site[200:]) for of in (fitted.decision_function, fitted.predict_proba))
    np.testing.assert_array_equal(found, scores > 0)
    assert shares.min() >= 0
    assert shares.max() <= 1
    np.testing.assert_allclose(shares, (scores + 0.5).clip(0, 1), atol=1e-9)
    np.testing.assert_array_equal(fitted.classes_, [0, 1, 2])
    assert fitted.score(X[200:], Y[200:], site[200:]) == (found == Y[200:]).all(1).mean()


def test_clients_that_mean_the_opposite_have_models_of_their_own(rows, fitted):
    X, Y, site = rows
    together = APFLClassifier().fit(X[:200], Y[:200])
    own = fitted.decision_function(X[200:], site[200:])[:, 0]
    shared = together.decision_function(X[200:])[:, 0]
    assert average_precision_score(Y[200:, 0], own) > average_precision_score(Y[200:, 0], shared) + 0.1


def test_the_threshold_has_the_highest_f1_of_left_out_rows_and_not_a_fixed_half(rows):
    X, Y, site = rows
    rare = Y.copy()
    rare[:, 2] = Y[:, 0] & Y[:, 1] & (X[:, 0] > np.median(X[:, 0]))
    model = APFLClassifier().fit(X[:200], rare[:200], clients=site[:200])
    threshold = model.chosen_["thresholds"][2]
    assert threshold < 0.5
    scores = model.decision_function(X[200:], site[200:])[:, 2]
    at_half = scores + threshold > 0.5 - 1e-12  # what a threshold of one half would give
    assert f1_score(rare[200:, 2], scores > 0) >= f1_score(rare[200:, 2], at_half & (scores > 0.5 - threshold))


def test_models_are_saved_cloned_pickled_and_cross_validated(rows, fitted, tmp_path):
    X, Y, site = rows
    model = fitted.model(1)
    model.save(tmp_path / "one.safetensors")
    again = load_model(tmp_path / "one.safetensors")
    np.testing.assert_array_equal(again.predict(X[site == 1]), fitted.predict(X[site == 1], 1))
    copied = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copied.predict(X, site), fitted.predict(X, site))
    table = np.column_stack([X, site])
    scores = cross_val_score(clone(APFLClassifier(client_column=-1)), table, Y, scoring="f1_micro", cv=3)
    assert scores.mean() > 0.6


def test_classes_after_labels_and_labels_after_classes(rows):
    X, Y, site = rows
    model = APFLClassifier(d_primary=32, d_refinement=32).fit(X, Y[:, 1], clients=site)
    assert model.predict(X, site).shape == (300,)
    model = clone(APFLClassifier()).fit(X, Y, clients=site).fit(X, Y[:, 1], clients=site)
    assert model.predict(X, site).shape == (300,)
    np.testing.assert_array_equal(model.fit(X, Y, clients=site).classes_, [0, 1, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, X, Y: model.partial_fit(X, Y), "is fitted whole"),
        (lambda model, X, Y: model.add_client("new", X, Y), "is fitted whole"),
        (lambda model, X, Y: model.remove_client(0), "is fitted whole"),
        (lambda model, X, Y: model.save("folder"), "has no folder"),
        (lambda model, X, Y: APFLClassifier(class_weight="balanced").fit(X, Y), "class_weight=.* with several labels"),
        (lambda model, X, Y: APFLClassifier(tau=1.0).fit(X, Y), "tau=1.0 given, which is of no use for multilabel"),
    ],
)
def test_what_several_labels_do_not_have(rows, fitted, call, message):
    with pytest.raises(InputError, match=message):
        call(fitted, rows[0], rows[1])
    assert fitted.predict(rows[0][:2], 0).shape == (2, 3)  # left as it was
