"""A run of a landmark federation in one process, with Flower's own messages and the site's own handlers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from apfl.federate import Coordinator, Terms, status_of
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import LANDMARKS, NAMES, PILOT, draw_shard

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from apfl.federate.flower.client_app import app
from apfl.federate.flower.conversation import Conversation, Policy
from apfl.federate.flower.events import Events
from tests.federate.test_conversation import RUN, as_sent, identity  # noqa: F401  # a fixture

DECIDED = ("piloting", "tried", "piloted", "outlined", "settled")


class Grid:
    """Sites by their node's number; those in ``only_receive`` contribute nothing."""

    def __init__(self, folder: Path, nodes: Iterable[int], only_receive: Iterable[int] = ()) -> None:
        self.folder, self.nodes, self.only_receive = folder, list(nodes), set(only_receive)
        self.replies: dict[str, tuple[str, dict[str, bytes]]] = {}
        for node in self.nodes:
            home, rows = folder / str(node), draw_shard(30 + node, node)
            home.mkdir(exist_ok=True)
            features, labels = rows.features.numpy(), rows.labels.numpy()
            np.savez(home / "rows.npz", features=features, labels=labels, class_names=np.array(NAMES))

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=node, name=f"site-{node}") for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node, name = message.metadata.dst_node_id, str(len(self.replies))
        message.metadata.__dict__["_message_id"] = name
        home = self.folder / str(node)
        config = {"name": f"site-{node}", "folder": str(home), "data": str(home / "rows.npz")}
        config |= {"contribute": node not in self.only_receive, "terms": str(self.folder / "terms.json")}
        self.replies[name] = as_sent(app(message, Context(RUN, node, config, RecordDict(), {})))
        return [name]

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        replies = [inflate_object_from_contents(*self.replies[name]) for name in names]
        for reply in replies:
            reply.metadata.__dict__["_message_id"] = "as Flower's grid does"
        return replies


def run(folder: Path, nodes: Iterable[int], method: APFL = LANDMARKS, only_receive: Iterable[int] = ()) -> list[dict]:
    """A run to its end, in which nothing fails; its events."""
    told = converse(folder, nodes, Terms("f", method=method), Policy(deadline=600.0), only_receive)
    assert not [event for event in told if event["event"] == "failed"], told
    return told


def converse(
    folder: Path, nodes: Iterable[int], terms: Terms, policy: Policy, only_receive: Iterable[int] = ()
) -> list[dict]:
    """A run to its end under any terms; its events."""
    (folder / "server" / "keys").mkdir(parents=True, exist_ok=True)
    (folder / "terms.json").write_text(terms.to_json())
    for node in nodes:
        (folder / "server" / "keys" / f"site-{node}.pub").touch()
    with Coordinator(folder / "server", terms) as coordinator:
        events = Events(folder / "server", str(RUN))
        before = len(events.path.read_text().splitlines()) if events.path.exists() else 0
        grid = Grid(folder, nodes, only_receive)
        assert Conversation(grid, coordinator, policy, events, folder / "server").run()
    return [json.loads(line) for line in events.path.read_text().splitlines()[before:]]


def asked(events: list[dict], client: str) -> list[str]:
    return [event["phase"] for event in events if event["event"] == "asked" and event["client"] == client]


def weight(events: list[dict], client: str, phase: str) -> int:
    """Bytes of the last question of this phase."""
    return [e["bytes"] for e in events if (e["event"], e.get("client"), e.get("phase")) == ("asked", client, phase)][-1]


def test_moments_then_statistics_and_landmarks_once_for_each_site(tmp_path):
    events = run(tmp_path, (1, 2))
    assert asked(events, "site-1") == ["describe", "spread", "statistics", "table", "refine"]
    assert [event["event"] for event in events if event["event"] in ("outlined", "settled")] == ["outlined", "settled"]
    landmarks = (tmp_path / "server" / "blobs" / "landmarks.safetensors").stat().st_size
    terms = json.dumps(status_of(tmp_path / "server")["terms"])
    assert landmarks <= weight(events, "site-1", "statistics") <= landmarks + len(terms)
    home = tmp_path / "1" / "f" / "site-1"
    publication = (home / "publication.safetensors").stat().st_size
    assert publication <= weight(events, "site-1", "table") <= publication + len(terms)
    assert len(list(home.glob("landmarks-*"))) == 1
    # A late site is asked for statistics at once, and one that only receives gets its landmarks with the publication.
    events = run(tmp_path, (1, 2, 3, 4), only_receive=(4,))
    assert asked(events, "site-3") == ["statistics", "table", "refine"]
    assert asked(events, "site-1") == ["rejoin", "table", "refine"]
    assert weight(events, "site-1", "rejoin") < len(terms) + 100
    assert asked(events, "site-4")[-1] == "refine"
    assert weight(events, "site-4", "refine") >= landmarks + publication
    members = [row["name"] for row in status_of(tmp_path / "server")["clients"] if row["state"] == "member"]
    assert members == ["site-1", "site-2", "site-3"]
    assert all((tmp_path / str(k) / "f" / f"site-{k}" / "model.safetensors").exists() for k in (1, 2, 3, 4))


def test_a_pilot_comes_before_the_outline_and_late_sites_do_not_repeat_it(tmp_path):
    events = run(tmp_path, (1, 2), PILOT)
    phases = ["describe", "pilot", "pilot_table", "spread", "statistics", "table", "refine"]
    assert asked(events, "site-1") == asked(events, "site-2") == phases
    settled = [event["event"] for event in events if event["event"] in DECIDED]
    assert settled == ["piloting", "tried", "piloted", "outlined", "settled"]
    (told,) = [event for event in events if event["event"] == "piloted"]
    state = status_of(tmp_path / "server")
    assert told["normalise"] == state["terms"]["method"]["normalise"] == state["pilot"]["normalise"]
    assert told["hits"] == state["pilot"]["hits"] == dict(state["terms"]["pilot"])
    clients = [draw_shard(30 + node, node) for node in (1, 2)]
    (simulated,) = PILOT.rounds(clients, 3, 0)
    assert simulated.index == len(phases) - 1  # every question but the last takes numbers up
    events = run(tmp_path, (1, 2, 3), PILOT)
    assert asked(events, "site-3") == ["statistics", "table", "refine"]
    assert asked(events, "site-1") == ["rejoin", "table", "refine"]


def test_a_pilot_that_was_broken_off_goes_on_where_it_was(tmp_path, monkeypatch):
    """The server is killed once the primaries are there: the next run asks for tables alone."""

    def killed(self, answers, waiting):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Conversation, "_prefer", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, (1, 2), PILOT)
    assert status_of(tmp_path / "server")["phase"] == "piloting"
    events = run(tmp_path, (1, 2), PILOT)
    assert asked(events, "site-1") == ["spread", "statistics", "table", "refine"]


def test_free_landmarks_need_no_moments(tmp_path):
    agreed = {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0, "weight": 1.0}
    events = run(tmp_path, (1, 2), replace(LANDMARKS, landmarks="free", **agreed))
    assert asked(events, "site-2") == ["describe", "statistics", "refine"]


def test_a_site_that_lost_its_landmarks_gets_them_again(tmp_path):
    run(tmp_path, (1, 2))
    home = tmp_path / "1" / "f" / "site-1"
    (kept,) = home.glob("landmarks-*")
    size = kept.stat().st_size
    kept.unlink()
    with Coordinator(tmp_path / "server") as coordinator:
        coordinator.leave("site-2")
        coordinator.lost_landmarks("site-1")  # as after the failure that this would be
    events = run(tmp_path, (1, 3))
    assert weight(events, "site-1", "rejoin") > size
    assert [*home.glob("landmarks-*")] == [kept]
