"""Checking a kernel against a pack, in the order of the dataflow."""

import dataclasses
import os
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref import kernels
from flamia_ref._errors import shown, unknown_name
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.golden import spread, twins, verdicts
from flamia_ref.golden.actual import Given, Results, cases_of, from_arrays, from_kernel, from_path
from flamia_ref.golden.bitwise import Aligned, align
from flamia_ref.golden.calls import has_backward
from flamia_ref.golden.dataflow import OUTPUTS, is_gradient, visible_pairs
from flamia_ref.golden.diagnosis import difference
from flamia_ref.golden.expectations import chosen
from flamia_ref.golden.explanation import lineage
from flamia_ref.golden.lineage import distance
from flamia_ref.golden.mistakes import diagnose as named_mistakes
from flamia_ref.golden.pack import Case, Pack, load
from flamia_ref.golden.recipes import provenance
from flamia_ref.golden.stage import Role, View
from flamia_ref.golden.verdicts import Verdict
from flamia_ref.kernels import KernelFailed, Unsupported
from flamia_ref.report.model import CaseResult, Diagnosis, Difference, Report, Status, TensorResult

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the name of the next one
_FORWARD_ONLY = "forward only: nothing of the backward was given"
_NO_BACKWARD = "forward alone: this recipe has no backward"
_SMOOTHED = (
    "lse not given: this recipe's is that of the smoothed scores, which a kernel need not return"
)
_FLOATS = (View.F32, View.BF16)

Actual = str | os.PathLike[str] | Callable[..., Any] | Mapping[str, Mapping[str, Any]] | Pack | Case


def check(
    pack: Pack | Case | str | os.PathLike[str],
    actual: Actual,
    *,
    cases: Sequence[str] | None = None,
    repeats: int = 1,
    diagnose: bool = True,
    instruction: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare what a kernel gives with a pack, or with one case of it.

    `pack` is a pack, one case, or the folder of a pack. `actual` is a kernel (see
    `flamia_ref.kernels`), a folder of ``CASE.safetensors``, one such file, or a mapping of case
    names to dicts like those that kernels return. Every tensor that is given is compared, in the
    order of the dataflow: operands bit for bit, and what a recipe leaves an order of additions open in
    by its envelope (`flamia_ref.golden.envelope`), given the stages before it. A case passes where all
    of them do and out and lse are among them; nothing else passes. A kernel need not have a backward:
    the report says where nothing of it, or not all of it, was given. Where the recipe has none, the report
    says so, and gradients that a kernel gives all the same are named there and not compared. Of a recipe that
    smooths the keys lse need not be given: its lse is that of the smoothed scores, which its kernels do not return.

    `cases` are names or patterns such as "poison.*", all by default. `repeats`: how often a kernel is
    called on each case; results that differ are no results. `diagnose`: whether known mistakes are tried
    on cases that fail. `instruction`: the one in `flamia_ref.arithmetic.INSTRUCTIONS` that adds the
    products of this kernel instead of those of the recipe, where its device has not these; envelopes are
    then those of that instruction, and nothing else changes.

    Raises ValueError or TypeError for a damaged pack, for results without any stage or output, for
    results that are the pack itself, for patterns that no case has, and where the kernel fails on every
    case.
    """
    if not isinstance(pack, Pack | Case):
        pack = load(pack)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats is {shown(repeats)}; it must be a whole number from 1 up")
    if instruction is not None:
        INSTRUCTIONS[instruction]  # an unknown one is refused here
    known = cases_of(pack)
    if cases is not None:
        known = {case.name: case for case in chosen(known.values(), cases)}
    results = _results(known, actual)
    for case in results.cases:
        case.verify()  # a kernel may run for hours
    compared = []
    kept: dict[str, Given] = {}
    failures: list[KernelFailed] = []
    for done, case in enumerate(results.cases):
        if progress is not None:
            progress(done, len(results.cases), case.name)
        try:
            found, given = _case(
                case, results, repeats=repeats, diagnose=diagnose, instruction=instruction
            )
        except KernelFailed as error:  # the other cases are compared all the same
            failures.append(error)
            given, note = None, str(error)
            found = CaseResult(
                name=case.name,
                status=Status.FAILED,
                why=case.spec.why,
                flags=case.spec.flags,
                note=note,
            )
        compared.append(_with_command(found, pack, results.subject, instruction))
        if given is not None:
            kept[case.name] = _outputs(case, given)
    if failures and not any(one.status is not Status.FAILED for one in compared):
        raise failures[0]
    compared = _with_leaks(results.cases, compared, kept)
    skipped = [name for name in known if name not in {case.name for case in results.cases}]
    left_out = (f"cases not compared: {', '.join(skipped)}",) if skipped else ()
    by_instruction = (
        ()
        if instruction is None
        else (f"products are judged as {instruction} adds them, not as the recipe says",)
    )
    recipes = {case.entry.recipe: case.recipe for case in results.cases}
    numerics_version = results.cases[0].numerics_version
    return Report(
        pack=str(pack.folder),
        subject=results.subject,
        numerics_version=numerics_version,
        evidence={name: str(recipe.evidence) for name, recipe in recipes.items()},
        environment={"python": platform.python_version(), "numpy": np.__version__},
        cases=tuple(compared),
        notes=(
            *left_out,
            *results.notes,
            *by_instruction,
            *_without_backward(results.cases),
            *provenance(numerics_version, recipes),
        ),
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
    if callable(actual) or kernels.staged(actual) is not None:
        return from_kernel(cases, actual)
    raise TypeError(
        f"actual is {shown(type(actual).__name__)}; give a kernel, a path, or a mapping of cases"
    )


def _case(
    case: Case, results: Results, *, repeats: int, diagnose: bool, instruction: str | None
) -> tuple[CaseResult, Given | None]:
    known: dict[str, Any] = {"why": case.spec.why, "flags": case.spec.flags}
    try:
        given = results.source(case)
    except Unsupported as refusal:
        note = refusal.note
        return CaseResult(name=case.name, status=Status.SKIPPED, note=note, **known), None
    if given is None:
        note = "no results were given"
        return CaseResult(name=case.name, status=Status.MISSING, note=note, **known), None
    stages = (case.places[name].stage for name in given if name in case.places)
    if all(stage.role is Role.INPUT for stage in stages):
        raise ValueError(
            f"the results of {case} hold no stage and no output, but {shown(sorted(given))}; give "
            f"at least {' and '.join(OUTPUTS)}"
        )
    unsteady: dict[str, int] = {}
    for _ in range(repeats - 1):
        for name, count in _unequal(given, results.source(case)).items():
            unsteady[name] = max(unsteady.get(name, 0), count)
    # Any bits may come, and a kernel may have told numpy to raise on them.
    with np.errstate(all="ignore"):
        return _compared(
            case, given, results, unsteady, diagnose=diagnose, instruction=instruction, **known
        ), given


def _compared(
    case: Case,
    given: Given,
    results: Results,
    unsteady: Mapping[str, int],
    *,
    diagnose: bool,
    instruction: str | None,
    **known: Any,
) -> CaseResult:
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
    handed = results.handed(case)
    judged = verdicts.judge(case, aligned, handed, instruction=instruction)
    compared = [
        failed[name] if name in failed else _tensor(case, name, aligned, judged[name])
        for name in case.places
        if name in given
    ]
    departed = next((one for one in compared if one.status is not Status.PASS), None)
    unknown = sorted(set(given) - set(case.places))
    compared += [_unknown(name, case) for name in unknown if not _beside(name, case)]
    left = [name for name in results.owed if name not in given]
    compared += [
        TensorResult(name=name, stage=name, status=Status.MISSING, note="every kernel gives it")
        for name in left
        if not _of_smoothed(name, case)
    ]
    compared += [
        _unsteady(case, name, count) for name, count in unsteady.items() if not _beside(name, case)
    ]
    whole = _whole(case, given) | handed
    diagnoses: tuple[Diagnosis, ...] = ()
    if diagnose and departed is not None and departed.name in aligned:
        diagnoses = _diagnoses(case, aligned, judged, departed.name)
    return CaseResult(
        name=case.name,
        status=_first_status(compared),
        tensors=tuple(compared),
        not_given=_not_given(case, given),
        departs=None if departed is None else departed.stage,
        suspects=() if departed is None else case.recipe.dataflow.suspects(departed.stage, whole),
        consistent=_consistent(case, aligned, judged, instruction),
        diagnoses=diagnoses,
        note="; ".join(_notes(case, given, unknown, left)),
        **known,
    )


def _diagnoses(
    case: Case, aligned: Mapping[str, Aligned], judged: Mapping[str, Verdict], first: str
) -> tuple[Diagnosis, ...]:
    """The known mistakes that explain what departs first; where that is an output, another output may say it."""
    asked = [first]
    if case.places[first].stage.role is Role.OUTPUT:
        later = [
            name
            for name, verdict in judged.items()
            if name != first
            and case.places[name].stage.role is Role.OUTPUT
            and verdict.failing.any()
        ]
        asked += later[:2]
    for name in asked:
        found = named_mistakes(case, aligned, name, failing=judged[name].failing)
        if found:
            return found
    return ()


def _first_status(tensors: Sequence[TensorResult]) -> Status:
    return next((one.status for one in tensors if one.status is not Status.PASS), Status.PASS)


def _consistent(
    case: Case,
    aligned: Mapping[str, Aligned],
    judged: Mapping[str, Verdict],
    instruction: str | None,
) -> bool | None:
    """Whether the outputs are permitted whatever lies between; None where every bit is equal, or nobody can say."""
    if not any(verdict.failing.any() or verdict.inside.any() for verdict in judged.values()):
        return None
    if any(verdict.note for verdict in judged.values()):
        return None  # the recipe has no envelope
    if not any(verdict.failing.any() for verdict in judged.values()):
        return True  # its own stages are such a way
    outputs = [name for name in judged if case.places[name].stage.role is Role.OUTPUT]
    between = any(case.places[name].stage.role is Role.STAGE for name in judged)
    if not between:
        return not any(judged[name].failing.any() for name in outputs)
    return verdicts.consistent(case, aligned, instruction=instruction)


def _unequal(given: Given, again: Given | None) -> dict[str, int]:
    """How many bytes of each tensor differ between two calls."""
    if again is None or set(given) != set(again):
        return dict.fromkeys(set(given) ^ set(again or {}), 0)
    counts = {}
    for name, one in given.items():
        other = again[name]
        first, second = one.array.tobytes(), other.array.tobytes()
        if one.array.shape != other.array.shape:
            counts[name] = 0
        elif first != second:
            left, right = (np.frombuffer(x, np.uint8) for x in (first, second))
            counts[name] = int(np.count_nonzero(left != right))
    return counts


def _unsteady(case: Case, name: str, count: int) -> TensorResult:
    stage = case.places[name].stage.name if name in case.places else name
    what = f"{count} bytes" if count else "the shape, or whether it was given,"
    return TensorResult(
        name=name,
        stage=stage,
        status=Status.NONDETERMINISTIC,
        note=f"two calls on the same inputs: {what} differ",
    )


def _outputs(case: Case, given: Given) -> Given:
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: given[name] for name in names if name in given and not _beside(name, case)}


def _with_leaks(
    cases: Sequence[Case], compared: Sequence[CaseResult], kept: Mapping[str, Given]
) -> list[CaseResult]:
    """The results with the leaks that twins show, where the recipe itself has none there."""
    by_data = {(case.spec.name, case.entry.recipe): case for case in cases}
    found = []
    for case, result in zip(cases, compared, strict=True):
        twin = case.spec.twin
        other = None if twin is None else by_data.get((twin.case, case.entry.recipe))
        if other is None or case.name not in kept or other.name not in kept:
            found.append(result)
            continue
        own = {leak.tensor for leak in twins.leaks(case.tensors, other.tensors, case.spec)}
        leaks = [
            leak
            for leak in twins.leaks(*_alike(kept[case.name], kept[other.name]), case.spec)
            if leak.tensor not in own
        ]
        tensors = tuple(
            TensorResult(name=leak.tensor, stage=leak.tensor, status=Status.LEAK, note=str(leak))
            for leak in leaks
        )
        if tensors:
            everything = (*result.tensors, *tensors)
            status = result.status if result.failed else _first_status(everything)
            result = dataclasses.replace(result, tensors=everything, status=status)
        found.append(result)
    return found


def _alike(first: Given, second: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those results of two cases that can be compared. What is wrong with the others is said elsewhere."""
    names = [
        name
        for name, one in first.items()
        if name in second
        and one.dtype == second[name].dtype
        and one.array.shape == second[name].array.shape
        and one.array.dtype.itemsize in (2, 4)
    ]
    return tuple({name: x[name].array for name in names} for x in (first, second))  # type: ignore[return-value]


def _with_command(
    result: CaseResult, pack: Pack | Case, subject: str, instruction: str | None
) -> CaseResult:
    """The result with the line that repeats its case."""
    how = "--kernel" if ":" in subject and not os.path.exists(subject) else "--actual"
    if subject == "the given arrays":
        return result
    words = ["flamia-ref", "golden", "check", str(pack.folder), how, subject, "--case", result.name]
    words += [] if instruction is None else ["--instruction", instruction]
    return dataclasses.replace(result, command=shlex.join(words))


def _whole(case: Case, given: Given) -> frozenset[str]:
    """Return the stages all tensors of which were given. Tiled scales stand for the scales."""
    missing = {place.stage for name, place in case.places.items() if name not in given}
    whole = {place.stage for place in case.places.values()} - missing
    return frozenset({stage.parents[0] if stage.tiled else stage.name for stage in whole})


def _has_backward(case: Case, given: Given) -> bool:
    """Return whether anything of the backward was given."""
    return any(name in case.places and case.places[name].stage.backward for name in given)


def _beside(name: str, case: Case) -> bool:
    """Whether a result is a gradient beside a recipe that has none: there is nothing to compare it with."""
    return is_gradient(name) and not has_backward(case)


def _of_smoothed(name: str, case: Case) -> bool:
    """Whether an output is the lse of smoothed scores, which a kernel need not give."""
    return name == "lse" and case.recipe.lse_of_smoothed_scores


def _notes(case: Case, given: Given, unknown: Sequence[str], left: Sequence[str]) -> Iterator[str]:
    """What there is to say of what a case passes without. `unknown`: given, and no tensors of the case; `left`:
    outputs that were not given."""
    if not has_backward(case):
        yield _NO_BACKWARD
    elif not _has_backward(case, given):
        yield _FORWARD_ONLY
    beside = [name for name in unknown if _beside(name, case)]
    if beside:
        yield f"given and not compared: {', '.join(beside)}"
    if any(_of_smoothed(name, case) for name in left):
        yield _SMOOTHED


def _without_backward(cases: Sequence[Case]) -> tuple[str, ...]:
    """The note on recipes without a backward, beside the verdict."""
    names = dict.fromkeys(case.entry.recipe for case in cases if not has_backward(case))
    return tuple(f"{name}: {_NO_BACKWARD}, no gradient was checked" for name in names)


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


def _tensor(
    case: Case, name: str, aligned: Mapping[str, Aligned], verdict: Verdict
) -> TensorResult:
    place, one = case.places[name], aligned[name]
    failing = verdict.failing
    count, inside = int(np.count_nonzero(failing)), int(np.count_nonzero(verdict.inside))
    known: dict[str, Any] = {
        "name": name,
        "stage": place.stage.name,
        "elements": failing.size,
        "inside": inside,
        "envelope": verdict.width,
    }
    unequal = failing | verdict.inside
    if count == 0 and inside == 0:
        return TensorResult(status=Status.PASS, **known)
    steps, distance = one.largest(unequal)
    known |= {
        "differing": count + inside,
        "largest_steps": steps,
        "largest": distance,
        "steps": spread.by_steps(one, unequal),
    }
    if count == 0:
        return TensorResult(status=Status.PASS, note=verdict.note, **known)
    status = _status(one, verdict)
    shown_first = _nan_apart(one) & failing if status is Status.NAN_PATTERN else failing
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(shown_first)), failing.shape))
    masked = place.stage.masked_optional and not visible_pairs(case.spec, place)[index[-2:]]
    notes = (
        ["in a masked pair, where 0, NaN, -inf or any number up to -1e4 would do too"]
        if masked
        else []
    )
    notes += [verdict.note] if verdict.note else []
    return TensorResult(
        status=status,
        first=_first(case, name, index, aligned),
        heat_map=spread.heat_map(case, place, failing),
        note="; ".join(notes),
        **known,
    )


def _first(
    case: Case, name: str, index: tuple[int, ...], aligned: Mapping[str, Aligned]
) -> Difference:
    """The first failing element, with the value that it was rounded from."""
    found = difference(case, name, index, aligned)
    try:
        before = lineage(case, name, index).before
    except (KeyError, IndexError):  # a pack need not hold every stage
        return found
    if before is None:
        return found
    boundary = distance(before, case.places[name].stage.view)
    return dataclasses.replace(found, before=before, boundary=boundary)


def _status(one: Aligned, verdict: Verdict) -> Status:
    """What is wrong with a tensor that has failing elements."""
    failing = verdict.failing
    if one.view in _FLOATS:
        if (_nan_apart(one) & failing).any():
            return Status.NAN_PATTERN
        return Status.OUTSIDE_ENVELOPE if verdict.judged else Status.BIT_MISMATCH
    if spread.permuted(one, failing):
        return Status.LAYOUT
    return Status.BIT_MISMATCH


def _nan_apart(one: Aligned) -> Any:
    """Where one side is NaN and the other is not."""
    return np.isnan(one.values(one.actual)) != np.isnan(one.values(one.expected))


def _unknown(name: str, case: Case) -> TensorResult:
    error = unknown_name("tensor", name, case.places)
    return TensorResult(name=name, stage=name, status=Status.UNKNOWN, note=str(error))
