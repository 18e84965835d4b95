"""The XML has the shape that Jenkins, GitLab and GitHub's reporters read, and the report's numbers."""

import xml.etree.ElementTree as ElementTree

import pytest

from flamia_ref.report import Report, Status
from tests.report import examples

# By the schema of Jenkins' xUnit plugin: children in this order, and attributes that must be there.
CHILDREN = {
    "testsuites": ("testsuite",),
    "testsuite": ("properties", "testcase", "system-out"),
    "testcase": ("properties", "skipped", "failure"),
    "properties": ("property",),
    "property": (),
    "skipped": (),
    "failure": (),
    "system-out": (),
}
ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testcase": {"name", "classname", "time"},
    "properties": set(),
    "property": {"name", "value"},
    "skipped": {"message"},
    "failure": {"message", "type"},
    "system-out": set(),
}


def read(report: Report) -> ElementTree.Element:
    text = report.to_junit()
    assert text.endswith("</testsuites>\n")
    top = ElementTree.fromstring(text.encode())
    assert top.tag == "testsuites"
    for node in top.iter():
        allowed = CHILDREN[node.tag]
        places = [allowed.index(child.tag) for child in node]
        assert places == sorted(places), node.tag
        assert set(node.attrib) == ATTRIBUTES[node.tag], node.tag
        if node.tag in ("testsuites", "testsuite"):
            cases = list(node.iter("testcase"))
            assert int(node.attrib["tests"]) == len(cases)
            for name, kind in (
                ("failures", "failure"),
                ("skipped", "skipped"),
                ("errors", "error"),
            ):
                assert int(node.attrib[name]) == sum(one.find(kind) is not None for one in cases)
    return top


def properties(node: ElementTree.Element) -> list[tuple[str, str]]:
    return [
        (one.attrib["name"], one.attrib["value"]) for one in node.findall("properties/property")
    ]


def test_a_suite_a_recipe_and_a_test_a_case() -> None:
    top = read(examples.mixed())
    assert top.attrib["tests"] == "5"
    assert top.attrib["failures"] == "2"
    assert top.attrib["skipped"] == "1"
    assert [
        (suite.attrib["name"], [one.attrib["name"] for one in suite.iter("testcase")])
        for suite in top
    ] == [
        ("flamia-mxfp8-folded", ["alpha.flamia-mxfp8-folded", "real.flamia-mxfp8-folded"]),
        ("bf16-fa4", ["zeta.bf16-fa4", "sink.bf16-fa4", "beta.bf16-fa4"]),
    ]
    assert properties(top[0]) == [
        ("pack", "packs/smoke"),
        ("subject", "mine:kernel"),
        ("verdict", "FAIL: 5 cases: 2 pass, 1 bit mismatch, 1 outside envelope, 1 skipped"),
        ("numerics_version", "3"),
        ("evidence", "derived"),
        ("environment.python", "3.11.7"),
        ("environment.numpy", "2.2.0"),
        ("environment.device", "NVIDIA H200"),
    ]
    assert dict(properties(top[1]))["evidence"] == "source"


def test_a_case_that_fails_says_all_of_it() -> None:
    report = examples.mixed()
    (case,) = (
        one
        for one in read(report).iter("testcase")
        if one.attrib["name"] == "real.flamia-mxfp8-folded"
    )
    assert case.attrib["classname"] == "flamia-mxfp8-folded"
    assert properties(case) == [
        ("status", "bit mismatch"),
        ("why", "real activations of a small model"),
        ("flags", "real, straddling"),
        ("departs", "v.scales"),
        ("diagnosis", "scale-off-by-one"),
        ("consistent", "false"),
        (
            "command",
            "flamia-ref golden check pack --kernel mine:kernel --case real.flamia-mxfp8-folded",
        ),
    ]
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib == {
        "message": "bit mismatch: one scale byte of V is too large by one",
        "type": "bit mismatch",
    }
    assert failure.text is not None
    assert failure.text in report.to_text()
    assert "v.scales: bit mismatch, 10 of 151 elements" in failure.text


def test_skipped_is_no_failure() -> None:
    (skipped,) = read(examples.mixed()).iter("skipped")
    assert skipped.attrib == {"message": "skipped: takes no sink"}


@pytest.mark.parametrize("status", [one for one in Status if one is not Status.SKIPPED])
def test_every_status_but_pass_is_a_failure(status: Status) -> None:
    top = read(examples.report(examples.case(status=status)))
    assert top.attrib["failures"] == str(int(status is not Status.PASS))


def test_no_character_that_xml_has_not() -> None:
    top = read(examples.hostile())
    text = examples.hostile().to_junit()
    assert all(c.isprintable() or c == "\n" for c in text)
    name = next(top.iter("testcase")).attrib["name"]
    assert name.startswith("<script>alert(1)</script>\"'&]]>-->")
    assert r"\x00\x1b[31m\u202e\ud800\ufffe\n" in name
    assert len(name) == 1000


def test_cases_of_no_known_recipe_have_a_suite_of_their_own() -> None:
    (suite,) = read(examples.report(examples.good("a", "unheard-of")))
    assert suite.attrib["name"] == "golden"


def test_of_two_recipes_that_end_a_name_the_longer_one_counts() -> None:
    report = examples.report(
        examples.good("a", "x.y"),
        examples.good("b", "y"),
        evidence={"y": "source", "x.y": "source"},
    )
    assert [suite.attrib["name"] for suite in read(report)] == ["x.y", "y"]


def test_a_report_of_nothing_is_valid() -> None:
    assert len(read(examples.report())) == 0
