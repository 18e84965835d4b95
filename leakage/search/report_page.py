"""The HTML form of a hunt: one page, with nothing to fetch."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator

from flamia_ref._errors import printable
from flamia_ref.leakage.search.hunt_report import HuntReport
from flamia_ref.leakage.search.report_text import shape, words

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#24292f}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}table{border-collapse:collapse}"
    "td,th{border:1px solid #d0d7de;padding:.25em .6em;text-align:left;vertical-align:top}"
    ".leak{color:#c8102e;font-weight:600}.none_found{color:#1a7f37;font-weight:600}"
    ".inconclusive{color:#9a6700;font-weight:600}img{max-width:100%;image-rendering:pixelated}"
)


def render(report: HuntReport) -> str:
    """Return the report as an HTML page."""
    title = f"Leak hunt in {_text(report.subject)}"
    body = "\n".join(_body(report))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(printable(text))


def _body(report: HuntReport) -> Iterator[str]:
    verdict = str(report.verdict)
    yield f'<p class="{verdict}">{verdict.replace("_", " ").upper()}</p>'
    yield f"<p>{_text(shape(report.setting))}</p>"
    evidence = "" if report.evidence is None else f", evidence {_text(report.evidence)}"
    yield (
        f"<p>{report.cases} perturbations, {report.calls} calls, {report.seconds:.1f} s, seed"
        f" {report.seed}{evidence}</p>"
    )
    if report.reasons:
        of = "Why it says nothing of the rest" if report.leaks else "Why it is inconclusive"
        yield f"<h2>{of}</h2>" + _list(report.reasons)
    yield "<h2>Witnesses</h2>"
    yield _table(
        ("severity", "kind", "what"),
        [(words(one.severity), str(one.kind), one.sentence) for one in report.witnesses],
    )
    yield "<h2>NaN and infinity</h2>"
    yield f"<p>{report.poison_tried} perturbations; what they move is no leak of finite inputs.</p>"
    yield _table(("what",), [(one.sentence,) for one in report.poison])
    yield "<h2>Planted leaks</h2>"
    yield _table(
        ("what", "found", "calls"),
        [(one.name, "yes" if one.found else "NO", str(one.calls)) for one in report.controls],
    )
    if report.moves:
        picture = base64.b64encode(report.to_png()).decode("ascii")
        yield "<h2>What moved</h2>"
        words_for_it = "which output tokens moved for which changed tokens"
        yield f'<p><img alt="{words_for_it}" src="data:image/png;base64,{picture}"></p>'
    if report.failures:
        yield "<h2>Failures of the kernel</h2>"
        yield _table(("case", "reason"), [(one.case, one.reason) for one in report.failures])
    if report.notes:
        yield "<h2>Notes</h2>" + _list(report.notes)


def _list(items: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return "<p>None.</p>"
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
