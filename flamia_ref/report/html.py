"""The report as one HTML file: no network, no other file, readable by eye, keyboard and screen reader.

Names, notes and numbers come from packs and from kernels. They are escaped, and the page forbids
itself to load anything and to run any script but its own.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from importlib import resources

from flamia_ref.evidence import Evidence
from flamia_ref.report import detail, sentences
from flamia_ref.report.chart import MOST_CELLS, legend
from flamia_ref.report.markup import Html, document, element, lines, raw, short, text
from flamia_ref.report.model import CaseResult, Report, Status

LARGEST = 2_700_000
"""Bytes beyond which pictures and tables of tensors are left out, the least important ones first."""

_LEFT_OUT = "Left out here, since this page is large: pictures or tables of this case. The JSON form has all."
_BYTES_OF_FIRST_MAPS, _BYTES_OF_CELL, _FEWEST_CELLS = 1_200_000, 8, 8
"""Heat maps of very many cases get fewer cells, so that each case has the first of its own."""
_FINDINGS = 20  # different findings that are listed

_INSIDE = (
    "An element is inside the envelope where it differs from the pack, and is what some permitted order of"
    " additions gives from the inputs of its stage: the kernel's own, where it gave them."
)

Extras = dict[int, list[Html]]  # by the number of the case


def render(report: Report) -> str:
    """Return the report as one HTML page. The same report gives the same bytes."""
    style, script = _asset("page.css"), _asset("page.js")
    extras = _within(report, LARGEST - len(style) - len(script))
    return document(
        "en",
        lines(
            [
                element("head", _head(report, style, script)),
                element("body", _body(report, extras), raw("script", script)),
            ]
        ),
    )


def _asset(name: str) -> str:
    return resources.files("flamia_ref.report").joinpath("assets", name).read_text("utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _head(report: Report, style: str, script: str) -> Html:
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return lines(
        [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("meta", name="referrer", content="no-referrer"),
            element(
                "title",
                text(
                    f"{sentences.word(report)}: {short(report.subject, 80)} against {report.pack}",
                    200,
                ),
            ),
            element("link", rel="icon", href="data:,"),
            raw("style", style),
        ]
    )


def _body(report: Report, extras: Extras) -> Html:
    return lines(
        [
            Html(""),
            element("a", text("Skip to the cases"), class_="skip", href="#cases"),
            element("header", _title(report), _theme()),
            element("main", _main(report, extras)),
        ]
    )


def _title(report: Report) -> Html:
    return element(
        "h1",
        text("Golden check: "),
        element("span", text(sentences.word(report)), class_=detail.kind(report.status)),
    )


def _theme() -> Html:
    return element(
        "button", text("Theme: system"), type="button", id="theme", hidden="", data_script=""
    )


def _main(report: Report, extras: Extras) -> Html:
    return lines(
        [
            Html(""),
            _section("summary", "Summary", _summary(report)),
            *([_section("findings", "Findings", _findings(report))] if _failed(report) else []),
            _section("cases", "Cases", _cases(report)),
            _section("details", "Details", _details(report, extras)),
            _section("ground", "What this rests on", _ground(report)),
        ]
    )


def _section(name: str, title: str, content: Html) -> Html:
    heading = element("h2", text(title), id=f"{name}-title")
    focus = -1 if name == "cases" else None  # the link at the top leads there
    return element(
        "section", heading, content, id=name, aria_labelledby=f"{name}-title", tabindex=focus
    )


def _failed(report: Report) -> list[CaseResult]:
    return [case for case in report.cases if case.failed]


def _summary(report: Report) -> Html:
    entries = [
        ("kernel", text(report.subject)),
        ("pack", text(report.pack)),
        ("verdict", text(sentences.verdict(report))),
    ]
    found = [entry for name, value in entries for entry in detail.entry(name, value)]
    notes = [element("p", text(note)) for note in report.notes]
    return lines([element("dl", *found), *notes])


def _finding(case: CaseResult) -> tuple[str, str]:
    """Return the stage where a case departs, or its status, and the best diagnosis."""
    return case.departs or str(case.status), case.diagnoses[0].sentence if case.diagnoses else ""


def _findings(report: Report) -> Html:
    """Return how many cases depart where, and why as far as is known."""
    counts = Counter(_finding(case) for case in _failed(report))
    rows = [
        element(
            "tr",
            element("td", text(count), class_="n"),
            element("td", element("code", text(where, 120))),
            element("td", text(why or "none")),
        )
        for (where, why), count in counts.most_common(_FINDINGS)
    ]
    more = len(counts) - _FINDINGS
    return lines(
        [
            element(
                "div",
                element(
                    "table",
                    element(
                        "thead",
                        element(
                            "tr",
                            element("th", text("cases"), scope="col", class_="n"),
                            element("th", text("first depart at"), scope="col"),
                            element("th", text("diagnosis"), scope="col"),
                        ),
                    ),
                    element("tbody", *rows),
                ),
                class_="wide",
            ),
            *([element("p", text(f"And {more} more kinds."))] if more > 0 else []),
        ]
    )


_COLUMNS = {
    "number": "n",
    "case": None,
    "verdict": None,
    "first departs at": None,
    "diagnosis": None,
    "elements that fail": "n",
    "elements": "n",
    "widest envelope / rms": "n",
}


def _cases(report: Report) -> Html:
    if not report.cases:
        return element("p", text("No case was compared."))
    heading = element(
        "tr",
        *(element("th", text(name), scope="col", class_=kind) for name, kind in _COLUMNS.items()),
    )
    rows = lines(_case_row(number, case) for number, case in enumerate(report.cases, 1))
    table = element(
        "table",
        element("caption", text("A case's name leads to its details below.")),
        element("thead", heading),
        element("tbody", Html("\n"), rows),
        id="case-table",
    )
    region = element(
        "div", table, class_="wide", role="region", aria_label="Table of the cases", tabindex=0
    )
    return lines([_filters(report), region])


def _filters(report: Report) -> Html:
    held = [status for status in Status if any(case.status is status for case in report.cases)]
    options = [("", "all"), ("failing", "all that fail"), *((str(one), str(one)) for one in held)]
    return element(
        "form",
        element(
            "label",
            text("Words in name, stage, diagnosis or flags"),
            element("input", type="search", id="words", autocomplete="off", spellcheck="false"),
        ),
        element(
            "label",
            text("Verdict"),
            element(
                "select",
                *(element("option", text(name), value=value) for value, name in options),
                id="verdict",
            ),
        ),
        element("button", text("Open details of those shown"), type="button", id="open"),
        element("button", text("Close all details"), type="button", id="close"),
        element("p", id="shown", role="status"),
        class_="controls",
        id="filters",
        role="search",
        aria_label="Filter the cases",
        hidden="",
        data_script="",
    )


def _case_row(number: int, case: CaseResult) -> Html:
    failing = sum(sentences.failing(one) for one in case.tensors)
    elements = sum(one.elements for one in case.tensors)
    wide = max((one.envelope.relative for one in case.tensors if one.envelope), default=None)
    link = element("a", text(case.name, 120), href=f"#case-{number}")
    return element(
        "tr",
        element("td", text(number), class_="n", data_key=number),
        element("th", link, scope="row", class_="name"),
        element("td", detail.badge(case.status)),
        element("td", element("code", text(case.departs, 120)) if case.departs else Html("")),
        element("td", text(case.diagnoses[0].sentence, 160) if case.diagnoses else Html("")),
        element("td", text(failing), class_="n", data_key=failing),
        element("td", text(elements), class_="n", data_key=elements),
        element(
            "td",
            text("" if wide is None else f"{wide:.2g}"),
            class_="n",
            data_key=-1 if wide is None else f"{wide:.6g}",
        ),
        data_case=number,
        data_verdict=str(case.status),
        data_failed=1 if case.failed else None,
        data_also=short(", ".join(case.flags), 200) if case.flags else None,
    )


def _details(report: Report, extras: Extras) -> Html:
    first = next((case for case in report.cases if case.failed), None)
    pictures = any(one.heat_map is not None for case in report.cases for one in case.tensors)
    parts = [element("p", text(_INSIDE))] if _is_inside(report) else []
    parts += [legend()] if pictures else []
    for number, case in enumerate(report.cases, 1):
        parts.append(
            element(
                "details",
                element(
                    "summary",
                    element("h3", text(case.name, 200)),
                    text(" "),
                    detail.badge(case.status),
                ),
                element("div", _facts(report, case), *extras.get(number, [])),
                class_="case",
                id=f"case-{number}",
                open="" if case is first else None,
                data_failed="" if case.failed else None,
            )
        )
    return lines(parts)


def _is_inside(report: Report) -> bool:
    return any(one.inside for case in report.cases for one in case.tensors)


def _facts(report: Report, case: CaseResult) -> Html:
    return detail.facts(case, sentences.recipe_of(report, case))


def _within(report: Report, limit: int) -> Extras:
    """Return pieces of the details of the cases, as many as fit, the most important ones of all cases first."""
    left = limit - sum(
        len(_case_row(number, case).encode()) + len(_facts(report, case).encode()) + 300
        for number, case in enumerate(report.cases, 1)
    )
    cells = _BYTES_OF_FIRST_MAPS / _BYTES_OF_CELL / max(1, len(_failed(report)))
    most_cells = max(_FEWEST_CELLS, min(MOST_CELLS, math.isqrt(int(cells))))
    kept: dict[int, list[tuple[int, Html]]] = {}
    queue = [
        (rank, number, order, piece)
        for number, case in enumerate(report.cases, 1)
        for order, (rank, piece) in enumerate(detail.pieces(case, most_cells))
    ]
    full = False
    for _, number, order, piece in sorted(queue, key=lambda one: one[:3]):
        # Nothing more is made once something did not fit: a report may have very many pictures.
        part = None if full else piece()
        if part is None or len(part.encode()) > left:
            full = True
            if all(last != _LAST for last, _ in kept.setdefault(number, [])):
                kept[number].append((_LAST, element("p", text(_LEFT_OUT), class_="quiet")))
        else:
            left -= len(part.encode())
            kept.setdefault(number, []).append((order, part))
    return {
        number: [part for _, part in sorted(parts, key=lambda one: one[0])]
        for number, parts in kept.items()
    }


_LAST = 1 << 30


def _ground(report: Report) -> Html:
    return lines(
        [
            element("h3", text("Evidence of the recipes")),
            element("dl", *_evidence(report)),
            element("h3", text("Environment")),
            element("dl", *_environment(report)),
        ]
    )


def _evidence(report: Report) -> Iterator[Html]:
    meanings = {str(one): one.meaning for one in Evidence}
    for recipe, label in report.evidence.items():
        meaning = meanings.get(label, "")
        yield from detail.entry(recipe, text(f"{label}: {meaning}" if meaning else label))


def _environment(report: Report) -> Iterator[Html]:
    yield from detail.entry("numerics version", text(report.numerics_version))
    for name, value in report.environment.items():
        yield from detail.entry(name, text(value))
