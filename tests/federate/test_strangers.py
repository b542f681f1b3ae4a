"""Strangers knock often, and hold connections open: members are served all the same."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter

import pytest

from apfl.federate.flower import peers
from apfl.federate.flower.fleet import FLEET, BoundedBodies
from apfl.federate.flower.peers import OWN
from apfl.federate.flower.strangers import AT_ONCE, EACH_SECOND, Connections, Requests

uvicorn = pytest.importorskip("uvicorn", reason="needs the flower extra: pip install 'apfl[flower]'")
pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")


def test_so_many_at_once_and_so_many_each_second():
    now = [0.0]
    requests = Requests(at_once=2, each_second=5.0, clock=lambda: now[0])
    with requests.counted() as first, requests.counted() as second, requests.counted() as third:
        assert (first, second, third) == (True, True, False)

    def knock() -> bool:
        with requests.counted() as taken:
            return taken

    assert [knock() for _ in range(5)] == [True] * 3 + [False] * 2  # five in this second, two of them before
    now[0] = 0.2
    assert (knock(), knock()) == (True, False)
    now[0] = 1000.0  # what was not used does not add up
    assert [knock() for _ in range(7)] == [True] * 5 + [False] * 2


def test_an_address_has_so_many_connections_and_gets_them_back():
    connections = Connections(most=2)
    assert [connections.opens("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert connections.opens("192.0.2.2")
    assert [connections.opens(f"2001:db8::{i}") for i in range(3)] == [True, True, False]  # of one network
    assert connections.opens("2001:db8:1::1")
    for _ in range(3):
        connections.closes("192.0.2.1")
    assert connections.opens("192.0.2.1")
    assert "192.0.2.2" in connections._open
    connections.closes("192.0.2.2")
    assert "192.0.2.2" not in connections._open  # what has ended takes no memory


async def _knocks(n: int) -> tuple[Counter[int], list[int]]:
    """Answers to ``n`` small requests of strangers, none of which ends; and of a member and of our own user then."""
    answers: Counter[int] = Counter()
    served: list[int] = []

    async def node(scope):
        return scope["node"]

    async def never():
        await asyncio.sleep(60)

    async def body():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def inner(scope, receive, send):
        await receive()
        served.append(scope["node"] or 0)

    async def send(message):
        if "status" in message:
            answers[message["status"]] += 1

    def request(node: int | None, *, own: bool = False) -> dict[str, object]:
        headers = [(b"content-length", b"100")]
        return {"type": "http", "path": FLEET + "pull-messages", "headers": headers, "node": node, "state": {OWN: own}}

    door = BoundedBodies(inner, node)
    strangers = [asyncio.create_task(door(request(None), never, send)) for _ in range(n)]
    await asyncio.sleep(0.05)
    await door(request(5), body, send)
    await door(request(None, own=True), body, send)
    for each in strangers:
        each.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    strangers = [asyncio.create_task(door(request(None), body, send)) for _ in range(3)]  # there is room again
    await asyncio.gather(*strangers)
    return answers, served


def test_strangers_hold_few_requests_and_members_pass():
    """All of them were read and handed to Flower."""
    answers, served = asyncio.run(_knocks(100))
    assert answers == {503: 100 - AT_ONCE}
    assert served == [5, 0, 0, 0, 0]
    assert AT_ONCE + 3 < EACH_SECOND  # or the last three would be too many in this second


@pytest.fixture
def port(monkeypatch):
    """A web server behind the protocol, for which nobody is its own user."""
    monkeypatch.setattr(peers, "is_own", lambda connection: False)
    monkeypatch.setattr(peers, "HEAD", 1.0)
    monkeypatch.setattr(peers, "Connections", lambda: Connections(most=4))

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=peers.protocol(), ws="none", lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


def ended(client: socket.socket) -> bool:
    """Whether the server ends a connection on which nothing is sent; it has a minute."""
    client.settimeout(60)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_connections_of_one_address_are_bounded_and_none_stays_silent(port):
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    held[0].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")  # a head that does not end
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", port)) as fifth:
        assert ended(fifth)
    assert all(ended(each) for each in held)
    for each in held:
        each.close()
    with socket.create_connection(("127.0.0.1", port)) as client:  # there is room again
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 204"
