"""Every message is one safetensors file with a JSON header; never pickle. What is read is bounded before it is read.

The header says the kind of message; who reads it says which tensors of which size that kind must have. Nothing is
allocated for a message that claims anything else, and not a byte may be left over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from apfl.errors import InputError

if TYPE_CHECKING:  # commands that only look at a ledger need no torch, which takes seconds
    from torch import Tensor

__all__ = ["Expected", "count", "seal", "sha256", "text", "unseal"]

VERSION = 1
LARGEST_HEADER = 16 * 2**20  # one of an earlier version lists the hashes of its members
SIZES = {"F64": 8, "F32": 4, "I64": 8, "I16": 2, "I8": 1, "U8": 1}

# Tensor name -> allowed dtypes, shape; made from the message's header.
Expected = Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]


def sha256(data: bytes) -> str:
    """The content hash a message is known by."""
    return hashlib.sha256(data).hexdigest()


def seal(kind: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The message as bytes; the same for the same content."""
    from safetensors.torch import save

    header_json = json.dumps({**header, "kind": kind, "version": VERSION}, sort_keys=True, allow_nan=False)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(save(plain, metadata={"apfl": header_json}))


def unseal(
    kind: str, data: bytes, expected: Callable[[dict[str, Any]], Expected]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a message of this kind; anything else is an `InputError` that says why."""
    from safetensors.torch import load

    length, listed, header = _header(data)
    if header.get("version") != VERSION or header.get("kind") != kind:
        received = f"{str(header.get('kind'))[:40]!r} of version {str(header.get('version'))[:8]}"
        raise InputError(f"a message of kind {received} given where {kind!r} of version {VERSION} is needed")
    wanted = expected(header)
    if listed.keys() != wanted.keys():
        raise InputError(f"a {kind} must hold {_names(wanted)}; this one holds {_names(listed)}")
    size = 0
    for name, (dtypes, shape) in wanted.items():
        size += _checked(kind, name, listed[name], dtypes, shape)
    if len(data) != 8 + length + size:
        raise InputError(f"a {kind} of this size takes {8 + length + size} bytes; {len(data)} given")
    try:
        # Copied to where tensors begin by themselves: a product of the same numbers elsewhere may differ in a digit.
        tensors = {name: tensor.clone() for name, tensor in load(data).items()}
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(f"a {kind} that cannot be read: {str(error)[:200]}") from error
    if {name: tuple(t.shape) for name, t in tensors.items()} != {name: shape for name, (_, shape) in wanted.items()}:
        raise InputError(f"a {kind} whose header contradicts its content")
    return header, tensors


def text(header: Mapping[str, Any], name: str) -> str:
    """A string of the header."""
    value = header.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise InputError(f"the header's {name!r} must be a short string; {str(value)[:40]!r} given")
    return value


def count(header: Mapping[str, Any], name: str, largest: int = 2**40) -> int:
    """A whole number, 0 or more, of the header."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise InputError(f"the header's {name!r} must be a whole number from 0 to {largest}; {str(value)[:40]} given")
    return value


def _header(data: bytes) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Length of the safetensors header, the tensors it lists, and our own header inside it."""
    length = int.from_bytes(data[:8], "little") if len(data) >= 8 else -1
    if not 0 <= length <= min(len(data) - 8, LARGEST_HEADER):
        raise InputError(f"{len(data)} bytes that are no message: truncated, or not from apfl")
    try:
        listed = json.loads(data[8 : 8 + length].decode())
        header = json.loads(listed.pop("__metadata__")["apfl"])
        if not all(isinstance(each, dict) for each in (header, *listed.values())):
            raise TypeError("not an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"a message with a damaged header ({type(error).__name__}); send it again") from error
    return length, listed, header


def _checked(kind: str, name: str, entry: Mapping[str, Any], dtypes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Bytes of one tensor, whose listed dtype and shape must be those expected."""
    if entry.get("dtype") not in dtypes or entry.get("shape") != list(shape):
        received = f"{str(entry.get('dtype'))[:10]} {str(entry.get('shape'))[:60]}"
        raise InputError(f"{name} of a {kind} must be {' or '.join(dtypes)} {list(shape)}; {received} given")
    size = SIZES[str(entry["dtype"])]
    for extent in shape:
        size *= extent
    return size


def _names(tensors: Mapping[str, Any]) -> str:
    return ", ".join(str(name)[:40] for name in sorted(tensors)[:10]) or "nothing"
