"""The list of packages, the symbolic links, and what each package exports."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.layout import (
    MAPPED,
    ROOT,
    is_type_checking,
    modules,
    package_folders,
    project,
)

PACKAGES = {module.name: module.path for module in modules() if module.is_package}


def test_the_list_of_packages_equals_the_tree() -> None:
    assert project()["tool"]["setuptools"]["packages"] == sorted(PACKAGES)


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {module.path.parent for module in modules()}
    assert folders == {path.parent for path in PACKAGES.values()}


def test_the_mapping_equals_the_tree() -> None:
    mapping = project()["tool"]["setuptools"]["package-dir"]
    assert {name: ROOT / folder for name, folder in mapping.items()} == package_folders()


def test_every_other_file_of_a_package_is_package_data() -> None:
    listed = set()
    for package, patterns in project()["tool"]["setuptools"]["package-data"].items():
        folder = PACKAGES[package].parent
        for pattern in patterns:
            files = set(folder.glob(pattern))
            assert files, f"{pattern} of {package} names no file"
            listed |= files
    others = {
        Path(folder, file)
        for top in package_folders().values()
        for folder, _, files in os.walk(top)
        for file in files
        if "__pycache__" not in folder and not file.endswith((".py", "README.md"))
    }
    assert listed == others


@pytest.mark.parametrize("name", MAPPED)
def test_the_links_are_links(name: str) -> None:
    link = ROOT / "flamia_ref" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("name", MAPPED)
def test_git_keeps_the_links_as_links(name: str) -> None:
    command = ["git", "ls-files", "--stage", "--", f"flamia_ref/{name}"]
    staged = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert staged.partition(" ")[0] == "120000"


def test_the_mapped_packages_are_not_imported_under_their_bare_names() -> None:
    for module in modules():
        importlib.import_module(module.name)
    assert not set(MAPPED) & {name.partition(".")[0] for name in sys.modules}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_static_and_lazy_exports_agree(name: str) -> None:
    tree = ast.parse(PACKAGES[name].read_text(encoding="utf-8"))
    static: dict[str, str] = {}
    for block in filter(is_type_checking, tree.body):
        assert isinstance(block, ast.If)
        for node in block.body:
            assert isinstance(node, ast.ImportFrom), f"line {node.lineno}: use `from a import b`"
            for alias in node.names:
                assert alias.asname == alias.name, f"line {node.lineno}: use `import x as x`"
                static[alias.name] = str(node.module)
    package = importlib.import_module(name)
    assert sorted(static) == getattr(package, "__all__", [])
    for export, source in static.items():
        value = getattr(package, export)
        if source == name:
            assert value is importlib.import_module(f"{name}.{export}")
        else:
            assert value is getattr(importlib.import_module(source), export)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_no_module_hides_an_export(name: str) -> None:
    # Importing a submodule binds it to its package, in place of an export of the same name.
    package = importlib.import_module(name)
    folder = PACKAGES[name].parent
    submodules = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    for export in submodules & set(getattr(package, "__all__", [])):
        assert getattr(package, export) is importlib.import_module(f"{name}.{export}")
