"""Checking a kernel against a pack, in the order of the dataflow, bit for bit."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.golden.actual import Given, Results, cases_of, from_arrays, from_kernel, from_path
from flamia_ref.golden.bitwise import Aligned, align
from flamia_ref.golden.dataflow import OUTPUTS, visible_pairs
from flamia_ref.golden.diagnosis import difference
from flamia_ref.golden.pack import Case, Pack, load
from flamia_ref.golden.recipes import provenance
from flamia_ref.golden.stage import Role
from flamia_ref.report.model import CaseResult, Report, Status, TensorResult

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the name of the next one
_FORWARD_ONLY = "forward only: nothing of the backward was given"

Actual = str | os.PathLike[str] | Callable[..., Any] | Mapping[str, Mapping[str, Any]] | Pack | Case


def check(
    pack: Pack | Case | str | os.PathLike[str], actual: Actual, *, progress: Progress | None = None
) -> Report:
    """Compare what a kernel gives with a pack, or with one case of it.

    `pack` is a pack, one case, or the folder of a pack. `actual` is a kernel (see
    `flamia_ref.kernels`), a folder of ``CASE.safetensors``, one such file, or a mapping of case
    names to dicts like those that kernels return. Every tensor that is given is compared, in the
    order of the dataflow. A case passes where all of them are equal bit for bit and out and lse are
    among them; nothing else passes. A kernel need not have a backward: the report says where nothing
    of it, or not all of it, was given.

    Raises ValueError or TypeError for a damaged pack, for results without any stage or output, for
    results that are the pack itself, and where the kernel fails.
    """
    if not isinstance(pack, Pack | Case):
        pack = load(pack)
    cases = cases_of(pack)
    results = _results(cases, actual)
    for case in results.cases:
        case.tensors  # noqa: B018  read and verified: a kernel may run for hours
    compared = []
    for done, case in enumerate(results.cases):
        if progress is not None:
            progress(done, len(results.cases), case.name)
        compared.append(_case(case, results.source(case)))
    skipped = [name for name in cases if name not in {case.name for case in results.cases}]
    left_out = (f"cases not compared: {', '.join(skipped)}",) if skipped else ()
    recipes = {case.entry.recipe: case.recipe for case in results.cases}
    numerics_version = results.cases[0].numerics_version
    return Report(
        pack=str(pack.folder),
        subject=results.subject,
        numerics_version=numerics_version,
        evidence={name: str(recipe.evidence) for name, recipe in recipes.items()},
        cases=tuple(compared),
        notes=(*left_out, *results.notes, *provenance(numerics_version, recipes)),
    )


def _results(cases: Mapping[str, Case], actual: Actual) -> Results:
    if isinstance(actual, Pack):
        actual = actual.folder
    elif isinstance(actual, Case):
        actual = actual.path
    if isinstance(actual, str | os.PathLike):
        return from_path(cases, Path(actual))
    if isinstance(actual, Mapping):
        return from_arrays(cases, actual)
    if callable(actual):
        return from_kernel(cases, actual)
    raise TypeError(
        f"actual is {shown(type(actual).__name__)}; give a kernel, a path, or a mapping of cases"
    )


def _case(case: Case, given: Given | None) -> CaseResult:
    if given is None:
        return CaseResult(name=case.name, status=Status.MISSING, note="no results were given")
    known = (case.places[name].stage for name in given if name in case.places)
    if all(stage.role is Role.INPUT for stage in known):
        raise ValueError(
            f"the results of {case} hold no stage and no output, but {shown(sorted(given))}; give "
            f"at least {' and '.join(OUTPUTS)}"
        )
    # Any bits may come, and a kernel may have told numpy to raise on them.
    with np.errstate(all="ignore"):
        return _compared(case, given)


def _compared(case: Case, given: Given) -> CaseResult:
    aligned: dict[str, Aligned] = {}
    failed: dict[str, TensorResult] = {}
    for name, place in case.places.items():
        if name in given:
            match align(place, case.tensors[name], given[name]):
                case Aligned() as one:
                    aligned[name] = one
                case (status, note):
                    failed[name] = TensorResult(
                        name=name, stage=place.stage.name, status=status, note=note
                    )
    results = [
        failed[name] if name in failed else _tensor(case, name, aligned)
        for name in case.places
        if name in given
    ]
    departed = next((one for one in results if one.status is not Status.PASS), None)
    results += [_unknown(name, case) for name in sorted(set(given) - set(case.places))]
    results += [
        TensorResult(name=name, stage=name, status=Status.MISSING, note="every kernel gives it")
        for name in OUTPUTS
        if name not in given
    ]
    return CaseResult(
        name=case.name,
        status=next((one.status for one in results if one.status is not Status.PASS), Status.PASS),
        tensors=tuple(results),
        not_given=_not_given(case, given),
        departs=None if departed is None else departed.stage,
        suspects=()
        if departed is None
        else case.recipe.dataflow.suspects(departed.stage, _whole(case, given)),
        note="" if _has_backward(case, given) else _FORWARD_ONLY,
    )


def _whole(case: Case, given: Given) -> frozenset[str]:
    """Return the stages all tensors of which were given. Tiled scales stand for the scales."""
    missing = {place.stage for name, place in case.places.items() if name not in given}
    whole = {place.stage for place in case.places.values()} - missing
    return frozenset({stage.parents[0] if stage.tiled else stage.name for stage in whole})


def _has_backward(case: Case, given: Given) -> bool:
    """Return whether anything of the backward was given."""
    return any(name in case.places and case.places[name].stage.backward for name in given)


def _not_given(case: Case, given: Given) -> tuple[str, ...]:
    """Return the stages that were not given, by the names of their tensors where some were.

    Not out and lse, which every kernel gives, nor tiled scales, which are another form of a stage,
    nor the backward where nothing of it was given.
    """
    some = {case.places[name].stage.name for name in given if name in case.places}
    backward = _has_backward(case, given)
    left = []
    for name, place in case.places.items():
        stage = place.stage
        expected = backward if stage.backward else stage.role is Role.STAGE
        if name not in given and expected and not stage.tiled:
            left.append(name if stage.name in some else stage.name)
    return tuple(dict.fromkeys(left))


def _tensor(case: Case, name: str, aligned: Mapping[str, Aligned]) -> TensorResult:
    place, one = case.places[name], aligned[name]
    differs = one.differs()
    if place.stage.masked_optional:
        differs &= visible_pairs(case.spec, place) | ~one.skipped()
    count = int(np.count_nonzero(differs))
    if count == 0:
        return TensorResult(
            name=name, stage=place.stage.name, status=Status.PASS, elements=differs.size
        )
    steps, distance = one.largest(differs)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differs)), differs.shape))
    masked = place.stage.masked_optional and not visible_pairs(case.spec, place)[index[-2:]]
    return TensorResult(
        name=name,
        stage=place.stage.name,
        status=Status.BIT_MISMATCH,
        elements=differs.size,
        differing=count,
        largest_steps=steps,
        largest=distance,
        first=difference(case, name, index, aligned),
        note="in a masked pair, where 0, -inf or NaN would do too" if masked else "",
    )


def _unknown(name: str, case: Case) -> TensorResult:
    error = unknown_name("tensor", name, case.places)
    return TensorResult(name=name, stage=name, status=Status.UNKNOWN, note=str(error))
