"""How Sphinx makes the site: `make docs`, or from the root: sphinx-build -c docs . build/site

The source folder is the root of the checkout, so that a link from a page to a file of the repository is the same link
in the site and in a checkout. Pages are Markdown (MyST); the docstrings are plain text with `code` in single backticks.
"""

import os
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

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/*.md", "docs/api/*.md", "docs/decisions/*.md", "README.md", "*/README.md", "examples/*/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "flamia_ref", "tests", "**/__pycache__"]
nitpicky = False

myst_heading_anchors = 4
default_role = "code"

autodoc_typehints = "description"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"FLAMIA-ref {release}"
