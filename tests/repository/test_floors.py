"""Imports go down the floors."""

from pathlib import Path

import pytest

from tests.repository.layout import violations


def test_imports_go_down_the_floors() -> None:
    assert violations() == []


def plant(root: Path, file: str, code: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("formats/a.py", "import flamia_ref.attention", "imports flamia_ref.attention (floor 3)"),
        ("formats/a.py", "from flamia_ref import golden", "imports flamia_ref.golden (floor 4)"),
        ("formats/a.py", "from flamia_ref.packing.b import c", "imports flamia_ref.packing"),
        ("formats/a.py", "import flamia_ref\nflamia_ref.cli.main()", "imports flamia_ref.cli"),
        (
            "formats/a.py",
            "def f():\n    import flamia_ref.report.text",
            "imports flamia_ref.report",
        ),
        (
            "formats/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import flamia_ref.report.a",
            "imports flamia_ref.report",
        ),
        (
            "formats/a.py",
            "import importlib\nimportlib.import_module('flamia_ref.leakage')",
            "imports flamia_ref.leakage",
        ),
        ("flamia_ref/arithmetic/a.py", "import flamia_ref.packing", "imports flamia_ref.packing"),
        ("flamia_ref/golden/a/b.py", "import flamia_ref.leakage", "imports flamia_ref.leakage"),
        ("leakage/a.py", "import flamia_ref.schedule", "imports flamia_ref.schedule"),
        ("flamia_ref/kernels.py", "import flamia_ref.sweep", "imports flamia_ref.sweep"),
        ("flamia_ref/evidence.py", "import flamia_ref.formats", "imports flamia_ref.formats"),
        ("flamia_ref/__init__.py", "import flamia_ref.formats", "imports flamia_ref.formats"),
        ("formats/a.py", "from . import b", "relative import of .."),
        ("formats/a.py", "from ..packing import b", "relative import of ..packing.b"),
        ("flamia_ref/golden/a.py", "import formats.scalar", "formats.scalar is not a package"),
        ("flamia_ref/golden/a.py", "from tests.a import b", "tests.a.b is not a package"),
        ("formats/a.py", "from flamia_ref import *", "flamia_ref.* has no floor"),
        ("flamia_ref/novelty.py", "", "flamia_ref.novelty has no floor"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, file: str, code: str, complaint: str) -> None:
    plant(tmp_path, file, code)
    (found,) = violations(tmp_path)
    assert complaint in found
    assert found.startswith(f"{file}:{max(1, len(code.splitlines()))}: ")


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("formats/a.py", "from flamia_ref import __version__\nfrom flamia_ref.formats.b import c"),
        ("flamia_ref/attention/recipes/a.py", "import flamia_ref.attention.operand"),
        ("properties/a.py", "import hypothesis, flamia_ref.golden, flamia_ref.leakage"),
        ("flamia_ref/evidence.py", "from flamia_ref._errors import unknown_name"),
        ("flamia_ref/cli.py", "def f():\n    from flamia_ref.properties import a"),
        (
            "flamia_ref/__init__.py",
            "from flamia_ref._lazy import attach\nif TYPE_CHECKING:\n    import flamia_ref.golden",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, file: str, code: str) -> None:
    plant(tmp_path, file, code)
    assert violations(tmp_path) == []


def test_links_are_not_read_twice(tmp_path: Path) -> None:
    plant(tmp_path, "formats/a.py", "import flamia_ref.attention")
    (tmp_path / "flamia_ref").mkdir()
    (tmp_path / "flamia_ref" / "formats").symlink_to("../formats")
    assert len(violations(tmp_path)) == 1
