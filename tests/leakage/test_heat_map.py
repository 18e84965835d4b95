"""PNG files and heat maps, read back by a decoder written from the specification."""

import dataclasses
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from flamia_ref.leakage.demo import SHOWN, Demo
from flamia_ref.report import font, png
from flamia_ref.report.heat_map import COLOURS, Cell, HeatMap, Panel, cells

ROOT = Path(__file__).resolve().parents[2]
RED, BLUE, GREY = (200, 16, 46), (122, 163, 214), (223, 227, 232)


def decode(data: bytes) -> np.ndarray:
    """A PNG of colour type 3, depth 8, filter 0, as [height, width, 3]; every chunk's checksum is verified."""
    assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])
    place, found = 8, []
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        name, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack_from(">I", data, place + 8 + size) == (zlib.crc32(name + body),)
        found.append((name, body))
        place += size + 12
    assert place == len(data)
    assert [name for name, _ in found] == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", found[0][1])
    assert rest == [8, 3, 0, 0, 0]
    palette = np.frombuffer(found[1][1], dtype=np.uint8).reshape(-1, 3)
    lines = np.frombuffer(zlib.decompress(found[2][1]), dtype=np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    return palette[lines[:, 1:]]


def is_colour(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (picture == np.array(colour, dtype=np.uint8)).all(axis=-1)


def box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of what is True."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(rows[0]), int(rows[-1]), int(columns[0]), int(columns[-1])


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (70, 1)])
def test_a_png_is_what_was_drawn(shape: tuple[int, int]) -> None:
    palette = [(i, 255 - i, (i * 7) % 256) for i in range(256)]
    pixels = (np.arange(np.prod(shape)) * 37 % 256).astype(np.uint8).reshape(shape)
    picture = decode(png.encode(pixels, palette))
    assert np.array_equal(picture, np.array(palette, dtype=np.uint8)[pixels])


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((0, 3), np.uint8), "pixels are uint8 of shape"),
        (np.zeros(3, np.uint8), "pixels are uint8 of shape"),
        (np.zeros((2, 2), np.int64), "pixels are int64 of shape"),
        (np.full((2, 2), 2, np.uint8), "a pixel is 2 and the palette has 2 colours"),
    ],
)
def test_no_picture(pixels: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        png.encode(pixels, [(0, 0, 0), (1, 1, 1)])
    assert "\n" not in str(error.value)


def test_the_font_has_every_character() -> None:
    ascii_ = "".join(map(chr, range(0x21, 0x7F)))
    seen = set()
    for character in ascii_:
        ink = font.bitmap(character)
        assert ink.shape == (font.HEIGHT, font.ADVANCE)
        assert ink.any()
        assert not ink[:, font.WIDTH :].any()
        seen.add(ink.tobytes())
    assert len(seen) == len(ascii_)
    assert not font.bitmap(" ").any()
    assert font.bitmap("").shape == (9, 0)
    box_ = font.bitmap("\u03a9")
    assert box_.any()
    assert box_.tobytes() not in seen
    assert np.array_equal(font.bitmap("a b"), np.concatenate([*map(font.bitmap, "a b")], axis=1))


def test_some_characters_by_eye() -> None:
    assert picture_of("v") == ["", "", "#...#", "#...#", "#...#", ".#.#", "..#", "", ""]
    assert picture_of("1") == ["..#", ".##", "..#", "..#", "..#", "..#", ".###", "", ""]
    assert picture_of("p")[-2:] == ["#", "#"]


def picture_of(character: str) -> list[str]:
    rows = font.bitmap(character)
    return ["".join(".#"[int(pixel)] for pixel in row).rstrip(".") for row in rows]


def test_cells() -> None:
    moved, forbidden = np.array([False, True, False, True]), np.array([False, False, True, True])
    found = cells(moved, forbidden)
    assert found.dtype == np.uint8
    assert found.tolist() == [Cell.STILL, Cell.MOVED, Cell.FORBIDDEN_STILL, Cell.FORBIDDEN_MOVED]


def test_the_pixels_of_a_panel_are_its_cells() -> None:
    rng = np.random.default_rng(5)
    panels = [
        Panel(
            cells=rng.integers(0, 4, shape).astype(np.uint8),
            strip=rng.integers(0, 4, shape[1]).astype(np.uint8),
            caption="a caption",
        )
        for shape in [(5, 7), (4, 90), (6, 8), (3, 2)]
    ]
    drawn = HeatMap(
        title=["title"],
        columns=[["one", "and a heading wider than its column"], ["two"]],
        rows=[("first", panels[:2]), ("second", panels[2:])],
        legend=[],
        notes=[],
    ).pixels()
    left = set()
    for index, panel in enumerate(panels):
        block = panel.cells.repeat(2, axis=1)
        height, width = block.shape
        windows = np.lib.stride_tricks.sliding_window_view(drawn, block.shape)
        places = np.argwhere((windows == block).all(axis=(2, 3)))
        assert len(places) >= 1
        top, start = places[0]
        assert (drawn[top + height : top + height + 2, start : start + width] == len(Cell)).all()
        strip = drawn[top + height + 2 : top + height + 8, start : start + width]
        assert (strip == panel.strip.repeat(2)).all()
        left.add((index % 2, int(start)))
    assert len(left) == 2


@pytest.fixture(scope="module")
def picture(shown: Demo) -> np.ndarray:
    return decode(shown.to_png())


def test_the_leak_is_red_and_nothing_else_is(picture: np.ndarray) -> None:
    red = is_colour(picture, RED)
    top, bottom, left, right = box(red[:400])
    # 16 tokens of 2 pixels, 128 channels of 1, with every pixel of it.
    assert (bottom - top + 1, right - left + 1) == (128, 32)
    assert red[:400].sum() == 32 * 128
    # To its right what may move, up to token 127; below it lse.
    assert is_colour(picture[top : bottom + 1, right + 1 : left + 256], BLUE).all()
    assert is_colour(picture[bottom + 3 : bottom + 9, left : left + 256], GREY).all()
    # The rest of the red is the legend.
    assert red[400:].sum() == 24 * 18
    assert picture.shape[1] <= 830


def test_the_other_panels_are_grey_then_blue(picture: np.ndarray) -> None:
    grey = is_colour(picture, GREY)
    top, _, left, _ = box(is_colour(picture, RED)[:400])
    starts = [row for row in range(1, len(picture)) if is_first_row(picture, row, left)]
    assert len(starts) == len(SHOWN)
    assert starts[0] == top
    for recipe, row in enumerate(starts):
        for column, token in enumerate((16, 32, 64)):
            x = left + column * (256 + 16)
            forbidden = grey[row : row + 128, x : x + 2 * token]
            assert forbidden.all() == ((recipe, column) != (0, 0))
            allowed = picture[row : row + 128, x + 2 * token : x + 256]
            assert is_colour(allowed, BLUE).all()


def is_first_row(picture: np.ndarray, row: int, left: int) -> bool:
    """Whether panels begin here: blue at the end of the first panel, paper above."""
    last = picture[row - 1 : row + 1, left + 255]
    return tuple(last[1]) == BLUE and tuple(last[0]) == (255, 255, 255)


def test_colours() -> None:
    assert COLOURS[Cell.FORBIDDEN_MOVED] == RED
    assert COLOURS[Cell.MOVED] == BLUE
    assert COLOURS[Cell.FORBIDDEN_STILL] == GREY
    assert len(set(COLOURS.values())) == len(Cell)


def test_the_committed_picture_is_made_of_this_one(shown: Demo) -> None:
    names = ("cudnn-mxfp8", "flamia-mxfp8")
    assert f"RECIPES = {names}".replace("'", '"') in (ROOT / "docs/pictures/leak.py").read_text()
    part = dataclasses.replace(
        shown,
        evidence={name: shown.evidence[name] for name in names},
        trials=tuple(one for one in shown.trials if one.recipe in names),
    )
    committed = decode((ROOT / "docs/pictures/leak.png").read_bytes())
    assert np.array_equal(committed, decode(part.to_png()))


def test_the_picture_has_a_text_for_those_who_do_not_see_it() -> None:
    readme = (ROOT / "README.md").read_text()
    (text,) = re.findall(r"!\[([^]]+)\]\(docs/pictures/leak\.png\)", readme)
    assert "cudnn-mxfp8" in text
