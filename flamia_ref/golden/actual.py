"""What a kernel gave: from files, from a callable, or from arrays in hand."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref import kernels
from flamia_ref._errors import line, shown, unknown_name
from flamia_ref.golden import calls
from flamia_ref.golden.arrays import to_host
from flamia_ref.golden.dataflow import OUTPUTS
from flamia_ref.golden.files import Stored, read_plain, tensors_from_bytes
from flamia_ref.golden.pack import Case, Pack
from flamia_ref.golden.stage import View

Given = Mapping[str, Stored]  # the tensors of one case by name
# None: nothing was given for the case. Raises kernels.Unsupported where the kernel takes no such case.
Source = Callable[[Case], Given | None]

# A file may hold float32 where the pack holds bfloat16 bits, and a longer header.
_LARGER, _HEADER_BYTES = 4, 1 << 20

_LISTED = 12  # names in a note

# Names of numpy's types, and of those of ml_dtypes, in safetensors; narrow floats are kept as bits.
_NAMES = {
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float4_e2m1fn": "F4_E2M1",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What there is to compare: the cases, where the results of each come from, and in whose name.

    `notes` say what was given beside that and is not compared. `owed` are the outputs that must be
    there. `handed` returns the stages whose bits in the pack the kernel was given: a fault does not lie
    in them.
    """

    subject: str
    cases: list[Case]
    source: Source
    notes: tuple[str, ...] = ()
    owed: tuple[str, ...] = OUTPUTS
    handed: Callable[[Case], frozenset[str]] = lambda _: frozenset()


def from_path(cases: Mapping[str, Case], path: Path) -> Results:
    """Return the results in a folder, or in one file.

    Raises ValueError where there is nothing to compare, the files are those of the pack itself, or
    the path cannot be read.
    """
    notes: tuple[str, ...] = ()
    try:
        if path.is_dir():
            files = {name: path / f"{name}.safetensors" for name in cases}
            present = {name: file for name, file in files.items() if os.path.lexists(file)}
            if not present:
                raise ValueError(
                    f"{path} holds no results of this pack; name the files CASE.safetensors, the "
                    f"first case is {next(iter(cases))}"
                )
            chosen = list(cases.values())
            found = {one for one in os.listdir(path) if one.endswith(".safetensors")}
            notes = _unknown(found - {file.name for file in files.values()}, f"files in {path}")
        elif os.path.lexists(path):
            name = path.name.removesuffix(".safetensors")
            if name not in cases and len(cases) > 1:
                raise ValueError(
                    f"{path} is named after no case of the pack; name it CASE.safetensors, for "
                    f"example {next(iter(cases))}.safetensors"
                )
            case = cases[name] if name in cases else next(iter(cases.values()))
            chosen, present = [case], {case.name: path}
        else:
            raise ValueError(f"there is no file or folder {path}")
        for name, file in present.items():
            if file.exists() and file.samefile(cases[name].path):
                raise ValueError(f"{file} is the pack's own file; give the results of a kernel")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error

    def source(case: Case) -> Given | None:
        if case.name not in present:
            return None
        file = present[case.name]
        limit = _HEADER_BYTES + _LARGER * sum(place.nbytes for place in case.places.values())
        return tensors_from_bytes(read_plain(file, limit=limit, follow=True), source=str(file))

    return Results(subject=str(path), cases=chosen, source=source, notes=notes)


def from_kernel(cases: Mapping[str, Case], kernel: kernels.Kernel | object) -> Results:
    """Return the results of a kernel, whole or in stages, which is called on the inputs of each case."""
    in_stages = kernels.staged(kernel)
    if in_stages is not None:
        return Results(
            subject=in_stages.name,
            cases=list(cases.values()),
            source=lambda case: stored(calls.by_stages(case, in_stages), case),
            owed=OUTPUTS if in_stages.forward is not None else (),
            handed=lambda case: calls.handed(case, in_stages),
        )
    if not callable(kernel):
        raise TypeError(f"the kernel is {shown(kernel)}, which cannot be called and has no stages")
    return Results(
        subject=kernels.name_of(kernel),
        cases=list(cases.values()),
        source=lambda case: stored(calls.whole(case, kernel), case),
    )


def from_arrays(cases: Mapping[str, Case], results: Mapping[str, Mapping[str, Any]]) -> Results:
    """Return results in hand: of each case, by its name, a dict like a kernel's.

    Raises ValueError where there are none of these cases, and, later, where an array is one of the
    pack's own.
    """
    if not any(name in cases for name in results):
        raise unknown_name("case", next(iter(results), None), cases)

    def source(case: Case) -> Given | None:
        if case.name not in results:
            return None
        given = stored(results[case.name], case)
        for name, tensor in given.items():
            own = case.tensors.get(name)
            if own is not None and np.shares_memory(own, tensor.array):
                raise ValueError(f"{name} of {case} is the pack's own array; give a kernel's")
        return given

    return Results(
        subject="the given arrays",
        cases=list(cases.values()),
        source=source,
        notes=_unknown({str(name) for name in results if name not in cases}, "results"),
    )


def _unknown(names: set[str], what: str) -> tuple[str, ...]:
    """Return the note on names that are none of a case."""
    if not names:
        return ()
    listed = ", ".join(shown(name) for name in sorted(names)[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (f"{what} that belong to no case here: {listed}{more}",)


def stored(results: Any, case: Case) -> dict[str, Stored]:
    """Return what a kernel returned as tensors with the names of the pack.

    Raises ValueError where a stage that is a list has not an array for each document, and where a
    tensor is there twice; TypeError for what is no dict of arrays.
    """
    if not isinstance(results, Mapping) or not all(isinstance(name, str) for name in results):
        raise TypeError(
            f"the results of {case} are {shown(type(results).__name__)}; give a dict of arrays by "
            "name"
        )
    tensors: dict[str, Stored] = {}
    for stage, value in results.items():
        for name, item in _by_document(stage, value, case):
            if name in tensors:
                raise ValueError(
                    f"{name} of {case} is given twice; give a list or one array a document"
                )
            tensors[name] = _array(item, name, case)
    return tensors


def _by_document(name: str, value: Any, case: Case) -> list[tuple[str, Any]]:
    """Return a result under the name, or the names, that it has in the pack."""
    stages = case.recipe.dataflow.stages
    if name not in stages or not stages[name].per_document:
        return [(name, value)]
    documents = len(case.spec.lengths)
    if not isinstance(value, list | tuple) or len(value) != documents:
        raise ValueError(f"{name} of {case} must be a list of {documents} arrays, one a document")
    return [(f"{name}.{document}", item) for document, item in enumerate(value)]


def _array(value: Any, name: str, case: Case) -> Stored:
    what = f"{line(name)} of {case}"
    with kernels.guarded(f"{what} is no array", TypeError):
        array = to_host(value)
    if array.dtype == object:
        raise TypeError(f"{what} is {shown(type(value).__name__)}, which is no array")
    one = stored_array(array)
    dtype = one.dtype
    if dtype == "F8_E4M3" and name in case.places:
        # Libraries keep scales without a sign in the type that has one.
        dtype = "U8" if case.places[name].stage.view is View.F8_UE4M3 else dtype
    return Stored(dtype=dtype, array=one.array)


def stored_array(array: np.ndarray[Any, Any]) -> Stored:
    """Return an array as a file would hold it: by safetensors' name of its dtype, narrow floats as their bits."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    dtype = _NAMES.get(array.dtype.name, array.dtype.name)
    if dtype in ("BF16", "F4_E2M1", "F8_E4M3", "F8_E8M0"):
        array = array.view(np.uint16 if dtype == "BF16" else np.uint8)
    return Stored(dtype=dtype, array=array)


def cases_of(pack: Pack | Case) -> dict[str, Case]:
    """Return the cases of a pack, or the one given, by name."""
    return {pack.name: pack} if isinstance(pack, Case) else dict(pack.cases)
