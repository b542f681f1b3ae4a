"""That the client of each row reaches the personal model, and that nothing else answers unnoticed."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import sklearn
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

from apfl import APFLClassifier, InputError

SMALL = {"map": "random", "d_primary": 48, "d_refinement": 32}
FOLDS = KFold(3)
NAMES = np.array(["north", "south"])


@pytest.fixture(scope="module")
def sites() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Digits, odd or even, at two sites that see mostly small and mostly large ones; the site as 0 or 1."""
    X, y = load_digits(return_X_y=True)
    X, y = X[:400], y[:400]
    swapped = np.random.default_rng(0).random(len(y)) < 0.2
    return X, np.where(y % 2 == 1, "odd", "even"), ((y > 4) ^ swapped).astype(int)


@pytest.fixture(scope="module")
def fitted(sites) -> APFLClassifier:
    X, y, site = sites
    return APFLClassifier(**SMALL).fit(X, y, clients=NAMES[site])


def scores_by_hand(X, y, site, scoring: str) -> tuple[list[float], list[float]]:
    """Of each fold: the score of the personal models, and of the shared stream."""
    personal, shared = [], []
    for train, test in FOLDS.split(X):
        clf = APFLClassifier(**SMALL, unknown="shared").fit(X[train], y[train], clients=site[train])
        for scores, given in ((personal, {"clients": site[test]}), (shared, {})):
            if scoring == "roc_auc":
                scores.append(roc_auc_score(y[test], clf.decision_function(X[test], **given)))
            else:
                scores.append(accuracy_score(y[test], clf.predict(X[test], **given)))
    return personal, shared


@pytest.mark.parametrize("scoring", ["roc_auc", "accuracy", None])
def test_cross_validation_measures_the_personal_model(sites, scoring):
    X, y, site = sites
    clf = APFLClassifier(**SMALL, client_column=0, unknown="error")
    measured = cross_val_score(clf, np.column_stack([site, X]), y, scoring=scoring, cv=FOLDS)
    personal, shared = scores_by_hand(X, y, site, scoring or "accuracy")
    np.testing.assert_allclose(measured, personal)
    assert not np.allclose(measured, shared)


def test_without_the_column_a_string_scorer_sees_no_client_and_says_so(sites):
    X, y, site = sites
    with pytest.warns(UserWarning, match=r"^no client is named; have: [01], [01]\. The shared stream answers") as said:
        measured = cross_val_score(APFLClassifier(**SMALL), X, y, params={"clients": site}, scoring="roc_auc", cv=FOLDS)
    assert len(said) == FOLDS.get_n_splits()  # once for each call
    np.testing.assert_allclose(measured, scores_by_hand(X, y, site, "roc_auc")[1])


def test_routed_clients_reach_the_personal_model_without_a_warning(sites):
    X, y, site = sites
    with sklearn.config_context(enable_metadata_routing=True):
        clf = APFLClassifier(**SMALL).set_fit_request(clients=True).set_score_request(clients=True)
        measured = cross_val_score(clf, X, y, params={"clients": site}, cv=FOLDS)
    np.testing.assert_allclose(measured, scores_by_hand(X, y, site, "accuracy")[0])


def test_grid_search_and_a_pipeline_see_the_column(sites):
    X, y, site = sites
    scaled = make_column_transformer((MinMaxScaler(), list(range(64))), remainder="passthrough")
    table = np.column_stack([X.astype(object), NAMES[site]])
    pipe = make_pipeline(scaled, APFLClassifier(**SMALL, client_column=-1, unknown="error"))
    search = GridSearchCV(pipe, {"apflclassifier__balance": [0.0, 0.5]}, scoring="roc_auc", cv=FOLDS).fit(table, y)
    best = search.best_estimator_[-1]
    assert sorted(best.clients_) == ["north", "south"]
    by_hand = MinMaxScaler().fit_transform(X)
    plain = APFLClassifier(**SMALL, balance=best.balance).fit(by_hand, y, clients=NAMES[site])
    np.testing.assert_allclose(search.decision_function(table), plain.decision_function(by_hand, NAMES[site]))


def test_calibration_sees_the_column(sites):
    X, y, site = sites
    clf = APFLClassifier(**SMALL, client_column=64, unknown="error")
    calibrated = CalibratedClassifierCV(clf, cv=FOLDS).fit(np.column_stack([X, site]), y)
    at_home, abroad = (calibrated.predict_proba(np.column_stack([X, of])) for of in (site, 1 - site))
    assert not np.allclose(at_home, abroad)


@pytest.mark.parametrize("dtype", ["object", "str", "category", "string"])
def test_a_named_column_of_a_dataframe(sites, fitted, dtype):
    pd = pytest.importorskip("pandas")
    X, y, site = sites
    table = pd.DataFrame(X, columns=[f"pixel {i}" for i in range(64)], index=np.arange(400)[::-1])
    table.insert(7, "site", pd.Series(NAMES[site], index=table.index, dtype=dtype))
    for column in ("site", 7, -58):
        clf = APFLClassifier(**SMALL, client_column=column, unknown="error").fit(table, y)
        np.testing.assert_array_equal(clf.decision_function(table), fitted.decision_function(X, NAMES[site]))
        assert clf.score(table, y) == fitted.score(X, y, clients=NAMES[site])
        assert clf.n_features_in_ == 65
        assert list(clf.feature_names_in_) == list(table.columns)
        with pytest.raises(ValueError, match="Feature names seen at fit time, yet now missing"):
            clf.predict(table.drop(columns="site"))
    with pytest.raises(InputError, match="no column 'sites'; did you mean 'site'"):
        APFLClassifier(client_column="sites").fit(table, y)
    table.loc[table.index[[2, 5]], "site"] = None
    with pytest.raises(InputError, match=r"2 of 400 clients are missing \(rows 2, 5,"):
        clf.predict(table)


def test_numeric_codes_in_an_array_are_the_same_clients_as_integers(sites):
    X, y, site = sites
    codes = site + 3
    clf = APFLClassifier(**SMALL, client_column=-1, unknown="error").fit(np.column_stack([X, codes]), y)
    assert [repr(client) for client in sorted(clf.clients_)] == ["3", "4"]
    plain = APFLClassifier(**SMALL, unknown="error").fit(X, y, clients=codes)
    for given in (codes, codes.astype(float), codes.astype(object), codes.tolist(), tuple(codes), list(codes)):
        np.testing.assert_array_equal(
            plain.decision_function(X, given), clf.decision_function(np.column_stack([X, codes]))
        )
    rows_as_lists = [[*row, int(code)] for row, code in zip(X.tolist(), codes, strict=True)]
    np.testing.assert_array_equal(clf.predict(rows_as_lists), plain.predict(X, codes))
    with pytest.raises(ValueError, match="64 features, but APFLClassifier is expecting 65"):
        clf.predict(X)


def test_clients_join_grow_and_leave_with_their_column(sites, fitted):
    X, y, site = sites
    table, north = np.column_stack([X.astype(object), NAMES[site]]), site == 0
    clf = APFLClassifier(**SMALL, client_column=-1, unknown="error", keep_rows=False).fit(table[north], y[north])
    with pytest.raises(InputError, match="names 'south' in the rows of 'west'"):
        clf.add_client("west", table[~north], y[~north])
    clf.add_client("south", table[~north], y[~north]).refit(table, y)
    # The rows come in another order, so sums differ in the last digits.
    np.testing.assert_allclose(clf.decision_function(table), fitted.decision_function(X, NAMES[site]), rtol=1e-7)
    with pytest.raises(InputError, match="names 'north' in the rows of 'south'"):
        clf.remove_client("south", table[north], y[north])
    assert clf.remove_client("south", table[~north], y[~north]).clients_ == ["north"]
    parts = APFLClassifier(**SMALL, client_column=-1)
    for rows in (north, ~north):
        parts.partial_fit(table[rows], y[rows], classes=["even", "odd"])
    np.testing.assert_allclose(parts.decision_function(table), fitted.decision_function(X, NAMES[site]), rtol=1e-7)


def test_a_column_that_cannot_be_is_refused(sites):
    X, y, site = sites
    for column, table, message in [
        ("site", X, r"is a name, but the columns of X \(ndarray\) have none"),
        (64, X, "client_column=64 is no column of X; give an index from 0 to 63"),
        (-65, X, "client_column=-65 is no column"),
        (1.0, X, "client_column=1.0 is no column"),
        (True, X, "client_column=True is no column"),
        (0, X[:, 0], r"it has shape \(400,\)"),
    ]:
        with pytest.raises(InputError, match=message):
            APFLClassifier(client_column=column).fit(table, y)
    clf = APFLClassifier(**SMALL, client_column=-1).fit(np.column_stack([X, site]), y)
    for call in (clf.fit, clf.partial_fit, clf.refit, clf.score):
        with pytest.raises(InputError, match="clients= given, and client_column=-1"):
            call(np.column_stack([X, site]), y, clients=site)
    for call in (clf.predict, clf.predict_proba, clf.decision_function):
        with pytest.raises(InputError, match="clients= given, and client_column=-1"):
            call(np.column_stack([X, site]), clients="north")
    with pytest.raises(ValueError, match="0 feature"):
        clf.fit(site[:, None], y)


def test_one_client_may_be_named_for_all_rows(sites, fitted):
    X, y, site = sites
    five, label = X[:5], y[:5]
    for predict in (fitted.predict, fitted.predict_proba, fitted.decision_function):
        np.testing.assert_array_equal(predict(five, clients="north"), predict(five, clients=["north"] * 5))
    assert fitted.score(five, label, clients="north") == fitted.score(five, label, clients=["north"] * 5)
    own = site == 0
    for name in ("north", 3, 3.0, np.str_("north"), np.int64(3), np.array("north")):
        clf = APFLClassifier(**SMALL, unknown="error").fit(X[own], y[own], clients=name)
        assert clf.clients_ == [name]
        clf.partial_fit(X[~own], y[~own], clients="south").refit(X[own], y[own], clients=name)
        assert clf.clients_ == [name, "south"]
        # The rows come in another order, so sums differ in the last digits.
        np.testing.assert_allclose(clf.decision_function(X[own], name), fitted.decision_function(X[own], "north"), 1e-7)


@pytest.mark.parametrize(
    ("strange", "message"),
    [
        ("nroth", r"^no client 'nroth' \(did you mean 'north'\?\); have: .*'north'"),
        (["north"] * 398 + ["x", "nroth"], r"^no client 'x', 'nroth' \(did you mean 'north'\?\); have: "),
        (list(range(400)), r"^no client 0, 1, 2, 3, 4 and 395 more; have: "),
        (None, r"^no client is named; have: "),
    ],
)
def test_a_client_that_was_not_fitted(sites, fitted, strange, message):
    X, _, _ = sites
    strict, silent = (copy(fitted).set_params(unknown=mode) for mode in ("error", "shared"))
    known = np.array([name == "north" for name in (strange if isinstance(strange, list) else [strange] * 400)])
    expected = np.where(known, fitted.decision_function(X, "north"), silent.decision_function(X))
    with pytest.warns(UserWarning, match=message) as said:
        scores = fitted.decision_function(X, strange)
    assert [warning.filename for warning in said] == [__file__]  # one, and it points here
    for answered in (scores, silent.decision_function(X, strange)):
        np.testing.assert_allclose(answered, expected, rtol=1e-9, atol=1e-12)
    for call in (strict.predict, strict.predict_proba, strict.decision_function):
        with pytest.raises(InputError, match=message):
            call(X, strange)


def test_a_number_is_not_its_text(sites):
    X, y, site = sites
    clf = APFLClassifier(**SMALL, unknown="error").fit(X, y, clients=site)
    with pytest.raises(InputError, match=r"^no client '0' \(of type str; the client 0 is of type int\); have: "):
        clf.predict(X, clients="0")
    with pytest.raises(InputError, match=r"^no client '1' \(of type str"):
        clf.model("1")


def test_how_unknown_clients_are_met_must_be_one_of_three(sites, fitted):
    X, y, _ = sites
    clf = copy(fitted).set_params(unknown="ignore")
    for call in (lambda: clf.fit(X, y), lambda: clf.predict(X, "north")):
        with pytest.raises(InputError, match="unknown='ignore' is not allowed; use 'warn', 'error' or 'shared'"):
            call()


def test_no_model_is_exported_under_a_mistaken_name(sites, fitted):
    X, y, site = sites
    for name, message in [
        ("nroth", r"no client 'nroth' \(did you mean 'north'\?\)"),
        ("alone", "no client is named"),
    ]:
        with pytest.raises(InputError, match=message):
            fitted.model(name)
    with pytest.raises(InputError, match=r"no client is named; .* \(model\(None\) is the shared stream\)"):
        fitted.model()
    shared = fitted.model(None)
    assert shared.refinement is None
    assert list(shared.class_names) == ["even", "odd"]
    assert fitted.model("north").refinement is not None
    silent = APFLClassifier(**SMALL, unknown="shared").fit(X, y, clients=NAMES[site])
    assert silent.model("nroth").refinement is None


MISSING = [None, float("nan"), np.float64("nan"), "", np.datetime64("NaT"), "pandas NA", "pandas NaT"]


@pytest.mark.parametrize("gap", MISSING, ids=str)
def test_a_missing_label_client_or_group_is_refused_with_its_rows(sites, fitted, gap):
    if str(gap).startswith("pandas"):
        pd = pytest.importorskip("pandas")
        gap = pd.NA if gap == "pandas NA" else pd.NaT
    X, y, site = sites
    clf = APFLClassifier(**SMALL)

    def with_gaps(values: np.ndarray) -> list[object]:
        return [gap if row in (3, 7) else value for row, value in enumerate(values.tolist())]

    rows = r"^2 of 400 {} are missing \(rows 3, 7, counted from 0\)"
    for as_given in (list, tuple, lambda values: np.array(values, dtype=object)):
        labels, clients, groups = (as_given(with_gaps(values)) for values in (y, NAMES[site], np.arange(400) // 2))
        for call in (clf.fit, clf.partial_fit):
            with pytest.raises(InputError, match=rows.format("labels")):
                call(X, labels)
            with pytest.raises(InputError, match=rows.format("clients")):
                call(X, y, clients=clients)
            with pytest.raises(InputError, match=rows.format("groups")):
                call(X, y, groups=groups)
        for call in (fitted.predict, fitted.predict_proba, fitted.decision_function):
            with pytest.raises(InputError, match=rows.format("clients")):
                call(X, clients=clients)
        with pytest.raises(InputError, match=rows.format("labels")):
            fitted.score(X, labels, clients=NAMES[site])
    with pytest.raises(InputError, match="cannot name a client"):
        fitted.add_client(gap, X, y)
    if gap is not None:  # None names nobody
        with pytest.raises(InputError, match="400 of 400 clients are missing"):
            fitted.predict(X, clients=gap)
