"""Integers as bytes: every vector comes back, whatever the bits, and nothing outside its range does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.maths import bits as room
from apfl.maths.bits import Layout, Part, Squeezed, pack_bits, squeeze, squeeze_each, unpack_bits
from apfl.maths.integers import statistics_layout
from apfl.maths.wire import ECHO_BYTES, rounded_bytes


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 2**32))
def test_packing_round_trips_by_another_route(bits, size, seed):
    """The other route is one large integer, in which each number stands at its own place."""
    codes = np.random.default_rng(seed).integers(0, 2**bits, size=size, dtype=np.int64)
    packed = pack_bits(codes, bits)
    whole = sum(int(code) << (bits * i) for i, code in enumerate(codes))
    assert packed.tobytes() == whole.to_bytes(-(-bits * size // 8), "little")
    assert unpack_bits(packed, bits, size).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", [12, 13, 17])
def test_packing_in_pieces_is_packing_at_once(bits, monkeypatch):
    codes = np.random.default_rng(0).integers(0, 2**bits, size=1003)
    whole = pack_bits(codes, bits)
    monkeypatch.setattr(room, "PACKED", 64)
    assert pack_bits(codes, bits).tobytes() == whole.tobytes()
    assert unpack_bits(whole, bits, 1003).tolist() == codes.tolist()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    parts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(2, 33), st.booleans()), min_size=1, max_size=4))
    return Layout(tuple(Part(str(i), *part) for i, part in enumerate(parts)))


@given(layouts(), st.data())
def test_a_vector_comes_back_from_its_layout_and_no_entry_outside_its_range(layout, data):
    vector = np.array(
        [data.draw(st.integers(part.low, part.high)) for part in layout.parts for _ in range(part.size)], np.int64
    )
    packed = layout.pack(vector)
    assert (packed.dtype, len(packed)) == (np.uint8, layout.n_bytes)
    assert layout.unpack(packed).tolist() == vector.tolist()
    for part in layout.parts:
        for outside in (part.low - 1, part.high + 1) if part.size else ():
            wrong = vector.copy()
            wrong[layout.places[part.name].start] = outside
            with pytest.raises(InputError, match=f"{part.name}: integers from"):
                layout.pack(wrong)


def test_what_no_layout_packs_is_refused():
    layout = Layout((Part("a", 3, 12), Part("b", 2, 16)))
    packed = layout.pack(np.array([1, -2, 3, 4, 5]))
    with pytest.raises(InputError, match="take 9 bytes; 10 given"):
        layout.unpack(np.append(packed, np.uint8(0)))
    with pytest.raises(InputError, match="belong to no integer"):  # four bits are left of the first five bytes
        layout.unpack(np.where(np.arange(9) == 4, packed | 0x80, packed))
    with pytest.raises(InputError, match="a: integers from"):  # 2^12 - 1 is the one code without a meaning
        layout.unpack(np.where(np.arange(9) < 4, np.uint8(255), packed))
    with pytest.raises(InputError, match="layout has 5"):
        layout.pack(np.zeros(4, np.int64))


@pytest.mark.parametrize("bits", [12, 13, 16, 32])
@pytest.mark.parametrize(("width", "n_classes"), [(1, 2), (7, 3), (40, 11)])
def test_byte_counts_are_those_of_the_layouts(bits, width, n_classes):
    assert rounded_bytes(width, n_classes, bits) + ECHO_BYTES == statistics_layout(width, n_classes, bits).n_bytes


# ------------------------------------------------------------------------------------------------------- squeezed


@given(layouts(), st.sampled_from([0.2, 3.0, 300.0, 1e9]), st.integers(0, 2**32))
def test_a_squeezed_vector_comes_back_and_takes_the_fewest_bytes(layout, size, seed):
    """By trying all numbers of bits of each part, and counting what does not fit its range entry by entry."""
    drawn = np.rint(size * np.random.default_rng(seed).standard_t(2, layout.size))
    vector = np.concatenate(
        [np.clip(drawn[layout.places[p.name]], p.low, p.high) for p in layout.parts]
    ).astype(np.int64)  # fmt: skip
    how = squeeze(layout, torch.from_numpy(vector))
    packed = how.pack(vector)
    assert (packed.dtype, len(packed)) == (np.uint8, how.n_bytes)
    assert how.unpack(packed).tolist() == vector.tolist()

    def weight(part: Part, bits: int) -> int:
        codes = range(1 - 2 ** (bits - 1), 2 ** (bits - 1)) if part.signed else range(2**bits - 1)
        codes = range(part.low, part.high + 1) if bits == part.bits else codes
        beside = sum(int(entry) not in codes for entry in vector[layout.places[part.name]])
        return -(-part.size * bits // 8) - (-beside * part.bits // 8)

    assert how.n_bytes == sum(min(weight(part, bits) for bits in range(1, part.bits + 1)) for part in layout.parts)


def test_a_squeezed_vector_reads_in_one_way_only():
    layout = Layout((Part("a", 4, 12), Part("b", 3, 9, signed=False)))
    vector = np.array([0, 1, -900, 1, 0, 0, 300])
    how = squeeze(layout, torch.from_numpy(vector))
    assert (how.bits, how.escaped, how.n_bytes) == ((2, 2), (1, 1), 6)
    packed = how.pack(vector)
    with pytest.raises(InputError, match="take 6 bytes; 5 given"):
        how.unpack(packed[:-1])
    for wrong, match in (
        ({"bits": (0, 1)}, "1 to 12 bits"),
        ({"bits": (13, 1)}, "1 to 12 bits"),
        ({"escaped": (5, 1)}, "at most 4 entries"),
        ({"bits": (12, 1)}, "none with all bits"),
        ({"escaped": (1,)}, "2 widths and 1 counts"),
    ):
        with pytest.raises(InputError, match=match):
            Squeezed(layout, **({"bits": how.bits, "escaped": how.escaped} | wrong))
    with pytest.raises(InputError, match="1 entries should follow, 2 do"):  # one more byte, as two entries take
        Squeezed(layout, how.bits, (2, 1)).unpack(np.insert(packed, 3, 0))
    small = Layout((Part("a", 1, 12),))
    with pytest.raises(InputError, match="could stand before"):  # a 1 that needs no room beside
        Squeezed(small, (2,), (1,)).unpack(np.append(np.uint8(0), small.pack(np.array([1]))))
    with pytest.raises(InputError, match="a: integers from"):
        how.pack(np.array([0, 1, 5000, 1, 0, 0, 3]))


def test_several_vectors_are_squeezed_as_each():
    layout = Layout((Part("a", 50, 12), Part("b", 9, 9, signed=False), Part("c", 4, 36)))
    rng = np.random.default_rng(0)
    vectors = np.concatenate(
        [rng.integers(-2047, 2048, (3, 50)) // np.array([[1], [100], [900]]), rng.integers(0, 512, (3, 9)),
         rng.integers(-(2**35) + 1, 2**35, (3, 4))], 1,
    )  # fmt: skip
    found = squeeze_each(layout, torch.from_numpy(vectors))
    assert found == [squeeze(layout, torch.from_numpy(vector)) for vector in vectors]
    for part, column in zip(layout.parts, zip(*(how.escaped for how in found), strict=True), strict=True):
        for vector, how, escaped in zip(vectors, found, column, strict=True):  # counted entry by entry
            bits = how.bits[layout.parts.index(part)]
            limit = 2 ** (bits - part.signed) - (0 if part.signed else 1)
            outside = (np.abs(vector[layout.places[part.name]]) >= limit).sum() if bits < part.bits else 0
            assert escaped == outside
    assert len({how.bits for how in found}) == 3


@pytest.mark.parametrize("bits", [8, 12, 24, 25, 32, 40])
def test_numbers_are_counted_by_binary_digits_as_one_by_one(bits):
    """As a GPU counts many: around each power of two, where a digit more or less decides."""
    powers = [2**k for k in range(bits)]
    below, above = ([*powers, *(each + step for each in powers)] for step in (-1, 1))
    sizes, limits = torch.tensor([[0, *below], [2**bits, *above]]), powers[::-1]
    counted = room._counted_by_digits(sizes, bits, limits)
    assert counted.tolist() == [[int((own >= limit).sum()) for limit in limits] for own in sizes]
