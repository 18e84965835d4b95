"""The pages of Markdown, what they link to, and the code that they show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.repository.layout import ROOT

PATTERNS = (
    "*.md",
    "*/README.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/decisions/*.md",
    "examples/*/README.md",
    "tests/*/README.md",
)
"""What is a page of the site; docs/conf.py has the same."""

_LEFT_OUT = re.compile(r"\.|(build|dist|pack)/")
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<mark>`{3,})(?P<kind>[^\n]*)\n(?P<text>.*?)^ *(?P=mark) *$", re.M | re.S
)
_LINK = re.compile(r"\]\(\s*<?([^()\s>]+(?:\([^()]*\)[^()\s>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
_HTML = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
_NOT_RUN = re.compile(r"<!-- not run: (\S[^\n]*?) -->\s*\Z")


@dataclass(frozen=True, kw_only=True)
class Code:
    """A block of code of a page; `not_run` is the reason that stands above one that no test runs, or empty."""

    page: Path
    kind: str
    text: str
    not_run: str


def pages(root: Path = ROOT) -> list[Path]:
    """Every page of the repository, each once."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    return sorted(path for path in found if not _LEFT_OUT.match(str(path.relative_to(root))))


def codes(page: Path) -> list[Code]:
    """The blocks of code of a page, without the indentation of the list that they are in."""
    text, found = page.read_text(encoding="utf-8"), []
    for block in _FENCE.finditer(text):
        reason = _NOT_RUN.search(text, 0, block.start())
        lines = (line.removeprefix(block["indent"]) for line in block["text"].splitlines(True))
        found.append(
            Code(
                page=page,
                kind=block["kind"].strip(),
                text="".join(lines),
                not_run=reason[1] if reason else "",
            )
        )
    return found


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(
        r"(`+)[^`].*?\1", "", _FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.S
    )


def links(page: Path) -> list[str]:
    """What a page links to or shows, as it is written there."""
    text = prose(page)
    # A link may be named in code, [`name`](target): the code is gone by now, the target is not.
    return [*_LINK.findall(text), *_HTML.findall(text)]


def slug(title: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it: lower case, spaces to hyphens, no other marks."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title.strip())
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page."""
    text, seen = _FENCE.sub("", page.read_text(encoding="utf-8")), dict[str, int]()
    for title in re.findall(r"^#{1,6} +(.+?) *#* *$", text, re.M):
        name = slug(title)
        seen[name] = seen.get(name, -1) + 1
        if seen[name]:
            seen[f"{name}-{seen[name]}"] = 0
    return {*seen, *re.findall(r"\b(?:id|name)=\"([^\"]+)\"", text)}


def broken(page: Path, root: Path = ROOT) -> Iterator[str]:
    """A line for each link of a page that leads to nothing in the repository."""
    for link in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        where = f"{page.relative_to(root)}: {link}"
        if not target.is_relative_to(root):
            yield f"{where} leads out of the repository"
        elif not target.exists():
            yield f"{where} is not there"
        elif target.is_dir():
            yield f"{where} is a folder; link to a file in it"
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            yield f"{where} has no such heading"


def navigated(page: Path) -> set[Path]:
    """The pages that a page has in its navigation, by name or by pattern."""
    found: set[Path] = set()
    for code in codes(page):
        if code.kind == "{toctree}":
            for line in code.text.splitlines():
                name = re.sub(r"^.*<(.*)>$", r"\1", line.strip())
                if name and not name.startswith(":"):
                    found |= {path.resolve() for path in _matching(page.parent, f"{name}.md")}
    return found


def _matching(folder: Path, pattern: str) -> Iterator[Path]:
    while pattern.startswith("../"):
        folder, pattern = folder.parent, pattern.removeprefix("../")
    yield from folder.glob(pattern)
