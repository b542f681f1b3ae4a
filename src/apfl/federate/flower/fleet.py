"""The SuperLink's door for sites: how much a request may bring before it is read, and in whose name it may speak.

Flower reads a body to its end before it asks who sent it, and takes from a registered site whatever message it brings,
also one in the server's name to another site. Here a request of more than a few kilobytes must be signed by a
registered key, which Flower's headers allow to check without the body. Nobody's request may be larger than one piece of
a message, and no message larger than what a site can have to say under the terms. Small requests that no registered
key signed are few at once and few each second (`strangers`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apfl.federate.contribution import largest_answer
from apfl.federate.flower.asgi import FLEET, App, Receive, Scope, Send
from apfl.federate.flower.events import Events
from apfl.federate.flower.peers import OWN
from apfl.federate.flower.strangers import Requests
from apfl.federate.ledger import Ledger
from apfl.federate.terms import Terms

__all__ = ["BoundedBodies", "Replies", "largest_reply", "registered"]

STRANGER = 16 * 2**10  # bytes: what connecting takes, with room to spare
ENVELOPE = 64 * 2**10  # what Flower puts around a piece of a message
PIECE = 5 * 2**20  # into which Flower cuts arrays (FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)
MEMBER = {"push-object": PIECE + ENVELOPE, "push-messages": 2**20}  # bytes of a request, by what it is for
AT_ONCE = 16  # large requests of one member; Flower sends two
IDLE = 120.0  # seconds without a byte, after which a body will not come any more
OBJECTS = 32  # of a message, besides the pieces

log = logging.getLogger("flwr")


class _RefusedError(Exception):
    """A request that is answered before it is read."""

    def __init__(self, status: int, words: str) -> None:
        self.status, self.words = status, words


class BoundedBodies:
    """An ASGI application that refuses bodies that are too large, or too many at once, before they are read.

    ``member`` tells from a request without its body which registered node signed it; None: no such node did.
    """

    def __init__(self, app: App, member: Callable[[Scope], Awaitable[int | None]], idle: float = IDLE) -> None:
        self.app, self.member, self.idle = app, member, idle
        self.at_once: Counter[int] = Counter()
        self.strangers = Requests()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self.app(scope, receive, send)
            return
        declared, own = _declared(scope), scope.get("state", {}).get(OWN, False)
        large = declared is None or declared > STRANGER
        member = None if own and not large else await self.member(scope)
        try:
            with self._counted(member if large else None), self._few(own or member is not None):
                body = await self._read(receive, declared or 0, _limit(scope, member))
                await self.app(scope, _again(body, receive), send)
        except _RefusedError as refused:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": refused.status, "headers": headers})
            await send({"type": "http.response.body", "body": f"{refused.words}\n".encode()})

    @contextmanager
    def _counted(self, member: int | None) -> Iterator[None]:
        """Count the large requests of a member that are held in memory."""
        if member is None:
            yield
            return
        if self.at_once[member] >= AT_ONCE:
            raise _RefusedError(503, f"more than {AT_ONCE} large requests at once; wait until some have been answered")
        self.at_once[member] += 1
        try:
            yield
        finally:
            self.at_once[member] -= 1

    @contextmanager
    def _few(self, known: bool) -> Iterator[None]:
        """Count a request of a stranger, and refuse it before it is read if there are too many."""
        if known:
            yield
            return
        with self.strangers.counted() as taken:
            if not taken:
                raise _RefusedError(503, "too many requests that no registered key signed; try again later")
            yield

    async def _read(self, receive: Receive, declared: int, limit: int) -> bytes:
        """The body, if it is not too large; as soon as it is, no more of it is read."""
        body, more, size = bytearray(), True, declared
        while more and size <= limit:
            try:
                message = await asyncio.wait_for(receive(), self.idle)
            except TimeoutError as error:
                raise _RefusedError(408, f"nothing came for {self.idle:.0f} s") from error
            body += message.get("body", b"")
            more = message.get("more_body", False)  # also of a disconnect: Flower then cannot answer either
            size = max(declared, len(body))
        if size > limit:
            raise _RefusedError(413, "too large for what it is and who sent it")
        return bytes(body)


def _limit(scope: Scope, member: int | None) -> int:
    """The most bytes that a request may have."""
    return STRANGER if member is None else MEMBER.get(scope["path"].removeprefix(FLEET), STRANGER)


def _declared(scope: Scope) -> int | None:
    """The length that the request announces."""
    stated = dict(scope["headers"]).get(b"content-length", b"")
    return int(stated) if stated.isdigit() else None


def _again(body: bytes, receive: Receive) -> Receive:
    """The body as if it had not been read yet."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Any:
        return pending.pop() if pending else await receive()

    return received


def registered(linkstate: Callable[[], Any]) -> Callable[[Scope], Awaitable[int | None]]:
    """The registered node that sent a request, as Flower's own headers say it: signed, and just now."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    def node(scope: Scope) -> int | None:
        request = Request({**scope, "state": {}})
        key = _decoded(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        # Of a request to connect, Flower's check compares the headers with nothing but the key.
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)
        try:
            authenticate_node(request)
        except HTTPException:
            return None
        node_id: int | None = linkstate().get_node_id_by_public_key(key)
        return node_id

    return lambda scope: run_in_threadpool(node, scope)


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        return b""


def largest_reply(terms: Terms) -> int:
    """The most bytes of a message with a site's answer: of whole pieces, and of what it has besides them."""
    return (largest_answer(terms) // PIECE + OBJECTS) * PIECE


class Replies:
    """Flower's handler of what sites push, for replies of the very site that pushes them, of bounded size.

    A site that tries anything else is named in the log, and once in ``events.jsonl``.
    """

    def __init__(self, push: Callable[..., Any], folder: str = "") -> None:
        self.push, self.folder = push, folder or os.environ.get("APFL_FEDERATION", "")
        self._told: set[int] = set()

    def __call__(self, request: Any, state: Any) -> Any:
        problem = self._problem(request)
        if not problem:
            return self.push(request=request, state=state)
        from starlette.exceptions import HTTPException

        self._tell(request, state, problem)
        raise HTTPException(403, problem)

    def _problem(self, request: Any) -> str:
        """What is wrong with a message, if anything is."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return "it must push one message at a time"
        metadata = request.messages_list[0].metadata
        if not metadata.reply_to_message_id:
            return "it pushed a question, which only the server may ask"
        if metadata.src_node_id != request.node.node_id:
            return "it pushed a reply in the name of another"
        if not _has_at_most(request.message_object_trees[0], self._objects()):
            return "its reply is larger than an answer under these terms can be"
        return ""

    def _objects(self) -> int:
        """The most objects that an answer consists of."""
        ledger = Ledger(self.folder, writer=False)
        try:
            fixed = (ledger.get(what) for what in ("terms", "outline", "trial", "draft"))
            terms = Terms.from_json(next(filter(None, fixed), "{}"))
        finally:
            ledger.close()
        return largest_reply(terms) // PIECE

    def _tell(self, request: Any, state: Any, problem: str) -> None:
        node = request.node.node_id
        name = next((info.name for info in state.get_node_info(node_ids=[node])), "") or str(node)
        log.warning("refused a message of %s: %s", name, problem)
        if node not in self._told:  # once: the events are not for it to fill
            self._told.add(node)
            run = str(request.messages_list[0].metadata.run_id) if request.messages_list else ""
            Events(Path(self.folder), run)("refused", client=name, reason=problem)


def _has_at_most(tree: Any, n: int) -> bool:
    """Whether a tree has no more than ``n`` objects."""
    waiting, count = [tree], 0
    while waiting and count <= n:
        count += 1
        waiting += waiting.pop().children
    return count <= n
