"""What a stage of a scene would be with something changed: mask, recipe, operands, what the backward takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.scene import Scene, as_bits, wide
from flamia_ref.golden.stage import Place, Role, View
from flamia_ref.packing import Mask

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.attention.results import Forward


class Codes(NamedTuple):
    """The codes of a copy of an input and its scales, as stages have them."""

    codes: Tensor
    scales: Tensor | None = None
    token_scales: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What is other than in the pack; None and nothing for what is not.

    `inputs` are bfloat16 bits of q, k, v, dout; `operands` are copies by name, which the products take in place of
    those that follow from the inputs. `backward` brings, for the backward alone, float32 `lse`, `out` [as in
    the pack], or `delta` [heads, tokens].
    """

    recipe: "Recipe | None" = None
    mask: Mask | None = None
    softmax_scale: float | None = None
    softcap: float | Literal["of the case"] | None = "of the case"
    sink: Tensor | Literal["of the case"] | None = "of the case"
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    operands: Mapping[str, Codes] = field(default_factory=dict)
    backward: Mapping[str, Tensor] = field(default_factory=dict)


def simulated(scene: Scene, place: Place, change: Change) -> Tensor | None:
    """Return a tensor of the scene, in stored bits, as it is with a change. None where it would not be there."""
    stage = place.stage.parents[0] if place.stage.tiled else place.stage.name
    found = (
        _backward(scene, stage, change) if place.stage.backward else _forward(scene, stage, change)
    )
    if found is None:
        return None
    if place.stage.tiled:
        return _tiled(scene, place, np.asarray(found))
    if place.document is not None:
        found = found[scene.documents.index(place.document)]
    return as_bits(found, place.stage.view)


def _tiled(scene: Scene, place: Place, scales: Tensor) -> Tensor:
    from dataclasses import replace

    from flamia_ref.golden.simulation import tiled_scales

    spec = scene.case.spec
    here = replace(
        spec,
        lengths=scene.lengths,
        key_lengths=None if spec.key_lengths is None else scene.key_lengths,
        heads=len(scene.heads),
        kv_heads=len(scene.kv_heads),
        plants=(),
        fills=(),
        sinks=(),
    )
    source = scene.case.recipe.dataflow.stages[place.stage.parents[0]]
    made = tiled_scales(scales, source, place.stage, here)
    return made[scene.documents.index(place.document or 0)]


def _bits(scene: Scene, change: Change, name: str) -> Tensor:
    return wide(change.inputs[name] if name in change.inputs else scene.expected(name))


def _shape(scene: Scene, change: Change) -> Any:
    from flamia_ref.attention import inputs

    softcap = scene.case.spec.softcap if change.softcap == "of the case" else change.softcap
    return inputs.Shape(
        change.mask or scene.mask, change.softmax_scale or scene.softmax_scale, softcap
    )


def _sink(scene: Scene, change: Change) -> Tensor | None:
    if not isinstance(change.sink, str):
        return change.sink
    return scene.expected("sink") if scene.case.spec.sinks else None


def _take(run: Any, change: Change, recipe: "Recipe", names: set[str]) -> None:
    from flamia_ref.attention.prepared import OperandCopy, Prepared

    copies = {
        name: OperandCopy(
            codes=one.codes,
            scales=one.scales,
            token_scales=one.token_scales,
            row_wise=None,
            column_wise=None,
        )
        for name, one in change.operands.items()
        if name.split(".")[0] in names
    }
    run.take(Prepared(operands=copies, guards={}, recipe=recipe))


def _forward(scene: Scene, stage: str, change: Change) -> Any:
    from flamia_ref.attention import forward_stages

    recipe = change.recipe or scene.recipe
    role = scene.case.recipe.dataflow.stages[stage].role
    if role is Role.STAGE and stage not in forward_stages(recipe):
        return None
    trace = (stage,) if role is Role.STAGE else ()
    run = _forward_run(scene, change, trace)
    if stage.split(".")[0] in ("q", "k", "v"):
        return run.copy_stage(stage)
    ahead = run.forward()
    return ahead.trace[stage] if trace else getattr(ahead, stage)


def _forward_run(scene: Scene, change: Change, trace: tuple[str, ...]) -> Any:
    from flamia_ref.attention import forward_stages, inputs
    from flamia_ref.attention.forward_pass import ForwardRun
    from flamia_ref.attention.run import Sizes
    from flamia_ref.attention.traced import check_trace

    recipe = change.recipe or scene.recipe
    q, k, v = (_bits(scene, change, name) for name in ("q", "k", "v"))
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    wanted = check_trace(trace, forward_stages(recipe), recipe)
    sink = inputs.sink_bits(_sink(scene, change))
    run = ForwardRun(recipe, _shape(scene, change), sizes, np, np, None, wanted, sink)
    run.inputs.update(q=q, k=k, v=v)
    _take(run, change, recipe, {"q", "k", "v"})
    return run


def _kept(scene: Scene, change: Change) -> "Forward":
    """Return the forward whose out and lse the backward takes: those of the pack, or changed ones."""
    from flamia_ref.attention import Forward
    from flamia_ref.attention.stages import kept_for_backward

    recipe, shape = change.recipe or scene.recipe, _shape(scene, change)
    saved = {}
    if kept_for_backward(recipe):
        saved = _forward_run(scene, change, ()).forward().saved
    return Forward(
        out=wide(change.backward.get("out", scene.expected("out"))).view(np.float32),
        lse=np.asarray(change.backward.get("lse", scene.expected("lse")), np.float32),
        saved=saved,
        sink=_sink(scene, change),
        recipe=recipe,
        mask=shape.mask,
        softmax_scale=shape.softmax_scale,
        softcap=shape.softcap,
    )


def _backward(scene: Scene, stage: str, change: Change) -> Any:
    from flamia_ref.attention import backward_stages, inputs
    from flamia_ref.attention.backward_pass import BackwardRun
    from flamia_ref.attention.run import Sizes
    from flamia_ref.attention.traced import check_trace

    ahead = _kept(scene, change)
    recipe = ahead.recipe
    role = scene.case.recipe.dataflow.stages[stage].role
    if role is Role.STAGE and stage not in backward_stages(recipe):
        return None
    trace = (stage,) if role is Role.STAGE else ()
    q, k, v, dout = (_bits(scene, change, name) for name in ("q", "k", "v", "dout"))
    sizes = Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    wanted = check_trace(trace, backward_stages(recipe), recipe)
    saved = {name: inputs.float32_bits(x) for name, x in ahead.saved.items()}
    run = BackwardRun(ahead, sizes, np, np, None, wanted, inputs.sink_bits(ahead.sink), saved)
    run.inputs.update(q=q, k=k, v=v)
    rows = run.rows_before(dout, ahead.out.view(np.uint32), ahead.lse.view(np.uint32))
    _take(run, change, recipe, {"q", "k", "v", "do"})
    if stage.split(".")[0] in ("q", "k", "v", "do"):
        return run.copy_stage(stage)
    if "delta" in change.backward and rows.delta is not None:
        delta = np.ascontiguousarray(change.backward["delta"].T, np.float32).reshape(-1)
        rows = rows._replace(delta=delta.view(np.uint32))
    back = run.backward(rows)
    return back.trace[stage] if trace else getattr(back, stage)


def is_scale(view: View) -> bool:
    """Whether a tensor holds scales."""
    return view in (View.F8_E8M0, View.F8_UE4M3)
