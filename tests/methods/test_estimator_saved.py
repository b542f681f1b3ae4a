"""The classifier in a folder and on the Hub: what was saved predicts the same, and nothing of the rows goes along."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from apfl import APFLClassifier, InputError, load_model
from tests.models.fake_hub import hub  # skips without the extra hub

__all__ = ["hub"]  # a fixture

SMALL = {"d_primary": 24}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 5))
Y = np.array(["fox", "owl", "elk"])[(X[:, 0] > 0) + (X[:, 1] > 0.5).astype(int)]
SITES = np.array(["north", "south", "west"])[np.arange(90) % 3]


@pytest.fixture(scope="module", params=["random", "landmarks"])
def fitted(request: pytest.FixtureRequest) -> APFLClassifier:
    return APFLClassifier(**SMALL, map=request.param, unknown="shared").fit(X, Y, clients=SITES)


def same(one: APFLClassifier, other: APFLClassifier, clients: object) -> None:
    for which in ("predict", "decision_function", "predict_proba"):
        np.testing.assert_array_equal(getattr(one, which)(X, clients), getattr(other, which)(X, clients))


def test_what_was_loaded_predicts_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "clf")
    loaded = APFLClassifier.load(tmp_path / "clf")
    same(loaded, fitted, SITES)
    same(loaded, fitted, "nobody")
    assert loaded.clients_ == fitted.clients_
    assert loaded.get_params() == fitted.get_params()
    assert loaded.chosen_ == {name: value for name, value in fitted.chosen_.items() if not isinstance(value, dict)}
    same(pickle.loads(pickle.dumps(loaded)), fitted, SITES)
    assert loaded.fit(X, Y, clients=SITES).statistics_.n_samples == 90  # it can be fitted anew


@pytest.mark.parametrize("classes", [np.arange(3), np.array([0.0, 1.0, 2.0]), np.array([-5, 7, 2**40])])
@pytest.mark.parametrize("clients", [SITES, np.arange(90) % 3, SITES == "north", (np.arange(90) % 3) / 2])
def test_classes_and_clients_keep_their_types(classes, clients, tmp_path):
    fitted = APFLClassifier(**SMALL).fit(X, classes[np.arange(90) % 3], clients=clients)
    fitted.save(tmp_path / "clf")
    loaded = APFLClassifier.load(tmp_path / "clf")
    assert [repr(each) for each in loaded.clients_] == [repr(each) for each in fitted.clients_]
    assert loaded.classes_.dtype == fitted.classes_.dtype
    same(loaded, fitted, clients)


def test_columns_keep_their_names_and_settings_their_values(tmp_path):
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=list("abcde")).assign(site=SITES)
    settings = {
        **SMALL,
        "client_column": "site",
        "map": "random",
        "activations": ("tanh", "relu"),
        "normalise": "columns",
    }
    fitted = APFLClassifier(**settings, random_state=np.random.RandomState(1)).fit(table, Y)
    fitted.save(tmp_path / "clf")
    loaded = APFLClassifier.load(tmp_path / "clf")
    assert loaded.activations == ("tanh", "relu")
    assert list(loaded.feature_names_in_) == [*"abcde", "site"]
    np.testing.assert_array_equal(loaded.decision_function(table), fitted.decision_function(table))
    assert loaded.model("west").predict(table[list("edcba")]).tolist() == fitted.model("west").predict(table).tolist()
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(table.rename(columns={"a": "z"}))


def test_nobody_joins_or_leaves_what_was_loaded(fitted, tmp_path):
    fitted.save(tmp_path / "clf")
    loaded = APFLClassifier.load(tmp_path / "clf")
    for call in (
        lambda: loaded.partial_fit(X, Y, clients=SITES),
        lambda: loaded.add_client("east", X, Y),
        lambda: loaded.remove_client("north"),
        lambda: loaded.refit(X, Y, clients=SITES),
    ):
        with pytest.raises(InputError, match=r"no sums and no rows: nobody can join or leave\. Fit it anew"):
            call()
    assert not hasattr(loaded, "statistics_")
    same(loaded, fitted, SITES)


def test_a_file_of_the_folder_is_a_model_of_its_own(fitted, tmp_path):
    fitted.save(tmp_path / "clf", clients=["south"])
    assert sorted(path.name for path in (tmp_path / "clf").iterdir()) == [
        "classifier.json", "client-0-south.safetensors", "shared.safetensors",
    ]  # fmt: skip
    model = load_model(tmp_path / "clf" / "client-0-south.safetensors")
    assert model.predict(X).tolist() == fitted.predict(X, "south").tolist()
    loaded = APFLClassifier.load(tmp_path / "clf")
    assert loaded.clients_ == ["south"]
    same(loaded, fitted, "south")
    np.testing.assert_array_equal(loaded.predict(X, "north"), fitted.predict(X, "nobody"))


def test_a_second_save_replaces_the_first(fitted, tmp_path):
    fitted.save(tmp_path / "clf")
    fitted.save(tmp_path / "clf", clients=["west"])
    assert [path.name for path in (tmp_path / "clf").glob("client-*")] == ["client-0-west.safetensors"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(InputError, match="is not empty and holds no classifier"):
        fitted.save(tmp_path / "other")


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ("north", "clients='north' given; give 'all' or a list"),
        (["nroth"], r"no client 'nroth' \(did you mean 'north'"),
    ],
)
def test_clients_to_save_must_be_there(fitted, tmp_path, clients, message):
    with pytest.raises(InputError, match=message):
        fitted.save(tmp_path / "clf", clients=clients)
    assert not (tmp_path / "clf").exists()


def test_a_client_that_json_cannot_name_is_refused(tmp_path):
    clients = [("a", 1)] * 45 + [("b", 2)] * 45
    named = np.fromiter(clients, object)
    with pytest.raises(InputError, match=r"client \('a', 1\) is tuple; only text and numbers can be saved"):
        APFLClassifier(**SMALL).fit(X, Y, clients=named).save(tmp_path / "clf")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index.pop("classes"), "is damaged"),
        (lambda index: index.update(params={"depth": 3}), "is damaged"),
        (lambda index: index.update(version=9), "format version 9; this apfl reads version 1"),
        (lambda index: index.update(format="x"), "is not the index of an APFLClassifier"),
        (lambda index: index["clients"][0].__setitem__(1, "../../secret.safetensors"), "which is not in its folder"),
    ],
)
def test_a_damaged_folder_is_refused(fitted, tmp_path, damage, message):
    fitted.save(tmp_path / "clf")
    path = tmp_path / "clf" / "classifier.json"
    index = json.loads(path.read_text())
    damage(index)
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        APFLClassifier.load(tmp_path / "clf")
    path.write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        APFLClassifier.load(tmp_path / "clf")
    with pytest.raises(InputError, match=r"there is no .*classifier\.json"):
        APFLClassifier.load(tmp_path)


def test_the_shared_stream_alone_goes_to_the_hub_unless_clients_are_named(fitted, hub, tmp_path):
    with pytest.warns(UserWarning, match="me/clf will tell whoever may read this private repository") as said:
        fitted.push_to_hub("me/clf", data="three wards", metrics={"balanced accuracy": 0.8})
    assert [Path(each.filename).name for each in said] == [Path(__file__).name]  # it points at the caller
    assert "client's own rows" not in str(said[0].message)
    there = hub.repositories["me/clf"].files
    assert sorted(there) == ["README.md", "classifier.json", "shared.safetensors"]
    card = there["README.md"].decode()
    for part in (
        "| data | three wards |", "| rows | 90 |", "| clients behind the shared stream | 3 |",
        "| balanced accuracy | 0.8 |",
        "| clients whose models are here | none: the shared stream alone |", "no differential privacy",
        "gamma, as chosen",
    ):  # fmt: skip
        assert part in card, part
    assert not [name for name in ("north", "south", "west") if name in card + there["classifier.json"].decode()]
    loaded = APFLClassifier.from_pretrained("me/clf", cache_dir=tmp_path)
    assert loaded.clients_ == []
    np.testing.assert_array_equal(loaded.predict(X, "anyone"), fitted.predict(X, "anyone"))


def test_named_clients_go_along_and_come_back(fitted, hub, tmp_path):
    with pytest.warns(UserWarning, match=r"the name of its client \(west\).*weights fitted to the client's own rows"):
        fitted.push_to_hub("me/clf", clients=["west"])
    loaded = APFLClassifier.from_pretrained("me/clf", cache_dir=tmp_path)
    assert loaded.clients_ == ["west"]
    same(loaded, fitted, "west")
