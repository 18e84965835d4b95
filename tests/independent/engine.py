"""Attention forward and backward of any recipe, given as plain data: an interpreter of its knobs.

The recipe is a dictionary as ``json.loads`` gives it. All stages come out, by their names in
traces. What the descriptions leave open is said in ``engine_forward`` and ``engine_backward``.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent import sinks
from tests.independent.copies import Copies, copies
from tests.independent.engine_backward import HeadBackward, gradients
from tests.independent.engine_forward import Forward, Head, Recipe, forward
from tests.independent.masks import Mask, Tiling, window_sides
from tests.independent.matrices import Integers
from tests.independent.operands import Matrix, widen
from tests.independent.scores import Scores

Bits = npt.NDArray[np.integer[Any]]
Stages = dict[str, Any]
PAIRED_HEAD_DIM = 128

ROW_STAGES = ("lse", "row_max", "row_sum", "delta")
OPERANDS = ("q", "k", "v", "do", "out", "o", "high_precision_out", "dq", "dk", "dv")
OF_KEY_HEADS = ("k", "v", "dk", "dv")


def run(
    recipe: Recipe,
    q_bits: Bits,
    k_bits: Bits,
    v_bits: Bits,
    dout_bits: Bits | None,
    cu_seqlens: Sequence[int] | Bits,
    *,
    cu_seqlens_k: Sequence[int] | Bits | None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Bits | None = None,
    out_bits: Bits | None = None,
    lse_bits: Bits | None = None,
) -> dict[str, Any]:
    """Run both passes of a recipe, or the forward alone without ``dout_bits``; every stage.

    ``q_bits`` [queries, heads, head_dim], ``k_bits`` [keys, kv_heads, head_dim], ``v_bits`` [keys, kv_heads, width],
    ``dout_bits`` [queries, heads, width]: bfloat16 bits. ``sink``: float32 bits [heads]. ``out_bits`` (like dout) and
    ``lse_bits`` (float32 bits [heads, queries]) are what the backward starts from; the forward's own by default.

    Returned are ``out``, ``dq``, ``dk``, ``dv`` (uint16), ``lse``, with a sink ``dsink`` (uint32 [heads]), and the
    stages: operands' codes [tokens, heads, ...]; rows [heads, tokens], with splits [splits, heads, tokens]; pairs as
    lists, an array [heads, queries, keys] a document. ``saved.row_base`` is such a list too, [heads, queries, key
    tiles]. ``high_precision_out`` (uint16 like out) is there where delta takes it.
    """
    tokens, heads, head_dim = q_bits.shape
    kv_heads = v_bits.shape[1]
    if heads % kv_heads or k_bits.shape[1:] != (kv_heads, head_dim):
        raise ValueError(
            f"shapes {q_bits.shape}, {k_bits.shape}, {v_bits.shape}: make k and v fit q"
        )
    bounds = [int(x) for x in cu_seqlens]
    key_bounds = bounds if cu_seqlens_k is None else [int(x) for x in cu_seqlens_k]
    if len(bounds) != len(key_bounds) or bounds[-1] != tokens or key_bounds[-1] != len(k_bits):
        raise ValueError(f"cu_seqlens {bounds} and {key_bounds}: make them fit each other, q and k")
    left, right = window_sides(window)
    scores = Scores(
        softmax=recipe["softmax"],
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale,
        softcap=softcap,
    )

    def document(queries: slice, keys: slice) -> tuple[Stages, list[list[list[int]]]]:
        mask = Mask(
            queries=queries.stop - queries.start,
            keys=keys.stop - keys.start,
            causal=causal,
            alignment=alignment,
            left=left,
            right=right,
        )
        groups, terms = [], []
        for kv_head in range(kv_heads):
            k, v = k_bits[keys, kv_head].astype(int), v_bits[keys, kv_head].astype(int)
            shared: dict[str, Any] = {
                "recipe": recipe,
                "mask": mask,
                "tiling": _tiling(recipe, mask, head_dim),
                "scores": scores,
                "k": k,
                "v": v,
                "k_copies": _copies("k", k, recipe),
                "v_copies": _copies("v", v, recipe),
            }
            group = []
            size = heads // kv_heads
            for head in range(kv_head * size, (kv_head + 1) * size):
                q = q_bits[queries, head].astype(int)
                dout = None if dout_bits is None else dout_bits[queries, head].astype(int)
                group.append(
                    Head(
                        **shared,
                        q=q,
                        dout=dout,
                        q_copies=_copies("q", q, recipe),
                        sink=None if sink is None else int(sink[head]),
                    )
                )
            given = range(kv_head * size, (kv_head + 1) * size)
            out = None if out_bits is None else [out_bits[queries, x].tolist() for x in given]
            lse = None if lse_bits is None else [lse_bits[x, queries].tolist() for x in given]
            stages, sink_terms = _run_group(group, out, lse)
            groups += stages
            terms += sink_terms
        return _joined_heads(groups, heads // kv_heads), terms

    spans = [itertools.starmap(slice, itertools.pairwise(x)) for x in (bounds, key_bounds)]
    found = [document(*pair) for pair in zip(*spans, strict=True)]
    # Without any document an empty one gives the shapes.
    stages = [one for one, _ in found] or [document(slice(0, 0), slice(0, 0))[0]]
    result = _joined_documents(stages, len(found), recipe["tiles"]["splits"])
    if sink is not None and dout_bits is not None:
        result["dsink"] = np.array(
            [sinks.gradient([terms[head] for _, terms in found]) for head in range(heads)],
            np.uint32,
        )
    return result


def _tiling(recipe: Recipe, mask: Mask, head_dim: int) -> Tiling:
    tiles = recipe["tiles"]
    partials = recipe["dq"]["accumulation"] == "float32_partials"
    return Tiling(
        mask=mask,
        query_size=tiles["query"],
        key_size=tiles["key"],
        computed=tiles["masked"] == "computed",
        paired=partials and head_dim >= PAIRED_HEAD_DIM,
    )


def _copies(tensor: str, bits: Integers, recipe: Mapping[str, Any]) -> Copies:
    return copies(tensor, widen(bits.tolist()), bits.shape[1], recipe)


def _run_group(
    group: Sequence[Head], out: list[Matrix] | None, lse: list[list[int]] | None
) -> tuple[list[Stages], list[list[list[int]]]]:
    """Both passes of the query heads of one key/value head: stages and terms of dsink of each."""
    results = [forward(head) for head in group]
    stages = [_forward_stages(head, result) for head, result in zip(group, results, strict=True)]
    if group[0].dout is None:
        return stages, []
    backwards = [
        HeadBackward(
            head,
            result,
            result.out if out is None else out[index],
            result.lse if lse is None else lse[index],
        )
        for index, (head, result) in enumerate(zip(group, results, strict=True))
    ]
    found = gradients(backwards)
    for own, head, one, dq in zip(stages, group, backwards, found.dq, strict=True):
        own.update(
            {
                **head.v_copies.stages(("o.v", "dp.v")),
                **head.k_copies.stages(("s.k", "dq.k")),
                **head.q_copies.stages(("s.q", "dk.q")),
                **one.stages(),
                "dq": _matrix(dq, head.q.shape[1]),
                "dk": _matrix(found.dk, head.k.shape[1]),
                "dv": _matrix(found.dv, head.v.shape[1]),
            }
        )
    terms = [] if group[0].sink is None else [one.sink_terms() for one in backwards]
    return stages, terms


def _forward_stages(head: Head, result: Forward) -> Stages:
    high = {}
    if head.recipe["gradient"]["delta_source"] == "high_precision_out":
        high["high_precision_out"] = _matrix(result.high, head.v.shape[1])
    return {
        **high,
        **head.q_copies.stages(("s.q",)),
        **head.k_copies.stages(("s.k",)),
        **head.v_copies.stages(("o.v",)),
        **result.stages,
        "out": _matrix(result.out, head.v.shape[1]),
        "lse": np.array(result.lse, np.uint32),
        "saved.row_base": np.array(result.bases, np.uint32).reshape(
            head.mask.queries, len(head.tiling.key_tiles)
        ),
    }


def _matrix(rows: Matrix, width: int) -> Bits:
    return np.array(rows, np.uint16).reshape(len(rows), width)


def _operand(name: str) -> str:
    return name.split(".")[0]


def _is_pairs(name: str) -> bool:
    return name not in ROW_STAGES and _operand(name) not in OPERANDS


def _joined_heads(heads: Sequence[Stages], group: int) -> Stages:
    """The stages of a document with an axis of heads."""
    joined = {}
    for name in heads[0]:
        # What belongs to a key/value head is the same in each query head of its group.
        arrays = [one[name] for one in heads[:: group if _operand(name) in OF_KEY_HEADS else 1]]
        first = arrays[0]
        axis = 1 if _operand(name) in OPERANDS or (name in ROW_STAGES and first.ndim == 2) else 0
        joined[name] = np.stack(arrays, axis=axis)
    return joined


def _joined_documents(documents: Sequence[Stages], count: int, splits: int) -> Stages:
    """The stages of all documents; ``count`` of them go into the lists."""
    result: Stages = {}
    for name in documents[0]:
        arrays = [document[name] for document in documents]
        if _is_pairs(name):
            result[name] = arrays[:count]
        else:
            is_row = name in ROW_STAGES
            result[name] = np.concatenate(arrays, axis=arrays[0].ndim - 1 if is_row else 0)
    return result
