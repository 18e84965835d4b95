"""Verdicts that are no plain mismatch, and what a rounded element comes from, in the words of every form."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from flamia_ref.report import Report, Status
from flamia_ref.report.model import CaseResult, TensorResult, Width
from flamia_ref.report.sentences import MEANINGS
from tests.report import examples
from tests.report.parsed import parse

# The status, its word, the tensor and what was said of it.
SAID = [
    (Status.LEAK, "leak", "out", "tokens 0 to 15 differ from those of leak-future-value"),
    (Status.LAYOUT, "layout mismatch", "v.scales.tiled.0", "the same bytes in another order"),
    (Status.NAN_PATTERN, "nan pattern", "out", "in a row that sees no key"),
    (Status.NONDETERMINISTIC, "nondeterministic", "dq", "two calls on the same inputs: 3 bytes"),
]


def of(status: Status, name: str, note: str) -> Report:
    tensor = TensorResult(name=name, stage=name, status=status, elements=64, note=note)
    return examples.report(
        examples.case(
            status=status, tensors=(tensor,), departs=name, diagnoses=(), consistent=None
        ),
        notes=(),
    )


@pytest.mark.parametrize(("status", "word", "name", "note"), SAID)
def test_the_words_of_a_verdict(status: Status, word: str, name: str, note: str) -> None:
    report = of(status, name, note)
    text = report.to_text()
    assert f"{word:<14} real.flamia-mxfp8-folded  (1 tensors, 64 elements)" in text
    assert f"    {name}: {word}, {note}\n" in text
    assert text.endswith(f"FAIL: 1 case: 1 {word}")

    page = parse(report.to_html())
    assert page.one("h1").text == "Golden check: FAIL"
    (row,) = (one.cells() for one in page.by_id("case-table").one("tbody").all("tr"))
    assert row[:4] == ["1", "real.flamia-mxfp8-folded", word, name]
    (told,) = (
        one.cells()
        for table in page.by_id("case-1").all("table")
        if "largest difference" in table.text
        for one in table.one("tbody").all("tr")
    )
    assert (told[0], told[1], told[-1]) == (name, word, note)

    top = ElementTree.fromstring(report.to_junit().encode())
    (failure,) = top.iter("failure")
    assert failure.attrib["type"] == word
    assert failure.attrib["message"].startswith(f"{word}: first departs at {name}")
    assert f"{name}: {word}, {note}" in (failure.text or "")

    document = json.loads(report.to_json())
    assert (document["status"], document["passed"]) == (word, False)
    (tensor,) = document["cases"][0]["tensors"]
    assert (tensor["status"], tensor["note"]) == (word, note)


def test_where_every_case_was_skipped_nothing_was_compared() -> None:
    report = examples.report(examples.skipped("a"), examples.skipped("b"), notes=())
    line = "NOTHING COMPARED: 2 cases: 2 skipped"
    text, page = report.to_text(), parse(report.to_html())
    assert text.endswith(line)
    assert "skipped        a.flamia-mxfp8-folded" in text
    assert "    takes no sink" in text
    assert page.one("h1").text == "Golden check: NOTHING COMPARED"
    assert page.one("title").text.startswith("NOTHING COMPARED: mine:kernel")
    assert page.one("h1").one("span").attributes["class"] == "skipped"
    assert line in page.by_id("summary").text
    assert "takes no sink" in page.by_id("case-1").text
    junit = report.to_junit()
    assert f'<property name="verdict" value="{line}"/>' in junit
    assert junit.count('<skipped message="skipped: takes no sink"/>') == 2
    document = json.loads(report.to_json())
    assert (document["status"], document["passed"]) == ("skipped", False)
    assert report.exit_code == 2
    for form in (text, report.to_html(), junit, report.to_json()):
        assert "FAIL" not in form


def test_a_report_of_no_case_compared_nothing() -> None:
    report = examples.report()
    assert report.to_text().endswith("NOTHING COMPARED: 0 cases")
    assert parse(report.to_html()).one("h1").text == "Golden check: NOTHING COMPARED"
    assert report.exit_code == 2


def test_a_skipped_case_beside_one_that_passes_is_a_pass() -> None:
    report = examples.report(examples.good("a"), examples.skipped("b"))
    assert report.to_text().endswith("PASS: 2 cases: 1 pass, 1 skipped")
    assert report.exit_code == 0


def rounded(before: float | None, boundary: float | None) -> CaseResult:
    first = replace(examples.DIFFERENCE, before=before, boundary=boundary)
    return examples.case(tensors=(replace(examples.SCALES, first=first),))


def test_what_an_element_was_rounded_from() -> None:
    words = "rounded from 17.9999, 0.0001 steps from the boundary"
    report = examples.report(rounded(17.9999, 0.0001))
    assert f"\n      {words}\n" in report.to_text()
    assert f"The expected one is {words}." in parse(report.to_html()).by_id("case-1").text
    assert words in report.to_junit()


def test_what_is_not_known_of_the_rounding_is_not_said() -> None:
    report = examples.report(rounded(17.9999, None))
    assert "\n      rounded from 17.9999\n" in report.to_text()
    assert "The expected one is rounded from 17.9999." in parse(report.to_html()).text
    unknown = examples.report(rounded(None, None))
    for form in (unknown.to_text(), unknown.to_html(), unknown.to_junit()):
        assert "rounded" not in form


def test_elements_that_were_not_judged_are_counted() -> None:
    wide = Width(relative=0.5, ambiguous=77, unbounded=3)
    report = examples.report(examples.case(tensors=(replace(examples.OUT, envelope=wide),)))
    assert "envelope 0.5 of the rms wide, 77 (3 not judged) ambiguous" in report.to_text()
    assert "77 (3 not judged)" in parse(report.to_html()).by_id("case-1").text
    assert '"unbounded": 3' in report.to_json()


def test_every_verdict_has_a_meaning() -> None:
    assert list(MEANINGS) == list(Status)
    assert all(words and "\n" not in words and len(words) <= 80 for words in MEANINGS.values())
