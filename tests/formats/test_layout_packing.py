"""6-bit packing, against Python integers: code i is bits 6 i to 6 i + 5, little-endian."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flamia_ref.formats import layout

pack, unpack = layout.pack_fp6, layout.unpack_fp6
spread, gather = layout.pack_fp6_b6x16_p32, layout.unpack_fp6_b6x16_p32


def bits_of(codes: list[int]) -> bytes:
    """The codes as one long integer, which is written low byte first."""
    whole = sum(code << 6 * i for i, code in enumerate(codes))
    return whole.to_bytes(len(codes) * 6 // 8, "little")


def in_containers(codes: list[int]) -> bytes:
    groups = (codes[start : start + 16] for start in range(0, len(codes), 16))
    return b"".join(bits_of(group) + bytes(4) for group in groups)


def test_spot_bytes() -> None:
    """By hand: 1, 2, 3, 4 is 000100 000011 000010 000001 in bits, the last code on the left."""
    assert pack(np.array([1, 2, 3, 4])).tolist() == [0b10000001, 0b00110000, 0b00010000]
    assert pack(np.array([63, 0, 0, 0])).tolist() == [0x3F, 0x00, 0x00]
    assert pack(np.array([0, 63, 0, 0])).tolist() == [0xC0, 0x0F, 0x00]
    assert pack(np.array([0, 0, 63, 0])).tolist() == [0x00, 0xF0, 0x03]
    assert pack(np.array([0, 0, 0, 63])).tolist() == [0x00, 0x00, 0xFC]


def test_every_pair_of_neighbours() -> None:
    """At each of the three places where one code ends and the next begins."""
    first, second = (axis.ravel() for axis in np.meshgrid(range(64), range(64)))
    for place in range(3):
        codes = np.full((4096, 4), 42, np.uint8)
        codes[:, place], codes[:, place + 1] = first, second
        packed = pack(codes)
        assert packed.shape == (4096, 3)
        assert packed.dtype == np.uint8
        assert packed.tobytes() == b"".join(bits_of(row) for row in codes.tolist())
        np.testing.assert_array_equal(unpack(packed), codes)


def test_every_three_bytes_are_four_codes() -> None:
    """Unpacking alone, against integers: each byte through all its values."""
    values = np.arange(256, dtype=np.uint8)
    packed = np.stack((values, values[::-1] ^ 0x5A, np.roll(values, 77)), axis=-1)
    whole = [int.from_bytes(row.tobytes(), "little") for row in packed]
    expected = [[word >> 6 * i & 63 for i in range(4)] for word in whole]
    found = unpack(packed)
    assert found.dtype == np.uint8
    assert found.tolist() == expected


def test_a_container_is_twelve_bytes_and_four_of_padding() -> None:
    codes = np.arange(2 * 3 * 48).reshape(2, 3, 48) * 37 % 64
    padded = spread(codes)
    assert padded.shape == codes.shape
    assert padded.dtype == np.uint8
    for i, j in np.ndindex(2, 3):
        assert padded[i, j].tobytes() == in_containers(codes[i, j].tolist())
    dirty = np.where(np.arange(48) % 16 < 12, padded, np.uint8(0xFF))
    assert (dirty != padded).sum() == 2 * 3 * 12
    np.testing.assert_array_equal(gather(dirty), codes)
    np.testing.assert_array_equal(
        unpack(padded.reshape(2, 3, 3, 16)[..., :12]), codes.reshape(2, 3, 3, 16)
    )


@given(st.lists(st.integers(0, 63), max_size=24), st.sampled_from([np.uint8, np.int64, np.uint16]))
def test_round_trips(drawn: list[int], dtype: Any) -> None:
    fours = drawn[: len(drawn) // 4 * 4]
    packed = pack(np.array(fours, dtype))
    assert packed.tobytes() == bits_of(fours)
    assert unpack(packed).tolist() == fours
    sixteens = drawn[: len(drawn) // 16 * 16]
    assert gather(spread(np.array(sixteens, dtype))).tolist() == sixteens
    assert spread(np.array(sixteens, dtype)).tobytes() == in_containers(sixteens)


@pytest.mark.parametrize(
    ("call", "empty", "result"),
    [(pack, (3, 0), (3, 0)), (unpack, (3, 0), (3, 0)), (spread, (0, 16), (0, 16))]
    + [(gather, (0, 32), (0, 32)), (pack, (0, 8), (0, 6)), (unpack, (0, 6), (0, 8))],
)
def test_empty(call: Callable[[Any], Any], empty: Any, result: Any) -> None:
    found = call(np.zeros(empty, np.uint8))
    assert found.shape == result
    assert found.dtype == np.uint8


@pytest.mark.parametrize(
    ("call", "group", "largest"),
    [(pack, 4, 63), (unpack, 3, 255), (spread, 16, 63), (gather, 16, 255)],
)
def test_bad_input(call: Callable[[Any], Any], group: int, largest: int) -> None:
    for width in (1, group - 1, group + 1, 2 * group + 1):
        with pytest.raises(ValueError, match=f"the last axis must be a multiple of {group}"):
            call(np.zeros((2, width), np.uint8))
    with pytest.raises(ValueError, match="at least one axis"):
        call(np.uint8(1))
    for wrong in (-1, largest + 1):
        with pytest.raises(ValueError, match=f"has no code {wrong}; codes are 0 to {largest}"):
            call(np.array([wrong] + [0] * (group - 1)))
    for dtype in (np.float32, np.complex64, bool, "U1"):
        with pytest.raises(TypeError, match="are integers, not"):
            call(np.zeros(group, dtype))
    assert call(np.full(group, largest)).dtype == np.uint8


def test_messages_name_what_was_given() -> None:
    with pytest.raises(ValueError, match="a 6-bit format has no code 64; codes are 0 to 63"):
        pack(np.array([64, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"codes have shape \(2, 6\); the last axis must be a"):
        pack(np.zeros((2, 6), np.uint8))
    with pytest.raises(ValueError, match=r"packed have shape \(4,\); the last axis must be a"):
        unpack(np.zeros(4, np.uint8))
