"""Tables, differences, figures and the page: statistics against known answers, records that must not be mixed."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from apfl.cli import main
from apfl.errors import InputError
from apfl.experiments.record import Record
from apfl.methods import load_method
from apfl.report.compare import Difference, Pairs, holm, paired_difference
from apfl.report.figures import FIGURES
from apfl.report.figures.draw import figure
from apfl.report.formats import as_csv, latex, markdown, text
from apfl.report.page import page
from apfl.report.published import published
from apfl.report.results import results
from apfl.report.sheet import Column, Row, gather, read
from apfl.report.summary import summary
from tests.report.records import CHOSEN, a_study, record

ROOT = Path(__file__).parents[2]
DEALT = {"partition": "dirichlet", "n_clients": 4, "alpha": 0.1}


def pairs(ours, theirs, weights=None) -> Pairs:
    weights = np.ones(len(ours)) if weights is None else weights
    return Pairs(np.array(ours, float), np.array(theirs, float), np.array(weights, float))


# --- differences and their intervals ---------------------------------------------------------------------------------


def test_with_one_seed_the_draws_are_those_that_enumerate_all():
    """Four clients can be drawn in 256 ways: all of them, against 200,000 at random."""
    one = pairs([0.6, 0.9, 0.4, 0.7], [0.5, 0.4, 0.5, 0.6], [1, 2, 3, 1])
    gaps, weights = one.ours - one.theirs, one.weights
    drawn = [list(i) for i in itertools.product(range(4), repeat=4)]
    exact = np.array([(gaps[i] * weights[i]).sum() / weights[i].sum() for i in drawn])
    found = paired_difference([one], n_draws=200_000)
    assert found.value == pytest.approx((0.1 + 2 * 0.5 - 3 * 0.1 + 0.1) / 7, abs=1e-12)
    # The quantiles of 256 equally likely values; 200,000 draws place them within the neighbouring values.
    for at, value in ((0.025, found.low), (0.975, found.high)):
        assert np.quantile(exact, at - 0.005) - 1e-12 <= value <= np.quantile(exact, at + 0.005) + 1e-12
    assert found.p == pytest.approx(2 * (exact <= 1e-12).mean(), abs=0.01)  # standard error of the share: 0.001
    assert found.speaks_of == "clients only, 1 seed"


def test_the_interval_of_one_seed_is_the_normal_one_if_clients_are_many():
    gaps = np.random.default_rng(1).normal(0.02, 0.1, 600)
    error = gaps.std() / np.sqrt(600)
    found = paired_difference([pairs(gaps, np.zeros(600))])
    assert found.value == pytest.approx(gaps.mean(), abs=1e-12)
    # Quantiles of 10,000 draws have a standard error of 0.027 of the error itself; three of those are allowed.
    assert found.low == pytest.approx(gaps.mean() - 1.96 * error, abs=0.08 * error)
    assert found.high == pytest.approx(gaps.mean() + 1.96 * error, abs=0.08 * error)
    assert (found.n_seeds, found.n_clients) == (1, 600)


def test_seeds_that_differ_give_the_t_interval_of_their_means():
    """The one-sample t test of scipy, on the weighted mean of each seed."""
    rng = np.random.default_rng(2)
    weights = rng.uniform(1, 3, (4, 9))
    gaps = np.array([0.1, 0.5, 0.2, 0.4])[:, None] + rng.normal(0, 0.01, (4, 9))
    means = (gaps * weights).sum(1) / weights.sum(1)
    known = ttest_1samp(means, 0)
    found = paired_difference([pairs(g, np.zeros(9), w) for g, w in zip(gaps, weights, strict=True)])
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()), abs=1e-12)
    assert found.p == pytest.approx(known.pvalue, abs=1e-12)
    assert (found.n_seeds, found.n_clients) == (4, 36)


def test_seeds_that_agree_by_chance_do_not_hide_the_clients():
    """Two seeds with the same mean say nothing of clients who differ; the interval is that of the clients."""
    a, b = pairs([1, 0, 0, 0, 0, 0, 0, 1.0], np.zeros(8)), pairs([0, 1, 0, 1, 0, 0, 0, 0.0], np.zeros(8))
    found = paired_difference([a, b])
    error = np.sqrt(2 * 0.25 * 0.75 / 8) / 2
    # Means of 16 clients come in steps of 1/16, so percentiles are that rough.
    assert found.low == pytest.approx(0.25 - 1.96 * error, abs=1 / 16)
    assert found.high == pytest.approx(0.25 + 1.96 * error, abs=1 / 16)


def test_three_seeds_of_which_one_failed_leave_the_order_open():
    """Seeds of 47, 86 and 89 % against 87 %: to say 'clear' is to speak of these three seeds only."""
    rng = np.random.default_rng(0)
    spread = rng.normal(0, 0.02, 20)
    spread -= spread.mean()
    study = [record("apfl", seed, list(mean + spread)) for seed, mean in enumerate((0.47, 0.86, 0.89))]
    study += [record("ditto", seed, list(0.87 + spread[::-1])) for seed in range(3)]
    found = results(gather(study))
    (difference,) = found.differences.values()
    assert difference.value == pytest.approx(-0.13)
    assert difference.low < 0 < difference.high
    assert difference.p > 0.05
    assert not difference.clear
    assert "*" not in text(found).split("apfl minus")[1].split("difference:")[0]
    assert "(seeds and clients, 3 seeds: few), Holm p = 0.438: not clear" in summary(found)[0]


def simulated(n_seeds: int, between: float, n: int = 600, n_clients: int = 20) -> list[Difference]:
    """Differences that are zero in truth; ``between`` over what clients alone make seeds differ."""
    rng = np.random.default_rng((n_seeds, int(between)))
    gaps = rng.normal(0, 1, (n, n_seeds, n_clients)) + rng.normal(0, between / n_clients**0.5, (n, n_seeds, 1))
    nothing = np.zeros(n_clients)
    return [paired_difference([pairs(seed, nothing) for seed in each], n_draws=999) for each in gaps]


@pytest.mark.parametrize("n_seeds", [2, 3, 5, 8])
@pytest.mark.parametrize("between", [1.0, 3.0])
def test_intervals_cover_what_they_say(n_seeds, between):
    """Clients alone cover 43 to 83 % here, seeds drawn with replacement 72 to 97."""
    found = simulated(n_seeds, between)
    covered = np.mean([each.low <= 0 <= each.high for each in found])
    assert covered >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / len(found))  # three standard errors of a share
    assert sum(each.p < 0.05 for each in found) == sum(not each.low <= 0 <= each.high for each in found)


@pytest.mark.parametrize(("n_seeds", "at_most"), [(2, 6.0), (3, 2.3), (5, 1.6), (8, 1.35)])
def test_what_the_seeds_cost_if_they_do_not_differ(n_seeds, at_most):
    """Mean width over that of the normal interval with known variance: t costs 5.2, 2.0, 1.4 and 1.2."""
    found = simulated(n_seeds, 0.0)
    wide = np.mean([each.high - each.low for each in found]) / (2 * 1.96 / np.sqrt(20 * n_seeds))
    assert 1.0 < wide < at_most
    assert np.mean([each.low <= 0 <= each.high for each in found]) >= 0.95


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
@pytest.mark.parametrize(("of_seeds", "of_clients"), [(0.0, 1.0), (0.2, 1.0), (1.0, 1.0)])
def test_intervals_cover_if_clients_are_the_same_in_every_seed(n_seeds, of_seeds, of_clients):
    rng = np.random.default_rng(n_seeds)
    gaps = rng.normal(0, of_clients, (600, 1, 8)) + rng.normal(0, 0.5, (600, n_seeds, 8))
    gaps += rng.normal(0, of_seeds, (600, n_seeds, 1))
    nothing = np.zeros(8)
    found = [
        paired_difference([pairs(seed, nothing) for seed in each], same_clients=True, n_draws=999) for each in gaps
    ]
    assert np.mean([each.low <= 0 <= each.high for each in found]) >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / 600)


@pytest.mark.parametrize("n_seeds", [1, 2, 3])
@pytest.mark.parametrize("same_clients", [False, True])
def test_an_interval_excludes_zero_if_and_only_if_p_is_below_5_percent(n_seeds, same_clients):
    """Gaps moved until zero is at an end of the interval, and a hair to either side."""
    gaps = np.random.default_rng(3).normal(0.3, 1, (n_seeds, 15))

    def moved(by: float) -> Difference:
        return paired_difference([pairs(each - by, np.zeros(15)) for each in gaps], same_clients=same_clients)

    for end in (moved(0).low, moved(0).high):
        at = [moved(end + hair) for hair in (-1e-6, 1e-6)]
        assert [each.p < 0.05 for each in at] == [not each.low <= 0 <= each.high for each in at]
        assert at[0].p < 0.05 or at[1].p < 0.05
        assert not (at[0].p < 0.05 and at[1].p < 0.05)


def test_equal_methods_are_not_clear_and_a_constant_gap_is():
    equal = paired_difference([pairs([0.5, 0.7, 0.9], [0.5, 0.7, 0.9])])
    assert (equal.value, equal.low, equal.high, equal.p) == (0, 0, 0, 1)
    gap = paired_difference([pairs([0.5, 0.7, 0.9], [0.4, 0.6, 0.8])])
    assert gap.low == pytest.approx(0.1) == gap.high
    assert gap.p == pytest.approx(2 / 10_001)
    assert gap.clear
    assert not equal.clear


def test_the_same_clients_in_every_seed_are_drawn_together():
    """Two seeds with the same gaps: drawn apart they average out, drawn together they are what one seed says."""
    one = pairs([1, 0, 0, 0, 0, 0, 0, 1.0], np.zeros(8))
    apart, together = paired_difference([one, one]), paired_difference([one, one], same_clients=True)
    known = ttest_1samp(one.ours, 0).confidence_interval()
    # The variance of 10,000 draws has a relative standard error of 0.014.
    assert together.low == pytest.approx(known.low, rel=0.05)
    assert together.high == pytest.approx(known.high, rel=0.05)
    assert apart.high - apart.low < together.high - together.low


def test_holm_by_hand():
    # 0.005 * 4 = 0.02; 0.01 * 3 = 0.03; 0.03 * 2 = 0.06; 0.04 * 1 = 0.04, raised to 0.06
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


# --- what belongs together -------------------------------------------------------------------------------------------


def test_mean_and_spread_are_over_seeds():
    found = results(gather([record(seed=s, accuracies=[a, a]) for s, a in enumerate((0.5, 0.6, 0.7))]))
    ((_, cell),) = found.cells.items()
    assert (cell.mean, cell.std, cell.seeds) == (pytest.approx(0.6), pytest.approx(0.1), (0, 1, 2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data_sha256": "b" * 64}, "data bbbbbbbb"),
        ({"protocol": DEALT | {"test_fraction": 0.5}}, "test_fraction 0.5"),
        ({"protocol": DEALT | {"minimum": 9}}, "minimum 9"),
        ({"protocol": DEALT | {"unseen_clients": 1}}, "1 unseen in training"),
        ({"protocol": DEALT | {"reshuffle": 2}}, "reshuffle 2"),
    ],
)  # fmt: skip
def test_other_data_or_protocol_is_another_column(change, told):
    sheet = gather([record(seed=0), record(seed=1), record(seed=0, accuracies=[0.1] * 4, **change)])
    assert len(sheet.columns) == 2
    assert [len(cell) for cell in sheet.cells.values()] == [2, 1]
    assert any(told in column.label for column in sheet.columns)


def test_a_protocol_from_before_an_option_is_the_same_protocol():
    now = {"partition": "dirichlet", "n_clients": 4, "alpha": 0.1, "minimum": None, "test_fraction": 0.25}
    assert len(gather([record(seed=0), record(seed=1, protocol=now)]).columns) == 1


def test_other_settings_are_another_row_where_they_meet_and_a_note_where_they_do_not():
    meet = gather([record("ditto", settings={"lr": 0.1}), record("ditto", settings={"lr": 0.3}, accuracies=[0.2] * 4)])
    assert [row.label for row in meet.rows] == ["ditto (lr=0.1)", "ditto (lr=0.3)"]
    wide = {"alpha": 1.0, "protocol": {"partition": "dirichlet", "n_clients": 4, "alpha": 1.0}}
    apart = gather([record("ditto", settings={"lr": 0.1}), record("ditto", settings={"lr": 0.3}, **wide)])
    assert [row.label for row in apart.rows] == ["ditto"]
    assert "Settings differ between columns: ditto." in text(results(apart))


def test_tuned_settings_tell_rows_apart_by_what_was_tuned():
    tuned = {"tuning": {"axes": {"lr": [0.1, 0.3]}}}
    sheet = gather(
        [record("ditto", 0, settings={"lr": 0.1}, **tuned), record("ditto", 1, settings={"lr": 0.3}, **tuned)]
    )
    assert [len(cell) for cell in sheet.cells.values()] == [2]
    assert "Tuned on a part of the training rows: ditto." in text(results(sheet))
    mixed = gather([record("ditto", 0, settings={"lr": 0.1}, **tuned), record("ditto", 0, accuracies=[0.2] * 4)])
    assert len(mixed.rows) == 2
    assert not any("None" in row.label for row in mixed.rows)


def test_the_same_record_twice_counts_once_and_two_results_of_one_run_are_refused():
    assert len(gather([record(), record(), record(protocol=DEALT | {"minimum": None})]).all) == 1
    with pytest.raises(InputError, match=r"two results of one run, apfl with seed 0 on toy\.npz"):
        gather([record(), record(accuracies=[0.1] * 4)])


def test_clients_that_differ_are_not_compared():
    with pytest.raises(InputError, match="different clients"):
        results(gather([record("apfl"), record("afl", n_test=[9] * 4)]))


def test_differences_use_the_seeds_both_have():
    found = results(gather([record("apfl", s) for s in range(5)] + [record("ditto", s, [0.5] * 4) for s in (1, 3)]))
    ((_, difference),) = found.differences.items()
    assert (difference.n_seeds, difference.n_clients, difference.value) == (2, 8, pytest.approx(0.35))
    assert "n=2" in text(found)


def test_clients_without_test_rows_are_left_out_of_pairs():
    found = results(gather([record("apfl", accuracies=[0.9, None, 0.7]), record("afl", accuracies=[0.8, None, 0.6])]))
    ((_, difference),) = found.differences.items()
    assert (difference.n_clients, difference.value) == (2, pytest.approx(0.1))


def test_sample_mean_weighs_clients_by_their_rows():
    big = {"n_test": [30, 10], "accuracy_sample_mean": 0.0}
    one = results(gather([record("apfl", accuracies=[0.9, 0.5], **big), record("afl", accuracies=[0.5, 0.5], **big)]),
                  "accuracy_sample_mean")  # fmt: skip
    ((_, difference),) = one.differences.items()
    assert difference.value == pytest.approx(0.3)


def test_what_cannot_be_compared_says_why():
    assert "no record of apfl" in (results(gather([record("afl")])).why_no_differences or "")
    sweep = [record(settings={"lr": lr}, accuracies=[lr] * 4) for lr in (0.1, 0.2)]
    assert "several settings" in (results(gather(sweep)).why_no_differences or "")
    assert results(gather(sweep), against="apfl (lr=0.1)").ours is not None
    with pytest.raises(InputError, match="several settings"):
        results(gather(sweep), against="apfl")
    with pytest.raises(InputError, match="did you mean 'afl'"):
        results(gather([record("afl")]), against="alf")


def test_several_federations_are_counted():
    assert (
        "in 2 of 2 federations; on average over all of them it is 5.0 points ahead"
        in summary(results(gather(a_study())))[0]
    )


def test_defaults_are_ours_among_variants():
    own = json.loads(json.dumps(asdict(load_method("apfl"))))
    sweep = [record(settings=own | {"beta": beta}, accuracies=[0.1 + beta / 100] * 4) for beta in (1.0, 2.0)]
    found = results(gather([*sweep, record(settings=own)]))
    assert found.ours is not None
    assert found.ours.label == "apfl (beta=auto, default)"
    assert len(found.differences) == 2


def test_settings_found_on_test_rows_do_not_compete():
    """One row over seeds whatever they were, no place, no part in Holm, and never the best of the others."""
    own = {"gamma": "auto", "beta": "auto", "balance": "auto", "tau": "auto", "d_primary": 64}
    apfl = [record("apfl", seed, [0.8, 0.7, 0.9, 0.8], settings=own) for seed in (0, 1)]
    oracle = [
        record("apfl_oracle", seed, [0.99] * 4, settings=own | {"gamma": 1.0 + seed, "beta": 2.0 * seed})
        for seed in (0, 1)
    ]
    ditto = [record("ditto", seed, [0.7, 0.6, 0.9, 0.7]) for seed in (0, 1)]
    found = results(gather([*apfl, *oracle, *ditto]))
    assert {row.label: found.cells[row, found.columns[0]].place for row in found.rows} == {
        "apfl_oracle": 0, "apfl": 1, "ditto": 2,
    }  # fmt: skip
    assert {row.label for row, _ in found.differences} == {"ditto"}
    assert "ahead of the only other method (80.0 %, ditto 72.5 %" in summary(found)[0]
    assert "on the test rows, for each seed: apfl_oracle. It does not compete." in markdown(found)


def test_a_gap_is_told_on_the_seeds_of_its_interval():
    apfl = [record("apfl", seed, [a, a]) for seed, a in ((0, 0.8), (1, 0.8), (2, 0.2))]
    ditto = [record("ditto", seed, [0.7, 0.7]) for seed in (0, 1)]
    (line,) = summary(results(gather([*apfl, *ditto])))
    assert "apfl is 10.0 points ahead of" in line
    assert "on the 2 seeds both have" in line


def test_a_client_without_test_rows_in_one_seed_keeps_its_place():
    """Clients that are the same in all seeds are drawn with all their seeds, also past one that has a gap."""
    given = {"partition": "given", "alpha": None, "protocol": {"partition": "given", "n_clients": None}}
    full, gap = [1.0, 0.0, 0.0, 0.0, 1.0], [None, 0.0, 0.0, 0.0, 1.0]
    apfl = [record("apfl", seed, each, **given) for seed, each in enumerate((full, gap))]
    zeros = [[None if a is None else 0.0 for a in each] for each in (full, gap)]
    others = [record("afl", seed, each, **given) for seed, each in enumerate(zeros)]
    found = results(gather([*apfl, *others]))
    (difference,) = found.differences.values()
    by_hand = paired_difference(
        [pairs(full, np.zeros(5)), pairs([0, 0, 0, 0, 1.0], np.zeros(5), [0, 1, 1, 1, 1])], same_clients=True
    )
    assert (difference.value, difference.low, difference.high) == (by_hand.value, by_hand.low, by_hand.high)
    assert difference.value == pytest.approx((0.4 + 0.25) / 2)
    assert difference.n_clients == 9


def test_short_training_of_the_others_is_said():
    def told(*n_rounds: int) -> list[str]:
        others = [
            record(name, settings={"n_rounds": n})
            for name, n in zip(("ditto", "fedavg", "fedas"), n_rounds, strict=False)
        ]
        return summary(results(gather([record("apfl"), *others])))

    assert told(1)[-1] == "The gradient methods were trained for 1 round; the paper has 200."
    assert told(2, 50)[-1] == "The gradient methods were trained for 2 to 50 rounds; the paper has 200."
    assert "trained" not in told(200, 400)[-1]


def test_behind_is_said():
    lines = summary(results(gather([record("apfl", accuracies=[0.6, 0.5]), record("ditto", accuracies=[0.9, 0.8])])))
    assert "30.0 points BEHIND" in lines[0]


# --- published values ------------------------------------------------------------------------------------------------


def test_published_values_are_the_papers():
    def column(n: int, alpha: float, data: str = "cifar100-x.npz", partition: str = "dirichlet") -> Column:
        return Column((), partition, n, alpha, data)

    assert published(Row("apfl_paper", {}), column(50, 0.1)) == pytest.approx(0.8072)
    assert published(Row("fedselect", {}), column(100, 1.0, "imagenet-r.npz")) == pytest.approx(0.0709)
    assert published(Row("apfl_paper", {"balance": 0.5}), column(50, 0.5)) == pytest.approx(0.6460)
    assert published(Row("apfl_paper", {"balance": 0.0}), column(50, 1.0)) == pytest.approx(0.5497)  # primary alone
    assert published(Row("apfl_paper", {"beta": 0.5}), column(50, 0.5)) is None
    assert published(Row("apfl", {}), column(50, 0.1)) is None
    assert published(Row("apfl_paper", {"tuned": "beta+normalise"}), column(50, 0.1)) == pytest.approx(0.8072)
    narrow = [record("apfl_paper", settings={"d_primary": 64, "d_refinement": 1024})]
    assert published(Row("apfl_paper", {}), column(50, 0.1), narrow) is None
    assert published(Row("afl", {}), column(50, 0.2)) is None
    assert published(Row("afl", {}), column(50, 0.1, "imagenet-resnet.npz")) is None
    assert published(Row("afl", {}), column(50, 0.1, partition="iid")) is None


def test_published_values_agree_with_the_paper_itself():
    """Every number of the file stands in the paper's tables, and the tables have no others."""
    paper = ROOT.parent / "shared" / "paper.tex"
    if not paper.exists():
        pytest.skip(f"needs {paper}, which is not part of the project")
    source = "\n".join(line for line in paper.read_text().splitlines() if not line.startswith("%"))
    tables = re.findall(r"\\begin\{table\*\}.*?\\end\{table\*\}", source, re.DOTALL)
    rows = [
        line for table in tables for line in table.splitlines() if line.count(r"\%") >= 10 and "Advance" not in line
    ]
    assert len(rows) == 12 + 6
    stated = sorted(float(x) for line in rows for x in re.findall(r"(\d+\.\d+)\\%", line))
    values = re.sub(r"#.*", "", (ROOT / "src/apfl/report/published.toml").read_text())
    ours = [float(x) for x in re.findall(r"\d+\.\d\d", values)]
    primary = [56.41, 55.20, 54.97, 33.37, 33.85, 32.94]
    assert sorted(ours + 4 * primary) == stated  # the paper repeats the primary stream's for every balance


# --- formats ---------------------------------------------------------------------------------------------------------


def test_every_format_has_the_numbers():
    found = results(gather(a_study()))
    mean = f"{100 * found.cells[found.rows[0], found.columns[0]].mean:.1f} "
    for written in (text(found), markdown(found), latex(found).replace(r"$\pm$", "±")):
        assert mean in written
        assert "accuracy" in written
        assert "The last round is what is reported" in written
        assert "3 seeds" in written
    assert f"**{mean}" in markdown(found)
    assert f"\\textbf{{{mean}" in latex(found)
    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert len(lines) == 8
    assert float(lines[0]["mean"]) == found.cells[found.rows[0], found.columns[0]].mean
    assert lines[0]["difference"] == ""
    assert float(lines[-1]["p_holm"]) < 0.05


FEW = "Fewer than 5 seeds are few"
ALONE = "With one seed the interval speaks of other clients only, not of other seeds."
BOTH = "The interval speaks of other seeds and other clients."


@pytest.mark.parametrize(
    ("n_seeds", "says", "silent"), [(1, [ALONE], [FEW, BOTH]), (4, [FEW, BOTH], [ALONE]), (5, [BOTH], [FEW, ALONE])]
)
def test_every_format_says_what_its_intervals_speak_of(n_seeds, says, silent):
    study = [record(name, seed, [a] * 9) for seed in range(n_seeds) for name, a in (("apfl", 0.9), ("afl", 0.8))]
    found = results(gather(study))
    told = f"on the seeds that both have: {n_seeds} seed"
    for written in (text(found), markdown(found), latex(found), page(study)):
        plain = " ".join(written.split())
        assert all(each in plain for each in [told, *says])
        assert not any(each in plain for each in [*silent, "unless n= says otherwise"])
    (difference,) = found.differences.values()
    assert f"({difference.speaks_of})" in summary(found)[0]
    (line,) = [line for line in csv.DictReader(io.StringIO(as_csv(found))) if line["method"] == "afl"]
    assert (line["interval_speaks_of"], line["seeds_compared"]) == (difference.speaks_of, str(n_seeds))
    assert difference.speaks_of == {
        1: "clients only, 1 seed", 4: "seeds and clients, 4 seeds: few", 5: "seeds and clients, 5 seeds",
    }[n_seeds]  # fmt: skip


def test_a_difference_of_fewer_seeds_than_the_others_says_so():
    study = [record(name, seed, [a] * 9) for seed in range(5) for name, a in (("apfl", 0.9), ("afl", 0.8))]
    study += [record("fedavg", seed, [0.7] * 9) for seed in range(5)] + [record("ditto", 0, [0.6] * 9)]
    found = results(gather(study))
    for written in (text(found), markdown(found), latex(found).replace("{[}", "[").replace("{]}", "]"), page(study)):
        assert "+30.0 [+30.0, +30.0]* n=1" in written
        assert "+10.0 [+10.0, +10.0]* n=" not in written
        plain = " ".join(written.split())
        assert all(each in plain for each in ("5 seeds unless n= says otherwise", ALONE, BOTH))


def test_latex_is_whole_and_escaped():
    odd = [record("apfl", data="a_b&c%$#{}~^\\.npz"), record("a_f&l", data="a_b&c%$#{}~^\\.npz", accuracies=[0.5] * 4)]
    source = latex(results(gather(odd)))
    bare = re.sub(
        r"\\[&%$#_{}]|\\textbackslash\{\}|\\text\w+\{\}|\$\\pm\$|\$[<>]\$|^%.*$", "", source, flags=re.MULTILINE
    )
    assert not set(bare) & set("$#_~^%")
    assert bare.count("{") == bare.count("}")
    for environment in ("table", "tabular"):
        assert source.count(f"\\begin{{{environment}}}") == source.count(f"\\end{{{environment}}}") > 0
    tabulars = re.findall(r"\\begin\{tabular\}\{l(r+)\}(.*?)\\end\{tabular\}", source, re.DOTALL)
    assert len(tabulars) == 2
    for columns, body in tabulars:
        name, *lines = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert name.startswith(f"\\multicolumn{{{len(columns) + 1}}}{{l}}")
        assert lines
        assert all(len(re.findall(r"(?<!\\)&", line)) == len(columns) for line in lines)


def test_markdown_rows_have_as_many_cells_as_heads():
    odd = [record("apfl"), record("a|b", accuracies=[0.5] * 4)]
    table = [line for line in markdown(results(gather(odd))).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {3}


def test_best_and_second_best_share_a_place_when_equal():
    found = results(gather([record("apfl"), record("afl"), record("ditto", accuracies=[0.5] * 4)]))
    assert {row.label: found.cells[row, found.columns[0]].place for row in found.rows} == {
        "apfl": 1,
        "afl": 1,
        "ditto": 2,
    }
    seconds = results(gather([record("apfl", seconds=2.0), record("afl", seconds=1.0)]), "seconds")
    assert seconds.cells[seconds.rows[0], seconds.columns[0]].place == 1
    assert seconds.rows[0].label == "afl"


# --- records, figures, page, commands --------------------------------------------------------------------------------


def test_records_from_before_are_read():
    for name in ("auto", "opponents", "floor", "width", "sensitivity"):
        path = ROOT / "docs" / "results" / "records" / f"{name}.jsonl"
        assert len(read([path])) == len(path.read_text().splitlines())
    before = json.loads(record().to_json())
    for new in ("class_names", "class_counts", "primary_accuracies", "threads", "source", "tuning", "curve"):
        before.pop(new)
    assert Record.from_json(json.dumps(before)).class_counts == ()
    assert Record.from_json(record().to_json()) == replace(record())


@pytest.mark.parametrize("change", [{"accuracy_client_mean": "x"}, {"curve": 3}, {"new": 1}, {"n_test": None}])
def test_what_is_not_a_record_is_refused(change, tmp_path):
    (tmp_path / "r.jsonl").write_text(json.dumps(json.loads(record().to_json()) | change))
    with pytest.raises(InputError, match="not a record"):
        read([tmp_path / "r.jsonl"])


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_draws(name):
    study = [*a_study(), *(record("ditto", settings={"lr": lr}, accuracies=[lr] * 4) for lr in (0.1, 0.2, 0.3))]
    sheet = gather(study)
    drawn = figure(name, sheet, results(sheet).ours)
    assert any(axes.has_data() for axes in drawn.axes)


def test_plot_without_a_name_says_which_figures_there_are(tmp_path, capsys):
    assert run("plot", tmp_path) == 0
    shown = capsys.readouterr().out
    assert all(f"--figure {name}" in shown and FIGURES[name] in shown for name in FIGURES)


def test_a_figure_that_cannot_be_drawn_says_so():
    sheet = gather([record("afl", class_counts=())])
    for name in ("partition", "tuning", "gains"):
        with pytest.raises(InputError, match=f"do not have what figure '{name}' shows"):
            figure(name, sheet, None)
    with pytest.raises(InputError, match="no method has several values of 'lr'"):
        figure("sensitivity", sheet, None, "lr")


def test_a_sweep_of_two_values_is_named():
    betas = (0.11, 110.0)
    sheet = gather([record(settings={"beta": b, "lr": 0.1}, accuracies=[0.5 + b / 1000] * 4) for b in betas])
    with pytest.raises(InputError, match="several values of 'betta' here; settings that vary: beta"):
        figure("sensitivity", sheet, None, "betta")
    with pytest.raises(InputError, match=r"needs --x, the setting to draw \(beta\)"):
        figure("sensitivity", sheet, None)
    assert figure("sensitivity", sheet, None, "beta").axes[0].has_data()


def test_ticks_can_be_read():
    """Whole rounds, no exponents, and no label upon the next."""
    gammas, betas = np.logspace(-0.5, 6.5, 21).tolist(), np.logspace(-1.9, 3.1, 6).tolist()
    table = CHOSEN["table"] | {"beta": betas, "hits": [[[60, 61], [70, 71], [65, 66]]] * 6}
    path = {"gamma": gammas, "gcv": [0.5] * 21}
    apfl = record(chosen=CHOSEN | {"beta": betas[2], "table": table, "gamma_path": path})
    fedavg = record("fedavg", rounds=3, curve=[[0.1 * t, 100.0 * t, 0.5] for t in range(1, 4)])
    sheet = gather([apfl, fedavg])
    tuning, overhead = (figure(name, sheet, None) for name in ("tuning", "overhead"))
    assert not [word for word in _ticks(tuning.axes[0].yaxis) if "e" in word]
    gamma = next(axes for axes in tuning.axes if axes.get_xlabel() == "gamma")
    tuning.canvas.draw()
    boxes = [label.get_window_extent() for label in gamma.get_xticklabels() if _inside(gamma, label.get_position()[0])]
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert all(float(word.replace("\N{MINUS SIGN}", "-")).is_integer() for word in _ticks(overhead.axes[0].xaxis))


def _ticks(axis) -> list[str]:
    axis.figure.canvas.draw()
    return [label.get_text() for label in axis.get_ticklabels()]


def _inside(axes, x: float) -> bool:
    low, high = axes.get_xlim()
    return low <= x <= high


class Tags(HTMLParser):
    """Tags that are open at the end, ids, and what could ask for something elsewhere."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action") and not value.startswith(("#", "data:")):
                self.outside.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_outside():
    found = Tags(page(each for each in a_study() if each.alpha == 0.1))
    assert found.open == []
    assert found.outside == []
    assert len(found.ids) == len(set(found.ids))


def test_what_comes_from_records_is_escaped():
    bad = "<script>alert(1)</script>\"'&"
    odd = {"data": bad, "client_names": [bad + str(i) for i in range(4)], "class_names": [bad, "y", "z"], "device": bad}
    odd |= {"settings": {bad: bad}, "provenance": {bad: bad}, "versions": {"apfl": bad}}
    source = page([record("apfl", **odd), record(f"local_ridge{bad}", accuracies=[0.5] * 4, **odd)], title=bad)
    assert "<script>alert" not in source
    assert source.count("<script>") == 1
    assert Tags(source).open == []


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_commands_from_records_to_files(tmp_path, capsys):
    study = [each for each in a_study() if each.alpha == 1.0]
    (tmp_path / "records.jsonl").write_text("".join(f"{each.to_json()}\n" for each in study))
    assert run("table", tmp_path) == 0
    assert "apfl is 5.0 points ahead of the best of 3 others" in " ".join(capsys.readouterr().out.split())
    for style, name in (("markdown", "t.md"), ("latex", "t.tex"), ("csv", "t.csv"), ("terminal", "t.txt")):
        assert run("table", tmp_path, "--format", style, "--out", tmp_path / name) == 0
        assert "apfl" in (tmp_path / name).read_text()
    assert run("table", tmp_path, "--methods", "apfl, fedavg", "--federation", "alpha 1", "--format", "csv") == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {row["method"] for row in rows} == {"apfl", "fedavg"}
    for kind in ("png", "svg", "pdf"):
        assert (
            run("plot", tmp_path, "--figure", "cost", "--federation", "alpha 1", "--out", tmp_path / f"f.{kind}") == 0
        )
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "f.pdf").read_bytes().startswith(b"%PDF")
    capsys.readouterr()
    assert run("report", tmp_path, "--out", tmp_path / "page.html") == 0
    assert capsys.readouterr().err.startswith("wrote")  # no empty line where nobody watches a bar
    assert "Everything measured" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["table", "nowhere"], "there is no nowhere"),
        (["table", "."], "no records given"),
        (["table", "r.jsonl", "--format", "html"], "no format 'html'"),
        (["table", "r.jsonl", "--metric", "accuracy"], "no metric 'accuracy'"),
        (["table", "r.jsonl", "--out", "."], "cannot write .: it is a folder; give a file name"),
        (["report", "r.jsonl", "--out", ".."], "it is a folder; give a file name"),
        (["plot", "r.jsonl", "--figure", "curve", "--out", "x.png"], "did you mean 'curves'"),
        (["plot", "r.jsonl", "--figure", "cost", "--out", "x.gif"], ".png, .svg or .pdf"),
        (["plot", "r.jsonl", "--figure", "cost", "--out", "x.png", "--federation", "alpha 7"], "no federation has"),
        (["plot", "r.jsonl", "--figure", "sensitivity", "--out", "x.png"], "needs --x"),
        (["table", "r.jsonl", "--methods", "apfl,nobody"], "no method in these records 'nobody'"),
        (["track", "r.jsonl", "--to", "tensorboard"], "no tracker 'tensorboard'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(record().to_json())
    assert run(*arguments) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


@pytest.mark.parametrize(
    "change",
    [{"tuning": {"axes": {"gamma": [1.0]}}}, {"files": {"method": {"path": "/x/mine.py:Mine", "sha256": "ab" * 32}}}],
    ids=["tuned", "a file of one's own"],
)
def test_records_with_and_without_a_mark_go_onto_one_page(change):
    before = [each for each in a_study() if each.method == "apfl"]
    records = [*before, *(replace(each, **change) for each in before)]
    assert len(gather(records).rows) == 2 * len(gather(before).rows)
    assert "Accuracy of every client" in page(records)
