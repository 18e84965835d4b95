"""Orientations and orders of tiles, 8x4 tiles and DeepGEMM's words, against loops over bytes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flamia_ref.formats import layout

tile, untile = layout.tile_scales_128x4, layout.untile_scales_128x4
tile8, untile8 = layout.tile_scales_8x4, layout.untile_scales_8x4
pack, unpack = layout.pack_scales_int32, layout.unpack_scales_int32


def random_bytes(*shape: int) -> Any:
    """Without 0, so that padding is told from scales."""
    return np.random.default_rng(sum(shape)).integers(1, 256, shape, np.uint8)


def inside(row: int, column: int) -> int:
    """Byte of a scale in its tile. Source: cuDNN front end, frost/tile_dsl/sf_layout.py."""
    return (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def placed(matrices: Any, order: str) -> Any:
    """[matrices, rows, columns] in one buffer of 128x4 tiles, a byte at a time.

    Source of the tile numbers: cuDNN front end 1.32.0, for the first two
    sdpa/bwd/kernels/sm100/bprop_sf_repack_mxfp8.py, for the third sdpa/kernels/_mxfp8_sf.py with
    thd_varlen.
    """
    count, rows, columns = matrices.shape
    planes, across = -(-rows // 128), -(-columns // 4)
    buffer = np.zeros(count * planes * across * 512, np.uint8)
    for matrix, row, column in itertools.product(range(count), range(rows), range(columns)):
        plane, k = row // 128, column // 4
        number = {
            "matrix": (matrix * planes + plane) * across + k,
            "planes_first": (plane * count + matrix) * across + k,
            "planes_last": (matrix * across + k) * planes + plane,
        }[order]
        buffer[number * 512 + inside(row, column)] = matrices[matrix, row, column]
    return buffer


ORDERS = ("matrix", "planes_first", "planes_last")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(2, 256, 8), (3, 130, 5), (2, 100, 9), (1, 257, 4)])
def test_orders_byte_by_byte(shape: tuple[int, int, int], order: str) -> None:
    scales = random_bytes(*shape)
    count, rows, columns = shape
    planes, across = -(-rows // 128), -(-columns // 4)
    tiled = tile(scales, order=order)
    whole = (count, planes * across * 512)
    assert tiled.shape == ((planes, count, across * 512) if order == "planes_first" else whole)
    np.testing.assert_array_equal(tiled.reshape(-1), placed(scales, order))
    np.testing.assert_array_equal(untile(tiled, shape, order=order), scales)


@pytest.mark.parametrize("order", ORDERS)
def test_column_wise_tiles_the_transposed_matrix(order: str) -> None:
    """V of two batches of three heads, 300 tokens, 200 channels: scales of 10 token blocks."""
    scales = random_bytes(2, 3, 10, 200)
    tiled = tile(scales, orientation="column_wise", order=order)
    transposed = scales.reshape(6, 10, 200).transpose(0, 2, 1)
    np.testing.assert_array_equal(tiled.reshape(-1), placed(transposed, order))
    back = untile(tiled, scales.shape, orientation="column_wise", order=order)
    np.testing.assert_array_equal(back, scales)


def test_spot_tiles_of_256_channels() -> None:
    """256 tokens, 256 channels, 2 heads: 8 token blocks, 2 planes of 2 tiles a head."""
    scales = np.zeros((2, 8, 256), np.uint8)
    scales[1, 4, 128] = 7  # head 1, second tile of tokens, second plane
    places = {"matrix": 7 * 512, "planes_first": 7 * 512, "planes_last": 7 * 512}
    scales[1, 0, 128] = 5  # head 1, first tile of tokens, second plane
    others = {"matrix": 6 * 512, "planes_first": 6 * 512, "planes_last": 5 * 512}
    scales[0, 4, 129] = 3  # head 0, second tile of tokens, second plane, channel 1 of it
    last = {"matrix": 3 * 512 + 16, "planes_first": 5 * 512 + 16, "planes_last": 3 * 512 + 16}
    for order in ORDERS:
        buffer = tile(scales, orientation="column_wise", order=order).reshape(-1)
        assert buffer[places[order]] == 7
        assert buffer[others[order]] == 5
        assert buffer[last[order]] == 3
        assert np.count_nonzero(buffer) == 3


def test_planes_first_is_one_matrix_of_all_heads() -> None:
    """TransformerEngine tiles [channels, all token blocks], where each head has whole tiles."""
    scales = random_bytes(3, 8, 256)
    one = np.concatenate(list(scales)).T
    found = tile(scales, orientation="column_wise", order="planes_first")
    np.testing.assert_array_equal(found.reshape(-1), tile(one))


@pytest.mark.parametrize("channels", [32, 96, 128])
def test_orders_agree_up_to_128_channels(channels: int) -> None:
    scales = random_bytes(2, 9, channels)
    first, *others = (
        tile(scales, orientation="column_wise", order=order).reshape(-1) for order in ORDERS
    )
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_sizes_of_the_bug_log() -> None:
    """A 64x64 tensor has scales (64, 2) and (2, 64), 512 bytes each, 384 of padding; and 160x96."""
    sizes = {}
    for name, rows, columns in (("64x64", 64, 64), ("160x96", 160, 96)):
        row_wise = tile(random_bytes(rows, columns // 32))
        column_wise = tile(random_bytes(rows // 32, columns), orientation="column_wise")
        sizes[name] = [(x.size, np.count_nonzero(x == 0)) for x in (row_wise, column_wise)]
    assert sizes["64x64"] == [(512, 384), (512, 384)]
    assert sizes["160x96"] == [(256 * 4, 1024 - 480), (8 * 128, 1024 - 480)]
    clean = random_bytes(2, 64)
    dirty = tile(clean, orientation="column_wise")
    dirty = np.where(dirty == 0, np.uint8(255), dirty)
    np.testing.assert_array_equal(untile(dirty, (2, 64), orientation="column_wise"), clean)


@pytest.mark.parametrize("shape", [(8, 4), (1, 1), (9, 5), (20, 3), (7, 12)])
def test_8x4_byte_by_byte(shape: tuple[int, int]) -> None:
    scales = random_bytes(*shape)
    rows, columns = shape
    expected = np.zeros(-(-rows // 8) * -(-columns // 4) * 32, np.uint8)
    for row, column in np.ndindex(shape):
        number = row // 8 * -(-columns // 4) + column // 4
        expected[number * 32 + row % 8 * 4 + column % 4] = scales[row, column]
    np.testing.assert_array_equal(tile8(scales), expected)
    np.testing.assert_array_equal(untile8(expected, shape), scales)
    np.testing.assert_array_equal(tile8(scales.T, orientation="column_wise"), expected)
    np.testing.assert_array_equal(
        untile8(expected, shape[::-1], orientation="column_wise"), scales.T
    )
    dirty = np.where(expected == 0, np.uint8(255), expected)
    np.testing.assert_array_equal(untile8(dirty, shape), scales)


def test_8x4_spots_and_batches() -> None:
    scales = random_bytes(2, 3, 17, 6)
    tiled = tile8(scales)
    assert tiled.shape == (2, 3, 3 * 2 * 32)
    places = {(0, 0): 0, (0, 3): 3, (1, 0): 4, (7, 3): 31, (0, 4): 32, (8, 0): 64, (16, 5): 161}
    for (row, column), place in places.items():
        assert tiled[1, 2, place] == scales[1, 2, row, column]
    np.testing.assert_array_equal(untile8(tiled, scales.shape), scales)


@pytest.mark.parametrize("shape", [(4, 4), (1, 1), (5, 6), (2, 3, 7, 9), (128, 56)])
def test_words_are_the_bytes_of_the_transposed_matrix(shape: tuple[int, ...]) -> None:
    """As DeepGEMM's host code: zero padded bytes seen as integers, then transposed."""
    scales = random_bytes(*shape)
    *batch, rows, columns = shape
    filled, words = -(-rows // 4) * 4, -(-columns // 4)
    whole = np.zeros((*batch, filled, 4 * words), np.uint8)
    whole[..., :rows, :columns] = scales
    packed = pack(scales)
    assert packed.dtype == np.int32
    np.testing.assert_array_equal(packed, whole.view("<i4").swapaxes(-1, -2))
    np.testing.assert_array_equal(unpack(packed, shape), scales)
    np.testing.assert_array_equal(unpack(packed.view(np.uint32), shape), scales)


def test_a_word_is_four_exponent_fields() -> None:
    """As DeepGEMM's kernel: it shifts the bits of float32 powers of two."""
    scales = np.array([[1, 127, 254, 128]], np.uint8)
    bits = [int(np.float32(2.0 ** (int(code) - 127)).view(np.uint32)) for code in scales[0]]
    word = bits[0] >> 23 | bits[1] >> 15 | bits[2] >> 7 | bits[3] << 1
    packed = pack(scales)
    assert packed.shape == (1, 4)
    assert packed[0].tolist() == [word - 2**32, 0, 0, 0]
    assert hex(word) == "0x80fe7f01"


def test_words_lie_in_memory_as_their_strides_say() -> None:
    """Strides (1, padded rows) in words, over (rows, words): word w of row m at w * padded + m."""
    scales = random_bytes(6, 11)
    packed = pack(scales)
    assert packed.shape == (3, 8)
    buffer = np.frombuffer(packed.data, np.uint8)
    for row, column in np.ndindex(6, 11):
        assert buffer[4 * (column // 4 * 8 + row) + column % 4] == scales[row, column]
    assert np.count_nonzero(buffer) == 66
    dirty = np.where(packed.view(np.uint8) == 0, np.uint8(0xEE), packed.view(np.uint8))
    np.testing.assert_array_equal(unpack(dirty.view(np.int32), (6, 11)), scales)


SHAPES = st.tuples(st.integers(0, 2), st.integers(0, 140), st.integers(0, 9))


@given(SHAPES, st.sampled_from(ORDERS), st.sampled_from(list(layout.Orientation)), st.binary())
def test_round_trips(shape: tuple[int, ...], order: str, side: str, seed: bytes) -> None:
    scales = np.resize(np.frombuffer(seed or b"\x01", np.uint8), shape)
    tiled = tile(scales, orientation=side, order=order)
    assert tiled.size % 512 == 0
    np.testing.assert_array_equal(untile(tiled, shape, orientation=side, order=order), scales)
    assert np.count_nonzero(tiled) == np.count_nonzero(scales)
    short = tile8(scales, orientation=side)
    np.testing.assert_array_equal(untile8(short, shape, orientation=side), scales)
    np.testing.assert_array_equal(unpack(pack(scales), shape), scales)


FORWARD: dict[str, Callable[..., Any]] = {"128x4": tile, "8x4": tile8, "words": pack}
BACKWARD: dict[str, Callable[..., Any]] = {"128x4": untile, "8x4": untile8, "words": unpack}


@pytest.mark.parametrize("form", FORWARD)
def test_scales_that_are_none(form: str) -> None:
    call = FORWARD[form]
    for scalar_or_row in (np.uint8(1), np.zeros(4, np.uint8)):
        with pytest.raises(ValueError, match=r"scales are \[\.\.\., rows, columns\], not of shape"):
            call(scalar_or_row)
    for dtype in (np.float32, np.complex64, bool):
        with pytest.raises(TypeError, match="are integers, not"):
            call(np.zeros((4, 4), dtype))
    for wrong in (-1, 256):
        with pytest.raises(ValueError, match=f"a scale has no code {wrong}; codes are 0 to 255"):
            call(np.full((4, 4), wrong))


@pytest.mark.parametrize("form", BACKWARD)
def test_shapes_that_are_not_their_own(form: str) -> None:
    forward, call = FORWARD[form], BACKWARD[form]
    stored = forward(np.ones((2, 130, 5), np.uint8))
    rows, columns = {"128x4": (257, 9), "8x4": (137, 9), "words": (133, 9)}[form]
    for shape in ((2, rows, 5), (2, 130, columns), (3, 130, 5), (130, 5), (1, 2, 130, 5)):
        with pytest.raises(ValueError, match=r"scales have shape .*; scales of shape .* take"):
            call(stored, shape)
    for broken in (stored[..., :-1], stored[0], stored[None]):
        with pytest.raises(ValueError, match="scales have shape"):
            call(broken, (2, 130, 5))
    for shape in ((130,), (), (-1, 5), (2.0, 5), None, "45", 5):
        with pytest.raises(ValueError, match="shape is"):
            call(stored, shape)
    np.testing.assert_array_equal(call(stored, [2, np.int64(130), 5]), np.ones((2, 130, 5)))


@pytest.mark.parametrize("call", [untile, untile8])
def test_tiles_that_are_no_bytes(call: Callable[..., Any]) -> None:
    size = tile(np.ones((4, 4), np.uint8)).size if call is untile else 32
    with pytest.raises(TypeError, match="are integers, not"):
        call(np.zeros(size, np.float32), (4, 4))
    with pytest.raises(ValueError, match="has no code 256"):
        call(np.full(size, 256), (4, 4))


def test_words_of_other_types_are_refused() -> None:
    for dtype in (np.uint8, np.int64, np.float32, ">i4"):
        with pytest.raises(TypeError, match="packed scales are int32 words, not"):
            unpack(np.zeros((1, 4), dtype), (4, 4))


def test_orders_and_orientations_have_names() -> None:
    scales = np.ones((4, 4), np.uint8)
    for call in (tile, lambda x, **how: untile(tile(x), (4, 4), **how)):
        with pytest.raises(ValueError, match="unknown tile order 'planes'; did you mean"):
            call(scales, order="planes")
    for call in (tile, tile8, lambda x, **how: untile8(tile8(x), (4, 4), **how)):
        with pytest.raises(ValueError, match="unknown orientation 'rowwise'; did you mean"):
            call(scales, orientation="rowwise")
    with pytest.raises(ValueError, match="tiled scales have shape"):
        untile(tile(random_bytes(2, 130, 4)), (2, 130, 4), order="planes_first")


@pytest.mark.parametrize("form", FORWARD)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4), (0, 4, 4)])
def test_empty(form: str, shape: tuple[int, ...]) -> None:
    stored = FORWARD[form](np.zeros(shape, np.uint8))
    assert stored.size == 0
    back = BACKWARD[form](stored, shape)
    assert back.shape == shape
    assert back.dtype == np.uint8
