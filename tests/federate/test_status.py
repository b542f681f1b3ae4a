"""Where a federation stands, read from the ledger without `Terms`: it must say what `Terms` says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Terms, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.status import _wants_tables, status
from tests.federate.federation_toys import AUTO, FIXED, LANDMARKS, contribute, make_sites

CLIENT = replace(AUTO, scope="client")
DRAFTS = [
    Terms("f", method=FIXED),
    Terms("f", method=AUTO),
    Terms("f", method=LANDMARKS),
    Terms("f", class_names=("ant", "bee", "cat"), quorum=3, max_share=0.5, method=CLIENT),
    *(Terms("f", method=replace(FIXED, **{name: "auto"})) for name in ("beta", "balance", "tau")),
]


def as_status(terms: Terms) -> dict[str, object]:
    return json.loads(terms.to_json()) | {"digest": terms.digest, "settled": terms.settled}


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_terms_are_those_that_count(draft, tmp_path):
    with Coordinator(tmp_path / "server", draft) as server:
        found = server.status()
        assert (found["federation"], found["quorum"], found["phase"]) == ("f", draft.quorum, "describing")
        assert found["terms"] == as_status(draft)
        for site in make_sites(tmp_path):
            server.describe(site.describe(server.invitation()), site.name)
        agreed = server.outline() if draft.landmarked else server.settle()
        terms = Terms.from_json(agreed)
        found = status(server.ledger)
        assert found["terms"] == as_status(terms)
        assert found["phase"] == ("spreading" if terms.outlined else "contributing")
        assert _wants_tables(found["terms"]) is terms.wants_tables


@pytest.mark.parametrize("draft", DRAFTS)
def test_at_the_end_it_is_published(draft, tmp_path):
    simulate(make_sites(tmp_path), draft, tmp_path / "server")
    found = status_of(tmp_path / "server")
    assert (found["phase"], found["terms"]["settled"]) == ("published", True)


@pytest.mark.parametrize(("method", "phase"), [(AUTO, "choosing"), (FIXED, "published"), (CLIENT, "published")])
def test_settings_are_being_chosen_until_every_member_has_sent_its_table(method, phase, tmp_path):
    with Coordinator(tmp_path / "server", Terms("f", method=method)) as server:
        contribute(server, make_sites(tmp_path))
        server.publish()
        assert server.status()["phase"] == phase


def test_a_ledger_whose_terms_are_damaged_is_named(tmp_path):
    with Coordinator(tmp_path, DRAFTS[0]) as server:
        with server.ledger.transaction():
            server.ledger.put("draft", "{")
        with pytest.raises(InputError, match="restore the folder from a backup"):
            server.status()
