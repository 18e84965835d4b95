"""Manifests that somebody changed, with a digest that fits: refused in a line, or read."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flamia_ref import golden
from flamia_ref.golden import canonical as canonical_json
from flamia_ref.golden.canonical import parse
from flamia_ref.golden.manifest import Manifest
from flamia_ref.golden.pack import read_manifest
from tests.golden.fuzz.mutations import ODD, TOKENS, documents, texts
from tests.golden.fuzz.refusals import ends_well, refused
from tests.golden.packs import canonical

few = settings(max_examples=50, suppress_health_check=list(HealthCheck))
many = settings(max_examples=1000, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny pack, the manifest of which is written anew for each example."""
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("fuzz") / "pack"))


@pytest.fixture(scope="module")
def original(made: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made / "manifest.json").read_text())
    del document["digest"]
    return document


def sealed(document: dict[str, Any]) -> str:
    """The canonical text with a digest that fits."""
    document = {key: value for key, value in document.items() if key != "digest"}
    digest = hashlib.sha256(canonical(document).encode()).hexdigest()
    return canonical(document | {"digest": digest})


def read_all(folder: Path) -> None:
    for case in golden.load(folder):
        case.verify()


def one_change(folder: Path, original: dict[str, Any], data: st.DataObject) -> None:
    document = data.draw(documents(original))
    (folder / "manifest.json").write_text(sealed(document))
    before = {path.name for path in folder.parent.rglob("*")}
    ends_well(lambda: read_all(folder))
    assert {path.name for path in folder.parent.rglob("*")} == before


@few
@given(data=st.data())
def test_changed_values(folder: Path, original: dict[str, Any], data: st.DataObject) -> None:
    one_change(folder, original, data)


@pytest.mark.nightly
@many
@given(data=st.data())
def test_many_changed_values(folder: Path, original: dict[str, Any], data: st.DataObject) -> None:
    one_change(folder, original, data)


@few
@given(data=st.data())
def test_changed_text(folder: Path, original: dict[str, Any], data: st.DataObject) -> None:
    text = data.draw(texts(original))
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "manifest.json" in refused(lambda: read_all(folder))


@few
@given(data=st.binary(max_size=200))
def test_any_bytes(folder: Path, data: bytes) -> None:
    (folder / "manifest.json").write_bytes(data)
    refused(lambda: read_all(folder))


@pytest.mark.parametrize("text", TOKENS, ids=lambda text: ascii(text[:20]))
def test_no_token_alone_is_a_manifest(text: str) -> None:
    refused(lambda: Manifest.from_json(text))
    refused(lambda: parse(f'{{"a": {text}}}\n', source="it"))


@pytest.mark.parametrize("key", ["suite", "recipes", "cases", "nan", "schema_version", "schema"])
@pytest.mark.parametrize("value", ODD, ids=lambda value: ascii(str(value)[:20]))
def test_each_odd_value_at_the_top(
    original: dict[str, Any], folder: Path, key: str, value: Any
) -> None:
    if key == "suite" and value == "all":
        return  # a name that a suite may have
    (folder / "manifest.json").write_text(sealed(original | {key: value}))
    refused(lambda: read_manifest(folder))


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@few
@given(document=st.dictionaries(st.text(), json_data, max_size=4))
def test_long_canonical_texts_are_read_like_short_ones(document: dict[str, Any]) -> None:
    """The look at the lines of a long text lets every canonical text pass, and none of several values a line."""
    text = canonical(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical_json, "_LONG", 1 << 60)
        short = ends_well(lambda: parse(text, source="it"))
        patch.setattr(canonical_json, "_LONG", 0)
        patch.setattr(canonical_json, "_SHORTEST_LINE", 1)
        assert ends_well(lambda: parse(text, source="it")) == short
        compact = json.dumps(document) + "\n"
        if compact != text:
            assert "its form is not canonical" in refused(lambda: parse(compact, source="it"))
