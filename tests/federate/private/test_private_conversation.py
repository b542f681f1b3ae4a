"""Noise over Flower's messages: a run with a trusted server, and a masked one, with the sites' own handlers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apfl.federate import Coordinator, Site
from apfl.federate.private import account
from apfl.federate.private.agreement import encoding_of
from apfl.models.file import read
from tests.federate.federation_toys import seen
from tests.federate.private.toys import FIXED, METHOD, need_accounting, private_terms, standardised

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from apfl.federate.flower.conversation import Policy
from tests.federate.masked.test_masked_conversation import Grid as MaskedGrid
from tests.federate.masked.test_masked_conversation import hurry, prepare  # noqa: F401  # a fixture
from tests.federate.masked.test_masked_conversation import run as run_masked
from tests.federate.test_conversation import identity  # noqa: F401  # a fixture
from tests.federate.test_landmark_conversation import asked, converse


@pytest.fixture(autouse=True)
def _accounting():
    need_accounting()


def test_a_run_with_a_trusted_server(tmp_path):
    terms, policy = private_terms(METHOD), Policy(deadline=600.0, evaluate=True)
    events = converse(tmp_path, (1, 2, 3), terms, policy)
    assert asked(events, "site-1") == ["describe", "statistics", "refine", "evaluate"]  # the last is declined
    for node in (1, 2, 3):
        told = read(tmp_path / str(node) / "f" / f"site-{node}" / "model.safetensors").settings
        assert told["privacy"]["epsilon"] <= 4.0
    # Another run asks for nothing that would be a release; a late site only receives.
    events = converse(tmp_path, (1, 2, 3, 4), terms, policy)
    assert asked(events, "site-4")[:2] == ["statistics", "refine"]
    (answer,) = [e for e in events if e["event"] == "answered" and e["phase"] == "statistics"]
    assert answer["outcome"] == "refused"
    assert "release 2 would make epsilon" in answer["reason"]
    assert (tmp_path / "4" / "f" / "site-4" / "model.safetensors").is_file()
    with Coordinator(tmp_path / "server") as server:
        assert len(account.releases(server.ledger)) == 1
        assert set(server.pool.members()) == {"site-1", "site-2", "site-3"}


def test_a_masked_run_with_broken_connections(tmp_path):
    """A site that answers twice sends the same noisy vector, and nothing else is summed up."""
    nodes = (1, 2, 3)
    prepare(tmp_path, nodes)
    grid = MaskedGrid(tmp_path, nodes, lambda what, phase, node: "fails" if node == 3 else "")
    terms = private_terms(replace(FIXED, noise="shares"), masked=True)
    events = run_masked(tmp_path, grid, terms, evaluate=True)
    assert [event["sum"] for event in events if event["event"] == "summed"] == ["statistics"]
    with Coordinator(tmp_path / "server") as server:
        (release,) = account.releases(server.ledger)
        sites = [
            Site.from_file(tmp_path / str(n), f"site-{n}", str(tmp_path / str(n) / "rows.npz"), test_column="test")
            for n in nodes
        ]
        noise = server.pool.running().vector - sum(site.own_vector(server.terms).numpy() for site in sites)
        unit = standardised(noise, encoding_of(server.terms), release.sigma)
        assert np.abs(unit).max() < 7
        assert 0.7 < unit.std() < 1.3  # of 375 draws
        own = [account.parse((site.home(server.terms) / "account.json").read_text()) for site in sites]
        assert [[each.key for each in made] for made in own] == [[release.key]] * 3
        assert seen(server.current(), server.terms).account["epsilon"] == release.epsilon
        assert server.ledger.confirmed(1) == {"site-1", "site-2", "site-3"}
    # The ledger has it all: another run asks for nothing.
    again = run_masked(tmp_path, MaskedGrid(tmp_path, nodes), evaluate=True)
    assert not [event for event in again if event["event"] == "asked"]
