"""Attention forward and backward of every recipe, one number at a time.

The steps are those of the recipes' descriptions; what a description leaves open is said in the
module of its recipe: ``folded`` and ``blocked`` (with ``flamia``), ``flash_attention``, ``cudnn``,
``attn_qat``.
Key tiles of 128 and blocks of 32 start at the document. For all recipes:

- Every NaN result is 0x7fffffff, and 0x7fff or the code 0x7f where it is rounded to bfloat16 or
  e4m3.
- A result holds the out and lse of the recipe's own forward, also where the backward was given
  others.
- A sum over the query heads of a group starts with the first head's accumulator.
- bfloat16 operands have no ``codes`` of their own; ``p`` and ``ds`` rounded to bfloat16 have.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent.attn_qat import AttnQat
from tests.independent.blocked import Guarded, Unguarded
from tests.independent.cudnn import CudnnBfloat16, CudnnScaled
from tests.independent.cudnn_reference import Reference
from tests.independent.flash_attention import FlashAttention
from tests.independent.flash_fp8 import Cutlass, FlashAttention3, FlashAttention4
from tests.independent.folded import Folded
from tests.independent.gradients import group_gradients
from tests.independent.heads import Head
from tests.independent.passes import Array, Passes, Stages, bits16
from tests.independent.sage import Sage

Bits = npt.NDArray[np.integer[Any]]

RECIPES: dict[str, Callable[[Head], Passes]] = {
    "flamia-mxfp8-folded": Folded,
    "flamia-mxfp8": Guarded,
    "flamia-mxfp8-unguarded": Unguarded,
    "bf16-fa4": FlashAttention,
    "cudnn-mxfp8": CudnnScaled,
    "cudnn-mxfp8-pv-bf16": CudnnBfloat16,
    "cudnn-mxfp8-reference": Reference,
    "attn-qat-nvfp4": AttnQat,
}

# Recipes without a backward: ``run`` takes no dout with them.
FORWARD_ONLY: dict[str, Callable[[Head], Passes]] = {
    "sage3-nvfp4": Sage,
    "fp8-fa4": FlashAttention4,
    "fp8-fa3": FlashAttention3,
    "cutlass-fp8": Cutlass,
}

# Stages [heads, tokens]; those of operands are [tokens, heads, ...], all others a list of pairs.
ROW_STAGES = ("lse", "row_max", "row_sum", "delta")
OPERANDS = ("q", "k", "v", "do", "out", "o", "high_precision_out", "dq", "dk", "dv")


def forward(
    q_bits: Bits,
    k_bits: Bits,
    v_bits: Bits,
    cu_seqlens: Sequence[int] | Bits,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """The forward pass of `flamia-mxfp8-folded`; arguments and result as those of ``run``."""
    return run(
        "flamia-mxfp8-folded",
        q_bits,
        k_bits,
        v_bits,
        None,
        cu_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
    )


def run(
    recipe_name: str,
    q_bits: Bits,
    k_bits: Bits,
    v_bits: Bits,
    dout_bits: Bits | None,
    cu_seqlens: Sequence[int] | Bits,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    out_bits: Bits | None = None,
    lse_bits: Bits | None = None,
) -> dict[str, Any]:
    """Run both passes of a recipe, or the forward alone without ``dout_bits``; every stage.

    ``q_bits`` and ``dout_bits`` are [tokens, heads, head_dim], ``k_bits`` and ``v_bits`` [tokens,
    kv_heads, head_dim], all bfloat16 bits (uint16). ``cu_seqlens`` runs from 0 to tokens; documents
    may be empty. ``softmax_scale`` is a float64, 1 / sqrt(head_dim) by default. ``out_bits``
    (uint16, like q) and ``lse_bits`` (float32 bits [heads, tokens]) are what the backward starts
    from; the forward's own by default.

    Returned arrays (bits are unsigned integers):

    - ``out``, ``dq`` uint16 [tokens, heads, head_dim], ``dk``, ``dv`` uint16 like k; ``lse`` uint32
      [heads, tokens]
    - of descales ``<operand>.scales`` uint32 [documents, kv_heads]
    - operands ``q``, ``k``, ``v``, ``do``, under ``<operand>.<use>`` where uses differ: ``.codes``
      uint8 of the operand's shape; ``.scales`` uint8 [tokens or blocks of 32 tokens, the operand's
      heads, blocks of channels], the blocks of all documents one after the other
    - ``row_max``, ``row_sum``, ``delta`` uint32 [heads, tokens]: final m and l in the recipe's units
    - ``o`` uint32 [tokens, heads, head_dim]: normalised, before output rounding; in `attn-qat-nvfp4` also
      ``high_precision_out``, uint16 likewise
    - lists, one array [heads, queries, keys] a document: ``s``, ``p``, ``dp``, ``p.dv``, ``ds``
      uint32, ``p.<use>.codes``, ``ds.<use>.codes`` uint8 or, of bfloat16, uint16; ``.scales`` uint8
      with blocks in place of queries or keys. ``s`` and ``dp`` hold masked pairs too, the others
      are 0 there; ``p`` is relative to the m of its key tile

    Raises ValueError for a name, shapes or bounds that do not fit.
    """
    recipes = RECIPES | FORWARD_ONLY
    if recipe_name not in recipes:
        raise ValueError(f"recipe {recipe_name!r}: pass one of {', '.join(recipes)}")
    if dout_bits is not None and recipe_name in FORWARD_ONLY:
        raise ValueError(f"recipe {recipe_name!r} has no backward: pass no dout")
    tokens, heads, head_dim = q_bits.shape
    kv_heads = k_bits.shape[1]
    bounds = [int(bound) for bound in cu_seqlens]
    if k_bits.shape != v_bits.shape or k_bits.shape != (tokens, kv_heads, head_dim):
        raise ValueError(
            f"shapes {q_bits.shape}, {k_bits.shape}, {v_bits.shape}: make k and v fit q"
        )
    if any(x is not None and x.shape != q_bits.shape for x in (dout_bits, out_bits)):
        raise ValueError(f"dout or out does not have the shape {q_bits.shape} of q: make it fit")
    if lse_bits is not None and (lse_bits.shape != (heads, tokens) or lse_bits.dtype != np.uint32):
        raise ValueError(
            f"lse is {lse_bits.dtype} {lse_bits.shape}: pass uint32 bits ({heads}, {tokens})"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads over {kv_heads}: pass a multiple")
    if bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens {bounds}: must ascend from 0 to {tokens}")
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale

    def run_document(start: int, end: int) -> Stages:
        part = slice(start, end)
        groups = []
        for kv_head in range(kv_heads):
            group = range(kv_head * (heads // kv_heads), (kv_head + 1) * (heads // kv_heads))
            passes = [
                recipes[recipe_name](
                    Head(
                        q=q_bits[part, head].tolist(),
                        k=k_bits[part, kv_head].tolist(),
                        v=v_bits[part, kv_head].tolist(),
                        dout=None if dout_bits is None else dout_bits[part, head].tolist(),
                        head_dim=head_dim,
                        causal=causal,
                        softmax_scale=scale,
                        group_q=tuple(q_bits[part, x].tolist() for x in group),
                    )
                )
                for head in group
            ]
            out = None if out_bits is None else [out_bits[part, x].tolist() for x in group]
            lse = None if lse_bits is None else [lse_bits[x, part].tolist() for x in group]
            groups.append(_run_group(passes, out, lse))
        return _join_heads(groups)

    # Without any document an empty one gives the shapes.
    documents = [run_document(start, end) for start, end in itertools.pairwise(bounds)]
    return _join_documents(documents or [run_document(0, 0)], len(documents))


def _run_group(
    group: Sequence[Passes], out: list[Any] | None, lse: list[Any] | None
) -> list[Stages]:
    """Both passes of the query heads of one key/value head: the stages of each."""
    results = [one.forward() for one in group]
    width = group[0].head.head_dim
    stages = [
        result.stages | {"out": bits16(result.out, width), "lse": np.array(result.lse, np.uint32)}
        for result in results
    ]
    if group[0].head.dout is None:
        return stages
    gradients = group_gradients(
        group,
        [result.out for result in results] if out is None else out,
        [result.lse for result in results] if lse is None else lse,
    )
    for own, backward, dq in zip(stages, gradients.heads, gradients.dq, strict=True):
        own.update(backward.stages)
        own["dq"] = bits16(dq, width)
        own["dk"], own["dv"] = bits16(gradients.dk, width), bits16(gradients.dv, width)
    return stages


def _operand(name: str) -> str:
    return name.split(".")[0]


def _is_pairs(name: str) -> bool:
    return name not in ROW_STAGES and _operand(name) not in OPERANDS


def _is_descale(name: str, stages: Stages) -> bool:
    """Whether a stage is one number of a document and key/value head."""
    return name.endswith(".scales") and stages[name].shape == (1,)


def _join_heads(groups: Sequence[Sequence[Stages]]) -> Stages:
    """The stages of a document with an axis of heads."""
    joined = {}
    for name in groups[0][0]:
        # What belongs to a key/value head is the same in each query head of its group.
        per_group = _operand(name) in ("k", "v", "dk", "dv") or _is_descale(name, groups[0][0])
        arrays = [one[name] for group in groups for one in (group[:1] if per_group else group)]
        joined[name] = np.stack(arrays, axis=1 if _operand(name) in OPERANDS else 0)
    return joined


def _join_documents(documents: Sequence[Stages], count: int) -> dict[str, Any]:
    """The stages of all documents; ``count`` of them go into the lists."""
    result: dict[str, Any] = {}
    for name in documents[0]:
        arrays: list[Array] = [document[name] for document in documents]
        if _is_pairs(name):
            result[name] = arrays[:count]
        else:
            result[name] = np.concatenate(arrays, axis=1 if name in ROW_STAGES else 0)
            if name.endswith(".scales") and arrays[0].dtype == np.uint32:  # one a document
                result[name] = result[name][:count]
    return result
