"""Links and anchors of all pages lead somewhere, the examples of the site's own pages run, and nothing is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.repository import pages
from tests.repository.layout import ROOT, project

DOCS = ROOT / "docs"

RUN = tuple(
    DOCS / f"{name}.md"
    for name in ("index", "adding-a-recipe", "overview", "evidence", "command-line")
)
"""Pages whose code runs here. The others' has tests of its own: test_readme.py, test_leakage_page.py."""


def program(name: str) -> ModuleType:
    """A program that makes pages."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return program("reference")


@pytest.fixture(scope="module")
def overview() -> ModuleType:
    return program("overview")


# Links.


def test_every_link_leads_somewhere() -> None:
    found = pages.pages()
    assert {ROOT / "README.md", DOCS / "index.md", DOCS / "decisions" / "README.md"} <= set(found)
    assert [line for page in found for line in pages.broken(page)] == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.md").write_text("# A title: `code`, *and* more\n## Twice\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-title-code-and-more) [c](there.md#twice-1) [d](https://nowhere)\n"
        '[e](gone.md) ![f](gone.png) [`g`](there.md#gone) [h](#gone) [i](folder) [j](../k) <img src="l.png">\n'
        "`[m](gone.md)`\n\n```\n[n](gone.md)\n# Gone\n```\n"
    )
    assert [line.split()[1] for line in pages.broken(page, tmp_path)] == [
        "gone.md",
        "gone.png",
        "there.md#gone",
        "#gone",
        "folder",
        "../k",
        "l.png",
    ]


def test_every_page_is_in_the_navigation() -> None:
    index, seen = DOCS / "index.md", set[Path]()
    todo = {index}
    while todo:
        seen |= todo
        todo = {found for page in todo for found in pages.navigated(page)} - seen
    assert {str(page.relative_to(ROOT)) for page in {*pages.pages()} - seen} == set()
    assert seen <= {*pages.pages()}


def test_the_site_has_the_same_pages() -> None:
    text = (DOCS / "conf.py").read_text(encoding="utf-8")
    listed = text.partition("include_patterns = [")[2].partition("]")[0]
    assert tuple(re.findall(r'"([^"]+)"', listed)) == pages.PATTERNS


def test_the_tools_of_the_site_are_pinned() -> None:
    extra = project()["project"]["optional-dependencies"]["docs"]
    assert all("==" in one for one in extra if not one.startswith("flamia-ref"))


# Examples.


def test_every_example_runs_or_says_why_not() -> None:
    kinds = {code.kind for page in RUN for code in pages.codes(page) if not code.not_run}
    assert kinds <= {"python", "console", "{toctree}"}
    assert "console" in kinds


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_examples(page: Path, tmp_path: Path) -> None:
    """The code of a page from the top, in one folder: programs run, and commands print what the page shows."""
    command = tmp_path / "flamia-ref"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flamia_ref.cli "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    def printed(arguments: list[str], accepted: tuple[int, ...]) -> str:
        run = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode in accepted, run.stderr
        return run.stdout

    for code in pages.codes(page):
        if code.not_run:
            continue
        if code.kind == "python":
            printed([sys.executable, "-c", code.text], (0,))
        if code.kind == "console":
            for one in re.split(r"^\$ ", code.text, flags=re.M)[1:]:
                line, *shown = one.splitlines()
                # 1 is a leak or a difference that was found, which the page is about.
                lines = printed(["sh", "-c", line], (0, 1)).splitlines()
                if shown and shown[-1] == "...":
                    shown, lines = shown[:-1], lines[: len(shown) - 1]
                assert [x for x in lines if x] == [x for x in shown if x], line


def test_a_block_of_code_and_the_reason_above_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n1\n```\n<!-- not run: slow -->\n\n```sh\n2\n```\n- in a list\n\n  ```console\n  $ 3\n    4\n  ```\n"
    )
    assert [(code.kind, code.text, code.not_run) for code in pages.codes(page)] == [
        ("python", "1\n", ""),
        ("sh", "2\n", "slow"),
        ("console", "$ 3\n  4\n", ""),
    ]


# Pages that are made.


def test_every_public_name_is_in_the_api(reference: ModuleType) -> None:
    """By the names that a package lists for static tools, not by what the program that makes the page looks at."""
    for short in (
        "formats",
        "arithmetic",
        "attention",
        "leakage",
        "golden",
        "properties",
        "kernels",
    ):
        text = (DOCS / "api" / f"{short}.md").read_text(encoding="utf-8")
        folder = {"formats": ROOT, "leakage": ROOT, "properties": ROOT}.get(
            short, ROOT / "flamia_ref"
        )
        file = folder / short / "__init__.py"
        if file.exists():
            names = re.findall(r"^    from \S+ import \w+ as (\w+)$", file.read_text(), re.M)
        else:
            source = (folder / f"{short}.py").read_text()
            names = re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", source, re.M)
        assert names
        for name in names:
            full = re.escape(f"flamia_ref.{short}")
            described = (
                rf"^\.\. auto\w+:: {full}\.{name}$|^\.\. py:data:: {name}\n   :module: {full}$"
            )
            assert re.search(described, text, re.M), (
                f"flamia_ref.{short}.{name}: run python docs/reference.py"
            )


def test_the_reference_is_that_of_today(reference: ModuleType) -> None:
    made = reference.pages()
    stale = [
        str(file.relative_to(ROOT))
        for file, text in made.items()
        if not file.is_file() or file.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: python docs/reference.py"
    assert {*(DOCS / "api").glob("*.md")} <= set(made)


def test_every_command_and_option_is_in_the_reference() -> None:
    """By what --help prints."""
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")

    def help_of(*command: str) -> str:
        run = subprocess.run(
            [sys.executable, "-m", "flamia_ref.cli", *command, "--help"],
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout

    groups = re.findall(r"^    (\w+) ", help_of(), re.M)
    assert {"golden", "leak", "recipes", "formats"} <= set(groups)
    for group in groups:
        assert re.search(rf"^##+ flamia-ref {group}$", text, re.M)
    for command in (("golden", "check"), ("leak", "prove"), ("formats", "quantize")):
        section = text.partition(f"### flamia-ref {' '.join(command)}\n")[2].partition("\n##")[0]
        options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_of(*command), re.M)) - {"--help"}
        assert options
        for option in options:
            assert f"`{option}" in section, option


def test_the_evidence_is_that_of_today() -> None:
    made = program("evidence").page()
    assert (DOCS / "evidence.md").read_text(encoding="utf-8") == made, (
        "run: python docs/evidence.py"
    )


def test_the_overview_is_that_of_today(overview: ModuleType) -> None:
    made = overview.page(overview.rows())
    assert overview.FILE.read_text(encoding="utf-8") == made, "run: python docs/overview.py"


# The overview.


def test_what_is_missing_is_a_dash(overview: ModuleType, tmp_path: Path) -> None:
    """With no other page there, the table has every recipe, and says nothing that was not measured."""
    from flamia_ref.attention import RECIPES

    some = {name: RECIPES[name] for name in ("bf16-fa4", "cudnn-mxfp8", "fp8-fa4")}
    text = overview.page(overview.rows(some, docs=tmp_path))
    (table,) = overview.tables(text)
    named = {cells[0]: dict(zip(table[0], cells, strict=True)) for cells in table[1:]}
    assert set(named) == {f"`{name}`" for name in some}
    for name, cells in named.items():
        for column in (
            "consistent",
            "C3",
            "C5",
            "packing",
            "prefix",
            "error of O",
            "of dQ",
            "bits a row at most",
            "bf16 of loss",
            "loss",
        ):
            assert cells[column] == "-", (name, column)
    assert named["`fp8-fa4`"]["bytes of q, k, v"] == named["`fp8-fa4`"]["gradients"] == "-"
    assert (named["`bf16-fa4`"]["leaks"], named["`bf16-fa4`"]["S"]) == ("no", "bf16")
    assert named["`cudnn-mxfp8`"]["leaks"] == "**forward, backward**"
    assert "3 recipes 0 leak nothing" in text
    assert "`bf16-fa4` and `cudnn-mxfp8`" in text.partition("Not judged here")[2].partition(".")[0]


def test_the_advice_follows_from_the_pages(overview: ModuleType, tmp_path: Path) -> None:
    """From a page written by hand: what is broken is not advised, and of the rest the least error is."""
    from flamia_ref.attention import RECIPES

    names = ("bf16-fa4", "flamia-mxfp8", "flamia-mxfp8-folded", "cudnn-mxfp8")
    holds = " | ".join(["holds"] * 6)
    (tmp_path / "recipes.md").write_text(
        "| recipe | C1 | C2 | C4 | gradient | packing | prefix |\n|---|---|---|---|---|---|---|\n"
        + "".join(f"| `{name}` | {holds} |\n" for name in names)
    )
    (tmp_path / "errors.md").write_text(
        "| recipe | O | dQ |\n|---|---|---|\n| `bf16-fa4` | 0.001 | 0.002 |\n| `cudnn-mxfp8` | 0.01 | 0.01 |\n"
        "| `flamia-mxfp8` | 0.07 | 0.08 |\n| `flamia-mxfp8-folded` | 0.03 | 0.05 |\n"
    )
    (tmp_path / "capacity.md").write_text(
        f"| recipe | {' | '.join(overview.BITS)} |\n|---|---|---|\n"
        "| `cudnn-mxfp8` | 12 (O) | 34 (dQ) |\n| `bf16-fa4` | 0, proved | 0, proved |\n"
    )
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "quality-cpu.json").write_text(
        '{"device": "a CPU", "perplexity": {"documents": {"length": 256}, "attentions": {'
        '"flamia-mxfp8": {"difference": {"mean": 0.5, "low": 0.25, "high": 0.75}}, "flamia-mxfp8-folded": {}}}}'
    )
    some = {name: RECIPES[name] for name in names}
    text = " ".join(overview.page(overview.rows(some, docs=tmp_path)).split())
    assert "of 4 recipes 3 leak nothing" in text  # cudnn-mxfp8 leaks, whatever a page says
    assert (
        "the least error of O is that of `flamia-mxfp8-folded`, error of O 0.03, of dQ 0.05" in text
    )
    assert "Furthest from it is `flamia-mxfp8`, +0.5000 [+0.2500, +0.7500] nats" in text
    # Figures stand beside the share of work of where they were measured. 256 tokens are 8 blocks, 8 of 36 guarded;
    # those of the errors 7, 6, 3, 2 and 1, so 19 of 59, in the forward and in 4 of 6 products.
    assert (
        "- `flamia-mxfp8`: **to train with**. Error of O 0.07, of dQ 0.08, both with 32% of the forward's work and 21%"
        " of all in bfloat16, loss +0.5000 [+0.2500, +0.7500] with 22% of the forward's work in bfloat16, at 8192"
        " tokens only 0.52% of all work, and error and loss were not measured there"
    ) in text
    assert "- `cudnn-mxfp8`: **not where leaks matter** (it leaks: forward, backward)" in text
    assert "- `bf16-fa4`: **to train with**, as the base line" in text
    assert "| **forward, backward** | forward 12 (O), backward 34 (dQ) | 660 |" in text
    assert "| no | 0, proved | 768 |" in text
    page = (tmp_path / "recipes.md").read_text()
    broken = f"| `flamia-mxfp8-folded` | holds | {overview.BROKEN} | {' | '.join(['holds'] * 4)} |"
    (tmp_path / "recipes.md").write_text(
        page.replace(f"| `flamia-mxfp8-folded` | {holds} |", broken)
    )
    text = " ".join(overview.page(overview.rows(some, docs=tmp_path)).split())
    assert "of 4 recipes 2 leak nothing" in text
    assert "the least error of O is that of `flamia-mxfp8`, error of O 0.07" in text
    assert "| **not C2** |" in text
    assert "- `flamia-mxfp8-folded`: **with care**, broken: C2" in text
