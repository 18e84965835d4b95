"""The pictures of a tensor in a page: where its elements fail, and how far off they are."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from flamia_ref.report.markup import Html, element, short, text
from flamia_ref.report.model import HeatMap, Status, TensorResult

MOST_CELLS = 48
"""Cells of a picture along an axis, unless a page asks for fewer; with more, neighbours are added up."""

_PITCH = 10  # units of the picture from one cell to the next
_WIDE, _LEAST, _LARGEST = (
    420,
    10,
    24,
)  # pixels: of a picture, if that gives its cells sizes between these
_SIDES = (2, 5, 6.5, 8, 10)
"""Sides of the squares: for no element, up to a quarter, up to half, fewer than all, and all."""
_MEANINGS = ("none fails", "up to a quarter", "up to half", "more than half", "all fail")

_BAR_WIDTH, _BAR_HEIGHT = 160, 10
_NO_AXIS = "one"  # the axis of what has one element a row
_WORST = 3  # cells that are named

Rows = tuple[tuple[int, ...], ...]


def heat_map(name: str, given: HeatMap, most: int = MOST_CELLS) -> Html:
    """Return the picture of where in a tensor elements fail, and the same in words.

    The larger a square, the larger the share of the elements of its cell that fail, so that no
    colour has to be told from another. A cell without an element is left empty.
    """
    shown = _coarser(given, most)
    two = shown.columns != _NO_AXIS
    failing = sum(count > 0 for row in shown.counts for count in row)
    cells = sum(size > 0 for row in shown.sizes for size in row)
    label = f"Heat map of {name}: elements fail in {failing} of {cells} cells"
    return element(
        "figure",
        _picture(shown, label),
        element(
            "figcaption",
            text(f"{label}. Rows: {_axis(shown.rows, shown.row_size)}"),
            text(f"; columns: {_axis(shown.columns, shown.column_size)}." if two else "."),
            text(f" Most: {'; '.join(_worst(shown))}." if failing else ""),
        ),
        class_="map",
    )


def legend() -> Html:
    """Return what the squares of a heat map mean."""
    entries = [
        element(
            "li",
            element(
                "svg",
                _dashes(level, [(0, 0, 1)]),
                width=12,
                height=12,
                viewBox=f"0 0 {_PITCH} {_PITCH}",
                aria_hidden="true",
            ),
            text(f" {meaning}"),
        )
        for level, meaning in enumerate(_MEANINGS)
    ]
    return element(
        "div",
        element(
            "p", text("A square of a heat map says how many of the elements of its cell fail:")
        ),
        element("ul", *entries),
        class_="legend",
    )


def histogram(one: TensorResult) -> Html:
    """Return the table of how far elements that differ are off, with a bar each."""
    most = max(one.steps.values(), default=0)
    unit = "codes" if is_code(one.name) else "units in the last place"
    rows = [
        element(
            "tr",
            element("th", text(distance, 40), scope="row"),
            element("td", text(count), class_="n"),
            element("td", _bar(count, most, one.status is Status.PASS)),
        )
        for distance, count in one.steps.items()
    ]
    return element(
        "table",
        element(
            "caption",
            text(f"{one.name}: distance of the elements that differ, in {unit}"),
        ),
        element(
            "thead",
            element(
                "tr",
                element("th", text("distance"), scope="col"),
                element("th", text("elements"), scope="col", class_="n"),
                element("td"),
            ),
        ),
        element("tbody", *rows),
        class_="steps",
    )


def is_code(name: str) -> bool:
    """Whether a tensor holds codes or scale bytes, by its name in the dataflow."""
    return not {"codes", "scales", "token_scales", "tiled"}.isdisjoint(name.split("."))


def _bar(count: int, most: int, passed: bool) -> Html:
    width = max(1, round(_BAR_WIDTH * count / most)) if count > 0 else 0
    return element(
        "svg",
        element("rect", width=width, height=_BAR_HEIGHT),
        class_="bar inside" if passed else "bar",
        width=_BAR_WIDTH,
        height=_BAR_HEIGHT,
        aria_hidden="true",
    )


def _picture(shown: HeatMap, label: str) -> Html:
    wide = max((len(row) for row in shown.counts), default=0) * _PITCH
    high = len(shown.counts) * _PITCH
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for y, row in enumerate(shown.counts):
        levels = [_level(count, size) for count, size in zip(row, shown.sizes[y], strict=True)]
        for level, group in groupby(range(len(levels)), key=levels.__getitem__):
            columns = list(group)
            runs.setdefault(level, []).append((columns[0], y, len(columns)))
    pixels = min(_LARGEST, max(_LEAST, _WIDE * _PITCH // max(wide, high, 1)))
    return element(
        "svg",
        *(_dashes(level, runs[level]) for level in sorted(runs) if level >= 0),
        role="img",
        aria_label=short(label, 200),
        width=wide // _PITCH * pixels,
        height=high // _PITCH * pixels,
        viewBox=f"0 0 {wide} {high}",
    )


def _level(count: int, size: int) -> int:
    """Return which square a cell gets, -1 for none."""
    if size <= 0:
        return -1
    if count <= 0:
        return 0
    if count >= size:
        return 4
    return 1 if 4 * count <= size else 2 if 2 * count <= size else 3


def _dashes(level: int, runs: Sequence[tuple[int, int, int]]) -> Html:
    """Return squares of one size, a dash each: runs of (column, row, cells)."""
    side = _SIDES[level]
    inset = (_PITCH - side) / 2
    path = "".join(
        f"M{x * _PITCH + inset:g} {y * _PITCH + _PITCH // 2}h{cells * _PITCH - 2 * inset:g}"
        for x, y, cells in runs
    )
    dashes = f"{side:g} {_PITCH - side:g}" if side < _PITCH else None
    kind = f"c{level}"
    return element("path", class_=kind, stroke_width=side, stroke_dasharray=dashes, d=path)


def _coarser(given: HeatMap, most: int) -> HeatMap:
    """Return a heat map with at most `most` cells along an axis."""
    down = -(-len(given.counts) // most) or 1
    across = -(-max((len(row) for row in given.counts), default=0) // most) or 1
    if down == across == 1:
        return given
    return HeatMap(
        rows=given.rows,
        columns=given.columns,
        row_size=given.row_size * down,
        column_size=given.column_size * across,
        counts=_added(given.counts, down, across),
        sizes=_added(given.sizes, down, across),
    )


def _added(cells: Rows, down: int, across: int) -> Rows:
    wide = max(len(row) for row in cells)
    return tuple(
        tuple(
            sum(sum(row[x : x + across]) for row in cells[y : y + down])
            for x in range(0, wide, across)
        )
        for y in range(0, len(cells), down)
    )


def _axis(name: str, size: int) -> str:
    return f"{_words(name)}, {size} a cell"


def _worst(shown: HeatMap) -> Iterator[str]:
    """Name the cells in which the most elements fail, the first of equals first."""
    cells = [
        (-count, y, x) for y, row in enumerate(shown.counts) for x, count in enumerate(row) if count
    ]
    for count, y, x in sorted(cells)[:_WORST]:
        row = _range(shown.rows, y, shown.row_size)
        column = f", {_range(shown.columns, x, shown.column_size)}"
        at = row if shown.columns == _NO_AXIS else row + column
        yield f"{at} ({-count} of {shown.sizes[y][x]})"


def _range(name: str, number: int, size: int) -> str:
    first = number * size
    return f"{_words(name)} {first}" + (f" to {first + size - 1}" if size > 1 else "")


def _words(name: str) -> str:
    return name.replace("_", " ")
