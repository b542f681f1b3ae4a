"""Our bytes inside Flower's messages.

A message of ours is one array of bytes, because Flower sends arrays in pieces of bounded size, however large they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from apfl.errors import InputError

__all__ = ["content", "parts", "reason"]

Setting = int | float | str | bool


def content(payloads: Mapping[str, bytes], settings: Mapping[str, Setting] | None = None) -> RecordDict:
    """Some named payloads and some settings as what a message holds."""
    arrays = {name: Array("uint8", (len(data),), "apfl", data) for name, data in payloads.items()}
    return RecordDict({"settings": ConfigRecord(dict(settings or {})), "payloads": ArrayRecord(arrays)})


def parts(message: Message) -> tuple[dict[str, Setting], dict[str, bytes]]:
    """Settings and payloads back; a message of another shape is refused."""
    held = message.content
    if set(held) != {"settings", "payloads"}:
        raise InputError(f"a message with records {sorted(map(str, held))[:5]}; expected 'settings' and 'payloads'")
    settings, payloads = held["settings"], held["payloads"]
    if not isinstance(settings, ConfigRecord) or not isinstance(payloads, ArrayRecord):
        raise InputError("a message whose records are not those of apfl")
    return dict(settings), {name: array.data for name, array in payloads.items()}


def reason(message: Message) -> str:
    """Why a reply is an error, in a line."""
    told = " ".join((message.error.reason or "no reason given").split())
    return f"{told[:300]} (Flower's code {message.error.code})"
