"""Rows in any form, and what a person sees of a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import apfl
from apfl.errors import InputError
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.maps import raw_map
from apfl.models.file import load_model, write
from apfl.models.landmark import LandmarkModel
from apfl.models.linear_head import LinearHead

NAMES = ("cat", "dog", "elk")
ROWS = np.array([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])


def models(folder) -> list:
    """A model of each kind that names the largest of three features, as files and back."""
    eye = torch.eye(3, dtype=torch.float64)
    of_each_kind = [
        LinearHead(torch.eye(3), torch.zeros(3), class_names=NAMES),
        apfl.DualStream(raw_map(3), eye, class_names=NAMES),
        LandmarkModel(LandmarkMap(torch.eye(3, dtype=torch.int8), torch.ones(3)), eye, class_names=NAMES),
    ]
    for k, model in enumerate(of_each_kind):
        write(model.container(), folder / f"{k}.safetensors")
    return [load_model(folder / f"{k}.safetensors") for k in range(3)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_form_of_rows_is_predicted(place, tmp_path):
    pandas = pytest.importorskip("pandas")
    model = models(tmp_path)[place]
    for rows in (ROWS, ROWS.astype(np.float32), ROWS.astype(int), ROWS.tolist(), pandas.DataFrame(ROWS)):
        assert model.predict(rows).tolist() == ["cat", "elk", "dog"]
    indices = model.predict(torch.from_numpy(ROWS).float())
    assert isinstance(indices, torch.Tensor)
    assert indices.tolist() == [0, 2, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_scores_and_probabilities_of_every_form_of_rows(place, tmp_path):
    pandas = pytest.importorskip("pandas")
    model = models(tmp_path)[place]
    tensor = torch.from_numpy(ROWS).float()
    expected = model.scores(tensor)
    for rows in (ROWS, ROWS.tolist(), pandas.DataFrame(ROWS)):
        torch.testing.assert_close(model.scores(rows), expected, rtol=0, atol=0)
        shares = model.predict_proba(rows)
        assert isinstance(shares, np.ndarray)
        np.testing.assert_allclose(shares, torch.softmax(expected.double(), 1), rtol=1e-12)
    assert isinstance(model.predict_proba(tensor), torch.Tensor)
    if not isinstance(model, LinearHead):
        halved = replace(model, temperature=0.5).predict_proba(ROWS)
        np.testing.assert_allclose(halved, torch.softmax(2 * expected, 1), rtol=1e-12)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_file_is_loaded_as_its_own_class_alone(place, tmp_path):
    model = models(tmp_path)[place]
    model.save(tmp_path / "m.safetensors")
    assert type(type(model).load(tmp_path / "m.safetensors")) is type(model)
    other = LinearHead if place else apfl.DualStream
    with pytest.raises(InputError, match=f"kind '{model.kind}' given where '{other.kind}' is needed"):
        other.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_features_are_found_in_a_frame_by_their_names(place, tmp_path):
    pandas = pytest.importorskip("pandas")
    told = {"client": "North", "feature_names": ["x", "y", "z"]}
    write(replace(models(tmp_path)[place], about=told).container(), tmp_path / "named.safetensors")
    model = load_model(tmp_path / "named.safetensors")
    assert model.about == told
    frame = pandas.DataFrame(ROWS, columns=["x", "y", "z"]).assign(site=["a", "b", "a"])
    assert model.predict(frame[["site", "z", "y", "x"]]).tolist() == ["cat", "elk", "dog"]
    assert model.predict(pandas.DataFrame(ROWS)).tolist() == ["cat", "elk", "dog"]  # no names: by place
    with pytest.raises(InputError, match=r"no column in the rows to predict 'y'\. \(have: site, x, z\)"):
        model.predict(frame[["site", "x", "z"]])


def test_without_names_arrays_give_indices():
    assert LinearHead(torch.eye(3), torch.zeros(3)).predict(ROWS).tolist() == [0, 2, 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_without_a_decision_has_no_name(place, tmp_path):
    model = models(tmp_path)[place]
    with pytest.warns(UserWarning, match=r"1 of 2 rows has no decision: row 1 \(every class has the same score\)"):
        assert model.predict(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])).tolist() == ["cat", ""]
    assert model.predict(torch.ones(1, 3)).tolist() == [-1]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS[0], r"ndarray of float64 with shape \(3,\) given; expected numbers with shape \(rows, features\)"),
        (np.array([["a", "b", "c"]]), r"with shape \(1, 3\) given; expected numbers"),
        (ROWS[:, :2], r"shape \(3, 2\) given; this model was made for \(n, 3\)"),
        ([[1.0, 2.0, 3.0], [4.0]], "list given that is no array .*; give rows of one length"),
        (ROWS * np.nan, "the rows to predict contain NaN or infinity"),
        (ROWS * 1e300, "the rows to predict contain NaN or infinity"),
    ],
)
def test_rows_that_cannot_be_predicted_are_refused(place, rows, says, tmp_path):
    with pytest.raises(InputError, match=says):
        models(tmp_path)[place].predict(rows)


def test_public_objects_are_shown_in_a_line(tmp_path):
    data = apfl.load_data(ROWS, NAMES, columns={"site": ["a", "b", "b"]})
    federation = apfl.federation(data, client_column="site")
    clients = federation.train
    last = list(apfl.load_method("afl").rounds(clients, 3, 0))[-1]
    statistics = apfl.statistics(torch.eye(2), torch.eye(2))
    shown = [repr(each) for each in (data, clients[1], federation, last, statistics, *models(tmp_path))]
    assert shown == [
        "Dataset('in memory', 3 rows, 3 features, 3 classes, columns site)",
        "Shard(2 rows, 3 features)",
        "Federation(2 clients: a, b; 3 training and 0 test rows, 3 features, 3 classes)",
        f"Round(1: 2 models, {last.bytes_up} bytes up, {last.bytes_down} down)",
        "Statistics(2 rows, width 2, 2 classes)",
        "LinearHead(weight (3, 3), 3 classes)",
        "DualStream(primary (3, 3), balance 0, 3 classes)",
        "LandmarkModel(3 landmarks, 3 classes)",
    ]
    assert repr(apfl.random_map(3, 8, "relu", seed=4)) == "FeatureMap(3 -> 8, relu, seed 4)"
