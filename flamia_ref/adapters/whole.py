"""A kernel that works in stages, as one that starts from bfloat16: this package quantizes between."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from flamia_ref.formats import layout
from flamia_ref.kernels import Staged
from flamia_ref.packing import Documents

Array = np.ndarray[Any, Any]


def quantizing(staged: Staged, recipe: str, *, name: str) -> Callable[..., dict[str, Array]]:
    """A kernel of the protocol: the operands of a recipe, then the stages of a kernel.

    It is for suites that have no pack, such as the search for leaks: there the quantization is part of what is tried.
    """

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        *,
        cu_seqlens: Array,
        causal: bool,
        softmax_scale: float,
        dout: Array | None = None,
    ) -> dict[str, Array]:
        settings = {"cu_seqlens": cu_seqlens, "causal": causal, "softmax_scale": softmax_scale}
        operands = operands_of(q, k, v, recipe, cu_seqlens=cu_seqlens, dout=dout)
        results: dict[str, Array] = dict(staged.forward(operands, **settings))  # type: ignore[misc]
        if dout is not None and staged.backward is not None:
            given = {"out": results["out"], "lse": results["lse"], "dout": dout}
            results |= staged.backward(operands, **settings, **given)
        return results

    kernel.__module__, kernel.__qualname__ = name.split(":")
    kernel.__name__ = kernel.__qualname__
    kernel.__doc__ = f"{staged.name} from bfloat16 inputs, quantized as {recipe} says."
    return kernel


def operands_of(
    q: Array, k: Array, v: Array, recipe: str, *, cu_seqlens: Any, dout: Array | None = None
) -> dict[str, Any]:
    """The operands of a recipe by the names of the stages of a pack, with tiled scales a list, an array a document.

    For recipes whose scales lie along channels (1x32) or along tokens (32x1), with queries and keys of one length.
    """
    from flamia_ref.attention import prepare, prepare_dout

    documents = Documents.from_cu_seqlens(cu_seqlens, len(q))
    found: dict[str, Any] = {"q": q, "k": k, "v": v}
    made = dict(prepare(q, k, v, recipe, cu_seqlens=cu_seqlens).operands)
    if dout is not None:
        found["dout"] = dout
        made |= prepare_dout(dout, recipe, cu_seqlens=cu_seqlens).operands
    for name, one in made.items():
        if one.scales is None:
            continue
        found[f"{name}.codes"], scales = np.asarray(one.codes), np.asarray(one.scales)
        found[f"{name}.scales"] = scales
        if one.row_wise is not None:
            found[f"{name}.scales.tiled"] = [
                _tiled(np.moveaxis(scales[part], 1, 0)) for part in documents
            ]
        if one.column_wise is not None:
            blocks = _blocks(documents)
            found[f"{name}.scales.tiled_transposed"] = [
                _tiled(np.moveaxis(scales[part], 0, 2)) for part in blocks
            ]
    return found


def _tiled(scales: Array) -> Array:
    """Scales [heads, rows, columns] in tiles, [heads, row tiles, column tiles, 512], filled up with 0."""
    heads, rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    fill = [(0, 0), (0, down * 128 - rows), (0, across * 4 - columns)]
    tiled = layout.tile_scales_128x4(np.pad(scales, fill))
    return np.asarray(tiled).reshape(heads, down, across, 512)


def _blocks(documents: Documents) -> list[slice]:
    """The blocks of 32 tokens of each document, among those of all."""
    ends = [0]
    for length in documents.lengths:
        ends.append(ends[-1] - -length // 32)
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
