"""Tiny packs, made once, and copies of them to damage."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.attention import RECIPES
from tests.golden.packs import WITH_TINY


@pytest.fixture(scope="session")
def tiny_suite() -> Iterator[None]:
    """A suite of two small cases, under the name "tiny"."""
    import flamia_ref.golden.making as making

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", WITH_TINY)
        yield


@pytest.fixture(scope="session")
def made(tiny_suite: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pack. Nobody may change it."""
    folder = tmp_path_factory.mktemp("made") / "pack"
    golden.make(folder, suite="tiny")
    return folder


@pytest.fixture(scope="session")
def every(tiny_suite: None, tmp_path_factory: pytest.TempPathFactory) -> golden.Pack:
    """A tiny pack of every recipe. Nobody may change it."""
    folder = tmp_path_factory.mktemp("every") / "pack"
    golden.make(folder, list(RECIPES), suite="tiny")
    return golden.load(folder)


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pack."""
    return Path(shutil.copytree(made, tmp_path / "pack"))
