"""What the simulator says about a case, as the tensors that a pack stores."""

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import STAGES, TRACE, Place, View, places
from flamia_ref.golden.files import Tensor

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

# The sign and payload of a NaN differ between processors, so packs hold one.
_NAN = np.uint32(0x7FFFFFFF)


def simulate(spec: CaseSpec, recipe: "Recipe") -> dict[str, Tensor]:
    """Run a case in numpy and return every tensor as it is stored, by name, in dataflow order.

    Raises ValueError where the results hold NaN and the case does not ask for it: such a pack would
    let a broken kernel pass.
    """
    from flamia_ref.attention import forward

    inputs = spec.inputs()
    q, k, v = (inputs[name].view(ml_dtypes.bfloat16) for name in "qkv")
    result = forward(
        q,
        k,
        v,
        recipe,
        cu_seqlens=spec.cu_seqlens,
        causal=spec.causal,
        softmax_scale=spec.softmax_scale,
        trace=TRACE,
    )
    values: dict[str, Any] = {**inputs, "cu_seqlens": spec.cu_seqlens, **result.trace}
    values |= {"out": result.out, "lse": result.lse}
    for stage in STAGES.values():
        if stage.tiled:
            values[stage.name] = tiled_scales(np.asarray(values[stage.parents[0]]), spec)
    tensors = {}
    for name, place in places(spec).items():
        value = values[place.stage.name]
        value = value if place.document is None else value[place.document]
        tensors[name] = _stored(np.asarray(value), place, spec)
    return tensors


def tiled_scales(scales: Tensor, spec: CaseSpec) -> list[Tensor]:
    """Return the scales of an operand in the order that kernels load, an array a document.

    `scales` is uint8 [tokens, heads, 1]: the one byte of a token stands before each of its blocks
    of 32 channels. Each result is uint8 [heads, row_tiles, column_tiles, 512]: tiles of 128 rows
    that start at the document, and of 4 blocks. The padding is 0.
    """
    from flamia_ref.formats.layout import tile_scales_128x4

    heads, blocks = scales.shape[1], spec.head_dim // 32
    made = []
    for start, length in zip(spec.starts, spec.lengths, strict=False):
        planes = np.repeat(scales[start : start + length].swapaxes(0, 1), blocks, axis=2)
        tiled = np.asarray(tile_scales_128x4(planes))
        made.append(tiled.reshape(heads, -(-length // 128), -(-blocks // 4), 512))
    return made


def _stored(value: Tensor, place: Place, spec: CaseSpec) -> Tensor:
    view = place.stage.view
    if value.shape != place.shape:
        raise ValueError(f"case {spec.name}: {place.name} is {value.shape}, not {place.shape}")
    if value.dtype == view.dtype and view is not View.F32:
        return value
    if view not in (View.F32, View.BF16):
        raise ValueError(f"case {spec.name}: {place.name} is {value.dtype}, not {view.dtype}")
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
