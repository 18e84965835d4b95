"""The page in a real browser: opened from disk, by mouse, by keys alone, in both schemes, and on paper.

Skipped where there is no Chromium, unless FLAMIA_BROWSER_REQUIRED is set.
"""

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flamia_ref.report import Report
from tests.report import examples
from tests.report.browser import REQUIRED, Browser, find, started

pytestmark = pytest.mark.xdist_group("browser")

SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    reports: dict[str, Report] = {
        "mixed": examples.mixed(),
        "hostile": examples.hostile(),
        "many": examples.report(
            *(examples.good(f"case-{number}") for number in range(400)),
            *(examples.case(f"wrong-{number}") for number in range(100)),
        ),
    }
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(report.to_html(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find()
    if binary is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"no Chromium, and {REQUIRED} is set; install the package chromium")
        pytest.skip("no Chromium; install the package chromium")
    with started(binary, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser, pages: Path) -> Iterator[Browser]:
    """The browser with the mixed report, in which nothing may go wrong."""
    browser.media()
    browser.size(1280, 900)
    browser.open(pages / "mixed.html")
    yield browser
    assert browser.complaints == []
    assert browser.requests == [(pages / "mixed.html").resolve().as_uri()]


def shown(browser: Browser) -> list[str]:
    """The numbers of the cases in the table, from above."""
    rows = "[...document.querySelectorAll('#case-table tbody tr')]"
    return list(
        browser.run(f"{rows}.filter(r => r.getClientRects().length).map(r => r.dataset.case)")
    )


def is_open(browser: Browser) -> list[str]:
    """The cases of which the details are open and to be seen."""
    parts = "[...document.querySelectorAll('details.case[open]')]"
    return list(browser.run(f"{parts}.filter(d => d.getClientRects().length).map(d => d.id)"))


def focus(browser: Browser) -> str:
    """What has the focus, in words."""
    return str(
        browser.run(
            "(e => e.id || e.getAttribute('href') || (e.tagName === 'SUMMARY' ? 'summary of '"
            " + e.parentElement.id : e.getAttribute('aria-label') || e.textContent.slice(0, 60)))"
            "(document.activeElement)"
        )
    )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["mixed", "hostile", "many"])
def test_it_opens_from_disk_without_a_complaint(
    browser: Browser, pages: Path, name: str, scheme: str
) -> None:
    browser.media(scheme=scheme)
    browser.open(pages / f"{name}.html")
    browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
    assert browser.complaints == []
    assert browser.requests == [(pages / f"{name}.html").resolve().as_uri()]
    assert browser.run("document.querySelectorAll('img, iframe, object').length") == 0


def test_a_click_on_a_case_opens_its_details(page: Browser) -> None:
    assert is_open(page) == ["case-2"]
    page.click('a[href="#case-3"]')
    assert is_open(page) == ["case-2", "case-3"]
    assert focus(page) == "summary of case-3"
    page.click("#case-3 > summary")
    assert is_open(page) == ["case-2"]
    page.click('a[href="#case-3"]')  # the same address again
    assert is_open(page) == ["case-2", "case-3"]


def test_a_link_to_a_case_opens_it(browser: Browser, pages: Path) -> None:
    browser.open(pages / "mixed.html", "#case-5")
    assert is_open(browser) == ["case-2", "case-5"]
    browser.open(pages / "mixed.html", "#case-5%22]x")
    assert is_open(browser) == ["case-2"]
    assert browser.complaints == []


def test_words_and_verdict_filter(page: Browser) -> None:
    assert page.run("document.querySelector('#shown').textContent") == "5 of 5 cases shown"
    page.click("#words")
    page.type("BF16-fa4 wide")  # "wide" is a flag
    assert shown(page) == ["3"]
    assert page.run("document.querySelector('#shown').textContent") == "1 of 5 cases shown"
    assert is_open(page) == []  # the details of the others are out of the way
    page.press("Enter")  # it is a form
    assert shown(page) == ["3"]
    page.run("document.querySelector('#words').value = ''")
    page.type("scale byte")
    assert shown(page) == ["2"]
    page.type("zzz")
    assert shown(page) == []


def test_the_verdict_is_chosen_by_keys(page: Browser) -> None:
    page.run("document.querySelector('#verdict').focus()")
    seen = []
    for _ in range(5):
        page.press("ArrowDown")
        seen.append((page.run("document.querySelector('#verdict').value"), shown(page)))
    assert seen == [
        ("failing", ["2", "3"]),
        ("pass", ["1", "5"]),
        ("bit mismatch", ["2"]),
        ("outside envelope", ["3"]),
        ("skipped", ["4"]),
    ]


def heading(column: int) -> str:
    return f"#case-table thead th:nth-child({column}) button"


def sorts(page: Browser) -> list[str | None]:
    cells = "[...document.querySelectorAll('#case-table thead th')]"
    return list(page.run(f"{cells}.map(c => c.getAttribute('aria-sort'))"))


def test_headings_sort(page: Browser) -> None:
    assert sorts(page) == [None] * 8
    page.click(heading(2))
    assert shown(page) == ["1", "5", "2", "4", "3"]  # alpha, beta, real, sink, zeta
    assert sorts(page)[1] == "ascending"
    page.click(heading(2))
    assert shown(page) == ["3", "4", "2", "5", "1"]
    # By numbers, not by text: 331 and 321 fail, 0 of the others, which keep their order.
    page.run(f"document.querySelector('{heading(6)}').focus()")
    page.press("Enter")
    assert shown(page) == ["1", "4", "5", "3", "2"]
    assert sorts(page) == [None] * 5 + ["ascending", None, None]
    page.press("Space")
    assert shown(page) == ["2", "3", "1", "4", "5"]
    assert sorts(page)[5] == "descending"
    page.click(heading(8))
    # No width comes first; 3.4e-07 before 0.00051.
    assert shown(page) == ["4", "1", "5", "2", "3"]
    page.click(heading(1))
    assert shown(page) == ["1", "2", "3", "4", "5"]


def background(page: Browser) -> str:
    return str(page.run("getComputedStyle(document.body).backgroundColor"))


def test_the_theme_follows_the_system_until_it_is_chosen(page: Browser) -> None:
    light = background(page)
    page.media(scheme="dark")
    dark = background(page)
    assert light != dark
    found = []
    for _ in range(3):
        page.click("#theme")
        found.append((page.run("document.querySelector('#theme').textContent"), background(page)))
    assert found == [("Theme: light", light), ("Theme: dark", dark), ("Theme: system", dark)]
    page.media(scheme="light")
    assert background(page) == light


def test_all_is_reached_by_tab_and_the_focus_is_seen(page: Browser) -> None:
    headings = page.run(
        "[...document.querySelectorAll('#case-table thead th')].map(c => c.textContent)"
    )
    expected = [
        "#cases",
        "theme",
        "words",
        "verdict",
        "open",
        "close",
        "Table of the cases",
        *headings,
        *(f"#case-{number}" for number in range(1, 6)),
        "summary of case-1",
        "summary of case-2",
        "Tensors of real.flamia-mxfp8-folded",
        *(f"summary of case-{number}" for number in range(3, 6)),
    ]
    order = []
    for _ in expected:
        page.press("Tab")
        order.append(focus(page))
        outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", order
    assert order == expected
    page.press("Tab", shift=True)
    assert focus(page) == order[-2]


def test_by_keys_alone_to_the_details(page: Browser) -> None:
    page.press("Tab")
    page.press("Enter")
    assert focus(page) == "cases"
    for _ in range(4 + 1 + 8 + 3):
        page.press("Tab")
    assert focus(page) == "#case-3"
    page.press("Enter")
    assert focus(page) == "summary of case-3"
    assert is_open(page) == ["case-2", "case-3"]
    page.press("Space")
    assert is_open(page) == ["case-2"]


def test_all_details_of_what_is_shown(page: Browser) -> None:
    page.click("#words")
    page.type("bf16")
    page.click("#open")
    assert is_open(page) == ["case-3", "case-4", "case-5"]
    page.click("#close")
    assert is_open(page) == []
    assert page.run("document.querySelectorAll('details[open]').length") == 0


CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.getClientRects().length) continue;
    if (["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    found.push(["text", element.className || element.tagName,
                ratio(parse(getComputedStyle(element).color), behind(element))]);
  }
  for (const e of document.querySelectorAll("input, select, button:not(th button)"))
    found.push(["edge", e.id, ratio(parse(getComputedStyle(e).borderTopColor), behind(e.parentElement))]);
  for (const e of document.querySelectorAll("path"))
    found.push(["picture", e.className.baseVal, ratio(parse(getComputedStyle(e).stroke), behind(e))]);
  for (const e of document.querySelectorAll(".bar rect"))
    found.push(["picture", "bar", ratio(parse(getComputedStyle(e).fill), behind(e))]);
  return found;
})()
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrast(page: Browser, scheme: str) -> None:
    # WCAG 2.2: 1.4.3 for text, 1.4.11 for edges of controls and for pictures.
    page.media(scheme=scheme)
    page.click("#open")
    found = page.run(CONTRAST)
    kinds = {kind for kind, _, _ in found}
    assert kinds == {"text", "edge", "picture"}
    assert len(found) > 100
    least = {"text": 4.5, "edge": 3.0, "picture": 3.0}
    assert [one for one in found if one[2] < least[one[0]]] == []


def with_role(tree: list[dict[str, Any]], *roles: str) -> list[str]:
    return [one["name"] for one in tree if one["role"] in roles]


def test_what_a_screen_reader_is_told(page: Browser) -> None:
    tree = page.tree()
    for role in ("banner", "main", "search"):
        assert len(with_role(tree, role)) == 1, role
    assert set(with_role(tree, "region")) == {
        "Summary",
        "Findings",
        "Cases",
        "Table of the cases",
        "Details",
        "Tensors of real.flamia-mxfp8-folded",
        "What this rests on",
    }
    headings = [(one["level"], one["name"]) for one in tree if one["role"] == "heading"]
    assert headings[0] == (1, "Golden check: FAIL")
    assert [name for level, name in headings if level == 2] == [
        "Summary",
        "Findings",
        "Cases",
        "Details",
        "What this rests on",
    ]
    assert with_role(tree, "searchbox", "textbox") == ["Words in name, stage, diagnosis or flags"]
    assert with_role(tree, "combobox") == ["Verdict"]
    assert with_role(tree, "img", "image") == [
        "Heat map of v.scales: elements fail in 4 of 6 cells"
    ]
    named = (
        "button",
        "link",
        "img",
        "image",
        "combobox",
        "searchbox",
        "region",
        "DisclosureTriangle",
    )
    assert all(one["name"].strip() for one in tree if one["role"] in named)
    assert "real.flamia-mxfp8-folded" in with_role(tree, "rowheader")
    assert {"case", "verdict", "elements that fail"} <= set(with_role(tree, "columnheader"))
    assert with_role(tree, "status") == [""]
    # Marks are for the eye.
    assert not [one for one in tree if set("✓✗○") & set(one["name"] or "")]


def test_the_policy_holds_in_a_browser(browser: Browser, pages: Path) -> None:
    browser.open(pages / "mixed.html")
    asked = len(browser.requests)
    browser.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.body.append(s); document.body.insertAdjacentHTML('beforeend',"
        ' \'<p style="color: red">x</p><img src="http://127.0.0.1:9/x.png">\'); })()'
    )
    answer = browser.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert answer == "refused"
    assert browser.run("window.ran === undefined") is True
    assert len([one for one in browser.complaints if "Content Security Policy" in one]) >= 3
    assert browser.requests[asked:] == ["http://127.0.0.1:9/x.png"]
    assert browser.blocked == ["csp"]


def test_on_paper_all_that_fails_is_open_and_light(page: Browser) -> None:
    page.run("document.querySelector('#theme').click()")
    page.run("document.querySelector('#theme').click()")
    page.media(scheme="dark", kind="print")
    assert background(page) == "rgb(255, 255, 255)"
    assert page.run("document.querySelector('#filters').getClientRects().length") == 0
    page.media()
    page.run("window.printed = []; addEventListener('beforeprint', () => printed.push("
             "...[...document.querySelectorAll('details[open]')].map(d => d.id)))")  # fmt: skip
    pdf = base64.b64decode(page.call("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) in range(1, 12)
    assert page.run("printed") == ["case-2", "case-3"]
    assert is_open(page) == ["case-2"]


@pytest.mark.parametrize("name", ["mixed", "hostile"])
@pytest.mark.parametrize("width", [320, 768, 1280])
def test_nothing_is_wider_than_the_window(
    browser: Browser, pages: Path, name: str, width: int
) -> None:
    browser.media()
    browser.size(width, 800)
    browser.open(pages / f"{name}.html")
    assert browser.run("document.scrollingElement.scrollWidth") <= width


def test_without_scripts_all_can_be_read(browser: Browser, pages: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages / "mixed.html")
        tree = browser.tree()
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert with_role(tree, "button", "combobox", "searchbox") == []
    assert len(with_role(tree, "link")) == 6
    assert "first departs at" in with_role(tree, "columnheader")


def test_500_cases_are_quick(browser: Browser, pages: Path) -> None:
    browser.open(pages / "many.html")
    page = browser
    assert len(shown(page)) == 500
    took = page.run(
        "(() => { const start = performance.now(); const words = document.querySelector('#words');"
        " words.value = 'wrong-7'; words.dispatchEvent(new Event('input'));"
        f" document.querySelector({heading(2)!r}).click();"
        " document.body.getBoundingClientRect(); return performance.now() - start; })()"
    )
    assert len(shown(page)) == 11
    assert took < 1000
