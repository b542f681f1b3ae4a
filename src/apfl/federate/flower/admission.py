"""Which sites are admitted: those whose public key lies in the server's ``keys`` folder at this moment.

Flower keeps a list of its own. A key once taken off that list never comes back to it, and a key that was replaced stays
on it. So every key is put on Flower's list once, and `Admitted` asks the folder at every request: a file that is
removed shuts the door, one that is replaced changes the lock, one that is put back opens the door again.

The key of a site that left is set aside as ``NAME.pub.left``. Whoever names that key is told that its site has left; a
request is not read any further, so this is no proof of who asks, and the answer has no name in it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from apfl.errors import InputError, optional
from apfl.federate.flower.asgi import FLEET, App, Receive, Scope, Send
from apfl.federate.flower.keys import public_keys
from apfl.files import replacing

__all__ = [
    "LEFT", "Admitted", "Registered", "fingerprint", "read_nodes", "read_registered", "write_node", "write_registered",
]  # fmt: skip

HEADER = b"flwr-public-key"
LOOK = 1.0  # seconds between two looks into the folder
LEFT = "this site has left the federation"
CODE = 2004  # Flower's answer to a key that is not on its list
UNKNOWN = "Failed to activate SuperNode."  # in its own words


class Registered(NamedTuple):
    """A site as Flower has it: the number of its node, and the fingerprint of its key."""

    node: str
    key: str


class Admitted:
    """An ASGI application that serves a site only while its key lies in the folder."""

    def __init__(self, app: App, keys: Path) -> None:
        self.app, self.keys = app, keys
        self._admitted: frozenset[bytes] = frozenset()
        self._left: frozenset[bytes] = frozenset()
        self._looked = -LOOK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self.app(scope, receive, send)
            return
        self._look()
        key = _key(scope["headers"])
        if key in self._admitted:
            await self.app(scope, receive, send)
            return
        # At 401 a site that is connected ends its connection; when it comes back it reads why it is turned away.
        status = 412 if scope["path"] == f"{FLEET}activate-node" else 401
        refusal = json.dumps({"code": CODE, "detail": LEFT if key in self._left else UNKNOWN}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(refusal)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal})

    def _look(self) -> None:
        if time.monotonic() - self._looked >= LOOK:
            self._looked, self._admitted = time.monotonic(), _keys_in(public_keys(self.keys).values())
            self._left = _keys_in(self.keys.glob("*.pub.left"))


def _key(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request names; None if it names none, or two, or what is not base64."""
    try:
        (given,) = (base64.b64decode(value, validate=True) for name, value in headers if name == HEADER)
    except (ValueError, binascii.Error):
        return None
    return given


def _keys_in(paths: Iterable[Path]) -> frozenset[bytes]:
    """The public keys in files as Flower sends them; a file that is no key, or half a key, admits nobody."""
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    keys = set()
    for path in paths:
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, optional("cryptography.exceptions", "flower").UnsupportedAlgorithm):
            continue
        keys.add(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return frozenset(keys)


def fingerprint(path: Path) -> str:
    """A public key's fingerprint, as ``ssh-keygen -lf`` prints it."""
    try:
        blob = base64.b64decode(path.read_text().split()[1], validate=True)
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path} is not a public key; make one: apfl federate keys FOLDER --site NAME") from error
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def read_registered(path: Path) -> dict[str, Registered]:
    """Name -> site, of those that Flower's list has and the folder admits."""
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); remove it, the server makes it anew") from error
    # An earlier version kept the number alone.
    return {name: Registered(site, "") if isinstance(site, str) else Registered(**site) for name, site in kept.items()}


def read_nodes(path: Path) -> dict[str, str]:
    """Fingerprint -> number of the node that Flower gave to this key, for good; empty if no version kept it."""
    try:
        return {str(key): str(node) for key, node in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def write_node(path: Path, key: str, node: str) -> None:
    """Keep the node of a key: Flower names it only when it first sees the key."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(read_nodes(path) | {key: node}))


def write_registered(path: Path, sites: Mapping[str, Registered]) -> None:
    """Keep the sites."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({name: site._asdict() for name, site in sites.items()}))
