"""Masks are the cipher's stream, sums wrap around, packed bytes have no gaps."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.federate.secure import masks
from apfl.federate.secure.masks import add_masks, add_packed, bits_for_sum, pack, packed_bytes, signed, word, words

ciphers = pytest.importorskip("cryptography.hazmat.primitives.ciphers", reason="needs the flower extra")

bit_counts = st.integers(1, 64)


def stream_of(key: bytes, n: int) -> bytes:
    """The stream of AES-256 in counter mode, one encrypted counter after another."""
    encryptor = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.ECB()).encryptor()
    return b"".join(encryptor.update(i.to_bytes(16)) for i in range(-(-n // 16)))[:n]


@pytest.mark.parametrize("bits", [16, 48])
def test_masks_are_the_stream_of_the_cipher_added_or_subtracted(bits, monkeypatch):
    monkeypatch.setattr(masks, "BLOCK_BYTES", 64)  # several blocks, the last one not whole
    size = word(bits).itemsize
    start = np.arange(41, dtype=word(bits))
    vector = start.copy()
    keys = [bytes([i]) * 32 for i in range(3)]
    add_masks(vector, [(keys[0], True), (keys[1], False), (keys[2], True)])
    streams = [np.frombuffer(stream_of(key, 41 * size), f"<u{size}").tolist() for key in keys]
    expected = [(i + a - b + c) % 2 ** (8 * size) for i, (a, b, c) in enumerate(zip(*streams, strict=True))]
    assert vector.tolist() == expected


def test_a_mask_added_and_subtracted_leaves_the_vector():
    vector = np.arange(100_000, dtype=np.uint32)
    add_masks(vector, [(b"k" * 32, True), (b"k" * 32, False)])
    assert (vector == np.arange(100_000)).all()


def test_memory_grows_neither_with_the_vector_nor_with_the_number_of_masks():
    vector = np.zeros(2**21, np.uint32)  # 8 MB
    add_masks(vector[:1], [(bytes(32), True)])  # what is imported at first use
    tracemalloc.start()
    add_masks(vector, [(bytes([i]) * 32, True) for i in range(50)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * masks.BLOCK_BYTES


@given(st.data(), bit_counts, st.integers(0, 200))
def test_packing_is_one_number_after_another(data, bits, n):
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n))
    vector = np.array(numbers, word(bits))
    packed = pack(vector, bits)
    assert int.from_bytes(packed, "little") == sum(number << i * bits for i, number in enumerate(numbers))
    assert len(packed) == packed_bytes(n, bits)
    total = vector.copy()
    add_packed(total, packed, bits)
    assert [int(value) % 2**bits for value in total] == [2 * number % 2**bits for number in numbers]


def test_packing_works_over_several_blocks(monkeypatch):
    monkeypatch.setattr(masks, "PACKED", 64)
    vector = np.arange(200, dtype=np.uint32)
    total = np.zeros(200, np.uint32)
    add_packed(total, pack(vector, 9), 9)
    assert (total == vector).all()


def test_packing_leaves_higher_bits_out():
    assert pack(np.array([0xFF], np.uint32), 3) == b"\x07"


@pytest.mark.parametrize(("data", "message"), [(b"\0", "take 2 bytes; 1 given"), (b"\0\xf8", "not zero")])
def test_packed_bytes_of_another_size_or_with_bits_left_over_are_refused(data, message):
    with pytest.raises(InputError, match=message):
        add_packed(np.zeros(1, np.uint32), data, 11)


@given(bit_counts, st.data())
def test_signed_numbers_come_back(bits, data):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    numbers = np.array(data.draw(st.lists(st.integers(low, high), min_size=1)), np.int64)
    unsigned = np.array([int(number) % 2**bits for number in numbers], np.uint64)
    assert (signed(unsigned, bits) == numbers).all()


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 100, 128, 129])
def test_the_sum_of_the_largest_and_the_smallest_fits(members):
    for number in (2**15 - 1, -(2**15)):
        total = number * members
        bits = bits_for_sum(16, members)
        assert -(2 ** (bits - 1)) <= total < 2 ** (bits - 1)
    assert members == 1 or 2**15 * members > 2 ** (bits_for_sum(16, members) - 2)  # and one bit less would not do


@pytest.mark.parametrize("bits", [0, 65, True, 8.0])
def test_bits_are_1_to_64(bits):
    with pytest.raises(InputError, match="bits from 1 to 64"):
        word(bits)


@pytest.mark.parametrize("vector", [np.zeros(3), np.zeros((2, 2), int), np.array(3), np.array([True])])
def test_vectors_are_of_integers(vector):
    with pytest.raises(InputError, match="vectors of integers"):
        words(vector, 8)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i4", "<u4", "<i8", "<u8"])
@pytest.mark.parametrize("bits", [5, 32, 33, 64])
def test_words_are_a_copy_with_the_same_lowest_bits(dtype, bits):
    info = np.iinfo(dtype)
    vector = np.array([info.min, 0, 1, info.max], dtype)
    made = words(vector, bits)
    assert [int(value) % 2**bits for value in made] == [int(value) % 2**bits for value in vector]
    made += np.ones(4, made.dtype)
    assert vector.tolist() == [info.min, 0, 1, info.max]
