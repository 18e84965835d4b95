"""What a traced run of a recipe shows of its consistency: numbers, without a verdict.

All of it is computed in float64 from codes, scales and float32 stages that the run returned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend, _float32
from flamia_ref.arithmetic import special
from flamia_ref.attention import backward_tile, inputs, row_softmax, softmax
from flamia_ref.attention.backward_pass import backward
from flamia_ref.attention.copies import copy_names, uses_of
from flamia_ref.attention.forward_pass import forward
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.attention.parts import Pairs, Values, capped, parts
from flamia_ref.attention.product import Operand, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.samples import Sample
from flamia_ref.attention.stages import backward_stages, forward_stages, pair_names
from flamia_ref.formats import BF16, E8M0, FORMATS, PRESETS, Overflow, decode, encode

_UNIT = 127  # e8m0 code of 2^0
_LOG2_E = np.log2(np.e)
_SAME = 2.0**-12
"""Two roundings of one P are the same below this relative difference. A step of bfloat16 is 2^-8 of a value, one of
e4m3 more; the float32 rounding of the base is far less."""


class Run(NamedTuple):
    """A forward and a backward of a recipe, every stage traced."""

    recipe: Recipe
    sample: Sample
    forward: Forward
    backward: Backward


def traced(recipe: Recipe, sample: Sample, **attended: Any) -> Run:
    """Run a recipe on a sample. `attended`: keywords of `forward`, which say how; keys are the queries' tokens."""
    cu_seqlens = np.array(sample.documents.offsets, dtype=np.int32)
    first = forward(
        sample.q,
        sample.k,
        sample.v,
        recipe,
        cu_seqlens=cu_seqlens,
        trace=forward_stages(recipe),
        **attended,
    )
    second = backward(
        sample.q, sample.k, sample.v, sample.dout, first, trace=backward_stages(recipe)
    )
    return Run(recipe, sample, first, second)


class Count(NamedTuple):
    """How many of how many elements differ, and the root of the summed squares of the differences over that of the
    elements."""

    differing: int
    elements: int
    relative: float


def recomputed_scores(run: Run) -> Count:
    """Visible pairs whose P of the backward does not follow, to the bit, from the forward's S and lse, or from S alone
    where the backward makes a softmax of its own."""
    recipe, ahead = run.recipe, run.forward
    knobs, folds = recipe.softmax, recipe.backward.gradient.normalisation == "fold_into_dout"
    shape = inputs.Shape(ahead.mask, ahead.softmax_scale, ahead.softcap)
    factors = inputs.factors(shape, knobs, recipe.backward.gradient.score_factor)
    differing = elements = 0
    for index, document in enumerate(ahead.documents):
        base = _float32.multiply(_backend.bits(ahead.lse[:, document]), softmax.LOG2_E)
        base = base[:, :, None]
        with np.errstate(all="ignore"):
            s, _ = softmax.scores(_backend.bits(ahead.trace["s"][index]), factors, knobs)
            if folds:
                base = _float32.floor(base)
            split = softmax.split(s, factors.c, knobs)
            if knobs.base == "natural_max":
                p = _natural_probabilities(run, index, s)
            elif folds and split.e is not None:
                p = softmax.raised(split.e, split.n, base)
            else:
                exponent = softmax.exponent(s, factors.c, _float32.negate(base), knobs)
                p = special.exp2_bits(exponent, model=knobs.exp2)
        found = _backend.bits(run.backward.trace["p.dv"][index])
        seen = np.broadcast_to(_seen(run, index), found.shape)
        differing += int((found != p)[seen].sum())
        elements += int(seen.sum())
    return Count(differing, elements, 0.0)


def _natural_probabilities(run: Run, index: int, s: npt.NDArray[np.uint32]) -> Any:
    """P of one document from scores S' [heads, queries, keys], relative to a base in natural units."""
    recipe, visible = run.recipe, np.broadcast_to(_seen(run, index), s.shape)
    document = list(run.forward.documents)[index]
    base, total = _backend.bits(run.forward.lse[:, document]), None
    if recipe.backward.gradient.normalisation == "row_softmax":
        base, total = row_softmax.of_scores(s, visible, recipe)
    return backward_tile.pair_probabilities(s, visible, base, np.uint32(0), recipe, total)


def two_values(run: Run, tensor: str) -> Count:
    """Elements of q, k, v or do that its two products take with different values, outside guarded blocks."""
    one, other = (_value(run, use) for use in uses_of(run.recipe, tensor))
    different = one != other
    relative = np.linalg.norm(one - other) / np.linalg.norm(one)
    return Count(int(different.sum()), one.size, float(relative))


def two_roundings(run: Run) -> Count:
    """Visible pairs whose P in dV was rounded otherwise than the P that made O, relative to the same base.

    `relative` is the effect on dV: with the backward's rounding instead of the forward's, everything else exact.
    """
    differing = elements = 0
    change = size = 0.0
    group = run.sample.q.shape[1] // run.sample.k.shape[1]
    for index, document in enumerate(run.sample.documents):
        s, seen = run.forward.trace["s"][index].astype(np.float64), _seen(run, index)
        s, _ = capped(s * run.forward.softmax_scale, run.forward.softcap)
        lse = run.forward.lse[:, document].astype(np.float64)[:, :, None]
        exact = np.where(seen, np.exp(s - lse), 0)
        p_o, p_dv = (
            exact * _kept(run, use, index, name)
            for use, name in ((Use.O_P, "p"), (Use.DV_P, "p.dv"))
        )
        differ = np.abs(p_o - p_dv) > _SAME * np.maximum(p_o, p_dv)
        differing += int(differ.sum())
        elements += int(seen.sum()) * len(s)
        dout = run.sample.dout[document].astype(np.float64)
        dv = [np.einsum("hij,ihd->hjd", p, dout) for p in (p_o, p_dv)]
        dv = [x.reshape(-1, group, *x.shape[1:]).sum(axis=1) for x in dv]
        change += float(((dv[0] - dv[1]) ** 2).sum())
        size += float((dv[0] ** 2).sum())
    return Count(differing, elements, (change / size) ** 0.5)


class Delta(NamedTuple):
    """How far the traced delta is from the row sum of dO times O, relative to that of the magnitudes, at most: with the
    returned O, and with O before its output rounding. dO is what delta takes of it, the codes' values where it takes
    these. `halved`: whether half the out gives half the delta, to the bit.
    """

    returned: float
    unrounded: float
    halved: bool


def delta(run: Run) -> Delta:
    """Which O delta is made of."""
    sample, recipe = run.sample, run.recipe
    dout = sample.dout.astype(np.float64)
    if recipe.backward.gradient.delta_source == "quantized_dout":
        dout = _value(run, Use.DP_DO)
    elif recipe.backward.gradient.normalisation == "fold_into_dout":
        r = run.forward.lse.T.astype(np.float64)[:, :, None] * _LOG2_E
        dout = dout * np.exp2(np.floor(r) - r)
    found = run.backward.trace["delta"].T.astype(np.float64)
    distances = []
    for out in (run.forward.out, run.forward.trace["o"]):
        terms = dout * out.astype(np.float64)
        if recipe.backward.gradient.delta is DeltaSum.HALF_PRODUCTS:
            terms = _bf16(terms)
        distance = np.abs(found - terms.sum(axis=2)) / np.abs(terms).sum(axis=2)
        distances.append(float(distance.max()))
    half = replace(run.forward, out=run.forward.out * np.float32(0.5), trace={})
    again = backward(sample.q, sample.k, sample.v, sample.dout, half, trace=("delta",))
    halved = (again.trace["delta"] == run.backward.trace["delta"] * np.float32(0.5)).all()
    return Delta(distances[0], distances[1], bool(halved))


class RowSums(NamedTuple):
    """The row sums of dS over rows that see two keys or more: the largest and the root mean square of what they are
    relative to the sums of the row's magnitudes, and the sum of all their magnitudes relative to the sum of all."""

    largest: float
    root_mean_square: float
    together: float


def row_sums(run: Run) -> RowSums:
    """How far the rows of dS are from sums of zero, which those of the exact dS have.

    A row that sees one key has dP = delta in exact numbers, and nothing but rounding in its dS.
    """
    sums, magnitudes = [], []
    for index in range(len(run.sample.documents)):
        ds = run.backward.trace["ds"][index].astype(np.float64)
        counted = _seen(run, index).sum(axis=1) > 1
        sums.append(np.abs(ds.sum(axis=2))[:, counted].ravel())
        magnitudes.append(np.abs(ds).sum(axis=2)[:, counted].ravel())
    row, whole = np.concatenate(sums), np.concatenate(magnitudes)
    relative = row / np.where(whole == 0, 1, whole)
    return RowSums(
        float(relative.max()),
        float(np.sqrt((relative**2).mean())),
        float(row.sum() / whole.sum()),
    )


def _seen(run: Run, index: int) -> Pairs:
    """Which pairs of one document are visible."""
    return run.forward.mask.visible(index)


def _value(run: Run, use: Use) -> Values:
    """What one use of q, k, v or do takes, [tokens, heads, head_dim]."""
    operand, trace = run.recipe.operand(use), {**run.forward.trace, **run.backward.trace}
    if operand.plain:
        tensor = use.split(".")[1]
        given = {"q": run.sample.q, "k": run.sample.k, "v": run.sample.v, "do": run.sample.dout}
        return np.asarray(given[tensor], dtype=np.float64)
    name = copy_names(run.recipe)[use]
    values = _elements(operand, trace[f"{name}.codes"])
    if operand.format not in PRESETS:
        return values
    scales = trace[f"{name}.scales"]
    rows, columns = operand.block or (1, 1)
    if rows != 1:
        first, of_token = 0, []
        for length in run.sample.documents.lengths:
            of_token.append(first + np.arange(length) // int(rows))
            first += -(-length // int(rows))
        scales = scales[np.concatenate(of_token)]
    width = values.shape[2] if columns == "all" else int(columns)
    scales = np.repeat(scales, width, axis=2)[:, :, : values.shape[2]]
    values = values * decode(scales, PRESETS[operand.format].scale, np.float64)
    powers = trace.get(f"{name}.token_scales")
    return values if powers is None else np.asarray(values * decode(powers, E8M0, np.float64))


def _elements(operand: Operand, codes: npt.NDArray[np.unsignedinteger]) -> Values:
    """Values of codes without scales that follow from data, a static one with them."""
    if operand.format in PRESETS:
        return np.asarray(decode(codes, PRESETS[operand.format].element, np.float64))
    values = decode(codes, FORMATS[operand.format], np.float64)
    if operand.static_scale is not None:
        values = values * 2.0 ** (operand.static_scale - _UNIT)
    return np.asarray(values)


def _kept(run: Run, use: Use, index: int, unrounded: str) -> Values:
    """What rounding left of P in one document, as a factor of it [heads, queries, keys]; 0 where P is 0."""
    recipe, trace = run.recipe, {**run.forward.trace, **run.backward.trace}
    operand, name = recipe.operand(use), pair_names(recipe)[use]
    p = trace[unrounded][index].astype(np.float64)
    rounded = _elements(operand, trace[f"{name}.codes"][index])
    if operand.format in PRESETS:
        rows, columns = (int(extent) for extent in operand.block or (1, 1))
        scales = trace[f"{name}.scales"][index]
        scales = np.repeat(np.repeat(scales, rows, axis=1), columns, axis=2)
        scales = scales[:, : p.shape[1], : p.shape[2]]
        rounded = rounded * decode(scales, PRESETS[operand.format].scale, np.float64)
    rounded = np.ldexp(rounded, -_folded_into(run, use, index))
    if use is Use.O_P and recipe.o.guarded:
        rounded = np.where(_guarded(run, index), _bf16(p), rounded)
    return np.where(p == 0, 0, rounded / np.where(p == 0, 1, p))


def _folded_into(run: Run, use: Use, index: int) -> npt.NDArray[np.int32]:
    """The exponents of the token scales that P took over in one use, to be broadcast [heads, queries, keys]."""
    partner = Use.O_V if use is Use.O_P else Use.DV_DO
    if run.recipe.operand(partner).scale_folded_into is not use:
        return np.zeros((1, 1, 1), dtype=np.int32)
    trace = {**run.forward.trace, **run.backward.trace}
    scales = trace[f"{copy_names(run.recipe)[partner]}.scales"]
    document = list(run.sample.documents)[index]
    exponents = scales[document, :, 0].T.astype(np.int32) - _UNIT
    if partner is Use.DV_DO:
        return np.asarray(exponents[:, :, None])
    group = run.sample.q.shape[1] // run.sample.k.shape[1]
    return np.asarray(np.repeat(exponents, group, axis=0)[:, None, :])


def _guarded(run: Run, index: int) -> Pairs:
    """Which pairs of one document are in guarded blocks."""
    guarded = np.zeros_like(_seen(run, index))
    for part in parts(run.forward.mask, 1, 1):
        if part.document == index:
            rows, keys = part.seen.shape
            first = (part.first_query, part.first_key)
            guarded[first[0] : first[0] + rows, first[1] : first[1] + keys] = part.guarded()
    return guarded


def _bf16(x: Values) -> Values:
    codes = encode(x.astype(np.float32), BF16, overflow=Overflow.NATIVE)
    return np.asarray(decode(codes, BF16, np.float64))
