"""Numbers and labels between machines, on the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch

from apfl.cli.federate import _agree
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, status_of
from apfl.federate.inprocess import simulate
from apfl.models.file import load_model
from apfl.report.status import status_view
from tests.commands import here as apfl
from tests.federate.number_toys import SIZES, TARGETS, draw_targets, number_terms


def table(path: Path, node: int, n: int, *, instead: dict[tuple[int, str], str] | None = None) -> Path:
    """A site's rows as a CSV file, with some entries replaced."""
    rows = draw_targets(n, node)
    names = [*(f"x{i}" for i in range(rows.features.shape[1])), *TARGETS]
    entries = torch.cat([rows.features, rows.responses(0)], 1).tolist()
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        for k, row in enumerate(entries):
            writer.writerow([(instead or {}).get((k, name), value) for name, value in zip(names, row, strict=True)])
    return path


def line(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def join(path: Path, *more: str) -> int:
    words = ["--server", "127.0.0.1:1", "--name", "a", "--data", str(path), "--show-what-leaves"]
    return apfl("federate", "join", *words, "--folder", str(path.parent / "site"), *more)


NUMBERS = ("--target", "regression", "--label-column", "price,rent")


def test_what_leaves_a_site_with_numbers_is_listed(tmp_path, capsys):
    path, terms = table(tmp_path / "rows.csv", 0, 40), tmp_path / "terms.json"
    assert join(path, *NUMBERS) == 0
    told = line(capsys)
    assert "names of 2 target columns: price, rent" in told
    assert "every other member is sent the sum of these over all members" in told
    terms.write_text(number_terms("regression", max_rows=25).to_json())
    assert join(path, *NUMBERS, "--terms", str(terms)) == 0
    assert "not sent: 15 rows beyond" in line(capsys)


def test_rows_that_do_not_fit_are_refused_in_a_sentence(tmp_path, capsys):
    terms = tmp_path / "terms.json"
    terms.write_text(number_terms().to_json())
    word = table(tmp_path / "word.csv", 0, 40, instead={(3, "price"): "cheap"})
    gap = table(tmp_path / "gap.csv", 0, 40, instead={(3, "price"): ""})
    good = table(tmp_path / "good.csv", 0, 40)
    words = {(k, "price"): ("cheap", "dear")[k % 2] for k in range(40)}
    classes = table(tmp_path / "classes.csv", 0, 40, instead=words)
    for path, more, reason in (
        (word, NUMBERS, "for regression give numbers"),
        (gap, NUMBERS, "in column 'price'"),
        (good, (*NUMBERS[:3], "price"), "target columns price given; the terms have price, rent"),
        (good, ("--target", "multilabel", "--label-column", "price,rent"), "for multilabel give 0 or 1 in every row"),
        (classes, ("--label-column", "price"), "rows with classes given; this federation's terms say regression"),
    ):  # fmt: skip
        assert join(path, *more, "--terms", str(terms)) == 2, path
        assert reason in line(capsys), path


def test_a_server_of_numbers_has_the_fewest_sites_by_default_and_no_masks(tmp_path):
    given = {"target": "regression", "class_names": TARGETS}
    draft = _agree(tmp_path / "new", None, {**given, "masked": False})
    assert (draft.quorum, draft.min_cohort, draft.max_share) == (3, 2, 0.5)
    with pytest.raises(InputError, match="--target regression given without --plain"):
        _agree(tmp_path / "masked", None, dict(given), masked=True)
    with pytest.raises(InputError, match="no target 'regressoin'; did you mean 'regression'"):
        _agree(tmp_path / "typo", None, {"target": "regressoin", "masked": False})
    with pytest.raises(InputError, match="has other terms"):
        _agree(tmp_path / "new", None, {"target": "multilabel", "class_names": TARGETS})


def test_a_site_predicts_from_its_file_and_the_status_says_what_came(tmp_path, capsys):
    paths = [table(tmp_path / f"{k}.csv", k, n) for k, n in enumerate(SIZES)]
    reading = {"target": "regression", "label_column": "price,rent"}
    sites = [Site.from_file(tmp_path / "sites", f"site-{k}", str(path), **reading) for k, path in enumerate(paths)]
    models = simulate(sites, number_terms(), tmp_path / "server").models
    assert apfl("predict", str(models[1]), str(paths[1])) == 0
    predicted = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    wanted = load_model(models[1]).scores(sites[1].train.features)[:, 1].tolist()
    assert [float(row["predicted rent"]) for row in predicted] == pytest.approx(wanted, rel=1e-5)
    state = status_of(tmp_path / "server")
    assert state["tables"] == [f"site-{k}" for k in range(4)]
    assert apfl("federate", "result", str(tmp_path / "server"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["targets"] == list(TARGETS)
    from rich.console import Console

    shown = Console(file=io.StringIO(), width=200)
    shown.print(status_view(state))
    assert "2 targets" in shown.file.getvalue()


def test_bytes_in_the_status_are_what_the_sites_sent(tmp_path):
    sites = [
        Site.from_file(tmp_path / "sites", f"site-{k}", str(table(tmp_path / f"{k}.csv", k, n)),
                       target="regression", label_column="price,rent")
        for k, n in enumerate(SIZES)
    ]  # fmt: skip
    found = simulate(sites, number_terms(), tmp_path / "server")
    assert status_of(tmp_path / "server")["bytes_up"] == found.bytes_up


def test_a_site_evaluates_its_model_itself(tmp_path):
    path = table(tmp_path / "rows.csv", 0, 60)
    reading = {"target": "regression", "label_column": "price,rent", "test_fraction": 0.5}
    sites = [Site.from_file(tmp_path / "sites", f"site-{k}", str(path), seed=k, **reading) for k in range(3)]
    simulate(sites, number_terms(), tmp_path / "server")
    with Coordinator(tmp_path / "server") as server:
        agreement = server.settle()
    told = sites[0].evaluate(agreement)
    test = sites[0].test
    errors = load_model(sites[0].model_path(number_terms())).scores(test.features) - test.responses(0)
    assert list(told["rmse"].values()) == pytest.approx(errors.square().mean(0).sqrt().tolist())
    assert set(told["rmse"]) == set(TARGETS)
    with pytest.raises(InputError, match="no accuracy to report"):
        sites[0].metrics(agreement)
