"""The SuperLink's door for sites: sizes are bounded before bodies are read, and sites push replies of their own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from apfl.federate import Coordinator, Terms
from apfl.federate.contribution import largest_answer
from apfl.federate.flower.fleet import (
    AT_ONCE,
    FLEET,
    MEMBER,
    OBJECTS,
    PIECE,
    STRANGER,
    BoundedBodies,
    Replies,
    registered,
)
from apfl.federate.flower.processes import environment
from apfl.maths.wire import ECHO_BYTES
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import FIXED, contribute, make_sites
from tests.federate.world import free_port

httpx = pytest.importorskip("httpx", reason="needs the flower extra: pip install 'apfl[flower]'")
pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")


def sent(size: int, path: str, *, member: bool, declared: bool = True, piece: int = 1000) -> tuple[int, int, int]:
    """Status of a request of this size; bytes that were read; bytes that reached Flower."""
    read, status = [0], []

    async def node(scope):
        return 5 if member else None

    async def receive():
        n = min(piece, size - read[0])
        read[0] += n
        return {"type": "http.request", "body": b"x" * n, "more_body": read[0] < size}

    async def inner(scope, receive, send):
        got, more = 0, True
        while more:
            message = await receive()
            got, more = got + len(message["body"]), message["more_body"]
        status.append(200)
        status.append(got)

    async def send(message):
        if "status" in message:
            status.extend((message["status"], 0))

    headers = [(b"content-length", str(size).encode())] if declared else []
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(BoundedBodies(inner, node)(scope, receive, send))
    return status[0], read[0], status[1]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("member", [True, False])
def test_a_body_is_refused_before_it_is_read(member, declared):
    """Whether it announces its size or not; a member's may be as large as what it is for."""
    for kind in ("push-object", "push-messages", "pull-messages", "activate-node", "anything"):
        limit = MEMBER.get(kind, STRANGER) if member else STRANGER
        assert sent(limit, FLEET + kind, member=member, declared=declared) == (200, limit, limit)
        status, read, reached = sent(limit + 1, FLEET + kind, member=member, declared=declared)
        assert (status, reached) == (413, 0)
        assert read <= (0 if declared else limit + 1000)
        assert sent(10**8, FLEET + kind, member=member, declared=declared)[1] <= limit + 1000


async def _opened(n: int, idle: float) -> tuple[list[int], int]:
    """The answers to ``n`` large requests of one member that send nothing; large requests that count afterwards."""
    statuses: list[int] = []

    async def node(scope):
        return 5

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        if "status" in message:
            statuses.append(message["status"])

    door = BoundedBodies(receive, node, idle)
    scope = {"type": "http", "path": FLEET + "push-object", "headers": [(b"content-length", b"100000")]}
    await asyncio.gather(*(door(scope, receive, send) for _ in range(n)))
    return statuses, door.at_once[5]


def test_a_member_holds_few_large_requests_and_none_for_ever():
    statuses, counted = asyncio.run(_opened(AT_ONCE + 3, 0.2))
    assert statuses == 3 * [503] + AT_ONCE * [408]
    assert counted == 0


def test_a_body_that_breaks_off_ends():
    """The site disconnects in the middle."""
    got: list[dict[str, object]] = []

    async def node(scope):
        return 5

    async def receive():
        got.append({})
        return (
            {"type": "http.disconnect"} if len(got) > 1 else {"type": "http.request", "body": b"x", "more_body": True}
        )

    async def inner(scope, receive, send):
        assert (await receive())["body"] == b"x"

    scope = {"type": "http", "path": FLEET + "push-object", "headers": []}
    asyncio.run(BoundedBodies(inner, node)(scope, receive, None))
    assert len(got) == 2


@pytest.mark.parametrize("how", ["honest", "unknown key", "other signature", "old", "rubbish", "no headers"])
def test_a_request_is_a_members_if_its_key_signed_it_just_now(how):
    from datetime import timedelta

    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

    (private, public), (other, stranger) = generate_key_pairs(), generate_key_pairs()
    known = public_key_to_bytes(public)
    at = (now() - timedelta(minutes=10 if how == "old" else 0)).isoformat().encode()
    key = public_key_to_bytes(stranger) if how == "unknown key" else known
    signature = sign_message(other if how in ("unknown key", "other signature") else private, at)
    headers = [
        (b"flwr-public-key", b"rubbish!" if how == "rubbish" else base64.b64encode(key)),
        (b"flwr-signature", base64.b64encode(signature)), (b"flwr-timestamp", at),
    ]  # fmt: skip
    state = SimpleNamespace(get_node_id_by_public_key={known: 5}.get)
    scope = {"type": "http", "path": FLEET + "push-object", "headers": [] if how == "no headers" else headers}
    assert asyncio.run(registered(lambda: state)(scope)) == (5 if how == "honest" else None)


def test_a_piece_of_a_message_passes():
    """As large as Flower makes them."""
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

    assert PIECE == FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    assert sent(PIECE + 1000, FLEET + "push-object", member=True)[0] == 200


def request(node: int = 5, source: int = 5, answers: str = "question", n_objects: int = 3, n_messages: int = 1):
    """What a node pushes."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata, ObjectTree
    from flwr.proto.node_pb2 import Node

    metadata = Metadata(run_id=7, src_node_id=source, dst_node_id=1, reply_to_message_id=answers)
    tree = ObjectTree(object_id="root", children=[ObjectTree(object_id=str(i)) for i in range(n_objects - 1)])
    return PushMessagesRequest(
        node=Node(node_id=node), messages_list=n_messages * [Message(metadata=metadata)],
        message_object_trees=n_messages * [tree],
    )  # fmt: skip


class State:
    """As much of Flower's state as is asked."""

    @staticmethod
    def get_node_info(*, node_ids):
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=node, name="mallory") for node in node_ids]


@pytest.fixture
def folder(tmp_path) -> Path:
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)):
        pass
    return tmp_path / "server"


@pytest.mark.parametrize(
    ("pushed", "problem"),
    [
        ({"answers": ""}, "only the server may ask"),
        ({"source": 1}, "in the name of another"),
        ({"source": 6}, "in the name of another"),
        ({"n_objects": 100_000}, "larger than an answer"),
        ({"n_messages": 2}, "one message"),
        ({"n_messages": 0}, "one message"),
    ],
)
def test_a_site_pushes_replies_of_its_own_and_nothing_else(pushed, problem, folder, caplog, capsys):
    from starlette.exceptions import HTTPException

    taken: list[object] = []
    replies = Replies(lambda request, state: taken.append(request), str(folder))
    replies(request=request(), state=State())
    assert len(taken) == 1
    for _ in range(3):
        with pytest.raises(HTTPException, match=problem) as refused:
            replies(request=request(**pushed), state=State())
        assert refused.value.status_code == 403
    assert len(taken) == 1
    (event,) = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["client"]) == ("refused", "mallory")
    assert problem in event["reason"]


def test_an_answer_may_be_as_large_as_the_terms_make_it(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        agreement = contribute(server, sites)
        assert max(len(site.sent(agreement)) for site in sites) <= largest_answer(server.terms)
    replies = Replies(lambda request, state: "taken", str(tmp_path / "server"))
    most = largest_answer(Terms.from_json(agreement)) // PIECE + OBJECTS
    assert replies(request=request(n_objects=most), state=State()) == "taken"
    with pytest.raises(Exception, match="larger than an answer"):
        replies(request=request(n_objects=most + 1), state=State())


@pytest.mark.parametrize("keep", [True, False])
def test_the_bound_has_room_for_what_a_wide_map_sends(keep):
    """The widest default map; a site that rejoins brings its former statistics too, if only sums are kept."""
    method = APFL(map="random", d_primary=8192, d_refinement=8192, normalise="row")
    terms = Terms("f", ("a", "b"), 16, method, keep_contributions=keep, fingerprints=("", ""))
    triangle = 8 * (8192 * 8193 // 2 + 8192 * 2) + ECHO_BYTES
    assert (2 - keep) * triangle <= largest_answer(terms) <= (2 - keep) * triangle + 2**26


# ----------------------------------------------------------------------------------------------- real processes

GUARDED = ["-m", "apfl.federate.flower.superlink"]
PLAIN = ["-c", "from flwr.superlink.cli.flower_superlink import flower_superlink; flower_superlink()"]
BODY = 60_000_000


def memory(pid: int) -> int:
    """Bytes that a process holds in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(code: list[str], folder: Path) -> tuple[int, list[int]]:
    """How much a SuperLink's memory grows at most while three strangers send it large bodies; what it answers."""
    port = free_port()
    words = ["--insecure", "--host", "127.0.0.1", "--port", str(port), "--database", str(folder / "superlink.db")]
    env = environment(folder / "flower", APFL_FEDERATION=str(folder))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *code, *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
    url, statuses = f"http://127.0.0.1:{port}", []

    def attack() -> None:
        try:
            headers = {"content-type": "application/protobuf"}
            answer = httpx.post(f"{url}{FLEET}push-object", content=b"\xff" * BODY, headers=headers, timeout=120)
            statuses.append(answer.status_code)
        except httpx.HTTPError:
            statuses.append(0)  # the connection was cut while it was sending

    try:
        wait_for(url, process)
        before, attackers = memory(process.pid), [threading.Thread(target=attack) for _ in range(3)]
        peak = before
        for each in attackers:
            each.start()
        while any(each.is_alive() for each in attackers):
            peak = max(peak, memory(process.pid))
            time.sleep(0.005)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        return peak - before, statuses
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=5)
            return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(f"nothing answers at {url}")


@pytest.mark.deployment
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_strangers_take_no_memory(folder):
    """Three bodies of 60 MB at once: Flower alone holds each of them about twice; behind the guard none is read."""
    plain, _ = growth(PLAIN, folder)
    assert plain > 1.5 * BODY
    guarded, statuses = growth(GUARDED, folder)
    assert guarded < BODY / 4
    assert set(statuses) <= {413, 0}
