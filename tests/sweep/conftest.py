"""A tiny pack that was made in one piece, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.golden import making
from tests.golden.packs import TINY, spec

SEVERAL = (*TINY, spec(name="third", lengths=(9,), seed=3), spec(name="fourth", lengths=(1, 6)))


@pytest.fixture(scope="session", autouse=True)
def suites() -> Iterator[None]:
    """Suites of small cases: "small" of two, "several" of four."""
    with pytest.MonkeyPatch.context() as patch:
        registry = Registry("suite", [("small", TINY), ("several", SEVERAL)])
        patch.setattr(making, "SUITES", registry)
        yield


@pytest.fixture(scope="session")
def whole(suites: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of the suite "several". Nobody may change it."""
    folder = tmp_path_factory.mktemp("whole") / "pack"
    golden.make(folder, suite="several")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
