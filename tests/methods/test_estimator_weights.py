"""Weights of rows and of classes in `APFLClassifier`."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits, make_classification
from sklearn.metrics import recall_score
from sklearn.utils.estimator_checks import check_sample_weight_equivalence_on_dense_data

from apfl import APFLClassifier, InputError

GIVEN = {
    "map": "random", "d_primary": 48, "d_refinement": 32, "normalise": "row",
    "gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def sites() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    return X[:240], y[:240], np.array(["north", "south"])[rng.integers(2, size=240)], rng.integers(0, 4, 240)


def same(one: APFLClassifier, other: APFLClassifier, X: np.ndarray, clients: np.ndarray) -> None:
    np.testing.assert_allclose(one.decision_function(X, clients), other.decision_function(X, clients), atol=1e-9)
    # The temperature is found by a bounded search that stops at 1e-5 in log T.
    np.testing.assert_allclose(one.predict_proba(X, clients), other.predict_proba(X, clients), atol=1e-3)


def test_scikit_learns_equivalence_of_weights_and_repeated_rows_holds_for_given_maps_and_settings():
    check_sample_weight_equivalence_on_dense_data("APFLClassifier", APFLClassifier(**GIVEN))


def test_a_row_of_weight_two_is_a_row_given_twice(sites):
    X, y, clients, weights = sites
    twice = np.repeat(np.arange(240), weights)
    one = APFLClassifier(**GIVEN).fit(X, y, clients=clients, sample_weight=weights)
    same(one, APFLClassifier(**GIVEN).fit(X[twice], y[twice], clients=clients[twice]), X, clients)
    blind = APFLClassifier(**GIVEN).fit(X, y, clients=clients)
    assert abs(one.primary_ - blind.primary_).max() > 0.01


def test_a_row_without_weight_is_absent_whatever_is_left_to_choose(sites):
    X, y, clients, weights = sites
    here = weights > 0
    groups = np.arange(240) // 2
    one = APFLClassifier().fit(X, y, clients=clients, groups=groups, sample_weight=here.astype(float))
    other = APFLClassifier().fit(X[here], y[here], clients=clients[here], groups=groups[here])
    same(one, other, X, clients)
    assert one.chosen_["table"]["hits"] == other.chosen_["table"]["hits"]


def test_clients_with_weights_come_and_go(sites):
    X, y, clients, weights = sites
    weights, north = weights + 0.5, clients == "north"
    at_once = APFLClassifier(**GIVEN).fit(X, y, clients=clients, sample_weight=weights)
    grown = APFLClassifier(**GIVEN).fit(X[~north], y[~north], clients=clients[~north], sample_weight=weights[~north])
    alone = grown.decision_function(X[~north], clients[~north])
    grown.add_client("north", X[north], y[north], sample_weight=weights[north])
    same(grown, at_once, X, clients)
    back = grown.remove_client("north").decision_function(X[~north], clients[~north])
    np.testing.assert_allclose(back, alone, atol=1e-8)  # sums less a client's round once more
    mixed = APFLClassifier(**GIVEN).fit(X[~north], y[~north], clients=clients[~north])
    mixed.add_client("north", X[north], y[north], sample_weight=weights[north])  # one has weights, one has none
    ones = np.where(north, weights, 1.0)
    same(mixed, APFLClassifier(**GIVEN).fit(X, y, clients=clients, sample_weight=ones), X, clients)


def test_rows_that_were_not_kept_come_back_with_their_weights(sites):
    X, y, clients, weights = sites
    weights, north = weights + 0.5, clients == "north"
    clf = APFLClassifier(**GIVEN, keep_rows=False).fit(X, y, clients=clients, sample_weight=weights)
    with pytest.raises(InputError, match="not those it joined with"):
        clf.remove_client("north", X[north], y[north])
    assert clf.remove_client("north", X[north], y[north], weights[north]).clients_ == ["south"]


def test_balanced_classes_weigh_the_same_and_rare_ones_are_found():
    X, y = make_classification(
        2500, 20, n_informative=8, n_classes=4, weights=[0.85, 0.10, 0.04, 0.01], flip_y=0, random_state=0
    )
    site, train = np.arange(2500) % 3, np.arange(2500) < 1500

    def recalls(class_weight):
        clf = APFLClassifier(class_weight=class_weight, d_primary=256)
        clf.fit(X[train], y[train], clients=site[train])
        return clf, recall_score(y[~train], clf.predict(X[~train], site[~train]), average=None)

    (plain, before), (clf, after) = recalls(None), recalls("balanced")
    assert before[3] < 0.1 < 0.3 < after[3]
    assert after.mean() > before.mean() + 0.05
    counts = clf.statistics_.class_counts
    np.testing.assert_allclose(counts, counts.mean(), rtol=1e-9)
    assert plain.statistics_.weight == pytest.approx(clf.statistics_.weight)


def test_the_accuracy_of_left_out_rows_is_a_share_however_much_classes_weigh():
    X, y = make_classification(600, 8, n_informative=5, n_classes=3, random_state=0)
    maps = {name: GIVEN[name] for name in ("map", "d_primary", "d_refinement", "normalise")}

    def share(times):
        clf = APFLClassifier(**maps, class_weight=times and dict.fromkeys(range(3), times))
        return clf.fit(X, y, clients=np.arange(600) % 2).chosen_["left_out_accuracy"]

    assert share(1.0) == pytest.approx(share(None), rel=1e-9)
    assert share(4.0) == pytest.approx(share(None), abs=0.05)  # other ridges of the same few may be the best


def test_a_dict_is_what_weights_of_rows_would_be_and_balanced_follows_who_is_there(sites):
    X, y, clients, _ = sites
    by_class, north = {3: 4.0, 8: 0.5}, clients == "north"
    weights = np.array([by_class.get(int(label), 1.0) for label in y])
    same(
        APFLClassifier(**GIVEN, class_weight=by_class).fit(X, y, clients=clients),
        APFLClassifier(**GIVEN).fit(X, y, clients=clients, sample_weight=weights),
        X, clients,
    )  # fmt: skip
    grown = APFLClassifier(**GIVEN, class_weight="balanced").fit(X[north], y[north], clients=clients[north])
    grown.add_client("south", X[~north], y[~north])
    same(grown, APFLClassifier(**GIVEN, class_weight="balanced").fit(X, y, clients=clients), X, clients)
    alone = APFLClassifier(**GIVEN, class_weight="balanced").fit(X[north], y[north], clients=clients[north])
    same(grown.remove_client("south"), alone, X[north], clients[north])
    forgetful = APFLClassifier(**GIVEN, class_weight="balanced", keep_rows=False)
    forgetful.fit(X[north], y[north], clients=clients[north])
    with pytest.raises(InputError, match="keep them, or give class_weight as a dict"):
        forgetful.add_client("south", X[~north], y[~north])
    assert forgetful.clients_ == ["north"]


def test_what_was_fitted_with_weights_of_classes_is_saved(sites, tmp_path):
    X, y, clients, _ = sites
    clf = APFLClassifier(**GIVEN, class_weight={np.int64(3): 4.0}).fit(X, y, clients=clients)
    clf.save(tmp_path / "clf")
    same(APFLClassifier.load(tmp_path / "clf"), clf, X, clients)


@pytest.mark.parametrize(
    ("settings", "weights", "reason"),
    [
        ({"class_weight": "balance"}, None, "class_weight='balance' given; allowed: None, 'balanced', or a dict"),
        ({"class_weight": {0: 0.0}}, None, "a dict of weights above 0"),
        ({"class_weight": {0: "much"}}, None, "a dict of weights above 0"),
        ({"class_weight": {"0": 2.0}}, None, "has the label '0', but the classes are like 0: .* numbers as numbers"),
        ({}, [1e-20, 1e-20], "mean of 1e-20 given.* allowed are 1e-06 to 1e.06: divide all by one number"),
        ({}, [1e300, 1e300], "mean of 1e.300 given"),
        ({}, [1.0, -1.0], "sample weights from -1 to 1 given"),
        ({}, [0.0, 0.0], "not all may be zero"),
        ({}, [1.0, float("nan")], "sample weights from nan to nan given"),
        ({}, [1.0], r"sample weights of shape \(1,\) given for 2 rows"),
        ({}, ["a", "b"], "give one number for each row"),
    ],
)
def test_bad_weights_are_refused(settings, weights, reason):
    with pytest.raises(InputError, match=reason):
        APFLClassifier(**settings).fit([[0.0, 1.0], [1.0, 0.0]], [0, 1], sample_weight=weights)
