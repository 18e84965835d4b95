"""The page holds what the report holds, in markup that is in order, whatever the names are."""

import base64
import hashlib
import itertools
import re
from typing import Any

import pytest

from flamia_ref.report import Report, chart, detail, html, markup
from tests.report import examples
from tests.report.parsed import Node, parse


@pytest.fixture(scope="module")
def page() -> Node:
    return parse(examples.mixed().to_html())


def rows(table: Node) -> list[list[str]]:
    return [row.cells() for row in table.one("tbody").all("tr")]


def table_of(part: Node, words: str) -> Node:
    """The one table with some words in its caption or heading."""
    found = [
        one
        for one in part.all("table")
        if any(words in x.text for name in ("caption", "thead") for x in one.all(name))
    ]
    (one,) = found
    return one


def test_the_summary_says_what_was_compared(page: Node) -> None:
    text = page.by_id("summary").text
    for words in (
        "mine:kernel",
        "packs/smoke",
        "FAIL: 5 cases: 2 pass, 1 bit mismatch, 1 outside envelope, 1 skipped",
        "cases not compared: other.flamia-mxfp8-folded",
    ):
        assert words in text
    assert page.one("h1").text == "Golden check: FAIL"
    assert page.one("title").text == "FAIL: mine:kernel against packs/smoke"


def test_the_table_of_cases(page: Node) -> None:
    # number, name, verdict, departs, diagnosis, failing: of v.scales 10, of out 9321 - 9000, elements, width
    assert rows(page.by_id("case-table")) == [
        ["1", "alpha.flamia-mxfp8-folded", "pass", "", "", "0", "29445", "3.4e-07"],
        [
            "2",
            "real.flamia-mxfp8-folded",
            "bit mismatch",
            "v.scales",
            "one scale byte of V is too large by one",
            "331",
            "58588",
            "0.00051",
        ],
        ["3", "zeta.bf16-fa4", "outside envelope", "out", "", "321", "57984", "0.00051"],
        ["4", "sink.bf16-fa4", "skipped", "", "", "0", "0", ""],
        ["5", "beta.bf16-fa4", "pass", "", "", "0", "29445", "3.4e-07"],
    ]
    assert rows(page.by_id("findings").one("table")) == [
        ["1", "v.scales", "one scale byte of V is too large by one"],
        ["1", "out", "none"],
    ]


def test_the_details_of_a_case(page: Node) -> None:
    found = page.by_id("case-2")
    assert page.by_id("case-2").attributes.keys() >= {"open", "data-failed"}
    assert "open" not in page.by_id("case-3").attributes
    text = found.text
    for words in (
        "This case first departs at v.scales; every stage that leads to it is equal.",
        "scale-off-by-one: one scale byte of V is too large by one (explains 9 of the 10 elements that fail in"
        " v.scales)",
        "document 1, kv head 0, token 75, tile 0, block 2, channels 0 to 63; index [75, 0, 2]",
        "real activations of a small model",
        "real, straddling",
        "row_max, ds.dq.codes.1",
        "not consistent: no way",
        "flamia-ref golden check pack --kernel mine:kernel --case real.flamia-mxfp8-folded",
        "Equal bit for bit: q.codes.",
    ):
        assert words in text, words
    assert rows(table_of(found, "index [75")) == [
        ["scale", "2^-10", "0x75", "2^-9", "0x76"],
        ["first code under it", "44.0", "0x63", "44.0", "0x63"],
    ]
    assert rows(table_of(found, "envelope width")) == [
        ["v.scales", "bit mismatch", "151", "10", "", "0.000976562", "2", "", "", ""],
        ["lse", "pass", "453", "12", "12", "1e-07", "1", "3.4e-07", "30", ""],
        [
            "out",
            "outside envelope",
            "28992",
            "9321",
            "9000",
            "0.386719",
            "4",
            "0.00051",
            "77",
            "",
        ],
    ]
    assert [row[:2] for row in rows(table_of(found, "v.scales: distance"))] == [
        ["1", "7"],
        ["2", "2"],
        ["NaN", "1"],
    ]
    assert "in codes" in table_of(found, "v.scales: distance").text
    assert "in units in the last place" in table_of(found, "out: distance").text


def test_a_case_after_stages_that_were_not_given_is_an_inference(page: Node) -> None:
    assert "an inference: the fault may lie before it, in s, p" in page.by_id("case-3").text
    assert "takes no sink" in page.by_id("case-4").text


def test_what_it_rests_on(page: Node) -> None:
    text = page.by_id("ground").text
    for words in (
        "flamia-mxfp8-foldedderived: follows from labelled rules by proof or exhaustive check",
        "bf16-fa4source: read in a kernel's public code",
        "numerics version3",
        "deviceNVIDIA H200",
    ):
        assert words in text


def test_headings_go_down_one_by_one(page: Node) -> None:
    levels = [int(name) for name in re.findall(r"<h([1-6])", examples.mixed().to_html())]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))


def test_every_table_has_headings_with_a_scope(page: Node) -> None:
    for table in page.all("table"):
        assert all(one.attributes.get("scope") in ("row", "col") for one in table.all("th"))
        assert all(list(row.all("th")) for row in table.one("thead").all("tr"))


def test_the_page_forbids_all_but_its_own_style_and_script(page: Node) -> None:
    (policy,) = (
        str(one.attributes["content"])
        for one in page.all("meta")
        if one.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    for name in ("style", "script"):
        digest = hashlib.sha256(page.one(name).text.encode()).digest()
        assert rules.pop(f"{name}-src") == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_points_outside(page: Node) -> None:
    text = examples.mixed().to_html()
    assert not re.findall(r"(?i)https?:|//[a-z]|url\(|@import|src=", text)


def test_a_report_without_a_case_or_without_a_failure_is_a_page() -> None:
    assert "No case was compared." in parse(examples.report().to_html()).text
    page = parse(examples.report(examples.good("alpha")).to_html())
    assert page.one("h1").text == "Golden check: PASS"
    assert not [one for one in page.all("section") if one.attributes["id"] == "findings"]


def test_hostile_names_are_text_and_cut() -> None:
    whole = examples.hostile().to_html()
    page = parse(whole)
    assert len(list(page.all("script"))) == 1
    assert not list(page.all("img"))
    assert "<script>alert(1)</script>" in page.by_id("case-table").text
    assert r"\x00\x1b[31m\u202e\ud800\ufffe\n" in page.by_id("summary").text
    assert len(whole) < 100_000
    assert len(examples.hostile(10).to_html()) > 10_000


def test_the_same_report_gives_the_same_bytes() -> None:
    assert examples.mixed().to_html() == examples.mixed().to_html()


@pytest.mark.nightly  # its smaller form is the next one
def test_500_cases_that_fail_everywhere_stay_below_3_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    # 15 000 heat maps, of which most must be left out, and all first ones kept.
    made = []

    def counted(*arguments: Any) -> markup.Html:
        made.append(arguments[0])
        return chart.heat_map(*arguments)

    monkeypatch.setattr(detail, "heat_map", counted)
    report = examples.large(500)
    whole = report.to_html()
    assert 2_000_000 < len(whole.encode()) < 3_000_000
    for number in (1, 250, 500):
        at = whole.index(f'id="case-{number}"')
        part = whole[at : whole.index("</details>", at)]
        assert "Heat map of s.0:" in part, number
    assert whole.count("Left out here") == 500
    assert (
        whole.count("<figure") == len(made) < 1000
    )  # none is made in vain: that would take minutes
    assert len(re.findall(r'<tr data-case="', whole)) == 500


def test_what_is_left_out_is_said_and_the_most_important_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = examples.large(3)
    whole = report.to_html()
    assert "Left out here" not in whole
    assert whole.count("<figure") == 90
    monkeypatch.setattr(html, "LARGEST", len(whole.encode()) // 2)
    less = report.to_html()
    assert len(less.encode()) <= len(whole.encode()) // 2
    parse(less)
    assert less.count("Equal bit for bit") == whole.count("Equal bit for bit")
    assert less.count("envelope width") == 3
    assert 3 <= less.count("<figure") < 60
    assert less.count("Left out here") >= 1


def test_texts_of_our_own_cannot_end_their_element() -> None:
    with pytest.raises(ValueError, match="write it in another way"):
        markup.raw("script", "x = '</script>'")


@pytest.mark.parametrize("length", [499, 500, 501, 5000])
def test_texts_are_cut_in_the_middle(length: int) -> None:
    given = "a" * (length - 3) + "end"
    shown = markup.short(given)
    assert len(shown) == min(length, 500)
    assert shown.endswith("end")
    assert (shown == given) is (length <= 500)


def test_nan_and_infinity_are_written() -> None:
    report: Report = examples.hostile(1)
    text = parse(report.to_html()).by_id("case-1").text
    assert "inf" in text
    assert "nan" in text
