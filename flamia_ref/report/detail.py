"""What a page says of one case: in pieces, of which the later ones may be left out for size."""

from collections.abc import Callable, Iterator
from functools import partial

from flamia_ref.report import sentences
from flamia_ref.report.chart import heat_map, histogram
from flamia_ref.report.markup import Html, element, joined, lines, short, text
from flamia_ref.report.model import CaseResult, Difference, Pair, Status, TensorResult

_ROWS = 60  # tensors in the table of a case
_NAMES = 2000  # characters of a list of names

Piece = Callable[[], Html]


def facts(case: CaseResult, recipe: str) -> Html:
    """Return the case in words: why it is there, where it departs and why, and how to repeat it."""
    return lines(_facts(case, recipe))


def pieces(case: CaseResult, most_cells: int) -> Iterator[tuple[int, Piece]]:
    """Yield what else there is to show, each with its rank: what has a higher one can be spared first.

    `most_cells` is the number of cells of a heat map along an axis.
    0: the pictures of the first tensor that fails. 1: the table of the tensors. 2: the pictures of
    the other tensors.
    """
    shown = [one for one in case.tensors if one.heat_map is not None or one.steps]
    first = case.first
    if first is not None and any(one is first for one in shown):
        yield 0, partial(_pictures, first, most_cells)
    if case.tensors:
        yield 1, partial(_tensors, case)
    for number, one in enumerate(one for one in shown if one is not first):
        yield 2, partial(_others if number == 0 else _pictures, one, most_cells)


def badge(status: Status) -> Html:
    """Return a status; the style puts a mark before it, so that it does not take its colour to be told."""
    return element("span", text(status), class_=kind(status))


def kind(status: Status) -> str:
    """Return the class of a status in the style: pass, fail or skipped."""
    return {Status.PASS: "pass", Status.SKIPPED: "skipped"}.get(status, "fail")


def _facts(case: CaseResult, recipe: str) -> Iterator[Html]:
    if case.note:
        yield element("p", text(case.note))
    if case.departs is not None:
        yield element("p", text(f"This case {sentences.departure(case)}.", _NAMES))
    if case.diagnoses:
        yield element("h4", text("Diagnosis"))
        yield element(
            "ul",
            *(
                element(
                    "li",
                    element("strong", text(one.mistake)),
                    text(f": {sentences.diagnosis(one)}"),
                )
                for one in case.diagnoses
            ),
        )
    first = case.first
    if first is not None and first.first is not None:
        yield element("h4", text(f"The first element that fails, in {short(first.name, 120)}"))
        yield _neighbourhood(first.first)
    yield element("dl", *_about(case, recipe))
    if case.command:
        yield element("h4", text("To repeat this case"))
        yield element("pre", element("code", text(case.command, _NAMES)))


def _about(case: CaseResult, recipe: str) -> Iterator[Html]:
    yield from entry("recipe", text(recipe) if recipe else None)
    yield from entry("why this case exists", text(case.why) if case.why else None)
    yield from entry("flags", text(", ".join(case.flags)) if case.flags else None)
    left = ", ".join(case.not_given)
    yield from entry("not given", text(left, _NAMES) if left else None)
    consistency = sentences.consistency(case)
    yield from entry("end to end", text(consistency) if consistency else None)


def entry(name: str, content: Html | None) -> Iterator[Html]:
    """Yield a term and what it is, for a list of descriptions; nothing where there is none."""
    if content is not None:
        yield element("dt", text(name, 120))
        yield element("dd", content)


def _neighbourhood(first: Difference) -> Html:
    """Return where the first element is, and the numbers beside it."""
    where = ", ".join(f"{name} {number}" for name, number in first.where.items())
    rows = [_pair("scale" if first.code is not None else "element", first.element)]
    if first.code is not None:
        rows.append(_pair("first code under it", first.code))
    if first.scale is not None:
        rows.append(_pair("scale of its block", first.scale))
    columns = ("", "expected", "bits", "actual", "bits")
    table = element(
        "table",
        element("caption", text(f"{where}; index {list(first.index)}")),
        element("thead", _heading(columns)),
        element("tbody", *rows),
    )
    wide = element("div", table, class_="wide")
    rounded = sentences.rounding(first)
    if not rounded:
        return wide
    return joined([wide, element("p", text(f"The expected one is {rounded}."))])


def _pair(name: str, pair: Pair) -> Html:
    cells = [element("th", text(name), scope="row")]
    for bits in (pair.expected, pair.actual):
        if bits is None:
            cells.append(element("td", text("not given"), colspan=2))
        else:
            cells.append(element("td", element("code", text(bits.value, 60))))
            cells.append(element("td", element("code", text(bits.bits, 60))))
    return element("tr", *cells)


def _pictures(one: TensorResult, most_cells: int) -> Html:
    name = short(one.name, 120)
    parts = [] if one.heat_map is None else [heat_map(name, one.heat_map, most_cells)]
    if one.steps:
        parts.append(element("div", histogram(one), class_="wide"))
    return element("div", *parts, class_="pictures")


def _others(one: TensorResult, most_cells: int) -> Html:
    """Return the pictures of the first of the other tensors, with the heading of all of them."""
    return joined([element("h4", text("Where other tensors differ")), _pictures(one, most_cells)])


def _tensors(case: CaseResult) -> Html:
    """Return the tensors that are not simply equal in a table, and the names of the others."""
    told = [
        one
        for one in case.tensors
        if one.status is not Status.PASS or one.differing or one.note or _is_wide(one)
    ]
    parts = []
    if told:
        parts.append(element("h4", text("Tensors, in the order of the dataflow")))
        columns = ("tensor", "verdict", *_NUMBERS, "note")
        table = element(
            "table",
            element("thead", _heading(columns)),
            element("tbody", lines(_row(one) for one in told[:_ROWS])),
            class_="tensors",
        )
        label = f"Tensors of {short(case.name, 120)}"
        parts.append(
            element("div", table, class_="wide", role="region", aria_label=label, tabindex=0)
        )
    if len(told) > _ROWS:
        parts.append(
            element(
                "p", text(f"And {len(told) - _ROWS} more; the JSON form of the report has all.")
            )
        )
    told_of = {id(one) for one in told}
    equal = ", ".join(one.name for one in case.tensors if id(one) not in told_of)
    if equal:
        parts.append(element("p", text(f"Equal bit for bit: {equal}.", _NAMES), class_="quiet"))
    return lines(parts)


def _is_wide(one: TensorResult) -> bool:
    """Return whether some element of a tensor may have more than one value."""
    return one.envelope is not None and (one.envelope.relative != 0 or one.envelope.ambiguous != 0)


_NUMBERS = (
    "elements",
    "differ",
    "inside envelope",
    "largest difference",
    "in steps of the format",
    "envelope width / rms",
    "ambiguous",
)


def _heading(columns: tuple[str, ...]) -> Html:
    return element(
        "tr",
        *(element("th", text(name), scope="col") if name else element("td") for name in columns),
    )


def _row(one: TensorResult) -> Html:
    wide = one.envelope
    numbers = (
        str(one.elements),
        str(one.differing),
        "" if wide is None else str(one.inside),
        "" if one.largest is None else f"{one.largest:.6g}",
        sentences.steps(one, short=True),
        "" if wide is None else f"{wide.relative:.2g}",
        "" if wide is None else sentences.ambiguous(wide),
    )
    return element(
        "tr",
        element("th", text(one.name, 120), scope="row"),
        element("td", text(one.status), class_=kind(one.status)),
        *(element("td", text(number)) for number in numbers),
        element("td", text(one.note)),
    )
