"""The keys in the server's folder decide who is admitted, at every moment."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apfl.errors import InputError
from apfl.federate.flower import admission
from apfl.federate.flower.admission import LEFT, Admitted, Registered, fingerprint, read_registered
from apfl.federate.flower.join import Connection, stay_connected
from apfl.federate.flower.keys import make_site_key
from apfl.federate.flower.processes import Server

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr(admission, "LOOK", 0.0)


def ask(door: Admitted, *keys: Path, path: str = "/v1/fleet/pull-messages") -> int:
    """The status that a site with these keys gets; 200 is the application's."""
    return answer(door, *keys, path=path)[0]["status"]


def answer(door: Admitted, *keys: Path, path: str) -> list[dict[str, Any]]:
    """What a site with these keys gets."""
    got = []

    async def send(message):
        got.append(message)

    headers = [(b"flwr-public-key", base64.b64encode(as_flower_sends(key))) for key in keys]
    asyncio.run(door({"type": "http", "path": path, "headers": headers}, None, send))
    return got


def as_flower_sends(key: Path) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(serialization.load_ssh_public_key(key.read_bytes()))


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})


def test_a_key_counts_while_it_lies_in_the_folder(tmp_path):
    pytest.importorskip("flwr")
    folder, elsewhere = tmp_path / "keys", tmp_path / "elsewhere"
    _, first = make_site_key(elsewhere / "first", "a")
    _, second = make_site_key(elsewhere / "second", "a")
    folder.mkdir()
    door = Admitted(inner, folder)
    assert ask(door, first) == 401
    (folder / "a.pub").write_bytes(first.read_bytes())
    assert (ask(door, first), ask(door, second)) == (200, 401)
    (folder / "a.pub").write_bytes(second.read_bytes())  # the lock is changed
    assert (ask(door, first), ask(door, second)) == (401, 200)
    (folder / "a.pub").write_bytes(first.read_bytes()[:40])  # half a key admits nobody
    assert (ask(door, first), ask(door, second)) == (401, 401)
    (folder / "a.pub").unlink()
    assert ask(door, second, path="/v1/fleet/activate-node") == 412
    (folder / "a.pub").write_bytes(first.read_bytes())  # put back
    assert ask(door, first) == 200
    assert ask(door, first, first) == ask(door) == 401
    assert ask(door, path="/v1/control/list-runs") == 200  # others guard that


def test_a_site_that_left_is_told_so_and_a_stranger_is_not(tmp_path):
    pytest.importorskip("flwr")
    from flwr.supercore.error.base import FlowerError

    _, left = make_site_key(tmp_path / "elsewhere", "a")
    _, stranger = make_site_key(tmp_path / "elsewhere", "b")
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a.pub.left").write_bytes(left.read_bytes())
    door = Admitted(inner, folder)

    def told(key: Path) -> tuple[int, str]:
        start, body = answer(door, key, path="/v1/fleet/activate-node")
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        read = FlowerError.from_json(body["body"].decode())  # as a site reads it
        assert read.code == 2004
        return start["status"], read.message

    assert told(left) == (412, LEFT)
    assert told(stranger) == (412, "Failed to activate SuperNode.")
    (folder / "a.pub").write_bytes(left.read_bytes())  # admitted once more
    assert ask(door, left) == 200


class TurnedAway(Connection):
    """A connection to a server that turns it away in these words."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", f"print('[code: 2004] {self.server}')"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (LEFT, "a has left the federation at this site has left the federation: whoever runs the server took it out"),
        ("no", "the server at no does not admit the key of a: give a.pub to whoever runs the server"),
    ],
)
def test_join_says_why_it_is_turned_away(words, says, tmp_path):
    connection = TurnedAway(tmp_path, "a", "rows.npz", words)
    with pytest.raises(InputError, match=says):
        stay_connected(connection, tmp_path / "log", lambda line: None, patience=600.0 if words == LEFT else -1.0)


class Listing(Server):
    """A server whose Flower admits everything once, and remembers it for ever, as the real one does."""

    taken: list[str] = []  # noqa: RUF012

    def flwr(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        key = Path(words[2]).read_text()
        if key in self.taken:
            return subprocess.CompletedProcess(words, 1, "", "Public key already in use.")
        self.taken.append(key)
        return subprocess.CompletedProcess(words, 0, json.dumps({"node-id": str(100 + len(self.taken))}), "")


def test_the_list_follows_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Listing, "taken", [])
    server, keys = Listing(tmp_path), tmp_path / "keys"
    _, first = make_site_key(keys, "a")
    one = first.read_bytes()
    assert server.admit() == [f"admitted a ({fingerprint(first)})"]
    assert server.admit() == []
    before = fingerprint(first)
    _, other = make_site_key(tmp_path / "elsewhere", "a")
    first.write_bytes(other.read_bytes())
    assert server.admit() == [f"changed the key of a ({fingerprint(other)})"]
    assert server.registered == {"a": Registered("102", fingerprint(other))}
    first.write_bytes(one)
    server.admit()
    assert server.registered["a"].key == before
    first.unlink()
    assert server.admit() == ["no longer admitted: a"]
    assert server.registered == {}


def test_one_bad_key_keeps_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Listing, "taken", [])
    server = Listing(tmp_path)
    make_site_key(tmp_path / "keys", "b")
    (tmp_path / "keys" / "a.pub").write_text("no key")
    with pytest.raises(InputError, match=r"admitted b .*a\.pub is not a public key"):
        server.admit()
    assert list(server.registered) == ["b"]


def test_a_key_that_comes_back_has_its_own_node_again(tmp_path, monkeypatch):
    """Keys A, B, A: the node of B counted as the site for as long as Flower took it for alive."""
    pytest.importorskip("flwr")
    from types import SimpleNamespace

    from apfl.federate.flower.presence import Presence

    monkeypatch.setattr(Listing, "taken", [])
    server = Listing(tmp_path)
    _, public = make_site_key(tmp_path / "keys", "a")
    _, other = make_site_key(tmp_path / "elsewhere", "a")
    first, second = public.read_bytes(), other.read_bytes()
    nodes = [SimpleNamespace(node_id=101, name="a"), SimpleNamespace(node_id=102, name="a")]

    def online(key: bytes | None) -> dict[int, str | None]:
        public.write_bytes(key) if key else public.unlink()
        server.admit()
        sites = Presence(SimpleNamespace(get_nodes=lambda: nodes), tmp_path)
        sites.look()
        return sites.online

    assert [online(key) for key in (first, second, first)] == [{101: "a"}, {102: "a"}, {101: "a"}]
    assert [online(None), online(second), online(None), online(first)] == [{}, {102: "a"}, {}, {101: "a"}]


class Unwilling(Server):
    """A server whose Flower refuses every key."""

    def flwr(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        self.tried.append(fingerprint(Path(words[2])))
        return subprocess.CompletedProcess(words, 1, "", "Error: the key is not an EC key")

    tried: list[str] = []  # noqa: RUF012


def test_a_key_that_flower_refuses_is_not_tried_at_every_look(tmp_path, monkeypatch, capsys):
    """Every look used to start a process, two seconds after the last."""
    from apfl.cli.federate import _admit
    from apfl.federate.flower import processes

    monkeypatch.setattr(Unwilling, "tried", [])
    server, problem = Unwilling(tmp_path), ""
    _, public = make_site_key(tmp_path / "keys", "a")
    first = fingerprint(public)
    for _ in range(5):
        problem = _admit(server, problem)
    assert server.tried == [first]
    assert "the key is not an EC key" in problem
    assert "".join(capsys.readouterr()).count("is not an EC key") == 1  # and is said once
    _, other = make_site_key(tmp_path / "elsewhere", "a")
    public.write_bytes(other.read_bytes())  # another key is another matter
    assert "the key is not an EC key" in _admit(server, problem)
    assert server.tried == [first, fingerprint(other)]
    monkeypatch.setattr(processes, "AGAIN", 0.0)  # it may have been busy: after a while it is tried again
    _admit(server, problem)
    assert server.tried == [first, fingerprint(other), fingerprint(other)]


def test_a_flower_command_that_hangs_does_not_end_the_server(tmp_path, monkeypatch):
    from apfl.cli.federate import _admit

    make_site_key(tmp_path / "keys", "a")
    server = Server(tmp_path)
    monkeypatch.setattr(Server, "flwr_command", lambda *words: ["sleep", "60"])
    with pytest.raises(InputError, match=r"did not carry out 'flwr run app' within 0 s; try again.*superlink\.log"):
        server.flwr("run", "app", timeout=0.1)
    monkeypatch.setattr(Server.flwr, "__kwdefaults__", {"timeout": 0.1})
    assert "did not carry out 'flwr supernode register'" in _admit(server, "")
    assert server.refused == {}  # the key is not to blame


def test_what_was_written_about_a_server_is_read(tmp_path):
    server = Server(tmp_path, port=9099, secure=False)
    server.refused["key"] = 0.0, "no"
    server.write()
    assert json.loads((server.home / "server.json").read_text()).keys() == {"folder", "host", "port", "secure"}
    assert Server.read(tmp_path) == server
    assert Server.read(tmp_path).refused == {}


def test_a_list_of_an_earlier_version_is_read(tmp_path, monkeypatch):
    _, public = make_site_key(tmp_path / "keys", "a")
    monkeypatch.setattr(Listing, "taken", [public.read_text()])
    server = Listing(tmp_path)
    server.home.mkdir()
    (server.home / "registered.json").write_text('{"a": "77"}')
    assert read_registered(server.home / "registered.json") == {"a": Registered("77", "")}
    server.admit()
    assert server.registered == {"a": Registered("77", fingerprint(public))}


def test_a_second_server_in_the_folder_is_refused(tmp_path, monkeypatch):
    """It used to start on another port, and `run` talked to whichever had started last."""
    from apfl.federate.flower import processes

    monkeypatch.setattr(processes, "MOMENT", 0.0)
    with Server(tmp_path, port=9091).hold(), pytest.raises(InputError, match=f"{tmp_path} is in use"):
        Server(tmp_path, port=9092).hold()
    Server(tmp_path, port=9092).hold().close()


def test_a_fingerprint_is_that_of_ssh(tmp_path):
    _, public = make_site_key(tmp_path, "a")
    try:
        said = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True).stdout
    except FileNotFoundError:
        pytest.skip("needs ssh-keygen")
    assert said.split()[1] == fingerprint(public)
