"""What the record says about the choice of settings, and when it states no accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apfl.maths.hits import Grid
from apfl.maths.personalise import (
    Choice,
    LeftOutHits,
    Personal,
    Rows,
    _account,
    _plans,
    leave_out,
    personalise,
    solve_primary,
)
from apfl.maths.ridge import statistics
from tests.maths.test_ridge import rows

TRIED = Grid([1.0, 2.0], [0.0, 0.5], [0.0, 0.1])
FIRST, SECOND = (1.0, 0.5, 0.0), (2.0, 0.0, 0.1)
PRIMARY = solve_primary(statistics(*rows(600, 5, 3, 0)), 1.0)


def client(n: int, *, copies: int = 0, unjudged: int = 0, noise: float = 0.0) -> LeftOutHits:
    """One whose table has 100 to 107 hits, in the order of the settings."""
    return LeftOutHits({1.0: 100 + torch.arange(8).view(2, 2, 2)}, n, copies, unjudged, noise, None)


def told_to(*settings: tuple[float, float, float]) -> list[Personal]:
    return [Personal(torch.zeros(0), *setting, None) for setting in settings]


def test_a_record_has_the_sums_over_clients():
    both = [client(300, copies=20, unjudged=4, noise=1.5), client(200, copies=5, unjudged=2, noise=-0.5)]
    told = _account(replace(PRIMARY, distinct_rows=570.4), both, told_to(FIRST, FIRST), TRIED)
    assert (told["d_primary"], told["gamma"]) == (5, 1.0)
    assert [told[name] for name in ("beta", "balance", "tau")] == list(FIRST)
    assert told["leverage_clipped"] == 6 / 500
    assert told["left_out_rows"] == 500 - 25 - 6
    assert told["left_out_noise"] == 1 / 475
    assert told["copies"] == {"at_their_client": 25, "elsewhere": 5}  # 600 - 570.4 - 25, rounded
    assert told["left_out_accuracy"] == 2 * 102 / 469
    assert told["left_out_accuracy_primary_alone"] == 2 * 100 / 469
    assert told["table"] == {
        "beta": [1.0, 2.0], "balance": [0.0, 0.5], "tau": [0.0, 0.1],
        "hits": (200 + 2 * torch.arange(8)).view(2, 2, 2).tolist(),
    }  # fmt: skip
    assert "gamma_path" not in told  # it was given


def test_clients_with_settings_of_their_own_are_counted_by_them():
    told = _account(PRIMARY, [client(300), client(300)], told_to(FIRST, SECOND), TRIED)
    assert (told["beta_per_client"], told["balance_per_client"]) == ([1.0, 2.0], [0.5, 0.0])
    assert told["tau_per_client"] == [0.0, 0.1]
    assert "beta" not in told
    assert told["left_out_accuracy"] == (102 + 105) / 600


@pytest.mark.parametrize(("balances", "taus"), [([0.5, 1.0], [0.0, 0.1]), ([0.0, 0.5], [0.1, 0.2])])
def test_the_primary_alone_is_counted_only_if_it_was_tried(balances, taus):
    tried = Grid([1.0, 2.0], balances, taus)
    told = _account(PRIMARY, [client(600)], told_to((1.0, balances[0], taus[0])), tried)
    assert "left_out_accuracy_primary_alone" not in told
    assert told["left_out_accuracy"] == 100 / 600


@pytest.mark.parametrize(
    ("left_out", "distinct", "stated"),
    [
        ([client(125), client(125)], 600, True),
        ([client(125), client(124)], 600, False),  # few rows
        ([client(125), client(126, copies=2)], 600, False),  # of which copies are none
        ([client(600, unjudged=30)], 600, True),  # 5 %
        ([client(600, unjudged=31)], 600, False),
        ([client(600)], 585, True),  # 15 rows that repeat another client's: each copy vouches for the other
        ([client(600)], 584, False),
        ([client(600, noise=6.0)], 600, True),  # 1 %
        ([client(600, noise=6.1)], 600, False),
        ([client(600, noise=-6.1)], 600, False),
    ],
)
def test_an_accuracy_that_would_mislead_is_not_stated(left_out, distinct, stated):
    told = _account(replace(PRIMARY, distinct_rows=distinct), left_out, told_to(*[FIRST] * len(left_out)), TRIED)
    assert (told["left_out_accuracy"] is not None) == stated
    assert (told["left_out_accuracy_primary_alone"] is not None) == stated


def test_without_a_choice_nothing_is_left_out():
    told = _account(PRIMARY, [], told_to(FIRST, FIRST), TRIED)
    assert told == {"d_primary": 5, "gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0, "leverage_clipped": 0.0}


def test_scopes_choose_by_everyones_table_or_by_each_ones_own():
    one, two = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)
    one[0, 1, 0], two[1, 0, 1], two[0, 1, 0] = 9000, 20_000, 19_000
    both = [LeftOutHits({1.0: table}, 20_000, 0, 0, 0.0, None) for table in (one, two)]

    def settings(left_out: list[LeftOutHits], n: int, scope: str) -> list[tuple[float, float, float]]:
        return [plan.setting for plan in _plans(left_out, n, TRIED, Choice("auto", "auto", "auto", scope, 0.03))]

    assert settings(both, 2, "client") == [FIRST, SECOND]
    assert settings(both, 2, "federation") == [FIRST, FIRST]
    assert settings([], 3, "federation") == [(1.0, 0.0, 0.0)] * 3  # as given


@pytest.mark.parametrize("beta", ["auto", 2.0])
def test_scores_are_kept_if_asked_for(beta):
    phi, y = rows(600, 5, 3, 0)
    choice = Choice(beta, 0.5, 0.0, "federation", 0.03)

    def rows_of(k: int) -> Rows:
        part = slice(300 * k, 300 * k + 300)
        return Rows(phi[part], phi[part], y[part].argmax(1))

    made = personalise(rows_of, [300, 300], PRIMARY, choice, 0, 0, keep_scores=True)
    assert [scores.alone.shape for scores in made.scores] == [(300, 3)] * 2
    assert ("table" in made.account) == (beta == "auto")  # nothing was chosen by them otherwise
    assert personalise(rows_of, [300, 300], PRIMARY, choice, 0, 0).scores == []
    assert [own.setting[1:] for own in made.clients] == [(0.5, 0.0)] * 2


def test_a_primary_keeps_the_curve_its_gamma_was_chosen_on():
    """With None for a point that is not admitted, because JSON knows no infinity."""
    chosen = solve_primary(statistics(*rows(30, 40, 3, 0)), "auto")
    assert None in chosen.path["gcv"]
    assert chosen.path["gcv"][chosen.path["gamma"].index(chosen.gamma)] > 0
    assert len(chosen.path["gcv"]) == len(chosen.path["gamma"])
    assert (PRIMARY.path, PRIMARY.distinct_rows) == (None, 600)
    assert PRIMARY.unit(10) == pytest.approx(2 * float(rows(600, 5, 3, 0)[0].square().sum(1).mean()))


def test_copies_are_not_among_the_rows_that_cannot_be_judged():
    phi, y = rows(600, 5, 3, 0)
    own = Rows(phi[:20], phi[:20], y[:20].argmax(1), copies=torch.arange(20) < 3)
    told = leave_out(own, PRIMARY.with_leverage(0, 0), 0.03, TRIED)
    assert (told.n_rows, told.n_copies, told.n_unjudged) == (20, 3, 0)
    # With a factor a hundred times smaller every leverage is above 1: no row can be judged.
    told = leave_out(own, replace(PRIMARY.with_leverage(0, 0), factor=PRIMARY.factor / 100), 0.03, TRIED)
    assert (told.n_rows, told.n_copies, told.n_unjudged) == (20, 3, 17)
    assert not told.table.any()
