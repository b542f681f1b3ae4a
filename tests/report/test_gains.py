"""Who gains by taking part, from records."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from apfl.report.gains import Gain, client_gains, compared_with_alone, gains_in_words, gains_table
from tests.report.records import record


def test_gains_of_each_client_over_seeds():
    together = [record("apfl", 0, [0.9, 0.5, None, 0.6]), record("apfl", 1, [0.7, 0.5, 1.0, 0.6])]
    alone = [record("local_ridge", 0, [0.5, 0.6, 0.5, 0.6]), record("local_ridge", 1, [0.5, 0.8, 0.5, 0.6])]
    gains = client_gains(together, alone)
    assert [(gain.client, pytest.approx(gain.value)) for gain in gains] == [
        ("site 2", 0.5), ("site 0", 0.3), ("site 3", 0.0), ("site 1", -0.2),
    ]  # fmt: skip
    said = gains_in_words(together, alone)
    assert "2 of 4 clients gain" in said
    assert "1 lose (0 clearly; most: site 1, -20.0)" in said
    assert "mean +15.0 points" in said


def test_seeds_that_only_one_has_are_left_out():
    gains = client_gains([record("apfl", 0), record("apfl", 5)], [record("local_ridge", 5, [0.5] * 4)])
    assert {gain.alone for gain in gains} == {0.5}
    assert gains_in_words([record("apfl", 0)], [record("local_ridge", 1)]).startswith("no client")


def test_the_standard_error_is_that_of_two_shares():
    gain = Gain("a", 100, 0.5, 0.8)
    assert gain.standard_error == pytest.approx(math.sqrt(0.25 / 100 + 0.16 / 100))
    assert gain.clear
    assert not Gain("a", 10, 0.5, 0.8).clear
    assert not Gain("a", 10, 1.0, 1.0).clear


@pytest.mark.parametrize(
    ("methods", "chosen"),
    [(["local_ridge", "apfl", "afl"], "apfl"), (["afl", "fed3r", "central"], "fed3r"), (["local_ridge"], None)],
)
def test_apfl_is_compared_or_else_the_last_method(methods, chosen):
    assert {each.method for each in compared_with_alone([record(name) for name in methods])} == {chosen} - {None}


def test_of_many_clients_both_ends_are_shown():
    n = 40
    names = {"client_names": [f"c{i}" for i in range(n)], "n_test": [50] * n}
    together, alone = record("apfl", 0, [i / n for i in range(n)], **names), record("x", 0, [0.5] * n, **names)
    console = Console(width=100, record=True)
    console.print(gains_table([together], [alone]))
    shown = console.export_text()
    assert "... 16 more" in shown
    assert [f"c{i} " in shown for i in (39, 28, 27, 12, 11, 0)] == [True, True, False, False, True, True]


@pytest.mark.parametrize("markup", [True, False])
def test_a_name_in_brackets_is_shown_as_it_is(markup):
    names = {"client_names": ["[bold]a[/bold]", "b", "c", "d"]}
    console = Console(width=100, record=True, markup=markup)
    console.print(gains_table([record("apfl", 0, **names)], [record("x", 0, [0.5] * 4, **names)]))
    assert " [bold]a[/bold] " in console.export_text()
