"""Our bytes inside Flower's messages.

A message of ours is one array of bytes, because Flower sends arrays in pieces of bounded size, however large they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content

from apfl.errors import InputError, printable
from apfl.federate.instructions import hashes

__all__ = ["answer", "content", "is_whole", "parts", "pulled", "reason"]

Setting = int | float | str | bool
HASHES = "hashes"  # of the payloads, among the settings of an answer


def content(payloads: Mapping[str, bytes], settings: Mapping[str, Setting] | None = None) -> RecordDict:
    """Some named payloads and some settings as what a message holds."""
    arrays = {name: Array("uint8", (len(data),), "apfl", data) for name, data in payloads.items()}
    return RecordDict({"settings": ConfigRecord(dict(settings or {})), "payloads": ArrayRecord(arrays)})


def parts(message: Message) -> tuple[dict[str, Setting], dict[str, bytes]]:
    """Settings and payloads back; a message of another shape is refused."""
    held = message.content
    if not isinstance(held, RecordDict) or set(held) != {"settings", "payloads"}:
        raise InputError("a message without the records 'settings' and 'payloads'")
    settings, payloads = held["settings"], held["payloads"]
    if not isinstance(settings, ConfigRecord) or not isinstance(payloads, ArrayRecord):
        raise InputError("a message whose records are not those of apfl")
    if not all(isinstance(array, Array) and isinstance(array.data, bytes) for array in payloads.values()):
        raise InputError("a message whose payloads are not bytes")
    return dict(settings), {name: array.data for name, array in payloads.items()}


def answer(payloads: Mapping[str, bytes], settings: Mapping[str, Setting]) -> RecordDict:
    """A site's answer: with the hashes of its payloads, by which the server notices if they change on the way.

    Flower checks hashes when a reply arrives, and no more after it has lain in its database.
    """
    return content(payloads, {**settings, HASHES: _hashes(payloads)})


def is_whole(settings: Mapping[str, Setting], payloads: Mapping[str, bytes]) -> bool:
    """Whether the payloads of an answer are those that the site sent; it may leave the hashes out."""
    return settings.get(HASHES) in (None, _hashes(payloads))


def _hashes(payloads: Mapping[str, bytes]) -> str:
    return json.dumps(hashes(payloads), sort_keys=True)


def pulled(grid: Grid, message_id: str, largest: int) -> list[Message]:
    """The reply to a message, if it is there; refused if Flower cannot read it, or above ``largest`` bytes of arrays.

    Flower takes a reply apart here, in the server's process, and raises whatever it stumbles over: a site chooses
    those bytes. If the SuperLink itself cannot be reached, that is no site's fault, and is raised as it is.
    """
    try:
        with _arrays_of_at_most(largest):
            return list(grid.pull_messages([message_id]))
    except (httpx.HTTPError, OSError, MemoryError, InputError):
        raise
    except Exception as error:
        raise InputError(f"a message that Flower cannot read ({type(error).__name__})") from error


@contextmanager
def _arrays_of_at_most(largest: int) -> Iterator[None]:
    """Refuse arrays that together have more bytes, before Flower puts them together.

    Flower repeats a piece as often as its array lists it: the pieces that a site sent do not bound the array.
    """
    whole, flowers, left = Array.inflate, Array.__dict__["inflate"], largest

    def bounded(cls: type[Array], object_content: bytes, children: dict[str, Any] | None = None) -> Array:
        nonlocal left
        left -= _listed_bytes(object_content, children or {})
        if left < 0:
            raise InputError(f"a message whose arrays list their pieces so often that they pass {largest} bytes")
        return whole(object_content, children)

    Array.inflate = classmethod(bounded)
    try:
        yield
    finally:
        Array.inflate = flowers


def _listed_bytes(object_content: bytes, children: Mapping[str, Any]) -> int:
    """Bytes of the array that Flower is about to put together."""
    names = get_object_children_ids_from_object_content(object_content)
    listed = json.loads(get_object_body(object_content, Array))["arraychunk_ids"]
    return sum(len(children[names[i]].data) for i in listed)


def reason(message: Message) -> str:
    """Why a reply is an error, in a line."""
    return f"{printable(message.error.reason or 'no reason given')} (Flower's code {message.error.code})"
