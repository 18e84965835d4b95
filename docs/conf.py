"""How Sphinx makes the site: `make docs`, or from the root: sphinx-build -c docs . build/site

The source folder is the root of the checkout, so that a link from a page to a file of the repository is the same link
in the site and in a checkout. Pages are Markdown (MyST); the docstrings are plain text with `code` in single backticks.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from flamia_ref import __version__  # noqa: E402

project = "FLAMIA-ref"
author = "The FLAMIA-ref developers"
copyright = author  # noqa: A001
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/*.md", "docs/api/*.md", "docs/decisions/*.md", "README.md", "*/README.md", "examples/*/README.md", "tests/independent/README.md", "tests/oracles/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "flamia_ref", "**/__pycache__"]
nitpicky = False

myst_heading_anchors = 4
default_role = "code"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields are described once more where they have docstrings of their own


html_theme = "furo"
html_title = f"FLAMIA-ref {release}"


SPECIAL = re.compile(r"`+[^`]*`+|[|*]")
"""Code, which stays as it is, or a character that means something in reStructuredText and nothing in our docstrings."""

LABEL = re.compile(r"(Returns|Raises|Yields): \S")


def escaped(text):
    """A line of a docstring as reStructuredText."""
    return SPECIAL.sub(lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)


def as_restructured(app, what, name, obj, options, lines):
    """Turn the plain text of a docstring into reStructuredText. A table of Markdown stays one, as text."""
    made, literal, table, labelled = [], False, False, False
    for line in lines:
        # "Raises: ValueError if ..." is a paragraph, its next lines indented.
        if LABEL.match(line):
            made, labelled = [*made, ""], True
        elif labelled:
            labelled = line.startswith(" ")
            line = line.lstrip()
        if line.startswith("|") and not literal:
            made += [f"    {line}"] if table else ["::", "", f"    {line}"]
            table = True
            continue
        table = False
        literal = literal and (not line or line[0].isspace())
        made.append(line if literal else escaped(line))
        literal = literal or line.endswith("::")
    lines[:] = made


def setup(app):
    """Sphinx calls this. Docstrings come here before napoleon, which writes reStructuredText of its own."""
    app.connect("autodoc-process-docstring", as_restructured, priority=400)
