"""How Sphinx makes the site: `make docs`, or from the root: sphinx-build -c docs . build/site

The source folder is the root of the checkout, so that a link from a page to a file is one and the same in the site and
in a checkout. Pages are Markdown (MyST). Docstrings are plain text with code in back quotes.
"""

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from reference import PUBLIC, exports  # noqa: E402
from sphinx.util import logging  # noqa: E402

from flamia_ref import __version__  # noqa: E402

project = "FLAMIA-ref"
author = "The FLAMIA-ref developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = [
    "*.md",
    "*/README.md",
    "docs/*.md",
    "docs/api/*.md",
    "docs/decisions/*.md",
    "examples/*/README.md",
    "tests/*/README.md",
]
# Folders that are left out are not walked through either.
exclude_patterns = [".*", "build", "dist", "pack", "*.egg-info", "flamia_ref", "**/__pycache__"]

myst_heading_anchors = 4
default_role = "code"

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"FLAMIA-ref {release}"
html_copy_source = False
html_extra_path = ["site"]

_SPECIAL = re.compile(r"`+[^`]*`+|[|*]")
"""Code, which stays as it is, or a character that means something in reStructuredText and nothing in our docstrings."""

_LABEL = re.compile(r"(Returns|Raises|Yields): \S")
_FIELDS = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Yields):$")
_FIELD = re.compile(r" {4}([\w*]+(?:, [\w*]+)*): (.*)$")


def escaped(text):
    """A line of a docstring as reStructuredText."""
    return _SPECIAL.sub(lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)


def as_restructured(app, what, name, obj, options, lines):
    """Turn the plain text of a docstring into reStructuredText: fields into lists, a table into text as it stands."""
    made, inside = [], ""  # what the last lines were of
    for line in lines:
        field = _FIELD.match(line)
        indented = line.startswith(" ") or not line
        if _FIELDS.match(line):
            made, inside = [*made, "", f"**{line}**", ""], "fields"
        elif inside in ("fields", "field") and field:
            names = ", ".join(f"``{one}``" for one in field[1].split(", "))
            made, inside = [*made, "", f"- {names}: {escaped(field[2])}"], "field"
        elif inside == "field" and line.startswith(" " * 5):
            made.append(f"  {escaped(line.strip())}")
        elif (
            inside in ("fields", "field") and indented
        ):  # text, or fields that are named by a phrase
            made += ["", escaped(line.strip())] if inside == "field" else [escaped(line.strip())]
            inside = "fields"
        elif _LABEL.match(line):  # a paragraph, its next lines indented
            made, inside = [*made, "", escaped(line)], "label"
        elif inside == "label" and line.startswith(" "):
            made.append(escaped(line.lstrip()))
        elif line.startswith("|") and line.endswith("|"):
            made += [f"    {line}"] if inside == "table" else ["::", "", f"    {line}"]
            inside = "table"
        elif inside == "literal" and indented:
            made.append(line)
        else:
            made += ["", escaped(line)] if inside else [escaped(line)]
            inside = "literal" if line.endswith("::") else ""
    lines[:] = made


def require_every_export(app, env):
    """Warn of what a public module exports and no page describes. `make docs` makes errors of warnings."""
    described = set(env.get_domain("py").objects)
    for module in (f"flamia_ref.{short}" for short in PUBLIC):
        for name in exports(module):
            if f"{module}.{name}" not in described:
                logging.getLogger(__name__).warning(
                    "%s.%s is on no page; run: python docs/reference.py", module, name
                )


def copy_pictures(app, failure):
    """Copy the pictures that a page names in HTML of its own, which Sphinx does not look into."""
    if failure is None:
        target = Path(app.outdir, "docs", "pictures")
        target.mkdir(exist_ok=True)
        for file in (ROOT / "docs" / "pictures").glob("*.png"):
            shutil.copyfile(file, target / file.name)


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", as_restructured)
    app.connect("env-check-consistency", require_every_export)
    app.connect("build-finished", copy_pictures)
