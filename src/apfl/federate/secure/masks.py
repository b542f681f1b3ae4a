"""Integer vectors modulo 2^b: masks from keys, added in place, block by block, and their packed bytes.

A mask is the stream of a cipher, read as little-endian words of 32 bits (b <= 32) or 64; its lowest b bits are uniform.
Words wrap around by themselves, so sums are reduced once, at the end. A block of the vector stays in the cache while
all masks are added to it, and memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfl.errors import InputError
from apfl.federate.secure.ciphers import keystream
from apfl.maths.bits import PACKED, pack_block, packed_bytes, unpack_block

__all__ = ["add_masks", "add_packed", "bits_for_sum", "pack", "packed_bytes", "signed", "word", "words"]

Words = NDArray[Any]  # uint32 or uint64
BLOCK_BYTES = 2**17  # of the stream at a time


def word(bits: int) -> np.dtype[Any]:
    """The words in which numbers of so many bits are added."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 64:
        raise InputError(f"sums are modulo 2^bits with bits from 1 to 64; {bits!r} given")
    return np.dtype("<u4" if bits <= 32 else "<u8")


def words(vector: NDArray[Any], bits: int) -> Words:
    """A copy of an integer vector as words, negative numbers as their complement."""
    vector = np.asarray(vector)
    if vector.dtype.kind not in "iu" or vector.ndim != 1:
        raise InputError(f"a masked sum takes vectors of integers; {vector.dtype} of shape {vector.shape} given")
    return vector.astype(word(bits), copy=True)


def add_masks(vector: Words, masks: Iterable[tuple[bytes, bool]]) -> None:
    """Add to ``vector``, in place, the mask of each key, or subtract it if its flag is False."""
    streams = [(keystream(key), np.add if plus else np.subtract) for key, plus in masks]
    zeros, size = bytes(BLOCK_BYTES), vector.dtype.itemsize
    stream_bytes = np.empty(BLOCK_BYTES, np.uint8)
    mask = stream_bytes.view(vector.dtype)
    for start in range(0, len(vector), len(mask)):
        block = vector[start : start + len(mask)]
        n = len(block) * size
        for stream, add in streams:
            stream.update_into(zeros[:n] if n < BLOCK_BYTES else zeros, stream_bytes)
            add(block, mask[: len(block)], out=block)


def bits_for_sum(bits: int, members: int) -> int:
    """The bits that a sum of so many numbers of ``bits`` bits needs.

    >>> bits_for_sum(16, 100)
    23
    """
    return bits + max(members - 1, 0).bit_length()


def signed(total: Words, bits: int) -> NDArray[np.int64]:
    """A sum modulo 2^b as the signed numbers -2^(b-1) ... 2^(b-1) - 1.

    >>> signed(np.array([0, 1, 7], np.uint32), 3).tolist()
    [0, 1, -1]
    """
    spare = np.uint64(64 - bits)
    return (total.astype(np.uint64) << spare).view(np.int64) >> np.int64(spare)


def pack(vector: Words, bits: int) -> bytes:
    """The lowest b bits of each number, without gaps, lowest bits first."""
    blocks = (pack_block(vector[start : start + PACKED], bits) for start in range(0, len(vector), PACKED))
    return b"".join(blocks)[: packed_bytes(len(vector), bits)]


def add_packed(total: Words, data: bytes, bits: int) -> None:
    """Add packed numbers to ``total``, in place; bytes that `pack` would not write are an error."""
    n = len(total)
    if len(data) != packed_bytes(n, bits):
        raise InputError(f"{n} numbers of {bits} bits take {packed_bytes(n, bits)} bytes; {len(data)} given")
    if data and n * bits % 8 and data[-1] >> n * bits % 8:
        raise InputError("the bits after the last number are not zero")
    for start in range(0, n, PACKED):
        block = total[start : start + PACKED]
        packed = data[start // 8 * bits : (start + PACKED) // 8 * bits]
        block += unpack_block(packed, len(block), bits).astype(total.dtype, copy=False)
