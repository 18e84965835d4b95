"""Lazy exports."""

import importlib
import sys
from pathlib import Path

import pytest

from flamia_ref._lazy import attach

INIT = """
from flamia_ref._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__, {exports})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that imports a new package with some exports and two modules."""
    names = []

    def make(exports: dict[str, list[str]]):
        name = f"lazy_{tmp_path.name}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(INIT.format(exports=exports))
        (folder / "one.py").write_text("value = object()\nother = 1\n")
        (folder / "two.py").write_text("import missing_from_everywhere\nname = 2\n")
        monkeypatch.syspath_prepend(tmp_path)
        names.append(name)
        return importlib.import_module(name)

    yield make
    for loaded in [key for key in sys.modules if key.partition(".")[0] in names]:
        del sys.modules[loaded]


def test_a_module_is_imported_on_first_use(package) -> None:
    module = package({"one": ["value"], "two": ["name"]})
    assert f"{module.__name__}.one" not in sys.modules
    value = module.value
    assert value is sys.modules[f"{module.__name__}.one"].value
    assert vars(module)["value"] is value
    assert f"{module.__name__}.two" not in sys.modules


def test_a_module_can_be_an_export(package) -> None:
    module = package({"one": []})
    assert module.__all__ == ["one"]
    assert module.one is sys.modules[f"{module.__name__}.one"]


def test_exports_are_listed_before_they_are_loaded(package) -> None:
    module = package({"one": ["value", "other"], "two": ["name"]})
    assert module.__all__ == ["name", "other", "value"]
    assert {"name", "other", "value", "__name__"} <= set(dir(module))


def test_an_unknown_name_is_an_attribute_error(package) -> None:
    module = package({"one": ["value"]})
    with pytest.raises(AttributeError, match="has no attribute 'valeu'") as caught:
        module.valeu  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("valeu", module)
    assert not hasattr(module, "other")


def test_an_error_inside_a_module_is_not_hidden(package) -> None:
    module = package({"two": ["name"]})
    with pytest.raises(ModuleNotFoundError, match="missing_from_everywhere"):
        module.name  # noqa: B018


def test_a_name_of_two_modules_is_refused() -> None:
    with pytest.raises(ValueError, match="p exports 'a' twice"):
        attach("p", {"one": ["a"], "two": ["b", "a"]})


@pytest.mark.parametrize("exports", [{"a": ["a"]}, {"a": ["b"], "c": ["a"]}])
def test_a_name_that_a_module_would_hide_is_refused(exports: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="p exports 'a', which is also a module"):
        attach("p", exports)
