"""The scikit-learn face."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from apfl import APFLClassifier, InputError
from apfl.data.federation import Shard
from apfl.maths import leaveout, refine
from apfl.methods import load_method
from apfl.models.file import about, load_model, read

SMALL = {"d_primary": 96}
# Maps that no rows decide: landmarks of the federation are drawn from the first ones, and stay.
FREE = {
    "random": {**SMALL, "map": "random", "d_refinement": 64},
    "landmarks": {**SMALL, "map": "landmarks", "landmarks": "free"},
}


# With given maps and settings it passes (test_estimator_weights.py). Otherwise rows as they are, whatever they weigh,
# make the normalisation, the landmarks and, left out, the settings.
NOT_EQUIVALENT = {
    "check_sample_weight_equivalence_on_dense_data": "maps and settings are chosen by rows, not by weights"
}


@parametrize_with_checks(
    [APFLClassifier(), APFLClassifier(map="landmarks", d_primary=32)],
    expected_failed_checks=lambda estimator: NOT_EQUIVALENT,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def sites() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Digits at three sites that differ in labels."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    preferred = np.digitize(y, [3, 7])
    site = np.where(rng.random(len(y)) < 0.8, preferred, rng.integers(3, size=len(y)))
    return X[:700], y[:700], np.array(["a", "b", "c"])[site[:700]]


def same(one: APFLClassifier, other: APFLClassifier, X: np.ndarray, clients: np.ndarray) -> None:
    assert sorted(one.clients_) == sorted(other.clients_)
    a, b = one.decision_function(X, clients), other.decision_function(X, clients)
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(one.primary_, other.primary_, rtol=1e-9, atol=1e-9)
    # T is found by a bounded search that stops at 1e-5 in log T.
    np.testing.assert_allclose(one.predict_proba(X, clients), other.predict_proba(X, clients), atol=1e-3)


@pytest.mark.parametrize("kind", ["random", "landmarks"])
def test_it_is_the_method_apfl(sites, kind):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL, map=kind, random_state=3).fit(X, y, clients=clients)
    shards = [Shard(torch.from_numpy(X[clients == k]), torch.from_numpy(y[clients == k])) for k in "abc"]
    (only,) = load_method("apfl", **SMALL, map=kind, sketch=0, bits=0).rounds(shards, 10, 3)
    for k, model in zip("abc", only.models, strict=True):
        rows = X[clients == k]
        np.testing.assert_allclose(
            clf.decision_function(rows, [k] * len(rows)), model.scores(torch.from_numpy(rows)), rtol=1e-9, atol=1e-9
        )


@pytest.mark.filterwarnings("ignore:no client 'b'; have")
@pytest.mark.parametrize("settings", FREE.values(), ids=FREE)
def test_removing_and_adding_a_client_is_exact(sites, settings):
    X, y, clients = sites
    settings = {**settings, "normalise": "row"}
    everyone = APFLClassifier(**settings).fit(X, y, clients=clients)
    without = APFLClassifier(**settings).fit(X[clients != "b"], y[clients != "b"], clients=clients[clients != "b"])
    own = clients == "b"
    same(clone(everyone).fit(X, y, clients=clients).remove_client("b"), without, X, clients)
    same(without.add_client("b", X[own], y[own]), everyone, X, clients)


@pytest.mark.parametrize("settings", FREE.values(), ids=FREE)
@pytest.mark.parametrize("normalise", ["row", "none"])
def test_partial_fit_equals_fit(sites, normalise, settings):
    X, y, clients = sites
    whole = APFLClassifier(**settings, normalise=normalise).fit(X, y, clients=clients)
    parts = APFLClassifier(**settings, normalise=normalise)
    for rows in np.array_split(np.arange(len(y)), 4):
        parts.partial_fit(X[rows], y[rows], classes=range(10), clients=clients[rows])
    same(parts, whole, X, clients)


@pytest.mark.filterwarnings("ignore:no client 'b'; have")
def test_without_kept_rows_a_leaver_brings_its_own(sites):
    X, y, clients = sites
    own, others = clients == "b", clients != "b"
    clf = APFLClassifier(**FREE["landmarks"], normalise="row", keep_rows=False).fit(X, y, clients=clients)
    with pytest.raises(InputError, match="not kept"):
        clf.remove_client("b")
    with pytest.raises(InputError, match="exactly those"):
        clf.remove_client("b", X[own][1:], y[own][1:])
    with pytest.raises(InputError, match="remove it and add it again"):
        clf.partial_fit(X[own], y[own], clients=clients[own])
    before = clf.decision_function(X[others], clients[others])
    clf.remove_client("b", X[own][::-1], y[own][::-1])  # in any order
    np.testing.assert_array_equal(clf.decision_function(X[others], clients[others]), before)  # until they refit
    clf.refit(X[others], y[others], clients=clients[others])
    never = APFLClassifier(**FREE["landmarks"], normalise="row").fit(X[others], y[others], clients=clients[others])
    same(clf, never, X, clients)


def test_an_unknown_client_gets_the_primary_alone(sites):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL, unknown="shared").fit(X, y, clients=clients)
    primary_alone = APFLClassifier(**SMALL, balance=0.0, tau=0.0).fit(X, y, clients=clients)
    new = ["new"] * len(y)
    alone = primary_alone.decision_function(X, clients)
    np.testing.assert_allclose(clf.decision_function(X, new), alone, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(clf.decision_function(X), clf.decision_function(X, new))  # nobody named: unknown
    assert not np.allclose(clf.decision_function(X, clients), clf.decision_function(X, new))


def test_personal_models_are_better_at_home(sites):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL).fit(X[:500], y[:500], clients=clients[:500])
    at_home = clf.score(X[500:], y[500:], clients=clients[500:])
    neighbour = {"a": "b", "b": "c", "c": "a"}
    abroad = clf.score(X[500:], y[500:], clients=[neighbour[site] for site in clients[500:]])
    assert at_home > abroad


def test_probabilities_are_calibrated_by_left_out_scores(sites):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL).fit(X[:500], y[:500], clients=clients[:500])
    chosen = clf.predict_proba(X[500:], clients[500:])
    np.testing.assert_allclose(chosen.sum(1), 1)
    scores = clf.decision_function(X[500:], clients[500:])
    assert np.array_equal(chosen.argmax(1), scores.argmax(1))

    def loss(temperature: float) -> float:
        scaled = np.exp(scores / temperature)
        return log_loss(y[500:], scaled / scaled.sum(1, keepdims=True), labels=range(10))

    # New rows agree with the choice made on left-out rows: neither half nor double the temperature is better.
    temperature = clf.model("a").temperature
    assert loss(temperature) < min(loss(temperature / 2), loss(temperature * 2))


def test_groups_are_left_out_together(sites):
    """Every row twice, all but equal: leaving one out leaves its twin in, unless they are one group."""
    X, y, _ = sites
    X, y = np.repeat(X[:150], 2, axis=0), np.repeat(y[:150], 2)
    X = X + 1e-6 * np.random.default_rng(0).standard_normal(X.shape)  # equal rows leave together anyway
    fixed = {
        **SMALL,
        "normalise": "root",
        "weight": 1.0,
        "gamma": 0.01,
        "beta": 1.0,
        "balance": 0.5,
        "tau": 0.0,
        "refinement": "in-sample",
    }
    blind = APFLClassifier(**fixed).fit(X, y)
    aware = APFLClassifier(**fixed).fit(X, y, groups=np.arange(300) // 2)
    np.testing.assert_allclose(blind.decision_function(X), aware.decision_function(X))  # the fit is the same
    assert blind.model().temperature < aware.model().temperature  # twins make left-out scores look too sure


def test_a_client_model_can_be_saved(sites, tmp_path):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL).fit(X, y.astype(str), clients=clients)
    clf.model("a").save(tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors")
    rows = X[clients == "a"]
    np.testing.assert_allclose(loaded.scores(torch.from_numpy(rows)), clf.decision_function(rows, ["a"] * len(rows)))
    assert list(loaded.class_names) == list(clf.classes_)


def test_pipeline_and_grid_search_route_clients(sites):
    X, y, clients = sites
    with sklearn.config_context(enable_metadata_routing=True):
        clf = APFLClassifier(**SMALL).set_fit_request(clients=True, groups=False).set_score_request(clients=True)
        search = GridSearchCV(
            make_pipeline(StandardScaler(), clf), {"apflclassifier__balance": [0.0, 0.5]}, cv=GroupKFold(2)
        )
        search.fit(X, y, clients=clients, groups=np.arange(len(y)) // 5)
        assert search.score(X, y, clients=clients) > 0.9
        assert search.best_estimator_[-1].clients_ == list(dict.fromkeys(clients.tolist()))


def test_bad_input_is_refused(sites):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL).fit(X, y, clients=clients)
    for call, message in [
        (lambda: clf.add_client("a", X, y), "already there"),
        (lambda: clf.remove_client("z"), "have: "),
        (lambda: clf.partial_fit(X[:3], [0, 1, 77]), "not among the classes"),
        (lambda: clf.predict(X, clients[:5]), "5 clients for 700 rows"),
        (lambda: clf.fit(X, y, groups=[1, 2]), "2 groups for 700 rows"),
        (lambda: clf.refit(X, y, clients=["z"] * 700), "no client 'z'"),
        (lambda: APFLClassifier(gamma=0.0).fit(X, y), "greater than 0"),
        (lambda: APFLClassifier(beta=-1.0).fit(X, y), "greater than 0"),
        (lambda: APFLClassifier(activations="rellu").fit(X, y), "allowed: 'relu'"),
        (lambda: APFLClassifier(normalise="rows").fit(X, y), "'row'"),
        (lambda: APFLClassifier(**SMALL).fit(X, y).remove_client("alone"), "the only one"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


def test_what_fails_leaves_the_classifier_as_it_was(sites):
    X, y, clients = sites
    clf = APFLClassifier(**SMALL).fit(X, y, clients=clients)
    before = clf.decision_function(X, clients)
    own = clients == "a"

    def broken_settings() -> None:
        clf.set_params(gamma=-1.0)
        try:
            clf.remove_client("a")
        finally:
            clf.set_params(gamma="auto")

    for call in (
        lambda: clf.partial_fit(X[own], y[own], clients=clients[own], groups=y[own]),  # its first rows had no groups
        lambda: clf.fit(X[:50], y[:50] % 2, clients=clients[:3]),
        lambda: clf.fit(X[:1], y[:1]),
        lambda: clf.partial_fit(X[:, :5], y, clients=clients),
        broken_settings,
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
        assert clf.statistics_.n_samples == len(y)
        assert sorted(clf.clients_) == ["a", "b", "c"]
        np.testing.assert_array_equal(clf.decision_function(X, clients), before)


def test_widths_that_are_auto_stay_what_the_first_fit_made_them(sites):
    """So leaving is exact for the maps there are, not for those a smaller federation would have drawn."""
    X, y, clients = sites
    others = clients != "b"
    given = {"map": "landmarks", "landmarks": "free", "normalise": "row"}
    left = APFLClassifier(**given).fit(X, y, clients=clients).remove_client("b")
    assert left.primary_.shape[0] == 512  # of 700 rows
    smaller = APFLClassifier(**given).fit(X[others], y[others], clients=clients[others])
    assert smaller.primary_.shape[0] == 256
    same_width = APFLClassifier(d_primary=512, **given).fit(X[others], y[others], clients=clients[others])
    np.testing.assert_allclose(left.primary_, same_width.primary_, rtol=1e-7, atol=1e-9)  # small gamma: condition 1e4


def test_the_left_out_accuracy_counts_the_rows_it_is_about(sites):
    X, y, clients = sites
    new = clients == "b"
    clf = APFLClassifier(**SMALL, keep_rows=False).fit(X[~new], y[~new], clients=clients[~new])
    clf.add_client("b", X[new], y[new])
    assert 0.8 < clf.chosen_["left_out_accuracy"] <= 1


def test_clients_must_have_names(sites):
    X, y, _ = sites
    with pytest.raises(InputError, match="cannot name a client"):
        APFLClassifier(**SMALL).fit(X, y, clients=[["a", "b"]] * len(y))


@pytest.mark.parametrize("settings", [{}, {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.1}])
def test_a_client_is_decomposed_once(sites, monkeypatch, settings):
    """For the hits and for the temperatures together."""
    X, y, clients = sites
    decomposed = []

    def counted(psi: torch.Tensor, least: float = 0.0) -> leaveout.HatBasis:
        decomposed.append(len(psi))  # clients of like sizes at once
        return leaveout.hat_basis(psi, least)

    monkeypatch.setattr(refine, "hat_of", counted)
    APFLClassifier(d_primary=64, normalise="row", **settings).fit(X[:500], y[:500], clients=clients[:500])
    assert sum(decomposed) == len(np.unique(clients[:500]))


@pytest.mark.parametrize("removed", [{"refinement": "cross-fitted"}, {"scope": "shrunk"}])
def test_removed_options_are_refused(sites, removed):
    X, y, clients = sites
    with pytest.raises(InputError, match="was removed"):
        APFLClassifier(**removed).fit(X, y, clients=clients)
    given = APFLClassifier(d_primary=64, refinement="in-sample").fit(X[:200], y[:200], clients=clients[:200])
    default = APFLClassifier(d_primary=64).fit(X[:200], y[:200], clients=clients[:200])
    np.testing.assert_array_equal(*(fit.decision_function(X, clients) for fit in (given, default)))


def test_a_saved_model_says_whose_it_is_also_after_it_was_loaded(tmp_path):
    rng = np.random.default_rng(0)
    X, clients = rng.normal(size=(60, 4)), np.array(["north", "south"])[np.arange(60) % 2]
    fitted = APFLClassifier(**SMALL).fit(X, X[:, 0] > 0, clients=clients)
    fitted.model("south").save(tmp_path / "a.safetensors")
    load_model(tmp_path / "a.safetensors").save(tmp_path / "b.safetensors")
    assert about(read(tmp_path / "b.safetensors")) == {"client": "south"}
