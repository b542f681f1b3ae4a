"""The front of accuracy, bytes and exchanges."""

from __future__ import annotations

import csv
import io
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfl.report.figures.draw import figure
from apfl.report.pareto import Point, front, pareto_csv, pareto_markdown, points, standing
from apfl.report.sheet import Row, gather
from tests.commands import here
from tests.report.records import a_study, record


def point(accuracy: float, n_bytes: float, exchanges: float) -> Point:
    return Point(Row("m", {}), accuracy, None, n_bytes, exchanges, 1)


def sent(method: str, accuracy: float, n_bytes: int, exchanges: int, **more):
    return record(method, accuracies=[accuracy] * 4, bytes_up=n_bytes, bytes_down=0, rounds=exchanges, **more)


FIELD = [
    sent("apfl", 0.9, 400, 3),
    sent("afl", 0.7, 400, 1),
    sent("fedavg", 0.8, 4000, 200),
    sent("fedncm", 0.5, 40, 1),
    sent("local_ridge", 0.6, 0, 0),
    sent("central", 0.99, 0, 0),
    sent("apfl_oracle", 0.95, 0, 0),
]


def test_the_front_of_a_small_field():
    (column,) = (sheet := gather(FIELD)).columns
    competing = points(sheet, column)
    assert [each.row.method for each in competing] == ["apfl", "fedavg", "afl", "local_ridge", "fedncm"]
    # fedavg is behind apfl in all three; fedncm costs more than going alone and is worse.
    assert [each.row.method for each in front(competing)] == ["apfl", "afl", "local_ridge"]
    assert {each.row.method: each.bytes for each in competing}["afl"] == 100  # each of four clients


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=9))
def test_on_the_front_are_those_that_no_other_one_beats(values):
    """By the definition, written out: better somewhere than each other point that differs from it."""
    competing = [point(*each) for each in values]
    on = set(map(id, front(competing)))
    for each, (a, b, e) in zip(competing, values, strict=True):
        better_somewhere = all(a > other[0] or b < other[1] or e < other[2] or (a, b, e) == other for other in values)
        assert (id(each) in on) == better_somewhere
    assert on


def test_two_methods_that_are_alike_are_both_on_it():
    assert len(front([point(0.5, 10, 1), point(0.5, 10, 1)])) == 2


def test_means_over_seeds_and_their_spread():
    study = [sent("afl", 0.6, 400, 1, seed=0), sent("afl", 0.8, 800, 1, seed=1)]
    (column,) = (sheet := gather(study)).columns
    (only,) = points(sheet, column)
    assert (only.accuracy, only.bytes, only.n_seeds) == (pytest.approx(0.7), 150, 2)
    assert only.spread == pytest.approx(0.02**0.5)


def test_in_words_and_tables():
    sheet = gather(FIELD)
    (said,) = standing(sheet)
    assert said.endswith(
        "on the front are apfl (90.0 %, 100 B in 3), afl (70.0 %, 100 B in 1) and local_ridge (60.0 %, nothing sent)."
    )
    assert "| afl | 70.0 | 100 B | 1 | yes |" in pareto_markdown(sheet)
    assert "| fedavg | 80.0 | 1.0 kB | 200 |  |" in pareto_markdown(sheet)
    rows = list(csv.DictReader(io.StringIO(pareto_csv(sheet))))
    assert [row["method"] for row in rows if row["front"] == "1"] == ["apfl", "afl", "local_ridge"]


def test_several_federations_are_counted():
    last = standing(gather(a_study()))[-1]
    assert last.startswith("Of 2 fronts: ")
    assert "apfl 2" in last


def test_the_figure_names_the_front():
    sheet = gather(FIELD)
    (axes,) = figure("pareto", sheet, sheet.rows[0]).axes
    texts = {text.get_text() for text in axes.texts}
    assert texts == {"apfl, 3", "afl, 1", "local_ridge, 0", "200", "1"}
    assert set(axes.get_legend_handles_labels()[1]) == {"apfl", "afl", "local_ridge", "fedavg", "fedncm"}


@pytest.mark.parametrize(("style", "to_file"), [*product(("terminal", "markdown", "csv"), (False, True))])
def test_the_command(style, to_file, tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text("\n".join(each.to_json() for each in FIELD))
    target = ["--out", tmp_path / "t.txt"] if to_file else []
    code = here("table", tmp_path / "records.jsonl", "--pareto", "--format", style, *target)
    if style == "terminal" and to_file:
        assert code == 2
        assert not (tmp_path / "t.txt").exists()
        return
    assert code == 0
    text = (tmp_path / "t.txt").read_text() if to_file else capsys.readouterr().out
    assert "local_ridge" in text


@pytest.mark.parametrize("options", [("--format", "latex"), ("--metric", "seconds")])
def test_what_the_front_does_not_have_is_refused(options, tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text(FIELD[0].to_json())
    assert here("table", tmp_path / "records.jsonl", "--pareto", *options) == 2
    assert "--pareto with" in capsys.readouterr().err
