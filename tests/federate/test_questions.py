"""What a run asks a site next, and when it stops asking: the states of a question, without a network."""

from __future__ import annotations

import pytest

from apfl.federate import Coordinator, Terms
from apfl.federate.flower.answers import Answers
from apfl.federate.flower.questions import ATTEMPTS, PHASES, Ask, Questions, State
from tests.federate.federation_toys import AUTO, contribute, make_sites, tabulate

KEY = ("site-a", "statistics", 0)


def owed(server: Coordinator, site: str, chosen: int = 0) -> list[str]:
    """The questions that the ledger lacks a site's answer to."""
    answers = Answers(server, chosen)
    return [name for name, phase in PHASES.items() if phase.owed(site, answers)]


def test_a_dead_node_that_fails_at_once_does_not_use_up_its_attempts(monkeypatch):
    """Flower lists a killed site for a while and fails every message to it within milliseconds."""
    now = [0.0]
    monkeypatch.setattr("apfl.federate.flower.questions.time.monotonic", lambda: now[0])
    questions, pauses = Questions(), []
    for attempt in range(ATTEMPTS - 1):
        questions.ask(str(attempt), Ask(1, *KEY))
        questions.fail(questions.take(str(attempt)).key)
        assert questions.is_open(KEY)
        began = now[0]
        while not questions.may_ask(KEY):
            now[0] += 0.5
        pauses.append(now[0] - began)
    assert pauses == [3.0, 6.0, 12.0, 24.0]


def test_a_broken_connection_is_tried_again_and_then_given_up():
    questions = Questions()
    for attempt in range(ATTEMPTS):
        assert questions.is_open(KEY)
        questions.ask(str(attempt), Ask(1, *KEY))
        assert questions.state(KEY) is State.ASKED
        assert questions.busy() == {1}
        questions.fail(questions.take(str(attempt)).key)
    assert questions.state(KEY) is State.GIVEN_UP
    assert not questions.busy()
    assert questions.is_open(("site-b", *KEY[1:]))


@pytest.mark.parametrize("end", ["answer", "refuse"])
def test_a_question_that_is_over_stays_over(end):
    """A second connection of the same site may break, or be asked, after the first one answered."""
    questions = Questions()
    questions.ask("1", Ask(1, *KEY))
    questions.ask("2", Ask(2, *KEY))
    getattr(questions, end)(questions.take("1").key)
    over = questions.state(KEY)
    questions.fail(questions.take("2").key)
    questions.ask("3", Ask(3, *KEY))
    assert questions.state(KEY) is over
    assert over in (State.ANSWERED, State.REFUSED)


def test_a_site_that_says_its_name_takes_its_question_along():
    questions = Questions()
    ask = Ask(7, None, "describe", 0)
    questions.ask("1", ask)
    assert questions.asked_for("describe") == {"7"}
    questions.name(ask, "site-a")
    questions.refuse(ask.key)
    assert questions.state(("site-a", "describe", 0)) is State.REFUSED
    assert questions.state(("7", "describe", 0)) is State.WAITING


def test_the_ledger_says_what_a_site_owes(tmp_path):
    """Describe, statistics, table, refine, metrics: one after the other, and none twice."""
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO)) as server:
        assert owed(server, "site-0") == ["describe"]
        server.describe(sites[0].describe(server.invitation()))
        assert owed(server, "site-0") == []
        agreement = contribute(server, sites[:3])
        assert owed(server, "site-0") == []
        assert owed(server, "site-3") == ["statistics"]
        server.publish()
        assert owed(server, "site-0") == ["table"]
        assert owed(server, "site-3") == ["statistics"]
        choice = tabulate(server, sites[:3])
        assert owed(server, "site-0") == []  # others may still send tables
        assert owed(server, "site-0", chosen=1) == ["refine"]
        sites[0].refine(agreement, server.deliver("site-0"), choice)
        server.confirm("site-0", 1)
        assert owed(server, "site-0") == ["evaluate"]
        assert owed(server, "site-1") == ["refine"]  # somebody has refined by the choice
        server.metrics(sites[0].metrics(agreement))
        assert owed(server, "site-0") == []


def test_everyone_sees_the_same_current_publication(tmp_path):
    """The ledger, the coordinator, the status and a run: also when a member left and there is no quorum without it."""
    sites = make_sites(tmp_path)

    def current(server: Coordinator) -> set[int | None]:
        row, publication = server.ledger.current(), server.current()
        numbers = {None if row is None else row["number"], None if publication is None else publication.number}
        return numbers | {server.status()["current"], Answers(server).current}

    with Coordinator(tmp_path / "server", Terms("f", method=AUTO, quorum=3)) as server:
        contribute(server, sites[:3])
        assert current(server) == {None}
        server.publish()
        assert current(server) == {1}
        server.leave("site-0")
        assert current(server) == {None}
        contribute(server, sites[3:])
        server.publish()
        assert current(server) == {2}
