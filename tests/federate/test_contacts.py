"""Who is connected, and when a site was last heard of."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from apfl.cli.federation import status_of_folder
from apfl.federate import Terms
from apfl.federate.flower.admission import Registered, write_registered
from apfl.federate.flower.contacts import Contact, contacts
from apfl.federate.inprocess import simulate
from apfl.files import hold
from tests.federate.federation_toys import FIXED, make_sites

NOW = time.time()


@pytest.fixture(autouse=True)
def _it_is_now(monkeypatch):
    """However long after the import a test runs."""
    monkeypatch.setattr("apfl.federate.flower.contacts.time", SimpleNamespace(time=lambda: NOW))


def flower_knows(home: Path, *nodes: tuple[int, str | None, str, float | None]) -> None:
    """Flower's database with these nodes: number, name, status, until when they count as connected."""
    home.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(home / "superlink.db")) as database:
        database.execute("CREATE TABLE node (node_id, name, status, online_until, heartbeat_interval)")
        database.executemany("INSERT INTO node VALUES (?, ?, ?, ?, 30.0)", nodes)
        database.commit()


def test_the_columns_are_those_of_flower():
    pytest.importorskip("flwr")
    from flwr.common.constant import HEARTBEAT_PATIENCE
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.state.schema.linkstate_models import Node

    from apfl.federate.flower.contacts import MISSED

    assert Node.__tablename__ == "node"
    assert {"node_id", "name", "status", "online_until", "heartbeat_interval"} <= set(Node.__table__.columns.keys())
    assert (NodeStatus.ONLINE, HEARTBEAT_PATIENCE) == ("online", MISSED)


def test_flower_says_who_is_connected_while_the_server_runs(tmp_path):
    home = tmp_path / "flower"
    flower_knows(
        home, (1, "a", "online", NOW + 50), (2, "b", "offline", NOW - 500), (3, "c", "online", NOW - 5),
        (4, "d", "registered", None), (-1, None, "online", NOW + 40), (6, None, "online", NOW + 40),
    )  # fmt: skip
    (home / "nodes.json").write_text(json.dumps({str(2**64 - 1): "e"}))
    heard = {"a": NOW - 10, "b": NOW - 500, "c": NOW - 65, "e": NOW - 20, "node 6": NOW - 20}
    with hold(home / "server.lock", what=tmp_path):
        found = contacts(tmp_path, [{"event": "answered", "client": "a", "at": NOW - 100}])
    assert {name: contact.heard for name, contact in found.items()} == pytest.approx(heard, rel=0, abs=1e-6)
    assert {name for name, contact in found.items() if contact.connected} == {"a", "e", "node 6"}
    assert not any(contact.connected for contact in contacts(tmp_path).values())  # the server has ended
    assert contacts(tmp_path / "elsewhere") == {}


def test_a_key_that_was_replaced_says_nothing_of_the_site(tmp_path):
    home = tmp_path / "flower"
    flower_knows(home, (1, "a", "online", NOW + 50), (2, "a", "offline", NOW - 500))
    write_registered(home / "registered.json", {"a": Registered("2", "SHA256:x")})
    with hold(home / "server.lock", what=tmp_path):
        assert contacts(tmp_path) == {"a": Contact(False, NOW - 500)}


def test_an_answer_is_a_sign_of_life(tmp_path):
    events = [{"event": "answered", "client": "a", "at": at} for at in (5.0, 9.0, 7.0)]
    events += [{"event": "asked", "client": "a", "at": 20.0}, {"event": "answered", "client": "b", "at": 1.0}]
    assert contacts(tmp_path, events) == {"a": Contact(False, 9.0), "b": Contact(False, 1.0)}


@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_without_flowers_database_nobody_is_connected(content, tmp_path):
    home = tmp_path / "flower"
    home.mkdir()
    if content is None:
        sqlite3.connect(home / "superlink.db").execute("CREATE TABLE node (node_id)").connection.close()
    else:
        (home / "superlink.db").write_bytes(content)
    assert contacts(tmp_path) == {}


def test_the_status_says_who_is_connected_and_when_it_last_heard_of_a_site(tmp_path):
    names = [site.name for site in make_sites(tmp_path)]
    folder = tmp_path / "server"
    simulate(make_sites(tmp_path), Terms("f", method=FIXED), folder)
    home, keys = folder / "flower", folder / "keys"
    keys.mkdir()
    for name in ("fresh", "absent", "former"):
        (keys / f"{name}.pub").touch()
    later = NOW + 86_400
    answered = {"at": later, "run": "1", "event": "answered", "client": names[1]}
    (folder / "events.jsonl").write_text(json.dumps(answered) + "\n")
    flower_knows(
        home, (1, "fresh", "online", NOW + 50), (2, "former", "offline", NOW - 9e6), (3, names[0], "online", NOW + 50),
        (4, "forgotten", "offline", NOW - 500),
    )  # fmt: skip
    with hold(home / "server.lock", what=folder):
        told = json.loads(status_of_folder(folder, as_json=True)())["contacts"]
        console = Console(width=250, file=io.StringIO())
        console.print(status_of_folder(folder, as_json=False)())
    assert {name for name, contact in told.items() if contact["connected"]} == {"fresh", names[0]}
    assert "forgotten" not in told
    lines = {line.split()[1]: line for line in console.file.getvalue().splitlines() if line.startswith("│")}
    assert ("not asked yet" in lines["fresh"], "connected" in lines["fresh"]) == (True, True)
    assert "not seen yet" in lines["absent"]
    assert "has connected before" in lines["former"]
    assert time.strftime("%Y-%m-%d", time.localtime(NOW - 9e6)) in lines["former"]
    assert "connected" in lines[names[0]]
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(later)) in lines[names[1]]  # not its contribution's
    assert time.strftime("%Y-%m-%d", time.localtime(NOW)) in lines[names[2]]
