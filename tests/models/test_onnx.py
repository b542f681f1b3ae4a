"""A model as an ONNX file: onnxruntime gives the scores, probabilities and classes that the model gives.

The tolerance is that of `to_onnx`: 1e-9 of the largest score, 1e-6 with gelu (onnxruntime has erf in float32 alone).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import apfl
from apfl import APFLClassifier, DualStream, InputError, random_map
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.lifts import Buckets, Products
from apfl.maths.maps import ACTIVATIONS, raw_map
from apfl.maths.normalise import Normalise, described, normaliser
from apfl.models.landmark import LandmarkModel
from apfl.models.linear_head import LinearHead
from apfl.models.residual import ResidualBlocks
from tests.commands import here

onnx = pytest.importorskip("onnx", reason="needs the extra onnx: pip install 'apfl[onnx]'")
runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx: pip install 'apfl[onnx]'")

NORMALISE = get_args(Normalise)  # all there are
NAMES = ("cat", "dog", "elk")
ROWS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 5.0, 1e3, 1.0, 1.0])


def answers(model: Any, rows: Tensor, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class, scores and probabilities by onnxruntime."""
    model.to_onnx(folder / "model.onnx")
    session = runtime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == ["class", "scores", "probabilities"]
    found = session.run(None, {"features": rows.numpy()})
    return found[0], found[1], found[2]


def agree(model: Any, rows: Tensor, folder: Path, tolerance: float = 1e-9) -> np.ndarray:
    """Compare with the model in float64; returns the classes."""
    classes, scores, shares = answers(model, rows, folder)
    expected = model.scores(rows.double()).double().numpy()
    finite = expected[np.isfinite(expected)]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=tolerance * max(1, np.abs(finite).max(initial=0)))
    np.testing.assert_allclose(shares, model.predict_proba(rows.double()).numpy(), rtol=0, atol=10 * tolerance)
    indices = model.predict(rows.double()).tolist()
    names = indices if model.class_names is None else [[*model.class_names, ""][i] for i in indices]
    assert classes.tolist() == names
    return classes


def weights(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_streams(how: str, activation: str = "hardswish", intercept: bool = False) -> DualStream:
    normalise = normaliser(how, described(how, ROWS))
    maps = [random_map(normalise.width(6), d, activation, seed, intercept=intercept) for seed, d in enumerate((33, 20))]
    return DualStream(
        maps[0], weights(maps[0].width, 3), maps[1], weights(maps[1].width, 3), 0.7, normalise, NAMES,
        temperature=0.3, prior=weights(3),
    )  # fmt: skip


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("how", NORMALISE)
def test_two_streams_with_every_normalisation(how, intercept, tmp_path):
    model = two_streams(how, intercept=intercept)
    agree(model, ROWS, tmp_path)
    alone = replace(model, refinement=None, refinement_map=None, prior=None)
    agree(alone, ROWS, tmp_path)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, tmp_path):
    agree(two_streams("columns", activation), ROWS, tmp_path, 1e-6 if activation == "gelu" else 1e-9)


@pytest.mark.parametrize("how", NORMALISE)
def test_landmarks_with_every_normalisation(how, tmp_path):
    normalise = normaliser(how, described(how, ROWS))
    points = (40 * weights(25, normalise.width(6))).round().clamp(-127, 127).to(torch.int8)
    model = LandmarkModel(LandmarkMap(points, torch.ones(normalise.width(6))), weights(25, 3), normalise, NAMES)
    agree(model, ROWS, tmp_path)
    agree(replace(model, prior=weights(3), temperature=2.0), ROWS, tmp_path)


def test_a_row_that_is_a_landmark_or_its_opposite(tmp_path):
    """There the arccosine is worst, and float32 has three digits of it."""
    points = torch.eye(6, dtype=torch.int8)
    model = LandmarkModel(LandmarkMap(points, torch.ones(6)), weights(6, 3), normaliser("row"), NAMES)
    nearly = torch.eye(6) + 1e-4 * ROWS[:6] / 1e3
    agree(model, torch.cat([torch.eye(6), -torch.eye(6), nearly]), tmp_path)


def test_a_linear_head_with_all_its_parts(tmp_path):
    plain = LinearHead(weights(6, 3).float(), weights(3).float(), normaliser=normaliser("row"))
    # The head computes in its own float32, the graph in float64.
    agree(plain, ROWS, tmp_path, 1e-5)
    double = {"weight": weights(5, 3), "bias": weights(3), "base_weight": weights(8, 5), "base_bias": weights(5)}
    full = LinearHead(
        **double, offset=weights(5), unit=True, feature_map=random_map(6, 8, "tanh", 0), class_names=NAMES
    )
    agree(full, ROWS, tmp_path)
    ruled_out = replace(full, bias=torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))
    assert "elk" not in agree(ruled_out, ROWS, tmp_path)


@pytest.mark.parametrize("how", NORMALISE)
@pytest.mark.parametrize("lift", [Products, partial(Products, pairs=True), partial(Buckets, levels=3, bits=4)])
def test_a_head_on_products_or_buckets(how, lift, tmp_path):
    normalise = normaliser(how, described(how, ROWS))
    made = lift(normalise.width(6))
    model = LinearHead(weights(made.width, 3), weights(3), feature_map=made, normaliser=normalise, class_names=NAMES)
    agree(model, ROWS, tmp_path)
    assert [each.shape for each in answers(model, ROWS[:0], tmp_path)] == [(0,), (0, 3), (0, 3)]


@pytest.mark.parametrize("how", NORMALISE)
def test_residual_blocks(how, tmp_path):
    normalise = normaliser(how, described(how, ROWS))
    first, *maps = [
        random_map(n_in, 7, act, 3).like(weights(1))
        for n_in, act in ((normalise.width(6), "tanh"), (7, "tanh"), (7, "relu"))
    ]
    blocks = [weights(7, 7, seed=seed) for seed in (4, 5)]
    agree(ResidualBlocks(first, maps, blocks, weights(7, 3), weights(3), normalise, NAMES), ROWS, tmp_path)


@pytest.mark.parametrize("how", NORMALISE)
def test_rows_of_zeros_tiny_and_huge_rows_and_no_rows(how, tmp_path):
    rows = torch.cat([torch.zeros(2, 6), 1e-37 * torch.ones(1, 6), ROWS[:3]])
    if how in ("row", "root"):
        rows = torch.cat([rows, 1e37 * ROWS[:1].sign()])
    model = two_streams(how)
    classes = agree(model, rows, tmp_path)
    assert (classes[:2] == "").all() == (how in ("row", "root"))
    assert [each.shape for each in answers(model, rows[:0], tmp_path)] == [(0,), (0, 3), (0, 3)]


def test_rows_without_a_decision_have_no_class(tmp_path):
    model = DualStream(raw_map(2), torch.eye(2, dtype=torch.float64), normaliser=normaliser("none"))
    rows = torch.tensor([[1.0, 2.0], [3.0, 3.0], [torch.nan, 1.0], [torch.inf, 1.0], [0.0, 0.0]])
    classes, _, _ = answers(model, rows, tmp_path)
    assert classes.tolist() == model.predict(rows.double()).tolist() == [1, -1, -1, -1, -1]
    named = replace(model, class_names=("no", "yes"))
    assert answers(named, rows, tmp_path)[0].tolist() == ["yes", "", "", "", ""]
    single = DualStream(raw_map(2), torch.ones(2, 1, dtype=torch.float64), class_names=("only",))
    assert agree(single, torch.tensor([[1.0, 2.0]]), tmp_path).tolist() == ["only"]


def test_models_of_a_run_and_of_the_estimator(tmp_path):
    settings = {"apfl": {"map": "landmarks", "d_primary": 64, "d_refinement": 64}}
    found = apfl.run("digits", ["apfl", "fedncm", "local_head"], clients=3, seeds=1, settings=settings)
    digits = apfl.load_data("digits").features[:50]
    for name in ("apfl", "fedncm", "local_head"):
        # A head of float32 against float64; the weights of a landmark model are large, and so are its rounding errors.
        agree(found.model(name, 1), digits, tmp_path, 1e-7 if name == "apfl" else 1e-5)
    X, y = digits.numpy(), np.arange(50) % 3
    fitted = APFLClassifier(d_primary=32, d_refinement=32).fit(X, y, clients=y)
    classes, scores, shares = answers(fitted.model(1), digits, tmp_path)
    np.testing.assert_allclose(scores, fitted.decision_function(X, 1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(shares, fitted.predict_proba(X, 1), rtol=0, atol=1e-8)
    assert classes.tolist() == fitted.predict(X, 1).astype(str).tolist()


def test_the_file_says_what_the_model_says(tmp_path):
    model = replace(two_streams("row"), about={"client": "North", "feature_names": list("abcdef")}, temperature=None)
    model.to_onnx(tmp_path / "m.onnx")
    told = {each.key: each.value for each in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(told["class_names"]) == list(NAMES)
    assert json.loads(told["about"]) == model.about
    assert (told["kind"], told["temperature"]) == ("dual-stream", "none: probabilities are not calibrated")


def test_without_the_extra_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"onnx cannot be imported .*pip install 'apfl\[onnx\]'"):
        two_streams("row").to_onnx(tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_the_command_exports_by_the_ending_or_by_the_format(tmp_path, capsys):
    model = replace(two_streams("row"), about={"client": "North"})
    model.save(tmp_path / "m.safetensors")
    for target, options in (("m.onnx", ()), ("m.bin", ("--format", "onnx"))):
        assert here("export", tmp_path / "m.safetensors", tmp_path / target, *options) == 0
        assert "by the model of client North" in capsys.readouterr().err
        session = runtime.InferenceSession(tmp_path / target, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(
            session.run(["class"], {"features": ROWS.numpy()})[0], model.predict(ROWS.numpy())
        )
    assert here("export", tmp_path / "m.safetensors", tmp_path / "x.onnx", "--format", "safetensors") == 0
    assert apfl.load_model(tmp_path / "x.onnx").about == model.about
