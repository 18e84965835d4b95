"""Reports of single cases become one, the same whatever order the tests ended in."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.golden.gathering import Finding, gathered, report_from_json
from flamia_ref.report.model import (
    Bits,
    CaseResult,
    Diagnosis,
    Difference,
    HeatMap,
    Pair,
    Report,
    Status,
    TensorResult,
    Width,
)
from tests.golden.packs import FIRST, SECOND, results

BITS = Bits(bits="0x01", value="2^-126")
FULL = Report(
    pack="pack",
    subject="m:f",
    numerics_version=1,
    evidence={"r": "assumed"},
    environment={"python": "3"},
    cases=(
        CaseResult(
            name="a",
            status=Status.OUTSIDE_ENVELOPE,
            why="why",
            flags=("nan", "real"),
            tensors=(
                TensorResult(
                    name="s.0",
                    stage="s",
                    status=Status.NAN_PATTERN,
                    elements=9,
                    differing=3,
                    inside=1,
                    envelope=Width(relative=0.5, ambiguous=2),
                    heat_map=HeatMap(
                        rows="queries",
                        columns="keys",
                        row_size=32,
                        column_size=32,
                        counts=((1, 2), (3, 4)),
                        sizes=((9, 9), (9, 9)),
                    ),
                    steps={"1": 2, "NaN": 1},
                    largest_steps=5,
                    largest=float("inf"),
                    first=Difference(
                        where={"document": 0, "channels": "0 to 31"},
                        index=(0, 1, 2),
                        element=Pair(expected=BITS, actual=BITS),
                        scale=Pair(expected=BITS, actual=None),
                    ),
                    note="note",
                ),
            ),
            not_given=("p",),
            departs="s",
            suspects=("q.codes",),
            consistent=False,
            diagnoses=(Diagnosis(mistake="m", sentence="s.", name="s.0", explained=3, failing=3),),
            command="c",
            note="n",
        ),
    ),
    notes=("one", "two"),
)


def test_a_report_with_every_field_comes_back() -> None:
    for kind in (Report, CaseResult, TensorResult, Difference, Diagnosis, HeatMap, Width, Pair):
        assert kind.__name__ in repr(FULL)
    for field in dataclasses.fields(CaseResult):
        assert getattr(FULL.cases[0], field.name) not in ((), "", None), field.name
    for field in dataclasses.fields(TensorResult):
        assert getattr(FULL.cases[0].tensors[0], field.name) not in ((), "", None, {}, 0), field
    assert report_from_json(FULL.to_json()) == FULL


def test_a_real_report_comes_back(made: Path) -> None:
    case = golden.load(made)[FIRST]
    given = results(case)
    given["lse"][0, 0] = np.inf
    given["q.scales"][1, 0, 0] ^= 1
    report = golden.check(case, {FIRST: given})
    assert report_from_json(report.to_json()) == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "flamia-ref report"}', "{" * 9])
def test_what_is_no_report(text: str) -> None:
    with pytest.raises(ValueError, match=r"report") as caught:
        report_from_json(text)
    assert "\n" not in str(caught.value)


def found_by(test: str, place: int, name: str, *others: str) -> Finding:
    case = CaseResult(name=name, status=Status.PASS)
    report = Report(
        pack="pack", subject=(*others, "m:f")[0], numerics_version=1, cases=(case,), notes=("n",)
    )
    return Finding(test=test, place=place, report=report.to_json())


def test_the_order_is_that_of_the_pack() -> None:
    found = [found_by("t[b]", 1, "b"), found_by("t[a]", 2, "a"), found_by("t[c]", 0, "c")]
    report = gathered(found, pack="other")
    assert [case.name for case in report.cases] == ["c", "b", "a"]
    assert (report.pack, report.subject, report.notes) == ("pack", "m:f", ("n",))
    assert report == gathered(reversed(found), pack="other")
    assert report.passed


def test_a_case_that_two_tests_check_is_there_twice() -> None:
    found = [found_by("u[a]", 0, "a", "m:g"), found_by("t[a]", 0, "a")]
    report = gathered(found, pack="")
    assert [(case.name, case.note) for case in report.cases] == [
        ("a", "checked by t[a]"),
        ("a", "checked by u[a]"),
    ]
    assert report.subject == "m:f, m:g"


def test_no_case_is_no_pass() -> None:
    report = gathered([], pack="pack")
    assert (report.pack, report.cases, report.passed) == ("pack", (), False)
    assert SECOND not in report.to_text()
