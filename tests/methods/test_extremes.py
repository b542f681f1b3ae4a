"""Rows of zeros, of huge and of tiny numbers, constant columns: through every normalisation and method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from apfl import APFLClassifier
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.experiments.metrics import client_accuracies, metrics
from apfl.maths.maps import raw_map
from apfl.maths.normalise import Normaliser, check_features, moments, normaliser
from apfl.methods import Method, load_method, method_names
from apfl.models.dual_stream import DualStream
from apfl.models.linear_head import LinearHead
from apfl.models.undecided import undecided
from tests.methods.head_toys import final, one_thread  # noqa: F401
from tests.methods.test_methods import small

DTYPES = [torch.float32, torch.float64]
ZERO, HUGE, TINY = 3, 4, 5  # rows of every client
LANDMARKS = "apfl with landmarks"
NAMES = [*method_names(), LANDMARKS]


def method(name: str, **settings: object) -> Method:
    """A small method of this name, in one of the maps that it can have."""
    if name == LANDMARKS:
        return load_method("apfl", **small("apfl"), map="landmarks", **settings)
    return load_method(name, **small(name), **settings)


def clients(dtype: torch.dtype, *, extreme: bool, width: int = 20, n: int = 40) -> list[Shard]:
    """Three clouds, one constant column and one row of zeros; two rows scaled far up and down if ``extreme``."""
    rng = np.random.default_rng(0)
    centres = 4 * rng.normal(size=(3, width))
    shards = []
    for _ in range(3):
        labels = rng.integers(3, size=n)
        rows = centres[labels] + 0.3 * rng.normal(size=(n, width))
        rows[:, 5] = 7.0
        rows[ZERO] = 0
        if extreme:
            rows[HUGE] *= 1e30
            rows[TINY] *= 1e-30
        shards.append(Shard(torch.from_numpy(rows).to(dtype), torch.from_numpy(labels)))
    return shards


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 4, 16, 1000])
@pytest.mark.parametrize("how", ["row", "root"])
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-16, 1.0, 1e18, 1e30, 3e38])
def test_rows_of_any_size_come_out_at_one_length_and_zeros_stay_zeros(dtype, width, how, size):
    rows = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (3, width))) * size
    rows[1] = 0
    rows = rows.to(dtype)
    z = normaliser(how)(rows)
    assert not z[1].any()
    assert torch.equal(z[::2].sign(), rows[::2].sign())
    lengths = torch.linalg.vector_norm(z[::2].double(), dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, math.sqrt(width)), rtol=2e-6, atol=0)  # float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_rows_are_computed_as_ever_whatever_is_beside_them(dtype):
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 33))).to(dtype)
    plain = rows * (math.sqrt(33) / torch.linalg.vector_norm(rows, dim=1, keepdim=True))
    rows[2] = 0
    rows[4] *= 1e30
    ordinary = [0, 1, 3, 5]
    assert torch.equal(normaliser("row")(rows)[ordinary], plain[ordinary])
    torch.testing.assert_close(normaliser("row")(rows)[4], plain[4], rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["row", "root", "standardise", "none"])
def test_normalising_does_not_hide_what_is_not_finite(value, how):
    rows = torch.ones(3, 20)
    made = normaliser(how, moments(torch.from_numpy(np.random.default_rng(0).normal(size=(9, 20)))))
    rows[1, 7] = value
    z = made(rows)
    assert not torch.isfinite(z[1]).all()
    assert torch.isfinite(z[::2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_standardising_constant_zero_and_tiny_columns(dtype):
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 4))).to(dtype)
    rows[:, 1], rows[:, 2] = 7.0, 0.0
    rows[:, 3], rows[0, 3] = 0.0, 1e-45  # the smallest float32: the std is below it
    z = normaliser("standardise", moments(rows))(rows)
    assert torch.isfinite(z).all()
    assert not z[:, 1:3].any()
    fresh = normaliser("standardise", moments(rows))(torch.zeros(2, 4, dtype=dtype))
    assert torch.isfinite(fresh).all()
    with pytest.raises(InputError, match="overflow"):
        normaliser("standardise", moments(torch.tensor([[1e200], [2e200]], dtype=torch.float64)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["row", "root"])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_rows_are_worth_what_they_are_at_an_ordinary_size(name, how, dtype):
    shards, ordinary = clients(dtype, extreme=True), clients(dtype, extreme=False)
    found, expected = (final(method(name, normalise=how), each, 3).models for each in (shards, ordinary))
    for model, as_ever, shard, same in zip(found, expected, shards, ordinary, strict=True):
        for key, tensor in model.container().tensors.items():
            assert key == "bias" or torch.isfinite(tensor).all(), key
        scores = model.scores(shard.features)
        assert not scores.isnan().any()
        assert undecided(model, shard.features, scores).nonzero().flatten().tolist() == [ZERO]
        rows = torch.arange(len(shard)) != ZERO
        hits = (scores.argmax(1) == shard.labels)[rows]
        assert hits.double().mean() >= (as_ever.scores(same.features).argmax(1) == same.labels)[rows].double().mean()
        assert hits[[HUGE - 1, TINY - 1]].all()  # one place further down without the row of zeros


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["standardise", "columns", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_and_constant_columns_as_they_are(name, how, dtype):
    shards = clients(dtype, extreme=False)
    models = final(method(name, normalise=how), shards, 3).models
    for model, shard in zip(models, shards, strict=True):
        scores = model.scores(shard.features)
        assert not scores.isnan().any()
        rows = torch.arange(len(shard)) != ZERO
        assert (scores.argmax(1) == shard.labels)[rows].double().mean() > 0.95


@pytest.mark.parametrize("how", ["standardise", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_would_drown_the_others_is_refused(name, how):
    with pytest.raises(InputError, match=r"row 4 of client 0 .* normalise='row'"):
        final(method(name, normalise=how), clients(torch.float32, extreme=True), 3)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_stops_every_method_with_one_message(name):
    shards = clients(torch.float32, extreme=False)
    shards[2].features[8, 3] = math.nan
    with pytest.raises(InputError, match=r"^the features of client 2 \(first in row 8, .*\) contain NaN or infinity"):
        final(method(name), shards, 3)


def test_one_large_column_is_what_standardising_is_for():
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 6)))
    rows[:, 2] *= 1e12
    rows[:40, 2] = 0
    check_features("standardise", [rows])
    check_features("row", [rows])
    with pytest.raises(InputError, match="lost to rounding"):
        check_features("none", [rows])


def test_features_that_do_not_vary_have_a_discriminant_all_the_same():
    same = [Shard(torch.full((20, 20), 7.0), torch.arange(20) % 3) for _ in range(3)]
    for how in ("row", "root", "standardise", "none"):
        (model, *_) = final(load_method("fedlda", normalise=how), same, 3).models
        assert model.weight.abs().max() < 1e15  # not the inverse of rounding
        assert torch.isfinite(model.scores(same[0].features)).all()


# ------------------------------------------------------------------------------------------------ no decision


def head(bias: list[float], how: str = "row") -> LinearHead:
    """Scores of a row are its features plus the bias."""
    width = len(bias)
    return LinearHead(torch.eye(width), torch.tensor(bias), normaliser=Normaliser(how))  # type: ignore[arg-type]


def test_which_rows_have_no_decision():
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]])

    def reasons(model: LinearHead) -> list[int]:
        return undecided(model, rows, model.scores(rows)).tolist()

    assert reasons(head([0.0, 0.0, 0.0])) == [0, 1, 3, 0]
    assert reasons(head([1.0, 0.0, 0.0])) == [0, 1, 0, 0]
    assert reasons(head([1.0, 0.0, 0.0], "none")) == [0, 0, 0, 3]  # zeros are features like others; -1 + 1 is level
    ruled_out = head([0.0, -math.inf, -math.inf])
    assert reasons(ruled_out) == [0, 1, 0, 0]  # the one class left is a decision
    assert reasons(head([-math.inf] * 3, "none")) == [2] * 4
    assert reasons(head([math.nan, 0.0, 0.0], "none")) == [2] * 4
    assert reasons(head([math.inf, 0.0, 0.0], "none")) == [2] * 4


def test_a_row_without_a_decision_counts_as_wrong():
    test = Shard(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 1, 0]))
    for model in (head([0.0, 0.0]), head([0.1, 0.0])):
        expected = 0.5 if model.bias[0] == 0 else 0.75  # with a bias the last row is decided; zeros never
        assert client_accuracies([model], [test]) == [expected]
        assert metrics([model], [test], 2)["accuracy_client_mean"] == expected
    unknown = metrics([head([math.nan, 0.0], "none")], [test], 2)
    assert unknown["accuracy_sample_mean"] == 0
    assert unknown["auroc_client_mean"] is not None
    assert math.isfinite(unknown["auroc_client_mean"])


def test_a_dual_stream_predicts_minus_one():
    model = DualStream(raw_map(2), torch.eye(2, dtype=torch.float64))
    assert model.predict(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])).tolist() == [0, -1, 1]


@pytest.mark.parametrize("normalise", ["root", "row", "standardise"])
def test_the_estimator_is_finite_and_says_which_rows_it_cannot_decide(normalise):
    shards = clients(torch.float64, extreme=normalise != "standardise")
    X, y = shards[0].features.numpy(), shards[0].labels.numpy()
    fitted = APFLClassifier(d_primary=64, normalise=normalise).fit(X, y)
    assert fitted.predict_proba(X[6:]).shape == (len(X) - 6, 3)  # no warning
    if normalise == "standardise":
        assert np.isfinite(fitted.predict_proba(X)).all()
        return
    with pytest.warns(UserWarning, match=r"1 of 40 rows has no decision: row 3 \(every feature is zero\)"):
        probabilities = fitted.predict_proba(X)
    assert np.isfinite(probabilities).all()
    prior = fitted.model().prior
    level = np.zeros(3) if prior is None else prior.numpy()
    with pytest.warns(UserWarning, match="no decision"):
        np.testing.assert_array_equal(fitted.decision_function(X)[ZERO], level)


@pytest.mark.parametrize(
    ("kind", "reason"), [("random", "a score is NaN or infinite"), ("landmarks", "every class has the same score")]
)
def test_the_estimator_refuses_a_row_that_would_drown_the_others(kind, reason):
    (shard, *_) = clients(torch.float64, extreme=True)
    with pytest.raises(InputError, match=r"row 4 \(counted from 0\) .* normalise='row'"):
        APFLClassifier(map=kind, normalise="none").fit(shard.features.numpy(), shard.labels.numpy())
    finite = shard.features.numpy().copy()
    finite[HUGE] /= 1e30
    fitted = APFLClassifier(map=kind, d_primary=64, normalise="none").fit(finite, shard.labels.numpy())
    beyond = np.zeros((1, finite.shape[1]))
    beyond[0, 0] = 1.7e308
    with pytest.warns(UserWarning, match=reason):
        assert np.isfinite(fitted.predict_proba(beyond)).all()
