"""Calling a kernel on a case, as a whole or stage by stage, with what the kernel protocol says."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from flamia_ref import kernels
from flamia_ref.golden.arrays import operand_names
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import View

if TYPE_CHECKING:
    from flamia_ref.attention.kernel_layouts import KernelLayout
    from flamia_ref.attention.prepared import Prepared

_INPUTS = ("q", "k", "v")
_OF_DOUT = ("lse", "row_max")  # what a quantizer is given where it names it: some recipes scale dO
_NAMED = ("row_max", "o", "delta")  # what a backward is given where it names it


def whole(case: Case, kernel: kernels.Kernel) -> dict[str, Any]:
    """Return what a kernel gives for the inputs of a case.

    Raises KernelError where it fails, and Unsupported where it does not take all that the case has.
    """
    extras = _extras(case)
    return kernels.call(
        kernel,
        *(_bfloat16(case, name) for name in _INPUTS),
        case=case.name,
        needed=tuple(extras),
        **_settings(case),
        **extras,
        **_of_recipe(case),
        **({"dout": _bfloat16(case, "dout")} if has_backward(case) else {}),
    )


def has_backward(case: Case) -> bool:
    """Return whether the recipe of a case has a backward."""
    return any(stage.backward for stage in case.recipe.dataflow.stages.values())


def by_stages(case: Case, kernel: kernels.Staged) -> dict[str, Any]:
    """Return what the stages of a kernel give together, each for the bytes of the pack.

    Raises as `whole`, and KernelError where two of them give the same name.
    """
    results: dict[str, Any] = {}
    givers: dict[str, str] = {}
    for part, function in kernel.parts.items():
        if part == "backward" and not has_backward(case):
            continue
        for name, value in _STAGES[part](case, function).items():
            if name in results:
                raise kernels.KernelError(
                    f"kernel {kernel.name}: {part} gives {name} in case {case}, which "
                    f"{givers[name]} gives too; give it once"
                )
            results[name], givers[name] = value, part
    return results


def handed(case: Case, kernel: kernels.Staged) -> frozenset[str]:
    """Return the stages whose bits in the pack the stages of a kernel are given."""
    found: set[str] = set()
    for part, function in kernel.parts.items():
        if part == "quantize":
            rows = (name for name in _OF_DOUT if kernels.names(function, name))
        else:
            rows = (name for name in _NAMED if part == "backward" and kernels.names(function, name))
            names = _operand_names(case, backward=part == "backward")
            found |= {case.places[name].stage.name for name in names}
        found |= {name for name in rows if name in case.places}
        found |= {"out", "lse"} if part == "backward" else set()
    return frozenset(found)


def _quantize(case: Case, function: kernels.Kernel) -> dict[str, Any]:
    documents = {name: x for name, x in _extras(case).items() if name == "cu_seqlens_k"}
    return kernels.call(
        function,
        *(_bfloat16(case, name) for name in _INPUTS),
        case=case.name,
        needed=tuple(documents),
        always=("cu_seqlens",),
        cu_seqlens=case.tensors["cu_seqlens"].copy(),
        **({"dout": _bfloat16(case, "dout")} if has_backward(case) else {}),
        **_named(case, function, _OF_DOUT),
        **documents,
        **_of_recipe(case),
    )


def _forward(case: Case, function: kernels.Kernel) -> dict[str, Any]:
    extras = _extras(case)
    return kernels.call(
        function,
        _operands(case, backward=False),
        case=case.name,
        needed=tuple(extras),
        **_settings(case),
        **extras,
        **_of_recipe(case),
        **_layouts(case, function, backward=False),
    )


def _backward(case: Case, function: kernels.Kernel) -> dict[str, Any]:
    extras, settings = _extras(case), _settings(case)
    # The sink is in the log-sum-exp: only a kernel that gives its gradient takes it.
    needed = tuple(name for name in extras if name != "sink")
    given = {
        "out": _bfloat16(case, "out"),
        "lse": case.tensors["lse"].copy(),
        "dout": _bfloat16(case, "dout"),
    }
    return kernels.call(
        function,
        _operands(case, backward=True),
        case=case.name,
        needed=needed,
        always=(*settings, *given),
        **settings,
        **given,
        **extras,
        **_named(case, function, _NAMED),
        **_of_recipe(case),
        **_layouts(case, function, backward=True),
    )


def _named(case: Case, function: kernels.Kernel, names: tuple[str, ...]) -> dict[str, Any]:
    """Return those tensors that the function names and the pack holds."""
    held = (name for name in names if name in case.tensors and kernels.names(function, name))
    return {name: case.tensors[name].copy() for name in held}


_STAGES = {"quantize": _quantize, "forward": _forward, "backward": _backward}


def _settings(case: Case) -> dict[str, Any]:
    """Return what every kernel is called with."""
    return {
        "cu_seqlens": case.tensors["cu_seqlens"].copy(),
        "causal": case.spec.causal,
        "softmax_scale": case.spec.softmax_scale,
    }


def _extras(case: Case) -> dict[str, Any]:
    """Return what this case has and others have not."""
    spec = case.spec
    found: dict[str, Any] = {}
    if spec.key_lengths is not None:
        found["cu_seqlens_k"] = case.tensors["cu_seqlens_k"].copy()
    if spec.alignment != "bottom_right":
        found["alignment"] = spec.alignment
    if spec.window is not None:
        found["window"] = spec.window
    if spec.softcap is not None:
        found["softcap"] = spec.softcap
    if spec.sinks:
        found["sink"] = case.tensors["sink"].copy()
    return found


def _of_recipe(case: Case) -> dict[str, Any]:
    """Return what says which numerics, and which stages, are wanted."""
    return {
        "recipe": case.entry.recipe,
        "recipe_json": json.dumps(dict(case.recipe.recipe), sort_keys=True),
        "trace": _traced(case),
    }


def _traced(case: Case) -> tuple[str, ...]:
    """Return the stages of both passes that the pack holds of a case."""
    flow, held = case.recipe.dataflow, {place.stage.name for place in case.places.values()}
    names = (*flow.trace(backward=False), *flow.trace(backward=True))
    return tuple(name for name in names if name in held)


def _bfloat16(case: Case, name: str) -> Tensor:
    return case.tensors[name].copy().view(ml_dtypes.bfloat16)


def _operand_names(case: Case, *, backward: bool) -> list[str]:
    """Return the codes and scales that a pass takes: the forward makes none of dO's."""
    places = case.places
    return [name for name in operand_names(case) if backward or not places[name].stage.backward]


def _operands(case: Case, *, backward: bool) -> dict[str, Any]:
    found: dict[str, Any] = {name: _bfloat16(case, name) for name in _INPUTS}
    if backward:
        found["dout"] = _bfloat16(case, "dout")
    for name in _operand_names(case, backward=backward):
        place, array = case.places[name], case.tensors[name].copy()
        if place.document is None:
            found[name] = array
        else:
            found.setdefault(place.stage.name, []).append(array)
    return found


def _layouts(case: Case, function: kernels.Kernel, *, backward: bool) -> dict[str, Any]:
    """Return the padded payloads and scales by use, where the kernel names them.

    Raises ValueError where they do not hold the codes of the pack, which another version made.
    """
    if not kernels.names(function, "layouts"):
        return {}
    from flamia_ref import attention
    from flamia_ref.attention.stages import kept_for_backward

    recipe = attention.Recipe.from_json(case.recipe.recipe)
    queries = case.tensors["cu_seqlens"]
    keys = None if case.spec.key_lengths is None else case.tensors["cu_seqlens_k"]
    q, k, v = (_bfloat16(case, name) for name in _INPUTS)
    prepared = [attention.prepare(q, k, v, recipe, cu_seqlens=queries, cu_seqlens_k=keys)]
    if backward:
        settings = _settings(case) | _extras(case)
        out = _bfloat16(case, "out").astype(np.float32)
        saved = {
            name: _bfloat16(case, name).astype(np.float32)
            if case.places[name].stage.view is View.BF16
            else case.tensors[name]
            for name in kept_for_backward(recipe)
        }
        ahead = attention.Forward.from_kernel(
            out, case.tensors["lse"], recipe, saved=saved, **settings
        )
        before = attention.preprocess(_bfloat16(case, "dout"), ahead)
        prepared.append(before.operands)
    products = ("s", "dp", "dv", "dq", "dk") if backward else ("s", "o")
    found: dict[str, KernelLayout] = {}
    for at, one in enumerate(prepared):
        _check_codes(case, one)
        for use, _ in recipe.uses():
            product, tensor = use.split(".")
            if product in products and tensor in (("q", "k", "v"), ("do",))[at]:
                copy = one.operand(use)
                layout = copy.row_wise if product in ("s", "dp") else copy.column_wise
                if layout is not None:
                    found[str(use)] = layout
    return {"layouts": found}


def _check_codes(case: Case, prepared: "Prepared") -> None:
    held: Mapping[str, Tensor] = case.tensors
    for name, copy in prepared.operands.items():
        codes = f"{name}.codes"
        if codes in held and not np.array_equal(np.asarray(copy.codes), held[codes]):
            raise ValueError(
                f"{codes} of {case} are not what this version makes; make the pack again"
            )
