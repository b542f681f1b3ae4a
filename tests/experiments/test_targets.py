"""Numbers and several labels, from a table to a report: what is measured, what is refused, what a model file says."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import make_friedman1, make_multilabel_classification
from sklearn.linear_model import Ridge
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error

import apfl
from apfl.data.federation import Shard
from apfl.data.load import load_data
from apfl.data.targets import codes_of, read_targets
from apfl.errors import InputError
from apfl.experiments.measures import measures
from apfl.experiments.record import Record
from apfl.federate.site import Site
from apfl.methods import load_method
from apfl.report.gains import client_gains
from apfl.report.page import page
from apfl.report.sheet import gather
from tests.commands import here


@pytest.fixture(scope="module")
def numbers():
    X, y = make_friedman1(240, noise=1.0, random_state=0)
    return X, 10 * y + 3, np.arange(240) % 3


@pytest.fixture(scope="module")
def labels():
    X, Y = make_multilabel_classification(240, 8, n_classes=4, random_state=0)
    return X, Y, np.arange(240) % 3


METHODS = ["local_ridge", "central", "apfl"]


@pytest.fixture(scope="module")
def regression(numbers, tmp_path_factory):
    X, y, site = numbers
    return apfl.run(X, METHODS, labels=y, clients=site, seeds=2, out=tmp_path_factory.mktemp("regression"))


@pytest.fixture(scope="module")
def multilabel(labels, tmp_path_factory):
    X, Y, site = labels
    return apfl.run(X, METHODS, labels=Y, clients=site, seeds=1, out=tmp_path_factory.mktemp("multilabel"))


@pytest.mark.parametrize(
    ("values", "asked", "kind"),
    [
        ([0.5, 1.0], None, "regression"),
        ([1.0, 2.0], None, None),
        ([1, 2], None, None),
        (["a", "b"], None, None),
        ([1, 2], "regression", "regression"),
        ([[0, 1], [1, 1]], None, "multilabel"),
        ([[0, 1], [1, 1]], "regression", "regression"),
        ([[0.0, 2.5], [1.0, 1.0]], None, "regression"),
        ([0.5, 1.0], "classification", None),
    ],
)
def test_what_columns_are_taken_for(values, asked, kind):
    found = read_targets("y", np.array(values), asked)
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ([[0, 2], [1, 1]], "multilabel", "holds 2; for multilabel give 0 or 1"),
        (["a", "b"], "regression", "for regression give numbers"),
        ([[0, 1], [1, 1]], "classification", "2 label columns given; a class needs one"),
        ([0.5, np.inf], "regression", "contain infinity"),
        ([0.5, np.nan], "regression", "1 of 2 targets of y is missing"),
        ([1, 2], "ranking", "no target 'ranking'"),
    ],
)
def test_columns_that_cannot_be_targets(values, asked, message):
    with pytest.raises(InputError, match=message):
        read_targets("y", np.array(values), asked)


def test_codes_for_partitions_are_tenths_of_numbers_and_the_rarest_label():
    numbers = np.arange(100.0)[::-1, None]
    assert np.bincount(codes_of("regression", numbers)).tolist() == [10] * 10
    assert codes_of("regression", numbers)[0] == 9
    assert codes_of("regression", np.zeros((5, 1))).max() <= 1
    given = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]])
    assert codes_of("multilabel", given).tolist() == [1, 0, 3, 2]


def test_numbers_are_standardised_by_training_rows_alone(numbers):
    X, y, site = numbers
    made = apfl.federation(X, y, clients=site)
    trained = torch.cat([shard.targets for shard in made.train])
    np.testing.assert_allclose([float(trained.mean()), float(trained.std(correction=0))], [0, 1], atol=1e-9)
    everyone = torch.cat([shard.targets for shards in (made.train, made.test) for shard in shards])
    np.testing.assert_allclose(np.sort(made.scale.undo(everyone)[:, 0]), np.sort(y), rtol=1e-9)
    again = load_data(made)
    np.testing.assert_allclose(np.sort(again.targets[:, 0]), np.sort(y), rtol=1e-9)
    assert again.target == "regression"


class Given:
    """A model with these scores."""

    kind, class_names = "given", None

    def __init__(self, scores) -> None:
        self._scores = torch.as_tensor(scores)

    def scores(self, features):
        return self._scores


def test_measures_of_numbers_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    truth, found = ([rng.normal(size=(n, 2)) for n in (12, 30)] for _ in range(2))
    tests = [
        Shard(torch.zeros(len(y), 1), torch.zeros(len(y)), targets=torch.from_numpy(y), target="regression")
        for y in truth
    ]
    tests.append(Shard(torch.zeros(0, 1), torch.zeros(0), targets=torch.zeros(0, 2).double(), target="regression"))
    got = measures([*map(Given, found), Given(np.zeros((0, 2)))], tests)
    rmse = [root_mean_squared_error(y.ravel(), f.ravel()) for y, f in zip(truth, found, strict=True)]
    np.testing.assert_allclose(got["client_measures"]["rmse"][:2], rmse, rtol=1e-9)
    assert got["client_measures"]["rmse"][2] is None
    assert got["n_clients_without_test"] == 1
    expected = {
        "rmse_client_mean": np.mean(rmse),
        "rmse_worst_decile": max(rmse),
        "rmse_sample_mean": root_mean_squared_error(np.concatenate(truth).ravel(), np.concatenate(found).ravel()),
        "mae_client_mean": np.mean([mean_absolute_error(y, f) for y, f in zip(truth, found, strict=True)]),
        "r2_client_mean": np.mean([r2_score(y, f) for y, f in zip(truth, found, strict=True)]),
        "r2_worst_decile": min(r2_score(y, f) for y, f in zip(truth, found, strict=True)),
    }
    for name, value in expected.items():
        assert got["measures"][name] == pytest.approx(value, rel=1e-9), name


def test_measures_of_labels_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    truth, found = rng.integers(0, 2, (40, 3)), rng.random((40, 3))
    truth[:, 2] = 0  # a label that nobody has: no precision, and an F1 of 0 because it is given
    test = Shard(torch.zeros(40, 1), torch.zeros(40), targets=torch.from_numpy(truth).double(), target="multilabel")
    got = measures([Given(found)], [test])["measures"]
    given = (found > 0.5).astype(int)
    assert got["map_client_mean"] == pytest.approx(average_precision_score(truth[:, :2], found[:, :2]), rel=1e-9)
    assert got["micro_f1_client_mean"] == pytest.approx(f1_score(truth, given, average="micro"), rel=1e-9)
    assert got["macro_f1_client_mean"] == pytest.approx(
        f1_score(truth, given, average="macro", zero_division=0), rel=1e-9
    )


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
@pytest.mark.parametrize("method", ["central", "afl"])
def test_shared_heads_are_the_ridge_of_all_rows(numbers, labels, kind, method):
    X, y, site = numbers if kind == "regression" else labels
    made = apfl.federation(X, y, clients=site)
    settings = {"d": 32, "gamma": 0.5} if method == "central" else {"normalise": "standardise"}
    (last,) = load_method(method, **settings).rounds(made.train, made.n_classes, 0)
    model, rows = last.models[0], torch.cat([shard.features for shard in made.train])
    phi = model.primary_map(model.normaliser(rows)).double().numpy()
    targets = torch.cat([shard.targets for shard in made.train]).numpy()
    ridge = Ridge(0.5 if method == "central" else 0, fit_intercept=False).fit(phi, targets)
    # Single-precision rows: their products, not the solution, are where the two routes part.
    np.testing.assert_allclose(model.primary.numpy().T, ridge.coef_.reshape(made.n_classes, -1), atol=1e-6)


def test_a_step_of_squared_error_and_of_binary_cross_entropy_is_autograds(numbers, labels):
    for X, y, site in (numbers, labels):
        made = apfl.federation(X, y, clients=np.zeros_like(site), test_fraction=0.0)
        method = load_method("fedavg", n_rounds=1, epochs=1, batch=1000, lr=0.1)
        shard = made.train[0]
        features = load_method("local_ridge").normalise and shard.features
        (last,) = method.rounds([shard], made.n_classes, 3)
        head = last.models[0]
        z = head.normaliser(features)
        start = _initial(method, shard, made.n_classes)
        weight, bias = (start[name].clone().requires_grad_() for name in ("weight", "bias"))
        logits, n = z @ weight + bias, len(z)
        if made.target == "regression":
            loss = (logits - shard.targets.float()).square().sum() / 2 / n
        else:
            loss = (
                torch.nn.functional.binary_cross_entropy_with_logits(logits, shard.targets.float(), reduction="sum") / n
            )
        loss.backward()
        # Single precision, one step.
        torch.testing.assert_close(head.weight, (weight - 0.1 * weight.grad).detach(), atol=1e-5, rtol=1e-5)
        shift = 0.5 if made.target == "multilabel" else 0.0
        torch.testing.assert_close(head.bias, (bias - 0.1 * bias.grad)[0].detach() + shift, atol=1e-5, rtol=1e-5)


def _initial(method, shard, n_columns):
    from apfl.methods._stack import Stack

    return {name: p[0] for name, p in Stack([method], [shard], n_columns, 3).initial().items()}


def test_records_tables_pages_and_gains_of_numbers(regression):
    record = regression.records[0]
    assert record.target == "regression"
    assert Record.from_json(record.to_json()) == record
    assert record.score == record.measures["rmse_client_mean"] == record.curve[-1][2]
    assert record.accuracy_client_mean is None
    assert "RMSE" in repr(record)
    assert "apfl" in regression.table("markdown")
    assert "in RMSE" in regression.table()
    assert regression.table("csv", metric="mae_worst_decile").count("mae_worst_decile") == 3
    best = min(regression.records, key=lambda each: each.score)
    lines = [line for line in regression.table("markdown").splitlines() if line.startswith("| ")]
    assert lines[2].startswith(f"| {best.method}")
    text = page(regression.records)
    assert "RMSE" in text
    assert (
        "accuracy" not in text.lower().replace("accuracy_client_mean", "").partition("<footer")[0].partition("<main")[2]
    )
    ours = [each for each in regression.records if each.method == "apfl"]
    alone = [each for each in regression.records if each.method == "local_ridge"]
    for gain in client_gains(ours, alone):
        assert gain.value == pytest.approx(gain.alone - gain.together)


def test_records_of_two_kinds_have_no_table(regression, multilabel):
    with pytest.raises(InputError, match="records of multilabel and regression given"):
        gather([*regression.records, *multilabel.records])


def test_a_model_file_gives_numbers_in_their_units(regression, numbers, tmp_path):
    X, y, site = numbers
    for method in METHODS:
        model = regression.model(method, client=1)
        found = model.predict(X[site == 1])
        assert found.shape == (80,)
        assert root_mean_squared_error(y[site == 1], found) < y.std()
        with pytest.raises(InputError, match="no probabilities"):
            model.predict_proba(X[:2])
    record = next(each for each in regression.records if each.method == "apfl" and each.seed == 0)
    assert (
        record.measures["rmse_client_mean"]
        < next(each for each in regression.records if each.method == "local_ridge" and each.seed == 0).score
    )


def test_a_model_file_gives_labels(multilabel, labels):
    X, Y, site = labels
    for method in METHODS:
        model = multilabel.model(method, client=1)
        found = model.predict(X[site == 1])
        assert set(np.unique(found)) <= {0, 1}
        assert f1_score(Y[site == 1], found, average="micro") > 0.5
        assert model.predict_proba(X[:5]).shape == (5, 4)
    assert multilabel.records[0].class_names == ["label 0", "label 1", "label 2", "label 3"]


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_onnx_predicts_the_same(kind, request, tmp_path, numbers, labels):
    runtime = pytest.importorskip("onnxruntime")
    X = (numbers if kind == "regression" else labels)[0].astype(np.float32)
    for method in ("apfl", "central"):
        model = request.getfixturevalue(kind).model(method, client=0)
        model.to_onnx(tmp_path / "model.onnx")
        session = runtime.InferenceSession(tmp_path / "model.onnx")
        predicted, scores = session.run(["predicted", "scores"], {"features": X[:20]})
        own = model.scores(torch.from_numpy(X[:20]))
        np.testing.assert_allclose(scores, own, atol=1e-6)  # single-precision maps
        expected = model.predict(X[:20])
        np.testing.assert_allclose(predicted.reshape(expected.shape), expected, rtol=1e-5)


@pytest.fixture(scope="module")
def table(numbers, labels, tmp_path_factory):
    X, y, site = numbers
    tags = labels[1]
    path = tmp_path_factory.mktemp("table") / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*"abcdefghij", "price", "red", "blue", "site"])
        writer.writerows([*x, p, *t[:2], "nsw"[s]] for x, p, t, s in zip(X, y, tags, site, strict=True))
    return path


def said(capsys) -> str:
    """What was printed, without line breaks."""
    return " ".join("".join(capsys.readouterr()).split())


def test_the_command_line_by_columns(table, tmp_path, capsys):
    common = ["run", "--data", table, "--client-column", "site", "--methods", "central,apfl", "--seeds", "1"]
    assert here(*common, "--label-column", "price", "--drop", "red,blue", "--out", tmp_path / "one") == 0
    text = said(capsys)
    assert "target: regression (price:" in text
    assert "RMSE" in text
    model = tmp_path / "one/models/apfl/seed-0/client-0-n.safetensors"
    assert here("predict", model, table, "--id-column", "site", "--out", tmp_path / "found.csv") == 0
    assert (tmp_path / "found.csv").read_text().splitlines()[0] == "row,site,predicted price"
    assert here(*common, "--label-column", "red,blue", "--drop", "price", "--out", tmp_path / "two") == 0
    text = said(capsys)
    assert "target: multilabel (red, blue:" in text
    assert "macro" in text
    record = json.loads((tmp_path / "two/records.jsonl").read_text().splitlines()[0])
    assert record["class_names"] == ["red", "blue"]
    assert record["target"] == "multilabel"
    assert here("rerun", tmp_path / "two", "--method", "apfl") == 0
    assert "matched: apfl, seed 0: mAP" in said(capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label-column", "price", "--methods", "fedcof"], "fedcof cannot be trained for regression"),
        (["--label-column", "price,cost"], "has no column 'cost'"),
        (["--label-column", "price", "--target", "ranking"], "no target 'ranking'"),
        (["--label-column", "site", "--target", "regression"], "for regression give numbers"),
        (["--label-column", "price", "--target", "multilabel"], "for multilabel give 0 or 1"),
        (["--label-column", "price", "--set", "apfl.tau=1"], "tau=1.0 given, which is of no use for regression"),
        (["--label-column", "price", "--target", "classification"], "divide the values into classes"),
    ],
)
def test_what_is_refused_in_one_sentence(table, tmp_path, options, message, capsys):
    assert here("run", "--data", table, "--clients", "3", "--seeds", "1", "--out", tmp_path / "no", *options) == 2
    assert message in said(capsys)
    assert not (tmp_path / "no").exists()


def test_a_plan_has_a_target(table, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'data = "{table}"\nlabel_column = "price"\ntarget = "regression"\ndrop = "red,blue"\nseeds = [0]\n'
        '[protocol]\npartition = "given"\nclient_column = "site"\n[methods.local_ridge]\ntune = {gamma = [0.1, 1.0]}\n'
    )
    assert here("bench", plan, "--out", tmp_path / "out", "--jobs", "1") == 0
    (cell,) = (tmp_path / "out/cells").glob("*.json")
    record = Record.from_json(cell.read_text())
    best = min(record.tuning["results"], key=lambda each: each["rmse_client_mean"])
    assert record.settings["gamma"] == best["gamma"]


def test_late_clients_have_models_of_their_own(numbers):
    X, y, site = numbers
    made = apfl.federation(X, y, clients=site)
    for method in ("apfl", "apfl_paper", "local_ridge"):
        (last,) = load_method(method, **({"d_primary": 32} if method == "apfl" else {})).rounds(made.train[:2], 1, 0)
        (late,) = last.admit(made.train[2:])
        assert root_mean_squared_error(made.test[2].targets, late.scores(made.test[2].features)) < 1


def test_rows_of_two_kinds_are_not_one_client():
    one = Shard(torch.zeros(2, 1), torch.zeros(2), targets=torch.zeros(2, 1).double(), target="regression")
    with pytest.raises(InputError, match="a client has rows of one kind"):
        one + Shard(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="without targets"):
        replace(one, targets=None)


def test_a_plan_refuses_what_its_methods_cannot_be_trained_for(table, tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'data = "{table}"\nlabel_column = "price"\n[methods.fedncm]\n')
    assert here("bench", plan, "--out", tmp_path / "out", "--jobs", "1") == 2
    assert "fedncm cannot be trained for regression" in said(capsys)
    assert not (tmp_path / "out/cells").exists()


def test_a_federation_between_machines_has_classes_alone(table, tmp_path):
    with pytest.raises(InputError, match="divide the values into classes"):
        Site.from_file(tmp_path / "site", "north", str(table), label_column="price")
