"""The refinement stream, left-out scores, and a model on disk."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from apfl.errors import InputError
from apfl.files import replacing
from apfl.maths.leaveout import LeftOut, fit_refinement, hat_basis, leverage_sketch, whiten
from apfl.maths.maps import FeatureMap, random_map, raw_map
from apfl.maths.normalise import moments, normaliser
from apfl.maths.ridge import factorise, one_hot, solve, statistics
from apfl.models.dual_stream import DualStream
from apfl.models.file import load_model, read, write
from tests.maths.test_ridge import augmented_lstsq, rows

ridges, widths = st.sampled_from([1e-3, 1.0, 50.0]), st.integers(1, 20)


@given(st.integers(1, 40), st.integers(1, 40), ridges, st.integers(0, 99))
def test_theorem_2_gradient_is_zero_primal_and_dual(n, d, beta, seed):
    psi, residual = rows(n, d, 3, seed)
    p = fit_refinement(psi, residual, beta)  # n < d is solved in dual form, n >= d in primal form
    gradient = psi.T @ (residual - psi @ p) - beta * p
    assert gradient.norm() <= 1e-9 * max(1.0, float((psi.T @ residual).norm()))
    torch.testing.assert_close(p, augmented_lstsq(psi, residual, beta), rtol=1e-8, atol=1e-10)  # 1e-3: condition ~ 1e5


@given(st.integers(1, 30), ridges, st.integers(0, 99))
def test_primal_equals_dual(n, beta, seed):
    psi, residual = rows(n, 17, 3, seed)
    primal = torch.linalg.solve(psi.T @ psi + beta * torch.eye(17, dtype=torch.float64), psi.T @ residual)
    dual = psi.T @ torch.linalg.solve(psi @ psi.T + beta * torch.eye(n, dtype=torch.float64), residual)
    # At beta = 1e-3 the larger form has condition 1e5, which rounding is multiplied by.
    torch.testing.assert_close(fit_refinement(psi, residual, beta), primal, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(fit_refinement(psi, residual, beta), dual, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("grouped", [False, True])
@given(
    n=st.integers(3, 14), others=st.integers(0, 12), d_primary=widths, d_refinement=widths, beta=ridges,
    seed=st.integers(0, 99),
)  # fmt: skip
def test_left_out_scores_equal_leaving_out_of_both_streams(grouped, n, others, d_primary, d_refinement, beta, seed):
    gamma, c = 0.7, 3
    phi, y = rows(n + others, d_primary, c, seed)
    psi, _ = rows(n, d_refinement, c, seed + 1)
    own, y_own = phi[:n], y[:n]
    groups = torch.arange(n) // 2 if grouped else None
    factor = factorise(statistics(phi, y), gamma)
    residual = y_own - own @ torch.cholesky_solve(phi.T @ y, factor)
    without = LeftOut(hat_basis(psi), whiten(own, factor), residual, groups)
    assume(without.clipped == 0)  # at 0.99, on purpose, for the sake of the sketch

    # The long way: take the rows out of both streams' data and fit everything again.
    def primary_without(out: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(n + others, dtype=torch.bool)
        keep[out] = False
        return augmented_lstsq(phi[keep], y[keep], gamma)

    parts = torch.arange(n).split(2 if grouped else 1)
    for out in parts:
        primary_again = primary_without(out)
        expected = y_own[out] - own[out] @ primary_again
        torch.testing.assert_close(without.primary[out], expected, rtol=1e-8, atol=1e-8)
        left = [part for part in parts if part is not out]
        targets = [y_own[part] - own[part] @ primary_again for part in left]
        again = psi[out] @ augmented_lstsq(psi[torch.cat(left)], torch.cat(targets), beta)
        torch.testing.assert_close(without.refinement(beta)[out], again, rtol=1e-8, atol=1e-8)


def test_the_leverage_sketch_converges_at_its_rate():
    """Relative spread sqrt(2 / m), whatever the rows."""
    phi, y = rows(400, 60, 3, 0)
    factor = factorise(statistics(phi, y), 2.0)
    exact = whiten(phi, factor).square().sum(1)
    for m in (32, 128, 512):
        errors = torch.stack(
            [(phi @ leverage_sketch(factor, m, seed)).square().sum(1) / exact - 1 for seed in range(40)]
        )
        # 40 sketches of 400 correlated rows: the spread itself is known to about a tenth.
        assert errors.std() == pytest.approx((2 / m) ** 0.5, rel=0.15)
        assert abs(float(errors.mean())) < 0.25 * (2 / m) ** 0.5  # unbiased


def example(refined: bool = True) -> tuple[DualStream, torch.Tensor]:
    features, y = rows(20, 6, 3, 0)
    primary_map, refinement_map = random_map(6, 9, seed=4, intercept=True), random_map(6, 7, "cosine", seed=5)
    normalise = normaliser("standardise", moments(features))
    primary = solve(statistics(primary_map(normalise(features)), y), 1.0)
    psi = refinement_map(normalise(features))
    refinement = fit_refinement(psi, y, 1.0)
    names = ["cat", "dog", "owl"]
    if not refined:
        return DualStream(primary_map, primary, normaliser=normalise, class_names=names), features
    return DualStream(primary_map, primary, refinement_map, refinement, 0.4, normalise, names, 0.2), features


@pytest.mark.parametrize("refined", [True, False])
def test_a_model_survives_the_disk(tmp_path, refined):
    model, features = example(refined)
    model.save(tmp_path / "model.safetensors")
    again = DualStream.load(tmp_path / "model.safetensors")
    assert torch.equal(again.scores(features), model.scores(features))
    assert torch.equal(again.predict(features), model.predict(features))
    for name in ("class_names", "temperature", "balance"):
        assert getattr(again, name) == getattr(model, name)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert torch.equal(load_model(tmp_path / "model.safetensors").scores(features), model.scores(features))


def test_scores_are_the_two_streams():
    model, features = example()
    z = model.normaliser(features)
    by_hand = model.primary_map(z) @ model.primary + 0.4 * model.refinement_map(z) @ model.refinement
    torch.testing.assert_close(model.scores(features), by_hand, rtol=1e-12, atol=1e-12)
    alone = dataclasses.replace(model, balance=0.0)
    torch.testing.assert_close(alone.scores(features), model.primary_map(z) @ model.primary, rtol=1e-12, atol=1e-12)


def test_shared_tensors_are_stored_once_and_checked(tmp_path):
    model, features = example()
    for k in (0, 1):
        write(model.container(), tmp_path / f"client-{k}.safetensors", shared=["primary"])
    (primary,) = tmp_path.glob("primary-*.safetensors")
    assert torch.equal(DualStream.load(tmp_path / "client-1.safetensors").scores(features), model.scores(features))
    save_file({"primary": model.primary + 1}, primary)
    with pytest.raises(InputError, match="hash differs"):
        read(tmp_path / "client-0.safetensors")
    primary.unlink()
    with pytest.raises(InputError, match="not beside it"):
        read(tmp_path / "client-0.safetensors")


def test_files_that_are_not_ours_are_refused(tmp_path):
    model, _ = example()
    good = tmp_path / "model.safetensors"
    model.save(good)
    truncated, foreign, later, missing = (tmp_path / name for name in ("truncated", "foreign", "later", "missing"))
    truncated.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated"):
        DualStream.load(truncated)
    save_file({"primary": torch.zeros(2)}, foreign)
    with pytest.raises(InputError, match="not an apfl model"):
        DualStream.load(foreign)
    save_file({"primary": torch.zeros(2)}, later, metadata={"format": "apfl", "version": "99"})
    with pytest.raises(InputError, match="format version 99"):
        DualStream.load(later)
    with pytest.raises(InputError, match="no file"):
        DualStream.load(missing)
    write(dataclasses.replace(model.container(), kind="strange"), later)
    with pytest.raises(InputError, match="strange"):
        load_model(later)


def test_a_map_that_comes_out_differently_is_refused(tmp_path):
    model, _ = example()
    container = model.container()
    container.settings["primary_map"]["fingerprint"] = "0" * 64
    write(container, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="comes out differently"):
        DualStream.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "spec",
    [random_map(5, 4, "tanh", 3), random_map(5, 4, "cosine", 3, scale=0.7), raw_map(5, intercept=True)],
)
def test_a_map_is_drawn_again_from_its_spec(spec: FeatureMap):
    features, _ = rows(4, 5, 2, 0)
    assert torch.equal(FeatureMap.from_spec(spec.spec())(features), spec(features))


def test_bad_features_and_ridges_are_refused():
    model, features = example()
    with pytest.raises(InputError, match=r"\(n, 6\)"):
        model.primary_map(features[:, :5])
    psi, y = rows(5, 4, 2, 0)
    with pytest.raises(InputError, match="greater than 0"):
        fit_refinement(psi, y, 0.0)
    psi[0, 0] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        fit_refinement(psi, y, 1.0)


def test_one_hot_counts():
    assert one_hot(torch.tensor([1, 1, 0]), 3).sum(0).tolist() == [1, 2, 0]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise a power cut may leave the name without the contents."""
    order, flush, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: order.append(os.fstat(handle).st_size) or flush(handle))
    monkeypatch.setattr(os, "replace", lambda old, new: order.append(new.name) or rename(old, new))
    with replacing(tmp_path / "record.json") as temporary:
        temporary.write_text("whole")
    assert order == [len("whole"), "record.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
