"""What a mean accuracy hides stands beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import apfl
from apfl.report.caveats import in_words, rarest_class, rarest_recall, too_wide, unmeasured
from apfl.report.formats import text
from apfl.report.page import page
from apfl.report.results import results
from apfl.report.runs import RunResults
from apfl.report.sheet import gather
from apfl.report.terminal import HEADS, results_lines, results_table
from tests.report.records import record

COUNTS = [[90, 9, 1], [80, 0, 4]]  # of two clients
SKEWED = record(accuracies=[0.9, 0.8], recall_per_class=[0.99, 0.5, 0.125], class_counts=COUNTS, n_train=[100, 84])


def shown(records, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(results_table(records), markup=True)
    return " ".join(captured.get().split())


def test_the_rarest_class_is_that_of_all_clients_together():
    assert rarest_class(SKEWED) == 2
    assert rarest_recall(SKEWED) == 0.125
    assert in_words([SKEWED]) == "z, 2.7 % of the training rows"
    assert in_words([SKEWED, replace(SKEWED, class_counts=[[90, 1, 9], [80, 0, 4]])]).startswith("z or y, 0.54 % of")


def test_a_class_without_test_rows_cannot_be_the_rarest_one():
    assert rarest_class(replace(SKEWED, recall_per_class=[0.99, 0.5, None])) == 1
    assert rarest_recall(replace(SKEWED, class_counts=())) is None  # a record of an earlier version
    assert in_words([replace(SKEWED, class_counts=())]) == ""


def test_balanced_accuracy_and_rare_recall_stand_beside_accuracy():
    other = replace(SKEWED, seed=1, recall_per_class=[0.99, 0.5, 0.375], balanced_accuracy_client_mean=0.45)
    (line,) = results_lines([replace(SKEWED, balanced_accuracy_client_mean=0.55), other])
    assert dict(zip(HEADS, line[1:], strict=True))["bal."] == "50.0"
    assert dict(zip(HEADS, line[1:], strict=True))["rare"] == "25.0"
    assert HEADS[:3] == ("acc.", "bal.", "rare")
    assert "rare: recall of the rarest class (z, 2.7 % of the training rows);" in shown([SKEWED, other])
    assert results_lines([replace(SKEWED, class_counts=())])[0][3] == "–"


def test_the_table_fits_eighty_columns():
    wide = {"bytes_up": 216_100_000, "bytes_down": 819_200, "seconds": 99.99, "rounds": 200}
    text = shown([replace(record(method, seed), **wide) for method in ("apfl", "local_ridge") for seed in (0, 1)])
    assert "…" not in text
    assert "216 MB 819 kB 99.99" in text


def test_a_real_run_shows_what_its_accuracy_hides():
    """85, 10, 4 and 1 % of four classes, of which the rarest two look like the first."""
    rng = np.random.default_rng(0)
    y = np.repeat(["a", "b", "c", "d"], [850, 100, 40, 10])
    X = rng.normal(size=(1000, 5)) + 4 * (y == "b")[:, None]
    found = apfl.run(X, ["local_ridge"], labels=y, clients=np.arange(1000) % 2, seeds=1)
    (line,) = results_lines(found.records)
    accuracy, balanced, rare = map(float, line[1:4])
    assert accuracy > 90
    assert balanced < 60
    assert rare < 10
    assert "(d, 1" in str(found)
    assert found.table("csv", metric="recall_rarest_class").count(f"{rare / 100:g}") >= 1


MISSING = record(accuracies=[0.9, None, 0.8, None])


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([record()], ""),
        ([MISSING, replace(MISSING, method="afl")], "clients site 1, site 3"),
        ([MISSING, replace(MISSING, seed=1)], "clients site 1, site 3"),
        ([MISSING, record(seed=1)], "seed 0: clients site 1, site 3"),
        (
            [record(accuracies=[0.9, *[None] * 9])],
            "clients " + ", ".join(f"site {k}" for k in range(1, 7)) + " and 3 more",
        ),
        ([record(accuracies=[0.9, None])], "client site 1"),
    ],
)
def test_clients_without_test_rows_are_named(records, words):
    assert unmeasured(records) == (f"No test rows, so missing from every mean: {words}." if words else "")


def test_every_table_and_the_page_name_them():
    says = "No test rows, so missing from every mean: clients site 1, site 3."
    sheet = results(gather([MISSING, replace(MISSING, method="afl")]))
    assert says in shown([MISSING])
    assert says in " ".join(text(sheet).split())
    assert says in page([MISSING, replace(MISSING, method="afl")])
    assert says in RunResults([MISSING], None)._repr_html_()
    two = [
        replace(each, alpha=alpha, protocol={**each.protocol, "alpha": alpha})
        for alpha in (0.1, 1.0)
        for each in (MISSING,)
    ]
    assert " ".join(text(results(gather([*two, replace(record(), alpha=5.0)]))).split()).count(says) == 2


def test_names_of_clients_are_text_and_no_markup():
    strange = record(accuracies=[0.9, None], client_names=["a", "[red]b"], class_names=["[i]x", "y", "z"])
    assert "client [red]b." in shown([strange])


def test_a_map_too_wide_for_masked_sums_is_said_in_one_line():
    """A quarter of the rows is admitted: 20 columns for 80 rows."""
    fits, wide = (record(chosen={"d_primary": width}) for width in (20, 21))
    assert too_wide([fits]) == ""
    assert "21 columns for 80 rows; between machines with masked sums at most 20 are admitted" in too_wide([fits, wide])
    assert "\n" not in too_wide([wide])
    assert too_wide([record(chosen={}, settings={"d_primary": 64})]).startswith("apfl used 64 columns")
    assert too_wide([record("afl"), record("fedavg", settings={"d_primary": 64})]) == ""
