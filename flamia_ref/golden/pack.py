"""Packs on disk, read as untrusted input: sizes, digests and shapes are checked before use."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes

from flamia_ref._errors import Registry, unknown_name
from flamia_ref.golden.case_file import CaseFile
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.files import Tensor, read_plain
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.manifest import FILE_NAME, MAX_BYTES, CaseEntry, Manifest
from flamia_ref.golden.recipes import RecipeEntry
from flamia_ref.golden.shards import SHARD_FILE_NAME
from flamia_ref.golden.stage import Place


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One case of a pack. Each of its tensors is read, and its digest checked, when it is used.

    `tensors` maps names to read-only arrays of the stored types, in dataflow order: bfloat16 and
    8-bit codes and scales are unsigned integers. `str(case)` is its name, so a case is an id in
    pytest.
    """

    folder: Path
    entry: CaseEntry
    recipe: RecipeEntry
    numerics_version: int

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in another process too, reads and verifies the file itself.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __repr__(self) -> str:
        return f"Case({self.name!r})"

    def __str__(self) -> str:
        return self.entry.name

    @property
    def name(self) -> str:
        """The name in the pack: that of the data, a dot, that of the recipe."""
        return self.entry.name

    @property
    def spec(self) -> CaseSpec:
        """The data of the case: lengths, heads, why it exists."""
        return self.entry.spec

    @property
    def path(self) -> Path:
        """The file with the tensors."""
        return self.folder / self.entry.file

    @cached_property
    def places(self) -> Mapping[str, Place]:
        """What each tensor of this case is, in dataflow order."""
        known = self.recipe.dataflow.places(self.spec)
        return Registry("tensor", ((name, known[name]) for name in self.entry.tensors))

    @cached_property
    def tensors(self) -> CaseFile:
        """All tensors by name, each read when it is looked up.

        Raises ValueError, now or at a look-up, where the file is not what the manifest says.
        """
        return CaseFile(self.path, self.entry)

    def verify(self) -> None:
        """Read the whole file and check all digests, in memory that does not grow with the file.

        Raises ValueError where the file is not what the manifest says.
        """
        self.tensors.verify()

    def inputs(self) -> dict[str, Tensor]:
        """Return copies of q, k, v and dout in bfloat16, and of cu_seqlens in int32."""
        made = {name: self.tensors[name].copy().view(ml_dtypes.bfloat16) for name in TENSORS}
        return made | {"cu_seqlens": self.tensors["cu_seqlens"].copy()}


@dataclass(frozen=True, kw_only=True, repr=False)
class Pack:
    """A golden pack: a collection of cases, and each of them by its name."""

    folder: Path
    manifest: Manifest
    cases: Mapping[str, Case] = field(hash=False)

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases.values())

    def __len__(self) -> int:
        return len(self.cases)

    def __contains__(self, case: object) -> bool:
        return isinstance(case, Case) and self.cases.get(case.name) == case

    def __repr__(self) -> str:
        return f"Pack({str(self.folder)!r}, {len(self)} cases)"

    def __getitem__(self, name: str) -> Case:
        """Return the case of a name. The recipe may be left out where that leaves one case.

        Raises ValueError (and KeyError) where there is none.
        """
        if name in self.cases:
            return self.cases[name]
        alike = [case for case in self if case.spec.name == name]
        if len(alike) != 1:
            short = dict.fromkeys(case.spec.name for case in self)
            raise unknown_name("case", name, [*self.cases, *short])
        return alike[0]


def load(folder: str | os.PathLike[str]) -> Pack:
    """Open a pack. The manifest and the sizes of all files are checked now, digests at use.

    `Case.verify` checks the digests of a case before any use.

    Raises ValueError where the folder holds no pack, or a file is missing, is of another size, or
    is a symbolic link.
    """
    root = Path(os.path.abspath(folder))
    try:
        manifest = read_manifest(root)
        for entry in manifest.cases:
            _check_size(root / entry.file, entry)
    except OSError as error:
        raise ValueError(f"cannot read {root}: {error.strerror or error}") from error
    cases = [
        Case(
            folder=root,
            entry=entry,
            recipe=manifest.recipes[entry.recipe],
            numerics_version=manifest.numerics_version,
        )
        for entry in manifest.cases
    ]
    return Pack(
        folder=root,
        manifest=manifest,
        cases=Registry("case", ((case.name, case) for case in cases)),
    )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a pack.

    Raises ValueError where there is none, or it is damaged, and OSError where the disk refuses.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; make a pack with `flamia-ref golden make`")
    path = folder / FILE_NAME
    try:
        path.lstat()
    except FileNotFoundError:
        if (folder / SHARD_FILE_NAME).is_file():
            raise ValueError(
                f"{folder} is a shard of a pack; join all shards with `flamia-ref golden merge`"
            ) from None
        raise ValueError(f"{folder} is no golden pack: it has no {FILE_NAME}") from None
    data = read_plain(path, limit=MAX_BYTES)
    try:
        return Manifest.from_json(data.decode("ascii"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not ASCII; it was changed") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _check_size(path: Path, entry: CaseEntry) -> None:
    if path.is_symlink() or not path.is_file():
        state = "is a symbolic link" if path.is_symlink() else "is missing"
        raise ValueError(f"{path} {state}; the manifest lists it with {entry.size} bytes")
    size = path.stat().st_size
    if size != entry.size:
        raise ValueError(f"{path} has {size} bytes; the manifest says {entry.size}")
