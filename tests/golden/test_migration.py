"""Packs that earlier versions wrote are brought up or refused, and are never changed.

data/schema-1 and data/schema-2 were written by those versions, of documents of 3, 0 and 2 tokens.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import golden
from flamia_ref.golden.migration import CHANGES
from flamia_ref.golden.simulator import numpy_kernel
from tests.golden.packs import flip, forge, offset

DATA = Path(__file__).parent / "data"
FILE = "old.flamia-mxfp8.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the pack of version 2."""
    return Path(shutil.copytree(DATA / "schema-2", tmp_path / "old"))


def refused(old: Path, tmp_path: Path, message: str) -> None:
    before = contents(old)
    with pytest.raises(ValueError, match=message) as caught:
        golden.migrate(old, tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert contents(old) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"old", "here"}


def test_version_2_is_brought_up(old: Path, tmp_path: Path) -> None:
    before = contents(old)
    with pytest.raises(ValueError, match=r"schema version 2.*flamia-ref golden migrate"):
        golden.load(old)
    manifest = golden.migrate(old, tmp_path / "new")
    assert contents(old) == before
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
    after = contents(tmp_path / "new")
    assert after[FILE] == before[FILE]
    pack = golden.load(tmp_path / "new")
    assert pack.manifest == manifest
    (case,) = pack
    was, is_now = (json.loads(one["manifest.json"]) for one in (before, after))
    assert (was["schema_version"], is_now["schema_version"]) == (2, 3)
    assert was["numerics_version"] == is_now["numerics_version"]
    assert was["recipes"] == is_now["recipes"]
    (one,), (other,) = was["cases"], is_now["cases"]
    assert set(other["spec"]) - set(one["spec"]) == {
        *(
            "fills",
            "key_lengths",
            "alignment",
            "window",
            "softcap",
            "sinks",
            "scale_padding",
            "twin",
        )
    }
    for name in one["tensors"]:
        assert one["tensors"][name]["sha256"] == other["tensors"][name]["sha256"]
    assert other["tensors"]["k.codes"]["layout"] == "row-major [key_tokens, kv_heads, head_dim]"
    assert (case.spec.alignment, case.spec.twin, case.spec.sinks) == ("bottom_right", None, ())


def test_what_was_brought_up_can_be_checked(old: Path, tmp_path: Path) -> None:
    golden.migrate(old, tmp_path / "new")
    report = golden.check(tmp_path / "new", numpy_kernel)
    assert report.passed, str(report)


def test_version_1_is_refused_for_what_it_lacks(tmp_path: Path) -> None:
    old = Path(shutil.copytree(DATA / "schema-1", tmp_path / "old"))
    refused(
        old,
        tmp_path,
        r"has schema version 1 and cannot be brought to 3: case 'old.flamia-mxfp8-folded' holds no dq, "
        r"dk, dv; make the pack again. Since then \(2: gradients",
    )


def test_every_version_says_what_it_changed() -> None:
    from flamia_ref.golden.manifest import SCHEMA_VERSION

    assert list(CHANGES) == list(range(2, SCHEMA_VERSION + 1))


def put(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(values)


def spec_of(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["cases"][0]["spec"].update(values)


def of_case(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["cases"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(schema_version=3), "has schema version 3 already; there is nothing to do"),
        (put(schema_version=4), "has schema version 4; this version of flamia-ref knows 1 to 3"),
        (put(schema_version=True), "has schema version True"),
        (put(schema_version=0), "has schema version 0"),
        (put(schema="something"), "is not the manifest of a flamia-ref golden pack"),
        (put(cases=None), "cannot be brought to 3: "),
        (put(cases=[]), "lists no case"),
        (put(cases=[1]), "cannot be brought to 3: "),
        (put(more=1), "has a field 'more', which is unknown"),
        (spec_of(window=None), "has window, which came later"),
        (spec_of(lengths=[1 << 40]), "every length must be 0 to"),
        (spec_of(heads="2"), "heads is '2'"),
        (of_case(file="../old.safetensors"), "in old.flamia-mxfp8.safetensors"),
        (of_case(tensors={}), "holds no dq, dk, dv"),
        (of_case(size=1 << 60), "bytes do not fit tensors"),
    ],
)
def test_a_forged_manifest_is_refused(
    old: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    forge(old, change)
    refused(old, tmp_path, message)


def test_a_layout_of_its_own_is_refused(old: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["cases"][0]["tensors"]["k"]["layout"] = "row-major [kv_heads, tokens, head_dim]"

    forge(old, change)
    refused(
        old, tmp_path, r"layout is 'row-major \[kv_heads, key_tokens, head_dim\]'; in this case"
    )


def test_a_damaged_manifest_is_refused(old: Path, tmp_path: Path) -> None:
    flip(old / "manifest.json", 200)
    refused(old, tmp_path, "manifest.json")


def test_a_damaged_file_is_refused(old: Path, tmp_path: Path) -> None:
    flip(old / FILE, offset(old / FILE, "k.codes"))
    refused(old, tmp_path, f"old/{FILE}.*was changed since it was written")


def test_a_link_is_not_followed(old: Path, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes((old / FILE).read_bytes())
    (old / FILE).unlink()
    (old / FILE).symlink_to(tmp_path / "here")
    refused(old, tmp_path, "is a symbolic link")


def test_no_pack(old: Path, tmp_path: Path) -> None:
    (old / "manifest.json").unlink()
    refused(old, tmp_path, "manifest.json")
    with pytest.raises(ValueError, match="there is no folder"):
        golden.migrate(tmp_path / "nothing", tmp_path / "new")


def test_nothing_is_overwritten(old: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    golden.migrate(old, target)
    before = contents(target)
    with pytest.raises(ValueError, match="exists"):
        golden.migrate(old, target)
    with pytest.raises(ValueError, match="exists"):
        golden.migrate(old, old)
    assert contents(target) == before
