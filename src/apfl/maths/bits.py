"""A vector of integers as bytes: parts of agreed sizes, each in as many bits as its range needs.

Everyone knows the layout, so nothing of it travels. A signed part of b bits has the range +-(2^(b-1) - 1),
an unsigned one 0 to 2^b - 1; what travels is the distance from the lowest, its smallest bit first. Sums of many such
vectors pass these ranges, and fit int64.

Few entries of a vector are large, and they would decide how many bits all others take. `Squeezed` packs each part in
fewer bits; the code 0 says that the entry follows after the part, in the part's own bits. A vector under a mask has no
small entries, and travels by its layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfl.errors import InputError

__all__ = [
    "PACKED",
    "Layout",
    "Part",
    "Squeezed",
    "pack_bits",
    "pack_block",
    "packed_bytes",
    "sizes_of",
    "squeeze",
    "squeeze_each",
    "squeezed",
    "unpack_bits",
    "unpack_block",
]

Words = NDArray[Any]
GROUP = 64  # numbers of b bits fill b words of 64
PACKED = 1024 * GROUP  # numbers packed at a time: they stay in the cache
_PIECE = 2**16  # numbers counted at a time, likewise
_COMPARED = 2**26  # comparisons that a GPU makes at once; more take longer than counting by binary digits
_IN_SINGLE = 24  # bits of a number that single precision holds exactly


def pack_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Integers from 0 to 2^bits - 1 as bytes, uint8; the last byte is filled up with zeros.

    >>> pack_bits(np.array([1, 2, 3]), 4).tolist()
    [33, 3]
    """
    if bits in (8, 16, 32):
        return np.frombuffer(codes.astype(f"<u{bits // 8}").tobytes(), np.uint8)
    blocks = (pack_block(codes[start : start + PACKED], bits) for start in range(0, len(codes), PACKED))
    return np.frombuffer(b"".join(blocks), np.uint8)[: packed_bytes(len(codes), bits)]


def unpack_bits(packed: np.ndarray, bits: int, size: int) -> np.ndarray:
    """The integers back from `pack_bits`, int64; refused if there are too many or too few bytes, or bits left over."""
    if len(packed) != packed_bytes(size, bits):
        raise InputError(f"{size} integers of {bits} bits take {packed_bytes(size, bits)} bytes; {len(packed)} given")
    if bits in (8, 16, 32):
        return np.frombuffer(packed.tobytes(), f"<u{bits // 8}").astype(np.int64)
    if len(packed) and size * bits % 8 and int(packed[-1]) >> size * bits % 8:
        raise InputError("bits that belong to no integer; the message is damaged")
    data, codes = packed.tobytes(), np.empty(size, np.int64)
    for start in range(0, size, PACKED):
        block = codes[start : start + PACKED]
        block[:] = unpack_block(data[start // 8 * bits : (start + PACKED) // 8 * bits], len(block), bits)
    return codes


def packed_bytes(length: int, bits: int) -> int:
    """Bytes of so many numbers of ``bits`` bits, without gaps.

    >>> packed_bytes(3, 23)
    9
    """
    return (length * bits + 7) // 8


def pack_block(vector: Words, bits: int) -> bytes:
    """The lowest b bits of each number, b up to 64, in whole groups; the last one is filled with zeros."""
    rows = np.zeros((-(-len(vector) // GROUP), GROUP), np.uint64)
    rows.reshape(-1)[: len(vector)] = vector
    rows &= np.uint64(2**bits - 1)
    columns = np.ascontiguousarray(rows.T)  # (64, groups): the same place in every group, side by side
    packed = np.zeros((bits, len(rows)), np.uint64)
    for j in range(GROUP):
        at, shift = divmod(j * bits, 64)
        packed[at] |= columns[j] << np.uint64(shift)
        if shift + bits > 64:
            packed[at + 1] |= columns[j] >> np.uint64(64 - shift)
    return packed.T.astype("<u8").tobytes()


def unpack_block(data: bytes, n: int, bits: int) -> Words:
    """The first n numbers back from `pack_block`, uint64."""
    groups = -(-n // GROUP)
    rows = np.frombuffer(data.ljust(groups * bits * 8, b"\0"), "<u8").reshape(groups, bits)
    packed = np.ascontiguousarray(rows.T)  # (bits, groups)
    columns = np.empty((GROUP, groups), np.uint64)
    for j in range(GROUP):
        at, shift = divmod(j * bits, 64)
        np.right_shift(packed[at], np.uint64(shift), out=columns[j])
        if shift + bits > 64:
            columns[j] |= packed[at + 1] << np.uint64(64 - shift)
    columns &= np.uint64(2**bits - 1)
    return np.ascontiguousarray(columns.T).reshape(-1)[:n]


@dataclass(frozen=True)
class Part:
    """Integers of one meaning and range."""

    name: str
    size: int
    bits: int
    signed: bool = True
    presence: bool = False  # of a masked sum only whether an entry is zero is told: entries are 0, or drawn at random

    @property
    def high(self) -> int:
        return int(2 ** (self.bits - 1) - 1) if self.signed else int(2**self.bits - 1)

    @property
    def low(self) -> int:
        return -self.high if self.signed else 0

    @property
    def n_bytes(self) -> int:
        return packed_bytes(self.size, self.bits)


@dataclass(frozen=True)
class Layout:
    """The parts of a vector, one after another; each begins with a byte of its own.

    >>> layout = Layout((Part("a", 2, 12), Part("b", 1, 4, signed=False)))
    >>> layout.size, layout.n_bytes, layout.unpack(layout.pack(np.array([-5, 7, 9]))).tolist()
    (3, 4, [-5, 7, 9])
    """

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    @cached_property
    def places(self) -> Mapping[str, slice]:
        """Where each part stands in the vector."""
        found, start = {}, 0
        for part in self.parts:
            found[part.name] = slice(start, start + part.size)
            start += part.size
        return found

    def check(self, vector: np.ndarray) -> None:
        """Refuse a vector of another size, or with an entry outside the range of its part."""
        if vector.shape != (self.size,):
            raise InputError(f"{vector.shape} integers given; the layout has {self.size}")
        for part in self.parts:
            own = vector[self.places[part.name]]
            if part.size and not part.low <= int(own.min()) <= int(own.max()) <= part.high:
                raise InputError(
                    f"{part.name}: integers from {int(own.min())} to {int(own.max())}; allowed are {part.low} to "
                    f"{part.high}"
                )

    def pack(self, vector: np.ndarray) -> np.ndarray:
        """The vector as bytes, uint8."""
        self.check(vector)
        return np.concatenate([pack_bits(vector[self.places[part.name]] - part.low, part.bits) for part in self.parts])

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The vector back, int64; refused if any entry is outside the range of its part."""
        if len(packed) != self.n_bytes:
            raise InputError(f"these integers take {self.n_bytes} bytes; {len(packed)} given")
        vector, start = np.empty(self.size, np.int64), 0
        for part in self.parts:
            codes = unpack_bits(packed[start : start + part.n_bytes], part.bits, part.size)
            vector[self.places[part.name]] = codes + part.low
            start += part.n_bytes
        self.check(vector)
        return vector


# ------------------------------------------------------------------------------------------------------- squeezed


@dataclass(frozen=True)
class Squeezed:
    """How one vector of a layout travels: the bits of each part, and how many of its entries follow after it.

    >>> layout = Layout((Part("a", 6, 12),))
    >>> how = squeeze(layout, torch.tensor([0, 1, -1, 0, 900, 1]))
    >>> how.bits, how.escaped, how.n_bytes, layout.n_bytes
    ((2,), (1,), 4, 9)
    >>> how.unpack(how.pack(np.array([0, 1, -1, 0, 900, 1]))).tolist()
    [0, 1, -1, 0, 900, 1]
    """

    layout: Layout
    bits: tuple[int, ...]
    escaped: tuple[int, ...]

    def __post_init__(self) -> None:
        parts = self.layout.parts
        if not len(parts) == len(self.bits) == len(self.escaped):
            raise InputError(f"{len(self.bits)} widths and {len(self.escaped)} counts given for {len(parts)} parts")
        for part, bits, escaped in zip(parts, self.bits, self.escaped, strict=True):
            if not 1 <= bits <= part.bits or not 0 <= escaped <= (part.size if bits < part.bits else 0):
                raise InputError(
                    f"{part.name}: {bits} bits and {escaped} entries beside them given; allowed are 1 to {part.bits} "
                    f"bits, and at most {part.size} entries, none with all bits"
                )

    @property
    def n_bytes(self) -> int:
        return sum(map(_squeezed_bytes, self.layout.parts, self.bits, self.escaped))

    def pack(self, vector: np.ndarray) -> np.ndarray:
        """The vector as bytes, uint8."""
        self.layout.check(vector)
        packed: list[np.ndarray] = []
        for part, bits in zip(self.layout.parts, self.bits, strict=True):
            own = vector[self.layout.places[part.name]]
            low, high = _narrow(part, bits)
            inside = (own >= low) & (own <= high)
            packed.append(pack_bits(np.where(inside, own - low + (bits < part.bits), 0), bits))
            packed.append(pack_bits(own[~inside] - part.low, part.bits))
        return np.concatenate(packed)

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """The vector back, int64; refused if any entry is outside its range, or beside it without need."""
        if len(packed) != self.n_bytes:
            raise InputError(f"these integers take {self.n_bytes} bytes; {len(packed)} given")
        vector, start = np.empty(self.layout.size, np.int64), 0
        for part, bits, escaped in zip(self.layout.parts, self.bits, self.escaped, strict=True):
            size = _squeezed_bytes(part, bits, escaped)
            vector[self.layout.places[part.name]] = _unsqueezed(packed[start : start + size], part, bits, escaped)
            start += size
        self.layout.check(vector)
        return vector


def squeeze(layout: Layout, vector: Tensor) -> Squeezed:
    """The fewest bytes for this vector, part by part."""
    (only,) = squeeze_each(layout, vector[None])
    return only


def squeeze_each(layout: Layout, vectors: Tensor) -> list[Squeezed]:
    """`squeeze` of several vectors (b, size)."""
    return squeezed(layout, sizes_of(layout, vectors))


def sizes_of(layout: Layout, vectors: Tensor) -> Tensor:
    """What decides how each of these vectors (b, size) is squeezed, (b, any): a GPU need not be waited for."""
    return torch.cat([_away(part, vectors[:, layout.places[part.name]]) for part in layout.parts], 1)


def squeezed(layout: Layout, sizes: Tensor) -> list[Squeezed]:
    """How the vectors behind `sizes_of` are squeezed."""
    cuts = [part.bits - 1 for part in layout.parts]
    by_part = [
        _fewest(part, own.numpy()) for part, own in zip(layout.parts, torch.split(sizes.cpu(), cuts, 1), strict=True)
    ]
    return [
        Squeezed(layout, tuple(bits for bits, _ in own), tuple(escaped for _, escaped in own))
        for own in zip(*by_part, strict=True)
    ]


def _narrow(part: Part, bits: int) -> tuple[int, int]:
    """The range of a code of so many bits: one value less than there are codes, unless they are all the part has."""
    if bits == part.bits:
        return part.low, part.high
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if part.signed else (0, 2**bits - 2)


def _squeezed_bytes(part: Part, bits: int, escaped: int) -> int:
    return packed_bytes(part.size, bits) + packed_bytes(escaped, part.bits)


def _fewest(part: Part, away: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Of each vector the bits of a code, and how many entries do not fit them; of equally short ones the most bits.

    ``away`` (b, bits - 1) is that of `_away`.
    """
    bits, escaped = np.arange(part.bits, 0, -1), np.pad(away, ((0, 0), (1, 0)))  # with all bits every entry fits
    sizes = (part.size * bits + 7) // 8 + (escaped * part.bits + 7) // 8  # `_squeezed_bytes` of all
    best = sizes.argmin(1)
    return [(int(bits[at]), int(own[at])) for at, own in zip(best, escaped, strict=True)]


def _away(part: Part, values: Tensor) -> Tensor:
    """How many entries of each vector (b, n) do not fit codes of one bit less than the part's, of two less, ..."""
    limits = [2 ** (bits - part.signed) for bits in range(part.bits - 1, 0, -1)]
    if values.device.type == "cpu":
        return torch.tensor([_counts(part, own, limits) for own in values.numpy()])
    sizes = values.abs() if part.signed else values.long() + 1
    if sizes.numel() * len(limits) <= _COMPARED:
        powers = torch.arange(part.bits - 1 - part.signed, -int(part.signed), -1, device=sizes.device)
        return (sizes[:, None] >= (1 << powers)[:, None]).sum(2)
    return _counted_by_digits(sizes, part.bits, limits)


def _counted_by_digits(sizes: Tensor, bits: int, limits: Sequence[int]) -> Tensor:
    """How many of each row's numbers (b, n), of at most so many bits, reach each limit, which is a power of two.

    A number reaches 2^k if it has more than k binary digits.
    """
    digits = torch.frexp(sizes.to(torch.float32 if bits <= _IN_SINGLE else torch.float64)).exponent
    most = bits + 2  # 2^b has b + 1
    first = torch.arange(0, most * len(sizes), most, device=sizes.device, dtype=digits.dtype)[:, None]
    counted = torch.bincount(digits.add_(first).flatten(), minlength=most * len(sizes)).view(-1, most)
    return counted.flip(1).cumsum(1).flip(1)[:, [limit.bit_length() for limit in limits]]


def _counts(part: Part, values: np.ndarray, limits: Sequence[int]) -> list[int]:
    """`_away` of one vector on a CPU: by pieces that stay in the cache, in 16 bits if their range allows."""
    short = part.bits <= 14 + 2 * part.signed
    counted = np.zeros(len(limits) if short else part.bits + 2, np.int64)
    for start in range(0, len(values), _PIECE):
        own: NDArray[Any] = values[start : start + _PIECE].astype(np.int16 if short else np.int64)
        sizes: NDArray[Any] = np.abs(own) if part.signed else own + 1
        if short:
            counted += [np.count_nonzero(sizes >= limit) for limit in limits]
        else:  # many limits: counted by binary digits, of which 2^b has b + 1
            counted += np.bincount(np.frexp(sizes)[1], minlength=len(counted))
    if not short:
        digits = [limit.bit_length() for limit in limits]
        counted = counted[::-1].cumsum()[::-1][digits]
    return [int(away) for away in counted]


def _unsqueezed(packed: np.ndarray, part: Part, bits: int, escaped: int) -> np.ndarray:
    low, high = _narrow(part, bits)
    n = packed_bytes(part.size, bits)
    codes, beside = unpack_bits(packed[:n], bits, part.size), unpack_bits(packed[n:], part.bits, escaped) + part.low
    if bits == part.bits:
        return codes + low
    away = codes == 0
    if int(away.sum()) != escaped or bool(((beside >= low) & (beside <= high)).any()):
        raise InputError(f"{part.name}: {int(away.sum())} entries should follow, {escaped} do, or could stand before")
    values = codes + (low - 1)
    values[away] = beside
    return values
