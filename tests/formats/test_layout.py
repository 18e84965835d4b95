"""4-bit packing and 128x4 tiles, against the formula and worked examples."""

from typing import Any

import numpy as np
import pytest

from flamia_ref.formats import layout

tile, untile = layout.tile_scales_128x4, layout.untile_scales_128x4
pack, unpack = layout.pack_fp4, layout.unpack_fp4


def offset(row: int, column: int, columns: int) -> int:
    """Byte of a scale. Source: cuDNN front end, 128x4 scale factor layout."""
    tiles = -(-columns // 4)
    tile_start = ((row // 128) * tiles + column // 4) * 512
    return tile_start + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


SPOTS = {
    (0, 0): 0, (1, 0): 16, (31, 0): 496, (32, 0): 4, (33, 1): 21, (127, 3): 511, (0, 4): 512,
    (128, 0): 1024, (129, 5): 1553, (255, 7): 2047,
}  # fmt: skip


def numbered(*shape: int) -> Any:
    return (np.arange(np.prod(shape)) % 251 + 1).reshape(shape).astype(np.uint8)


def test_spot_offsets() -> None:
    scales = numbered(256, 8)
    tiled = tile(scales)
    assert tiled.shape == (2048,)
    for (row, column), place in SPOTS.items():
        assert offset(row, column, 8) == place
        assert tiled[place] == scales[row, column]


def test_the_worked_example_of_the_cudnn_front_end() -> None:
    """Its page: a 4x2 matrix a to h, and the row and column of each byte of a tile."""
    letters = np.arange(97, 105, dtype=np.uint8).reshape(4, 2)
    tiled = tile(letters)
    held = {place: bytes([byte]) for place, byte in enumerate(tiled.tolist()) if byte}
    assert held == dict(
        zip((0, 1, 16, 17, 32, 33, 48, 49), (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"),
            strict=True)
    )  # fmt: skip
    scales = np.random.default_rng(1).integers(0, 256, (128, 4), np.uint8)
    tiled = tile(scales)
    for place in range(512):
        assert tiled[place] == scales[place % 16 // 4 * 32 + place // 16, place % 4]


@pytest.mark.parametrize("shape", [(1, 1), (64, 2), (2, 64), (128, 4), (129, 5), (160, 3), (5, 96)])
def test_every_offset_and_the_padding(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = numbered(rows, columns)
    tiled = tile(scales)
    assert tiled.size == -(-rows // 128) * 128 * -(-columns // 4) * 4
    expected = np.zeros_like(tiled)
    for row in range(rows):
        for column in range(columns):
            expected[offset(row, column, columns)] = scales[row, column]
    np.testing.assert_array_equal(tiled, expected)
    np.testing.assert_array_equal(untile(tiled, shape), scales)


def test_sizes_of_a_64_by_64_tensor() -> None:
    for shape in ((64, 2), (2, 64)):
        tiled = tile(np.full(shape, 255, np.uint8))
        assert (tiled == 0).sum() == tiled.size - 128
    assert tile(np.zeros((64, 2), np.uint8)).size == 512
    assert tile(np.zeros((160, 3), np.uint8)).size == 256 * 4
    assert tile(np.zeros((5, 96), np.uint8)).size == 128 * 96


def test_padding_is_dropped_whatever_it_holds() -> None:
    scales = numbered(100, 3)
    tiled = tile(scales)
    dirty = np.where(tile(np.ones_like(scales)) == 0, np.uint8(255), tiled)
    np.testing.assert_array_equal(untile(dirty, (100, 3)), scales)


def test_batches() -> None:
    scales = numbered(2, 3, 130, 6)
    tiled = tile(scales)
    assert tiled.shape == (2, 3, 2048)
    np.testing.assert_array_equal(tiled[1, 2], tile(scales[1, 2]))
    np.testing.assert_array_equal(untile(tiled, scales.shape), scales)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    tiled = tile(np.zeros(shape, np.uint8))
    assert tiled.shape == (*shape[:-2], 0)
    assert untile(tiled, shape).shape == shape


def test_bad_scales() -> None:
    with pytest.raises(ValueError, match=r"not of shape \(4,\)"):
        tile(np.zeros(4, np.uint8))
    with pytest.raises(TypeError, match="are integers, not"):
        tile(np.zeros((4, 4), np.float32))
    with pytest.raises(ValueError, match="a scale has no code -1; codes are 0 to 255"):
        tile(np.full((4, 4), -1))
    tiled = tile(numbered(128, 4))
    for shape in ((128, 5), (129, 4), (1, 128, 4), (0, 4)):
        with pytest.raises(ValueError, match=r"tiled scales have shape \(512,\)"):
            untile(tiled, shape)
    for shape in ((128,), (), (-1, 4)):
        with pytest.raises(ValueError, match="shape is"):
            untile(tiled, shape)
    with pytest.raises(ValueError, match="tiled scales have shape"):
        untile(tiled.reshape(128, 4), (128, 4))


def test_nibble_order() -> None:
    """1.0 and -6.0: the even column is in the low nibble."""
    assert pack(np.array([[0x2, 0xF]], np.uint8)).tolist() == [[0xF2]]
    assert unpack(np.array([[0xF2]], np.uint8)).tolist() == [[0x2, 0xF]]


def test_packing_all_pairs() -> None:
    codes = np.stack(np.divmod(np.arange(256), 16)[::-1], axis=-1)
    packed = pack(codes)
    assert packed.dtype == np.uint8
    assert packed[:, 0].tolist() == list(range(256))
    np.testing.assert_array_equal(unpack(packed), codes)
    assert unpack(packed).dtype == np.uint8
    assert pack(np.zeros((3, 0), np.uint8)).shape == (3, 0)


def test_bad_packing() -> None:
    for width in (15, 17):
        with pytest.raises(ValueError, match="must be even"):
            pack(np.zeros((2, width), np.uint8))
    with pytest.raises(ValueError, match="codes have at least one axis"):
        pack(np.uint8(1))
    with pytest.raises(ValueError, match="e2m1 has no code 16"):
        pack(np.array([0, 16], np.uint8))
    with pytest.raises(TypeError, match="are integers, not"):
        pack(np.zeros(2, bool))
    with pytest.raises(ValueError, match="a byte has no code 256"):
        unpack(np.array([256]))
    with pytest.raises(ValueError, match="packed have at least one axis"):
        unpack(np.uint8(1))
