"""Heat maps and histograms show the numbers that they were given."""

import re

import pytest

from flamia_ref.report import chart
from flamia_ref.report.model import HeatMap
from tests.report import examples
from tests.report.parsed import Node, Strict


def parsed(markup: str) -> Node:
    reader = Strict()
    reader.feed(f"<div>{markup}</div>")
    reader.close()
    return reader.top


def drawn(markup: str, columns: int, rows: int) -> list[list[str]]:
    """The cells of a picture, found by walking along its dashes."""
    cells = [["" for _ in range(columns)] for _ in range(rows)]
    for path in parsed(markup).all("path"):
        kind, side = str(path.attributes["class"]), float(str(path.attributes["stroke-width"]))
        pattern = str(path.attributes.get("stroke-dasharray", "10 0"))
        assert [float(part) for part in pattern.split()] == [side, 10 - side]
        for x, y, wide in re.findall(r"M([\d.]+) (\d+)h([\d.]+)", str(path.attributes["d"])):
            first = (float(x) - (10 - side) / 2) / 10
            count = (float(wide) + 10 - side) / 10
            assert first == int(first)
            assert count == int(count)
            assert int(y) % 10 == 5
            for column in range(int(first), int(first + count)):
                assert cells[int(y) // 10][column] == ""
                cells[int(y) // 10][column] = kind
    return cells


def test_squares_grow_with_the_share_that_fails() -> None:
    found = str(chart.heat_map("v.scales", examples.MAP))
    assert drawn(found, 4, 2) == [["c4", "c1", "c2", "c3"], ["c0", "c0", "", ""]]
    sides = [float(one) for one in re.findall(r'stroke-width="([\d.]+)"', str(chart.legend()))]
    assert sides == sorted(set(sides))
    assert len(sides) == 5


def test_the_same_in_words() -> None:
    node = parsed(str(chart.heat_map("v.scales", examples.MAP)))
    assert node.one("svg").attributes["role"] == "img"
    label = "Heat map of v.scales: elements fail in 4 of 6 cells"
    assert node.one("svg").attributes["aria-label"] == label
    assert node.one("figcaption").text == (
        f"{label}. Rows: tokens, 32 a cell; columns: head dim, 16 a cell. Most: tokens 0 to 31,"
        " head dim 0 to 15 (4 of 4); tokens 0 to 31, head dim 48 to 63 (3 of 4); tokens 0 to 31,"
        " head dim 32 to 47 (2 of 4)."
    )


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (49, 1), (1, 97), (200, 130)])
def test_a_large_map_is_added_up(rows: int, columns: int) -> None:
    # Only the last cell fails, of sizes 5 everywhere.
    counts = [[0] * columns for _ in range(rows)]
    counts[-1][-1] = 5
    given = HeatMap(
        rows="queries",
        columns="keys",
        row_size=1,
        column_size=2,
        counts=tuple(map(tuple, counts)),
        sizes=tuple((5,) * columns for _ in range(rows)),
    )
    down, across = -(-rows // 48), -(-columns // 48)
    high, wide = -(-rows // down), -(-columns // across)
    found = str(chart.heat_map("s.0", given))
    cells = drawn(found, wide, high)
    assert sum(row.count("") for row in cells) == 0
    assert sum(row.count("c0") for row in cells) == high * wide - 1
    last = (rows - down * (high - 1)) * (columns - across * (wide - 1)) * 5
    assert f"(5 of {last})" in found
    assert f"queries, {down} a cell; columns: keys, {2 * across} a cell" in found


def test_a_tensor_of_one_column_has_rows_alone() -> None:
    given = HeatMap(
        rows="key tokens",
        columns="one",
        row_size=32,
        column_size=1,
        counts=((0,), (2,)),
        sizes=((32,), (7,)),
    )
    assert parsed(str(chart.heat_map("v.scales", given))).one("figcaption").text == (
        "Heat map of v.scales: elements fail in 1 of 2 cells. Rows: key tokens, 32 a cell."
        " Most: key tokens 32 to 63 (2 of 7)."
    )


def test_an_empty_map_is_a_picture_too() -> None:
    given = HeatMap(rows="a", columns="b", row_size=1, column_size=1, counts=(), sizes=())
    assert "elements fail in 0 of 0 cells" in str(chart.heat_map("x", given))


def test_bars_are_as_long_as_their_numbers() -> None:
    node = parsed(str(chart.histogram(examples.SCALES)))
    widths = [int(str(one.attributes["width"])) for one in node.all("rect")]
    assert widths == [160, round(160 * 2 / 7), round(160 / 7)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("q.codes", True),
        ("p.o.scales.3", True),
        ("v.scales.tiled.0", True),
        ("k.token_scales", True),
        ("out", False),
        ("s.0", False),
        ("row_max", False),
        ("encodes", False),
    ],
)
def test_codes_are_told_from_floats_by_name(name: str, code: bool) -> None:
    assert chart.is_code(name) is code
