"""The two passes over a case: the runs of the simulator, set up for ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from flamia_ref.arithmetic.instructions import Instruction
from flamia_ref.attention import inputs
from flamia_ref.attention.backward_pass import BackwardRun
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.forward_pass import ForwardRun
from flamia_ref.attention.product import Use
from flamia_ref.attention.results import Forward
from flamia_ref.attention.run import Sizes
from flamia_ref.attention.traced import Wanted
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.envelope.backward import BackwardEnvelope, taken_copy
from flamia_ref.golden.envelope.forward import ForwardEnvelope
from flamia_ref.golden.envelope.ranges import Range, exactly
from flamia_ref.golden.envelope.record import Bits, Record, wide

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe


def forward(
    spec: CaseSpec,
    recipe: Recipe,
    expected: Mapping[str, Bits],
    record: Record,
    machine: Instruction | None,
) -> Range | None:
    """Note what the forward permits. Returns O before its output rounding, where delta is computed from that."""
    keeps = recipe.has_backward and recipe.backward.gradient.delta_source == "unrounded_out"
    if keeps:
        record.wanted = record.wanted | {"o"}
    run = ForwardRun(
        recipe,
        _shape(spec),
        _sizes(spec),
        np,
        np,
        None,
        Wanted(()),
        _sink(expected),
    )
    run.inputs.update({name: _values(expected[name]) for name in ("q", "k", "v")})
    _take(run, record, (Use.S_Q, Use.S_K, Use.O_V))
    ForwardEnvelope(run, record, machine).all_tiles()
    if not keeps:
        return None
    if "o" in record.given:
        return exactly(wide(record.given["o"]))
    found = record.found["o"]
    return Range(found.low, found.high, found.nan)


def backward(
    spec: CaseSpec,
    recipe: Recipe,
    expected: Mapping[str, Bits],
    record: Record,
    out: Bits,
    lse: Bits,
    o: Range | None,
    machine: Instruction | None,
) -> None:
    """Note what the backward permits after out and lse, float32 bits."""
    shape = _shape(spec)
    ahead = Forward(
        out=out.view(np.float32),
        lse=lse.view(np.float32),
        saved={},
        trace={},
        recipe=recipe,
        mask=shape.mask,
        softmax_scale=shape.softmax_scale,
        softcap=shape.softcap,
        sink=None,
    )
    run = BackwardRun(ahead, _sizes(spec), np, np, None, Wanted(()), _sink(expected), {})
    run.inputs.update({name: _values(expected[name]) for name in ("q", "k", "v")})
    _take(run, record, (Use.S_Q, Use.S_K, Use.DP_V, Use.DQ_K, Use.DK_Q))
    BackwardEnvelope(run, record, o, machine).gradients(_values(expected["dout"]), out, lse)


def _take(run: ForwardRun | BackwardRun, record: Record, uses: tuple[Use, ...]) -> None:
    names = copy_names(run.recipe)
    for name in dict.fromkeys(names[use] for use in uses):
        taken_copy(run, record, name)


def _shape(spec: CaseSpec) -> inputs.Shape:
    return inputs.Shape(
        spec.mask,
        inputs.checked_scale(spec.softmax_scale, spec.head_dim),
        inputs.checked_softcap(spec.softcap),
    )


def _sizes(spec: CaseSpec) -> Sizes:
    return Sizes(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim)


def _sink(expected: Mapping[str, Bits]) -> Bits | None:
    if "sink" not in expected:
        return None
    return np.asarray(inputs.sink_bits(np.asarray(expected["sink"], np.float32)))


def _values(bits: Bits) -> Bits:
    """float32 bits of an input, rounded as the simulator rounds it."""
    return np.asarray(inputs.rounded_bits({"x": bits.view(ml_dtypes.bfloat16)})["x"])
