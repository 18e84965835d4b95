"""Every knob acts, and where it should: another value of it changes bits, first in the stage that it belongs to, and
no stage before. Values and stages are those that the descriptions of the knobs name."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest

from flamia_ref.attention import RECIPES, Recipe, backward_stages, forward_stages
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.stages import pair_names
from tests.attention.changes import with_changes
from tests.attention.samples import BF16, bits, cancelling
from tests.attention.shapes import Shape, run

FOLDED, CUDNN, FA4 = "flamia-mxfp8-folded", "cudnn-mxfp8", "bf16-fa4"
REFERENCE = "cudnn-mxfp8-reference"
QAT, CUDNN_BF16 = "attn-qat-nvfp4", "cudnn-mxfp8-pv-bf16"
GUARDED, FP4, UE4M3 = "flamia-mxfp8", "flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3"

Changes = Mapping[str, Any]


def _infinite_dp():
    """A value beyond e4m3's scale beside a large dO: dP of a key that no earlier query sees is infinite."""
    shape = Shape(lengths=((40, 40),), heads=1, head_dim=32, value_dim=32)
    q, k, v, dout = shape.arrays()
    v[39], dout[5] = 2.0**120, 2.0**100
    return (q, k, v, dout), {}


def _cancelling(groups: str, unit: int):
    *arrays, _ = cancelling(groups, unit, heads=3)
    q, k, v, dout = arrays
    return (q, k[:, :1], v[:, :1], dout), {"causal": False}


def _cancelling_heads():
    """Heads alike but for dO, which is x, -x and x 2^-22 in them."""
    (q, k, v, dout), options = _of(lengths=((40, 40),), heads=3)
    q[:], dout[:] = q[:, :1], dout[:, :1]
    dout[:, 1] *= BF16.type(-1)
    dout[:, 2] *= BF16.type(2.0**-22)
    return (q, k, v, dout), options


def _of(**fields):
    shape = Shape(**{"head_dim": 40, "value_dim": 40, **fields})
    queries, keys = shape.cu_seqlens
    return shape.arrays(), {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}


INPUTS = {
    "plain": lambda: _of(lengths=((70, 70), (9, 9))),
    "sharp": lambda: _of(lengths=((70, 70),), spread=4.0),
    "full": lambda: _of(lengths=((70, 100),), mask="full", spread=2.0, heads=3),
    "softcap": lambda: _of(lengths=((40, 40),), softcap=2.0, spread=2.0),
    "odd softcap": lambda: _of(lengths=((40, 40),), softcap=1.7, spread=2.0),
    "sink": lambda: _of(lengths=((40, 40),), sink=(0.5, 3.0)),
    "infinite dP": _infinite_dp,
    "cancelling heads": _cancelling_heads,
    "cancelling": lambda: _cancelling("bns", 32),
    "cancelling steps": lambda: _cancelling("bsn", 16),
}


def results(recipe: Recipe, given: str) -> dict[str, bytes]:
    """The bytes of every stage and result in the order of the dataflow; codes and scales by their uses."""
    arrays, options = INPUTS[given]()
    found = run(arrays, recipe, **options)
    named: dict[str, Any] = {}
    uses = {**copy_names(recipe), **pair_names(recipe)}
    for name in (*forward_stages(recipe), "out", "lse", *backward_stages(recipe)):
        own = [use for use, copy in uses.items() if copy == name.rpartition(".")[0]]
        for key in [f"{use} {name.rpartition('.')[2]}" for use in own] or [name]:
            named[key] = found[name]
    named |= {name: found[name] for name in ("dq", "dk", "dv", "dsink") if name in found}
    return {
        name: b"".join(bits(x).tobytes() for x in (value if isinstance(value, list) else [value]))
        for name, value in named.items()
    }


@functools.cache
def base(recipe: str, before: tuple[tuple[str, Any], ...], given: str) -> dict[str, bytes]:
    return results(with_changes(recipe, dict(before)), given)


def moved(recipe: str, before: Changes, after: Changes, given: str) -> list[str]:
    """The stages that `after` changes in a recipe that has `before`."""
    old = base(recipe, tuple(before.items()), given)
    new = results(with_changes(recipe, {**before, **after}), given)
    return [name for name in new if new[name] != old.get(name)]


RAW = {"softmax.base": "raw_max", "softmax.exp2_argument": "fused", "softmax.lse": "log2_fma"}
SCALED = {
    "softmax.base": "scaled_max",
    "softmax.exp2_argument": "fused",
    "softmax.lse": "natural_fma",
}
SKIPPED = {"tiles.masked": "skipped"}
STATIC = {
    "format": "e4m3",
    "block": None,
    "scope": "static",
    "static_scale": 127,
    "same_codes_as": None,
}
HALF = {
    "format": "bf16",
    "block": None,
    "scope": "unit",
    "same_codes_as": None,
    "dequantized": False,
}
PREVIOUS = {"scope": "previous_block", "static_scale": 127, "same_codes_as": None}


def at(path: str, fields: Changes) -> dict[str, Any]:
    return {f"{path}.{name}": value for name, value in fields.items()}


CASES: list[tuple[str, Changes, Changes, str, str]] = [
    # recipe, what it has before, the change, the inputs, the first stage that moves
    (FOLDED, {}, {"softmax.exp2": "correct"}, "plain", "p"),
    (FOLDED, {}, {"softmax.log2": "correct"}, "plain", "lse"),
    (FOLDED, {}, {"softmax.reciprocal": "correct"}, "plain", "o"),
    (FOLDED, {}, {"softmax.tanh": "correct"}, "softcap", "p"),
    (CUDNN, {}, {"softmax.emulated": None}, "plain", "p"),
    (FA4, {}, {"softmax.score": "scaled"}, "plain", "p"),
    (FOLDED, {}, {"softmax.score": "scaled"}, "plain", "p"),
    (FOLDED, {}, RAW, "plain", "p"),
    (FOLDED, {}, SCALED, "plain", "p"),
    (FOLDED, RAW, SCALED, "plain", "row_max"),  # in other units
    (FOLDED, {}, {"softmax.exp2_argument": "fused"}, "plain", "p"),
    (FOLDED, {}, {"softmax.exp2_argument": "unfused"}, "plain", "p"),
    (CUDNN, {}, {"softmax.exp2_argument": "unfused"}, "plain", "p"),
    (FA4, {}, {"softmax.mask_value": -8.0}, "plain", "p"),
    (FOLDED, {}, {"softmax.rescale_threshold": 4}, "full", "p"),
    (FOLDED, {}, {"softmax.p_offset": 3}, "plain", "p"),
    (FA4, {}, {"softmax.p_offset": 3}, "plain", "p"),
    (FOLDED, {}, {"softmax.row_sum": "two_lanes"}, "plain", "row_sum"),
    (FOLDED, {}, {"softmax.row_sum": "ascending"}, "plain", "row_sum"),
    (CUDNN, {}, {"softmax.row_sum": "ascending"}, "plain", "row_sum"),
    (REFERENCE, {}, {"softmax.row_sum": "ascending"}, "plain", "row_sum"),
    (CUDNN, {}, {"softmax.row_sum": "by_tiles"}, "plain", "row_sum"),
    (REFERENCE, {}, {"softmax.rescale_threshold": 0}, "sharp", "p"),
    (REFERENCE, {"softmax.rescale_threshold": 1}, {"softmax.threshold_unit": "log2"}, "sharp", "p"),
    (REFERENCE, {}, {"softmax.p_scaling": "exponent"}, "plain", "o.p codes"),
    (REFERENCE, {}, {"softmax.normalisation": "division"}, "plain", "o"),
    (REFERENCE, {}, {"gradient.normalisation": "lse"}, "plain", "p.dv"),
    (REFERENCE, {}, {"gradient.softmax_scale": "in_ds"}, "plain", "ds"),
    (CUDNN, {}, {"gradient.softmax_scale": "times_ds"}, "plain", "ds"),
    (CUDNN, {}, {"softmax.normalisation": "clamped_quotient"}, "plain", "o"),
    (FOLDED, {}, {"softmax.row_sum_of": "codes"}, "plain", "row_sum"),
    (FA4, {}, {"softmax.row_sum_of": "codes"}, "plain", "row_sum"),
    (GUARDED, {}, {"softmax.row_sum_of": "codes"}, "plain", "row_sum"),
    (FOLDED, {}, {"softmax.normalisation": "division"}, "plain", "o"),
    (FOLDED, {}, {"softmax.normalisation": "quotient"}, "plain", "o"),
    (CUDNN, {}, {"softmax.normalisation": "quotient"}, "plain", "o"),
    (CUDNN, {}, {"softmax.normalisation": "reciprocal"}, "plain", "o"),
    (CUDNN, {}, {"softmax.lse": "log2_sum"}, "plain", "lse"),
    (FA4, {}, {"softmax.lse": "factor_fma"}, "plain", "lse"),
    (FA4, {}, {"softmax.lse": "scale_fma"}, "plain", "lse"),
    (FA4, {}, {"softmax.exp2_argument": "fused_base", "softmax.p_offset": 3}, "plain", "p"),
    (FA4, {"softmax.p_offset": 3}, {"softmax.exp2_argument": "fused_base"}, "plain", "p"),
    (FA4, {}, {"softmax.softcap": "folded"}, "softcap", "row_max"),  # P is nearly the same
    (CUDNN, {}, {"softmax.softcap": "folded"}, "softcap", ""),  # a cap of 2 rounds nothing
    (CUDNN, {}, {"softmax.softcap": "folded"}, "odd softcap", "p"),
    (FOLDED, {}, {"softmax.softcap": "folded"}, "plain", ""),
    (FOLDED, {}, {"softmax.row_sum": "quads"}, "plain", "row_sum"),
    (FA4, {"softmax.row_sum": "octets"}, {"softmax.row_sum": "quads"}, "plain", "row_sum"),
    (FA4, {}, {"softmax.row_sum": "halved_lanes"}, "sharp", "row_sum"),
    (FOLDED, {}, {"softmax.lse": "natural_fma"}, "plain", "lse"),
    (FOLDED, {}, {"tiles.splits": 2}, "plain", "p"),
    (FOLDED, {"tiles.splits": 2}, {"softmax.combine": "divide_last"}, "plain", "o"),
    (FA4, {"tiles.splits": 3}, {"softmax.combine": "divide_last"}, "full", "o"),
    (FOLDED, {"tiles.splits": 2}, {"tiles.splits": 3}, "full", "row_max"),  # the third is empty
    (FOLDED, {"tiles.splits": 2}, {"tiles.splits": 4}, "full", "p"),
    (FOLDED, {}, {"tiles.key": 64}, "full", "p"),
    (FOLDED, {}, {"tiles.query": 64}, "sink", "dsink"),
    (FOLDED, {}, {"gradient.softmax_scale": "in_ds"}, "plain", "ds"),
    (CUDNN, {}, {"gradient.softmax_scale": "in_ds"}, "plain", "ds"),
    (FA4, {}, {"gradient.score_factor": "exact_product"}, "plain", "p.dv"),
    (FOLDED, {}, {"gradient.normalisation": "lse"}, "plain", "dp.do codes"),
    (CUDNN, {}, {"gradient.normalisation": "fold_into_dout", "gradient.p_offset": 7}, "plain",
     "dp.do codes"),
    (FOLDED, {}, {"gradient.delta": "thread_vectors"}, "plain", "delta"),
    (FOLDED, {}, {"gradient.delta": "half_products"}, "plain", "delta"),
    (FOLDED, {}, {"gradient.delta_source": "unrounded_out"}, "plain", "delta"),
    (FOLDED, {}, {"gradient.delta_source": "quantized_dout"}, "plain", "delta"),
    (QAT, {}, {"gradient.delta_source": "returned_out"}, "plain", "delta"),
    (QAT, {}, {"gradient.delta_source": "unrounded_out"}, "plain", "delta"),
    (CUDNN_BF16, {}, {"gradient.delta_source": "high_precision_out"}, "plain", "high_precision_out"),
    (QAT, {}, {"softmax.row_sum": "ascending"}, "plain", "row_sum"),
    (QAT, {}, {"softmax.mask_value": None}, "plain", ""),  # far below all scores
    (QAT, {}, {"gradient.p_for_dv": "forward"}, "plain", "dv.p codes"),
    (QAT, {}, at("o.left", HALF), "plain", "o.p codes"),
    (QAT, {}, at("dv.left", HALF), "plain", "dv.p codes"),
    (QAT, {}, at("dp.right", HALF), "plain", "dp"),
    (FOLDED, {}, {"gradient.delta_source": "p_dp"}, "plain", "delta"),
    (FA4, {}, {"gradient.delta_source": "p_dp"}, "sink", "delta"),
    (CUDNN, {}, {"gradient.delta_source": "p_dp"}, "softcap", "delta"),
    (FOLDED, {}, {"gradient.p_for_dv": "forward"}, "plain", "dv.p codes"),
    (FA4, {}, {"gradient.p_for_dv": "forward"}, "plain", "dv.p codes"),
    (CUDNN, {}, {"gradient.p_for_dv": "forward"}, "plain", "dv.p codes"),
    (FA4, {}, {"gradient.p_offset": 2}, "plain", "dv.p codes"),
    (CUDNN, {}, {"gradient.masked_ds": "product"}, "infinite dP", "ds"),
    (CUDNN, {}, {"gradient.heads": "float32_sum"}, "cancelling steps", "dk"),
    (FOLDED, {}, {"gradient.heads_order": "descending"}, "cancelling heads", "dk"),
    (CUDNN, {}, {"gradient.heads_order": "descending"}, "cancelling steps", "dk"),
    (FOLDED, SKIPPED, {"tiles.masked": "computed", "softmax.mask_value": None}, "plain", ""),
    (FA4, {}, {"o.tile_order": "ascending"}, "full", "p"),
    (FA4, {}, {"o.accumulation": "float32_partials"}, "full", "o"),
    (CUDNN, {}, {"o.accumulation": "float32_partials"}, "full", "o"),
    (FOLDED, {}, {"dq.tile_order": "descending"}, "cancelling", "dq"),
    (FOLDED, {}, {"dq.tile_order": "shifted"}, "cancelling", "dq"),
    (CUDNN, {}, {"dq.accumulation": "float32_partials"}, "cancelling", "dq"),
    (FOLDED, {}, {"dk.tile_order": "descending", "dv.tile_order": "descending"}, "cancelling", "dk"),
    (FOLDED, {}, {"dk.tile_order": "shifted", "dv.tile_order": "shifted"}, "cancelling", "dk"),
    (FA4, {}, {"s.k_order": "descending"}, "plain", "s"),
    (FOLDED, {}, {"s.k_order": "descending"}, "plain", "s"),
    (FP4, {}, {"s.k_order": "descending"}, "plain", ""),  # 40 channels are one step
    (UE4M3, {}, {"s.k_order": "descending"}, "plain", ""),
    (FA4, {}, {"dp.k_order": "descending"}, "plain", "dp"),
    (FA4, {}, {"o.k_order": "descending"}, "full", "o"),
    (FA4, {}, {"dq.k_order": "descending"}, "cancelling steps", "dq"),
    (FA4, {}, {"dk.k_order": "descending"}, "cancelling steps", "dk"),
    (FA4, {}, {"dv.k_order": "descending"}, "cancelling steps", "dv"),
    (FOLDED, {}, {"s.instruction": "exact"}, "sharp", "s"),
    (FA4, {}, {"s.instruction": "float32"}, "sharp", "s"),
    (FA4, {}, {"o.instruction": "exact"}, "sharp", "o"),
    (CUDNN, {}, at("s.left", STATIC), "plain", "s.q codes"),
    (CUDNN, at("s.left", STATIC), {"s.left.static_scale": 130}, "plain", "s.q codes"),
    (CUDNN, {}, at("o.right", PREVIOUS), "plain", "o.v codes"),
    (CUDNN, at("o.right", PREVIOUS), {"o.right.static_scale": 120}, "plain", "o.v codes"),
    (GUARDED, {}, {"guard_operands": "codes"}, "plain", "s"),
    (GUARDED, {}, {"s.right.guard": "none", "s.guard_instruction": None}, "plain", "s"),
    (GUARDED, {}, {"s.guard_instruction": "float32"}, "plain", "s"),
    (FP4, {}, {"dq.right.promoted_from": None}, "plain", "dq.k codes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "before", "after", "given", "first"),
    CASES,
    ids=lambda x: " ".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else x,
)
def test_a_knob_acts_first_in_its_stage(
    recipe: str, before: Changes, after: Changes, given: str, first: str
) -> None:
    found = moved(recipe, before, after, given)
    assert (found[0] if found else "") == first, found


ELSEWHERE = {
    "softmax.score_factor": "test_computed.py",
    "softmax.nan_p": "test_mutations.py and the cases of tests/independent",
    "softmax.p_overflow": "test_mutations.py and the cases of tests/independent",
    "softmax.p_scale": "test_sage3.py",
}
"""Knobs that are tried in other files, which hold them to independent implementations."""


def test_every_knob_is_tried() -> None:
    """Each field of the softmax, the gradient and the tiles, with each value that is a name."""
    tried = {path for _, before, after, _, _ in CASES for path in (*before, *after)}
    data = json.loads(RECIPES[FOLDED].to_json())
    for part in ("softmax", "gradient", "tiles"):
        for name in data[part]:
            if f"{part}.{name}" not in ELSEWHERE:
                assert f"{part}.{name}" in tried, f"{part}.{name}"
