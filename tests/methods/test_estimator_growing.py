"""Rows in pieces, clients with new classes, and what a client's model remembers."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.datasets import load_digits

from apfl import APFLClassifier, InputError
from apfl.maths.normalise import Normalise

# With every setting given, and a condition that leaves nine digits.
FIXED = {"d_primary": 64, "gamma": 1.0, "beta": 1.0, "balance": 0.7, "tau": 0.1, "normalise": "row"}
# Maps that no rows decide: landmarks of the federation are drawn from the first ones.
MAPS = {"random": {"map": "random", "d_refinement": 48}, "landmarks": {"map": "landmarks", "landmarks": "free"}}


@pytest.fixture(params=MAPS)
def fixed(request: pytest.FixtureRequest) -> dict[str, object]:
    return {**FIXED, **MAPS[request.param]}


@pytest.fixture(scope="module")
def sites() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    X, y = load_digits(return_X_y=True)
    X, y = X[:300], y[:300]
    return X, y, np.array(["a", "b", "c"])[np.random.default_rng(0).integers(3, size=len(y))]


def same(one: APFLClassifier, other: APFLClassifier, X: np.ndarray, clients: np.ndarray) -> None:
    assert one.classes_.tolist() == other.classes_.tolist()
    assert sorted(one.clients_) == sorted(other.clients_)
    for which in ("decision_function", "predict_proba"):
        # A temperature comes from a bounded search that stops at 1e-5 in log T.
        tolerance = 1e-9 if which == "decision_function" else 1e-3
        a, b = (getattr(each, which)(X, clients) for each in (one, other))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_pieces_in_any_order_and_size_give_what_one_fit_gives(sites, fixed):
    X, y, clients = sites
    whole = APFLClassifier(**fixed).fit(X, y, clients=clients)
    for seed, n_pieces in ((0, 2), (1, 7)):
        order = np.random.default_rng(seed).permutation(len(y))
        parts = APFLClassifier(**fixed)
        for rows in np.array_split(order, n_pieces):
            parts.partial_fit(X[rows], y[rows], classes=range(10), clients=clients[rows])
        same(parts, whole, X, clients)


@pytest.mark.parametrize("kind", MAPS)
def test_every_call_chooses_open_settings_from_all_rows_so_far(sites, kind):
    X, y, clients = sites
    given = {"d_primary": 64, "normalise": "row", **MAPS[kind]}
    whole = APFLClassifier(**given).fit(X, y, clients=clients)
    parts = APFLClassifier(**given)
    for rows in (slice(0, 40), slice(40, None)):
        parts.partial_fit(X[rows], y[rows], classes=range(10), clients=clients[rows])
    chosen = ("gamma", "beta", "balance", "tau")
    assert [parts.chosen_[each] for each in chosen] == pytest.approx([whole.chosen_[each] for each in chosen], rel=1e-9)


@pytest.mark.parametrize("kind", ["random", "landmarks"])
def test_the_first_call_fixes_widths_and_normalisation_that_are_auto(sites, kind):
    X, y, clients = sites
    parts = APFLClassifier(map=kind).partial_fit(X[:30], y[:30], classes=range(10), clients=clients[:30])
    first = parts.model("a")
    parts.partial_fit(X[30:], y[30:], clients=clients[30:])
    of = "primary_map" if kind == "random" else "feature_map"
    assert getattr(parts.model("a"), of).fingerprint == getattr(first, of).fingerprint
    assert parts.model("a").normaliser is first.normaliser


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("new", [[0, 5], [9], [2, 3, 4]])
def test_a_client_with_new_classes_is_as_if_they_had_been_known(sites, new, text, fixed):
    """Also if they come first, last or between the others in the order of classes."""
    X, y, clients = sites
    y = y.astype(str) if text else y
    late = (clients == "c") | np.isin(y, np.array(new, y.dtype))
    clients = np.where(late, "c", np.where(clients == "c", "a", clients))
    grown = APFLClassifier(**fixed).fit(X[~late], y[~late], clients=clients[~late])
    assert len(grown.classes_) == 10 - len(new)
    grown.add_client("c", X[late], y[late])
    same(grown, APFLClassifier(**fixed).fit(X, y, clients=clients), X, clients)
    kept = grown.remove_client("c")
    with_classes = APFLClassifier(**fixed).partial_fit(X[~late], y[~late], classes=np.unique(y), clients=clients[~late])
    same(kept, with_classes, X[~late], clients[~late])


def test_clients_without_kept_rows_rule_new_classes_out_until_they_refit(sites, fixed):
    X, y, clients = sites
    late = y == 4
    clients = np.where(late, "new", clients)
    grown = APFLClassifier(**fixed, keep_rows=False).fit(X[~late], y[~late], clients=clients[~late])
    before = grown.decision_function(X, "a")
    grown.add_client("new", X[late], y[late])
    after = grown.decision_function(X, "a")
    np.testing.assert_allclose(np.delete(after, 4, 1), before, rtol=1e-9, atol=1e-12)
    assert (grown.predict(X, "a") != 4).all()
    assert (grown.predict_proba(X, "a")[:, 4] == 0).all()
    grown.refit(X, y, clients=clients)  # the rows are known again by their digests, whatever their classes are numbered
    same(grown, APFLClassifier(**fixed).fit(X, y, clients=clients), X, clients)
    own = clients == "b"
    assert "b" not in grown.remove_client("b", X[own], y[own]).clients_


@pytest.mark.parametrize("how", get_args(Normalise))
def test_every_normalisation_of_the_method_is_one_of_the_estimator(sites, how, fixed):
    X, y, clients = sites
    clf = APFLClassifier(**{**fixed, "normalise": how}).fit(X, y, clients=clients)
    assert clf.model("a").normaliser.how == how
    assert clf.score(X, y, clients=clients) > 0.8


def test_labels_of_another_type_are_no_new_classes(sites, fixed):
    X, y, clients = sites
    clf = APFLClassifier(**fixed).fit(X, y, clients=clients)
    with pytest.raises(InputError, match="labels such as '0' given for classes such as 0; give both as text or both"):
        clf.add_client("new", X, y.astype(str))
    with pytest.raises(InputError, match=r"label 77 is not among the classes \[0, .*\(add_client\)"):
        clf.partial_fit(X[:2], [0, 77], clients="a")
    with pytest.raises(ValueError, match="Unknown label type"):
        clf.add_client("new", X, y + 0.5)
    assert clf.classes_.tolist() == list(range(10))


def test_a_model_finds_the_features_of_the_estimator_by_name(sites, tmp_path, fixed):
    pd = pytest.importorskip("pandas")
    X, y, clients = sites
    table = pd.DataFrame(X[:, :30], columns=[f"pixel {i}" for i in range(30)])
    mixed = table.assign(site=clients)[["site", *reversed(table.columns)]]
    plain = APFLClassifier(**fixed).fit(table, y, clients=clients)
    assert plain.feature_names_in_.tolist() == list(table.columns)
    expected = plain.predict(table, "b").astype(str)
    np.testing.assert_array_equal(plain.model("b").predict(mixed), expected)
    for column in ("site", 0, -31):
        model = APFLClassifier(**fixed, client_column=column).fit(mixed, y).model("b")
        assert model.about == {"client": "b", "feature_names": list(reversed(table.columns))}
    with pytest.raises(InputError, match="no column in the rows to predict 'pixel 3'"):
        plain.model("b").predict(mixed.drop(columns="pixel 3"))
    with pytest.raises(ValueError, match="feature names should match"):
        plain.predict(table[table.columns[::-1]], "b")


def test_sparse_rows_are_refused_with_the_remedy(sites, fixed):
    X, y, clients = sites
    sparse = csr_array(X)
    fitted = APFLClassifier(**fixed).fit(X, y, clients=clients)
    for call in (
        lambda: APFLClassifier(**fixed).fit(sparse, y),
        lambda: APFLClassifier(**fixed, client_column=0).fit(sparse, y),
        lambda: fitted.partial_fit(sparse, y, clients=clients),
        lambda: fitted.add_client("new", sparse, y),
        lambda: fitted.predict(sparse, clients),
    ):
        with pytest.raises(TypeError, match=r"dense data is required. Use '.toarray\(\)'"):
            call()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gamma": -1}, "apfl.gamma=-1 given; allowed: a number greater than 0 or 'auto'"),
        ({"d_primary": 0}, "apfl.d_primary=0 given; allowed: a number greater than 0 or 'auto'"),
        ({"intercept": "x"}, "apfl.intercept='x' given; allowed: true or false"),
        ({"scope": "all"}, "apfl.scope='all' given; allowed: 'federation' or 'client'"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(sites, setting, message, fixed):
    X, y, _ = sites
    with pytest.raises(InputError) as refused:
        APFLClassifier(**{**fixed, **setting}).fit(X, y)
    assert str(refused.value) == message


def test_representations(sites):
    X, y, clients = sites
    clf = APFLClassifier(balance=0.5, client_column=None).fit(X, y, clients=clients)
    assert repr(clf) == "APFLClassifier(balance=0.5)"
    assert "APFLClassifier" in clf._repr_html_()
    assert len(repr(clf.model("a"))) < 120
    assert len(repr(clf.statistics_)) < 120
