"""A site that left comes back under its name: if its key is put back, and if it wants to. Then all is as before."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from apfl.federate import Coordinator, Terms, status_of
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import AUTO, FIXED, LANDMARKS, NAMES, contribute, make_sites, same, seen
from tests.federate.liars import Attack, digits_sites, lie_of

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from flwr.app import Context, Message, RecordDict

from apfl.federate.flower.answers import Answers
from apfl.federate.flower.client_app import app
from apfl.federate.flower.conversation import Conversation, Policy
from apfl.federate.flower.events import Events
from apfl.federate.flower.questions import PHASES
from tests.federate import test_landmark_conversation
from tests.federate.test_conversation import RUN, as_sent, identity  # noqa: F401  # a fixture
from tests.federate.test_landmark_conversation import asked


class Grid(test_landmark_conversation.Grid):
    """Of sites that were started with or without --rejoin, with keys or without."""

    rejoin, named = True, True

    def get_nodes(self):
        nodes = super().get_nodes()
        for node in nodes if not self.named else ():
            node.name = ""
        return nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node, name = message.metadata.dst_node_id, str(len(self.replies))
        message.metadata.__dict__["_message_id"] = name
        home = self.folder / str(node)
        config = {"name": f"site-{node}", "folder": str(home), "data": str(home / "rows.npz"), "rejoin": self.rejoin}
        self.replies[name] = as_sent(app(message, Context(RUN, node, config, RecordDict(), {})))
        return [name]


def run(folder: Path, method: APFL, *, rejoin: bool = True, named: bool = True, keep: bool = True) -> list[dict]:
    """A run of three sites to its end; its events."""
    keys = folder / "server" / "keys"
    if named and not keys.exists():
        keys.mkdir(parents=True)
        for node in (1, 2, 3):
            (keys / f"site-{node}.pub").touch()
    with Coordinator(folder / "server", Terms("f", method=method, keep_contributions=keep)) as coordinator:
        events = Events(folder / "server", str(RUN))
        before = len(events.path.read_text().splitlines()) if events.path.exists() else 0
        grid = Grid(folder, (1, 2, 3))
        grid.rejoin, grid.named = rejoin, named
        assert Conversation(grid, coordinator, Policy(deadline=600.0), events, folder / "server").run()
    return [json.loads(line) for line in events.path.read_text().splitlines()[before:]]


def members(folder: Path) -> list[str]:
    return [row["name"] for row in status_of(folder / "server")["clients"] if row["state"] == "member"]


def leave(folder: Path, name: str) -> None:
    with Coordinator(folder / "server") as server:
        sent = None
        if not server.draft.keep_contributions:
            digest = server.contribution_of(name)
            sent = (folder / "3" / "f" / name / f"sent-{digest}.safetensors").read_bytes()
        server.leave(name, sent)


@pytest.mark.parametrize(
    ("method", "keep"),
    [
        (FIXED, True),
        pytest.param(AUTO, False, marks=pytest.mark.slow),
        pytest.param(LANDMARKS, True, marks=pytest.mark.slow),
    ],
)
def test_a_site_that_left_comes_back_with_its_key_if_it_was_started_to_rejoin(method, keep, tmp_path, capsys):
    run(tmp_path, method, keep=keep)
    with Coordinator(tmp_path / "server") as server:
        before = seen(server.current(), server.terms)
    leave(tmp_path, "site-3")
    key = tmp_path / "server" / "keys" / "site-3.pub"
    key.rename(key.with_suffix(".pub.left"))
    assert asked(run(tmp_path, method, keep=keep), "site-3") == []
    key.touch()
    capsys.readouterr()
    events = run(tmp_path, method, rejoin=False, keep=keep)
    assert asked(events, "site-3") == ["return"]
    assert [event["client"] for event in events if event["event"] == "declined"] == ["site-3"]
    assert "to take part again, join with --rejoin" in capsys.readouterr().out
    assert members(tmp_path) == ["site-1", "site-2"]
    events = run(tmp_path, method, keep=keep)
    assert asked(events, "site-3") == ["return", *(["table"] if method is not FIXED else []), "refine"]
    assert "takes part in f again: sends new statistics" in capsys.readouterr().out
    assert members(tmp_path) == ["site-1", "site-2", "site-3"]
    with Coordinator(tmp_path / "server") as server:
        after = seen(server.current(), server.terms)
    assert after.n_samples == before.n_samples
    if method is not LANDMARKS:  # integers are rounded anew
        assert same(replace(after, members=before.members), before)


def test_without_keys_nobody_has_said_that_it_may_come_back(tmp_path):
    """Its process may still run with --rejoin: it would be back with the next run after it was taken out."""
    run(tmp_path, FIXED, named=False)
    leave(tmp_path, "site-3")
    assert asked(run(tmp_path, FIXED, named=False), "site-3") == []
    assert members(tmp_path) == ["site-1", "site-2"]


def test_leaving_and_coming_back_is_no_way_around_the_share(tmp_path):
    """The settled cap is of one who comes later, and was made with this site's own rows."""
    *honest, liar = sites = digits_sites(tmp_path)
    draft = Terms.checked({"federation": "f", "max_share": 0.5, "method": {"map": "random", "d_primary": 128}})
    with Coordinator(tmp_path / "server", draft) as server:
        contribute(server, sites)
        others, own = sum(len(site.train) for site in honest), len(liar.train)
        assert server.terms.max_rows >= 5 * own > others
        server.leave(liar.name)
        refused = server.accept(lie_of(liar, server.terms, Attack(weight=5, nonce="again")), liar.name)
        assert f"with the {others} rows of the others at most {others} may be" in refused.reason
        assert server.accept(liar.statistics(server.settle(), again=True), liar.name).outcome == "accepted"


def test_a_site_that_never_left_is_not_asked_to_return(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED, class_names=NAMES)) as server:
        contribute(server, sites)
        assert not PHASES["return"].owed("site-0", Answers(server))
        server.leave("site-0")
        assert PHASES["return"].owed("site-0", Answers(server))
