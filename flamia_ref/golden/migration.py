"""Packs of earlier schema versions: what changed since, and bringing them up to this one.

A pack is brought up where all that this version asks of it is there: its files stay as they are, to
the bit, and the manifest says more. Its numerics version stays too: expected bits are not made anew.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flamia_ref._errors import line, shown
from flamia_ref.golden.canonical import parse, render, sha256
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import GRADIENTS
from flamia_ref.golden.files import read_plain
from flamia_ref.golden.manifest import FILE_NAME, MAX_BYTES, SCHEMA, SCHEMA_VERSION, Manifest
from flamia_ref.golden.pack import load
from flamia_ref.golden.replacing import require_free, write_whole

CHANGES = MappingProxyType(
    {
        2: "gradients and the stages of the backward in every case; stages follow from the recipe",
        3: (
            "cases may have keys of their own, an alignment, a window, a soft cap, a sink, padding of "
            "scales, fills and a twin; the axes of keys have names of their own"
        ),
    }
)
"""What each schema version brought."""

# Words of layouts by what version 2 had in their place.
_OLD_WORDS = (
    ("key_token_blocks", "token_blocks"),
    ("key_tokens", "tokens"),
    ("padding scale_padding", "padding 0"),
)


def migrate(folder: str | os.PathLike[str], target: str | os.PathLike[str]) -> Manifest:
    """Write a pack of an earlier schema version as one of this version, and return its manifest.

    The old pack is read as untrusted input, every digest is verified, and nothing of it is changed.
    `target` must not exist.

    Raises ValueError where the folder holds no pack, it is damaged, it has this version or a later
    one, or it lacks what this version asks for: the message says what.
    """
    source, path = Path(os.path.abspath(folder)), Path(os.path.abspath(target))
    try:
        document = _read(source)
        manifest = _raised(document, source)
        require_free(path, force=False)
        _write(source, path, manifest)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot migrate {source} to {path}: {reason}") from error
    return manifest


def changes(folder: str | os.PathLike[str]) -> dict[int, str]:
    """Return what each schema version after that of a pack brought, by version.

    Raises ValueError where the folder holds no pack of an earlier version, or its manifest is damaged.
    """
    version = _read(Path(os.path.abspath(folder)))["schema_version"]
    return {one: words for one, words in CHANGES.items() if one > version}


def _read(source: Path) -> dict[str, Any]:
    """Return the data of a manifest whose digest fits and whose version is an earlier one."""
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}; give that of the old pack")
    data = read_plain(source / FILE_NAME, limit=MAX_BYTES)
    try:
        document = parse(data.decode("ascii"), source=FILE_NAME)
    except ValueError as error:
        raise ValueError(f"{source}: {line(str(error))}") from error
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{source}: {FILE_NAME} is not the manifest of a {SCHEMA}")
    version = document.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(
            f"{source} has schema version {shown(version)}; this version of flamia-ref knows 1 to "
            f"{SCHEMA_VERSION}, use a newer one"
        )
    if version == SCHEMA_VERSION:
        raise ValueError(f"{source} has schema version {version} already; there is nothing to do")
    digest = document.pop("digest", None)
    if digest != sha256(render(document).encode("ascii")):
        raise ValueError(f"{source}: {FILE_NAME} was changed since it was written")
    return document


def _raised(document: dict[str, Any], source: Path) -> Manifest:
    version = document["schema_version"]
    since = "; ".join(f"{one}: {words}" for one, words in CHANGES.items() if one > version)
    try:
        _require_gradients(document)
        return Manifest.from_document(_with_defaults(document))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{source} has schema version {version} and cannot be brought to {SCHEMA_VERSION}: "
            f"{line(str(error))}; make the pack again. Since then ({since})"
        ) from error


def _require_gradients(document: Mapping[str, Any]) -> None:
    """Raise ValueError where a case has no gradients, which version 1 did not have."""
    for case in document["cases"]:
        missing = [name for name in GRADIENTS if name not in case["tensors"]]
        if missing:
            raise ValueError(f"case {shown(case['name'])} holds no {', '.join(missing)}")


def _with_defaults(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of version 2 in the words of this version: the fields that came later, layouts."""
    later = {one.name: one.default for one in fields(CaseSpec) if one.default is not MISSING} | {
        "plants": (),
        "flags": (),
    }
    cases = []
    for case in document["cases"]:
        unknown = set(case["spec"]) & (set(later) - {"plants", "flags"})
        if unknown:
            raise ValueError(
                f"case {shown(case['name'])} has {sorted(unknown)[0]}, which came later"
            )
        spec = {key: _plain(value) for key, value in later.items()} | case["spec"]
        tensors = {
            name: tensor | {"layout": _layout(name, tensor["layout"])}
            for name, tensor in case["tensors"].items()
        }
        cases.append(case | {"spec": spec, "tensors": tensors})
    return document | {"schema_version": SCHEMA_VERSION, "cases": cases}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _layout(name: str, layout: str) -> str:
    """Return the layout of a tensor in the words of this version."""
    new_words = [(old, new) for new, old in _OLD_WORDS]
    if not isinstance(layout, str):
        raise ValueError(f"the layout of {name} is {shown(layout)}")
    padding, blocks, tokens = new_words[2], new_words[0], new_words[1]
    layout = layout.replace(*padding)
    if "kv_heads" in layout and "tile" not in layout:
        layout = layout.replace(*blocks) if blocks[0] in layout else layout.replace(*tokens)
    return layout


def _write(source: Path, target: Path, manifest: Manifest) -> None:
    scratch = target.with_name(f".{target.name}.migrating")
    scratch.mkdir()
    try:
        for case in manifest.cases:
            write_whole(scratch / case.file, read_plain(source / case.file, limit=case.size))
        write_whole(scratch / FILE_NAME, manifest.to_json().encode("ascii"))
        for one in load(scratch):
            one.verify()  # no pack appears that is damaged
        scratch.rename(target)
    except ValueError as error:
        raise ValueError(line(str(error)).replace(str(scratch), str(source))) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
