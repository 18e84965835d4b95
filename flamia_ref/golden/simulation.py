"""What the simulator says about a case, as the tensors that a pack stores."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import Dataflow, dataflow
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.stage import (
    BLOCK,
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    Place,
    Role,
    Stage,
    View,
)

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

# The sign and payload of a NaN differ between processors, so packs hold one.
_NAN = np.uint32(0x7FFFFFFF)


def simulate(spec: CaseSpec, recipe: "Recipe") -> dict[str, Tensor]:
    """Run a case in numpy and return every tensor as it is stored, by name.

    They are those of the forward and, where the recipe has one, the backward, in dataflow order. Raises ValueError
    where the results hold NaN and the case does not ask for it: such a pack would let a broken kernel pass.
    """
    return simulate_inputs(spec, spec.inputs(), recipe)


def simulate_inputs(
    spec: CaseSpec,
    inputs: Mapping[str, Tensor],
    recipe: "Recipe",
    *,
    backward: bool = True,
    wanted: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Run a recipe on bfloat16 bits of q, k, v and dout that have the shapes, the mask and the options of a case.

    `backward`: whether to run that pass, where the recipe has one. `wanted`: names of stages; without it, all. The
    result is that of `simulate`, and so is what is raised.
    """
    from flamia_ref.attention import backward as run_backward
    from flamia_ref.attention import forward

    flow = dataflow(recipe)
    backward = backward and recipe.has_backward
    traced = {one: _traced(flow, wanted, backward=one) for one in (False, True)}
    q, k, v, dout = (inputs[name].view(ml_dtypes.bfloat16) for name in TENSORS)
    ahead = forward(
        q,
        k,
        v,
        recipe,
        cu_seqlens=spec.cu_seqlens,
        cu_seqlens_k=spec.cu_seqlens_k,
        causal=spec.causal,
        alignment=spec.alignment,
        window=spec.window,
        softmax_scale=spec.softmax_scale,
        softcap=spec.softcap,
        sink=spec.sink,
        trace=traced[False],
    )
    values: dict[str, Any] = {**inputs, "cu_seqlens": spec.cu_seqlens, **ahead.trace}
    values |= {"cu_seqlens_k": spec.cu_seqlens_k, "sink": spec.sink}
    values |= {"out": ahead.out, "lse": ahead.lse}
    if backward:
        back = run_backward(q, k, v, dout, ahead, trace=traced[True])
        values |= {**back.trace, "dsink": back.dsink, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    for stage in flow.stages.values():
        if stage.tiled and stage.parents[0] in values:
            source = flow.stages[stage.parents[0]]
            values[stage.name] = tiled_scales(np.asarray(values[source.name]), source, stage, spec)
    tensors = {}
    for name, place in flow.places(spec).items():
        if place.stage.name not in values:
            continue  # not wanted
        value = values[place.stage.name]
        value = value if place.document is None else value[place.document]
        tensors[name] = _stored(np.asarray(value), place, spec)
    return tensors


def _traced(flow: Dataflow, wanted: Collection[str] | None, *, backward: bool) -> tuple[str, ...]:
    """Return what a pass traces for the stages that are wanted, tiled scales by what they are made of."""
    every = flow.trace(backward=backward)
    if wanted is None:
        return every
    needed = {
        *wanted,
        *(flow.stages[name].parents[0] for name in wanted if flow.stages[name].tiled),
    }
    return tuple(name for name in every if name in needed)


def tiled_scales(scales: Tensor, source: Stage, tiled: Stage, spec: CaseSpec) -> list[Tensor]:
    """Return the scales of an operand in the order that kernels load, an array a document.

    `scales` is uint8, shaped as its stage `source` says; `tiled` is the stage of the result. A
    document's scales are repeated until there is one for each token and block of channels, 32 or, in
    FP4, 16, or, transposed, for each channel and block of 32 tokens. These lie in tiles of 128 rows,
    which start at the document or at channel 0, and of 4 blocks. The padding is what the case says.
    """
    from flamia_ref.formats.layout import tile_scales_128x4

    by_tokens, _, channels = source.axes
    transposed = "channel_tiles" in tiled.axes
    step = BLOCK if by_tokens.endswith("_blocks") else 1
    made, first = [], 0
    for length in spec.lengths_of_keys if source.of_keys else spec.lengths:
        count = -(-length // step)
        whole = scales[first : first + count].swapaxes(0, 1)
        first += count
        if channels == "one":
            whole = np.repeat(whole, spec.head_dim // BLOCK, axis=2)
        if transposed:
            if channels == "channel_blocks":
                whole = np.repeat(whole, BLOCK, axis=2)
            whole = whole.swapaxes(1, 2)
        elif step == BLOCK:
            whole = np.repeat(whole, BLOCK, axis=1)[:, :length]
        heads, rows, columns = whole.shape
        shape = (heads, -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_BYTES)
        tiles = np.asarray(tile_scales_128x4(whole)).reshape(shape)
        if spec.scale_padding:
            inside = np.asarray(tile_scales_128x4(np.ones_like(whole))).reshape(shape)
            tiles = np.where(inside > 0, tiles, np.uint8(spec.scale_padding))
        made.append(tiles)
    return made


def _stored(value: Tensor, place: Place, spec: CaseSpec) -> Tensor:
    view = place.stage.view
    if value.shape != place.shape:
        raise ValueError(f"case {spec.name}: {place.name} is {value.shape}, not {place.shape}")
    if place.stage.role is Role.INPUT:
        return value
    if view is View.BF16 and value.dtype == np.uint16:
        value = (value.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if view not in (View.F32, View.BF16):
        if value.dtype != view.dtype:
            raise ValueError(f"case {spec.name}: {place.name} is {value.dtype}, not {view.dtype}")
        return value
    numbers = np.asarray(value, np.float32)
    nan = np.isnan(numbers)
    if nan.any() and "nan" not in spec.flags:
        raise ValueError(f"case {spec.name}: {place.name} holds NaN; the case does not ask for it")
    bits = np.where(nan, _NAN, numbers.view(np.uint32))
    if view is View.F32:
        return bits.view(np.float32)
    if np.any((bits & np.uint32(0xFFFF)) != 0, where=~nan):
        raise ValueError(f"case {spec.name}: {place.name} has values that are not bfloat16")
    return (bits >> np.uint32(16)).astype(np.uint16)
