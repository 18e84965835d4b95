"""Every known mistake, planted by other code than that under test, is named: at its stage, and from outputs alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.golden.mistakes import Name
from tests.golden.mistakes.planting import (
    LOG2_E,
    InMemory,
    backward,
    case_of,
    changed,
    diagnosed,
    forward,
    inputs,
    recipe_of,
)

FOLDED, CUDNN, FA4, GUARDED = "flamia-mxfp8-folded", "cudnn-mxfp8", "bf16-fa4", "flamia-mxfp8"
SQUARES, FP4, PV = "flamia-mxfp8-unguarded", "flamia-nvfp4-fp8", "cudnn-mxfp8-pv-bf16"

Plant = Callable[[InMemory], dict[str, Any]]


def scaled(factor: Callable[[float], float]) -> Plant:
    return lambda case: forward(case, softmax_scale=factor(case.spec.softmax_scale))


def masked(**settings: Any) -> Plant:
    return lambda case: forward(case, **settings)


def with_recipe(path: str, **fields: Any) -> Plant:
    return lambda case: forward(case, changed(recipe_of(case), path, **fields))


def back_with_recipe(path: str, **fields: Any) -> Plant:
    return lambda case: backward(case, changed(recipe_of(case), path, **fields))


def own_key_hidden(case: InMemory) -> dict[str, Any]:
    """The last key of each document left out, the mask aligned bottom right: every query loses its own."""
    given, starts = inputs(case), case.spec.starts
    rows = np.concatenate([np.arange(a, b - 1) for a, b in pairwise(starts)])
    lengths = [length - 1 for length in case.spec.lengths]
    found = forward(
        case,
        k=given["k"][rows],
        v=given["v"][rows],
        cu_seqlens_k=np.array([0, *np.cumsum(lengths)], np.int32),
    )
    return {name: found[name] for name in ("row_max", "row_sum", "o", "out", "lse")}


def merged(case: InMemory) -> dict[str, Any]:
    found = forward(case, cu_seqlens=np.array([0, case.spec.tokens], np.int32))
    return {name: found[name] for name in ("row_max", "row_sum", "o", "out", "lse")}


def keys_of_next_document(case: InMemory) -> dict[str, Any]:
    given, starts, lengths = inputs(case), case.spec.starts, case.spec.lengths
    other = [min(one + 1, len(lengths) - 1) for one in range(len(lengths))]
    rows = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in other])
    found = forward(
        case,
        k=given["k"][rows],
        v=given["v"][rows],
        cu_seqlens_k=np.array([0, *np.cumsum([lengths[one] for one in other])], np.int32),
    )
    return {name: found[name] for name in ("row_max", "row_sum", "o", "out", "lse")}


def zeros_past_the_end(case: InMemory) -> dict[str, Any]:
    given, parts = inputs(case), {"k": [], "v": []}
    for a, b in pairwise(case.spec.starts):
        for name, of in parts.items():
            of.append(np.pad(given[name][a:b], ((0, -(b - a) % 32), (0, 0), (0, 0))))
    lengths = [len(part) for part in parts["k"]]
    found = forward(
        case,
        k=np.concatenate(parts["k"]),
        v=np.concatenate(parts["v"]),
        cu_seqlens_k=np.array([0, *np.cumsum(lengths)], np.int32),
    )
    return {name: found[name] for name in ("row_max", "row_sum", "o", "out", "lse")}


def not_normalised(case: InMemory) -> dict[str, Any]:
    found = forward(case)
    o = np.asarray(found["o"]) * np.asarray(found["row_sum"]).T[:, :, None]
    return found | {"o": o, "out": nearest(o)}


def nearest(x: Any) -> Any:
    b = np.asarray(x, np.float32).view(np.uint32)
    return ((b + 0x7FFF + ((b >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def cut_off(case: InMemory) -> dict[str, Any]:
    found = forward(case)
    b = np.asarray(found["o"], np.float32).view(np.uint32)
    return found | {"out": (b & np.uint32(0xFFFF0000)).view(np.float32)}


def lse_of(change: Callable[[Any, Any], Any]) -> Plant:
    def plant(case: InMemory) -> dict[str, Any]:
        found = forward(case)
        lse = np.asarray(found["lse"], np.float64)
        new = change(lse, np.asarray(found["row_sum"], np.float64))
        return found | {"lse": new.astype(np.float32)}

    return plant


def unrescaled(case: InMemory) -> dict[str, Any]:
    """O with the sums of the first tile as they were, in float64 from what the pack holds."""
    from flamia_ref.formats import decode

    found = forward(case)
    codes = decode(np.asarray(found["p.o.codes"][0]), "e4m3", np.float64)
    scales = 2.0 ** (np.repeat(found["p.o.scales"][0].astype(float), 32, axis=2) - 127)
    p = codes * scales[:, :, : codes.shape[2]]
    v = decode(np.asarray(found["v.codes"]), "e4m3", np.float64)
    o = np.einsum("hqk,khd->qhd", p, v) / np.asarray(found["row_sum"], np.float64).T[:, :, None]
    return {"out": nearest(o), "lse": found["lse"]}


def by_modulo(case: InMemory) -> dict[str, Any]:
    given, spec = inputs(case), case.spec
    taken = [head % spec.kv_heads for head in range(spec.heads)]
    found = forward(case, k=given["k"][:, taken], v=given["v"][:, taken])
    return {name: found[name] for name in ("s", "row_max", "p", "row_sum", "o", "out", "lse")}


def one_head(case: InMemory) -> dict[str, Any]:
    given = inputs(case)
    found = forward(case, k=given["k"][:, [0] * 4], v=given["v"][:, [0] * 4])
    return {name: found[name] for name in ("s", "row_max", "p", "row_sum", "o", "out", "lse")}


def last_head_of_group(case: InMemory) -> dict[str, Any]:
    given, found, spec = inputs(case), backward(case), case.spec
    heads = np.arange(spec.heads).reshape(spec.kv_heads, -1)[:, -1]
    part = attention.forward(
        given["q"][:, heads],
        given["k"],
        given["v"],
        recipe_of(case),
        cu_seqlens=spec.cu_seqlens,
        softmax_scale=spec.softmax_scale,
    )
    back = attention.backward(
        given["q"][:, heads], given["k"], given["v"], given["dout"][:, heads], part
    )
    return found | {"dk": back.dk}


def no_delta(case: InMemory) -> dict[str, Any]:
    found = backward(
        case, change=lambda rows, ahead: (replace(rows, delta=np.zeros_like(rows.delta)), ahead)
    )
    return {name: value for name, value in found.items() if name != "delta"}


def gradient_times(name: str, power: int) -> Plant:
    def plant(case: InMemory) -> dict[str, Any]:
        found = backward(case)
        return found | {name: np.asarray(found[name]) * case.spec.softmax_scale**power}

    return plant


def swapped(case: InMemory) -> dict[str, Any]:
    found = backward(case)
    return found | {"dq": found["dk"], "dk": found["dq"]}


def lse_taken_for(factor: float) -> Plant:
    """The backward with lse in another base."""

    def plant(case: InMemory) -> dict[str, Any]:
        return backward(
            case,
            before=lambda ahead: replace(ahead, lse=(ahead.lse * factor).astype(np.float32)),
        )

    return plant


def read_scales(name: str, use: str, moved: Callable[[Any], Any]) -> Plant:
    """A forward from operands whose scales the product reads from other places; what was written is right."""

    def plant(case: InMemory) -> dict[str, Any]:
        recipe, given = recipe_of(case), inputs(case)
        right = forward(case)
        whole = attention.prepare(
            given["q"], given["k"], given["v"], recipe, cu_seqlens=case.spec.cu_seqlens
        )
        copy = whole.operands[name]
        operands = dict(whole.operands) | {name: replace(copy, scales=moved(copy.scales))}
        ahead = attention.forward_from_operands(
            replace(whole, operands=operands),
            cu_seqlens=case.spec.cu_seqlens,
            causal=case.spec.causal,
            softmax_scale=case.spec.softmax_scale,
            trace=attention.forward_stages(recipe),
        )
        found = {**ahead.trace, "out": ahead.out, "lse": ahead.lse}
        return found | {part: right[part] for part in found if part.split(".")[0] in "qkv"}

    return plant


def next_along(axis: int, step: int) -> Callable[[Any], Any]:
    def moved(x: Any) -> Any:
        index = np.clip(np.arange(x.shape[axis]) + step, 0, x.shape[axis] - 1)
        return np.take(x, index, axis=axis)

    return moved


def written(name: str, moved: Callable[[Any], Any]) -> Plant:
    """The right results with one tensor written in another order."""

    def plant(case: InMemory) -> dict[str, Any]:
        return {
            one: moved(np.array(case.tensors[one])) if one.startswith(name) else case.tensors[one]
            for one, place in case.places.items()
            if place.stage.role != "input"
        }

    return plant


def tiles_split_32x4(x: Any) -> Any:
    """Tiles [heads, down, across, 512] written with row r at 16 (r // 4) + 4 (r % 4)."""
    found = np.zeros_like(x)
    for row in range(128):
        for column in range(4):
            right = row % 32 * 16 + row // 32 * 4 + column
            found[..., row // 4 * 16 + row % 4 * 4 + column] = x[..., right]
    return found


def rows_not_tiles(x: Any) -> Any:
    """Row-major bytes where tiles are expected, of one tile column."""
    found = np.zeros_like(x)
    for row in range(128):
        for column in range(4):
            found[..., row * 4 + column] = x[..., row % 32 * 16 + row // 32 * 4 + column]
    return found


def nibbles(x: Any) -> Any:
    found = x.copy()
    found[..., 0::2], found[..., 1::2] = x[..., 1::2], x[..., 0::2]
    return found


def transposed(x: Any) -> Any:
    """Codes [tokens, heads, channels] of a document of 64 tokens and 64 channels."""
    found = x.copy()
    found[:64] = np.swapaxes(x[:64], 0, 2)
    return found


def toward_zero(case: InMemory) -> dict[str, Any]:
    """q's codes rounded toward zero: one less in magnitude where nearest went up."""
    from flamia_ref.formats import decode

    found = dict(forward(case))
    x = np.abs(inputs(case)["q"].astype(np.float64)) / 2.0 ** (
        found["q.scales"].astype(float) - 127
    )
    codes = np.asarray(found["q.codes"])
    up = np.abs(decode(codes, "e4m3", np.float64)) > x
    return {"q.codes": codes - up.astype(np.uint8), "q.scales": found["q.scales"]} | {
        name: found[name] for name in ("out", "lse")
    }


def v_along_tokens(case: InMemory) -> dict[str, Any]:
    from flamia_ref.formats import dequantize, quantize

    v, starts = inputs(case)["v"], case.spec.starts
    for a, b in pairwise(starts):
        for head in range(v.shape[1]):
            blocked = quantize(v[a:b, head].astype(np.float32), "te-mx-e4m3", block=(32, 1))
            v[a:b, head] = np.asarray(dequantize(blocked)).astype(v.dtype)
    found = forward(case, v=v)
    return {"out": found["out"], "lse": found["lse"]}


def no_guard(case: InMemory) -> dict[str, Any]:
    from flamia_ref.attention.product import Guard

    product = recipe_of(case).s
    plain = replace(product, right=replace(product.right, guard=Guard.NONE), guard_instruction=None)
    return forward(case, replace(recipe_of(case), s=plain))


def floor_rule(case: InMemory) -> dict[str, Any]:
    recipe = recipe_of(case)
    for part in ("s.left", "s.right", "o.right", "dk.right", "dq.right", "dp.right"):
        recipe = changed(recipe, part, format="ocp-mx-floor-e4m3")
    return forward(case, recipe)


BOTH = ("staged", "final")
PLANTED: list[tuple[str, str, Name, Plant, tuple[str, ...]]] = [
    *(
        entry
        for recipe in (FOLDED, CUDNN, FA4)
        for entry in (
            ("documents", recipe, Name.NO_SOFTMAX_SCALE, scaled(lambda s: 1.0), BOTH),
            ("documents", recipe, Name.SOFTMAX_SCALE_TWICE, scaled(lambda s: s * s), BOTH),
            ("documents", recipe, Name.NATURAL_EXPONENT, scaled(lambda s: s / LOG2_E), BOTH),
            ("documents", recipe, Name.NO_MASK, masked(causal=False), BOTH),
            (
                "documents",
                recipe,
                Name.MASK_OFF_BY_ONE,
                masked(causal=False, window=(None, 1)),
                BOTH,
            ),
            ("documents", recipe, Name.NO_ISOLATION, merged, BOTH),
            ("documents", recipe, Name.HEADS_BY_MODULO, by_modulo, BOTH),
        )
    ),
    ("documents", FOLDED, Name.MASK_OFF_BY_ONE, own_key_hidden, BOTH),
    ("documents", GUARDED, Name.NO_MASK, masked(causal=False), BOTH),
    ("documents", GUARDED, Name.NO_GUARD, no_guard, BOTH),
    ("documents", FOLDED, Name.ONE_HEAD, one_head, BOTH),
    ("documents", FOLDED, Name.WRONG_DOCUMENT, keys_of_next_document, BOTH),
    ("full", FOLDED, Name.CAUSAL_MASK, masked(causal=True), BOTH),
    ("full", FOLDED, Name.STALE_PADDING, zeros_past_the_end, BOTH),
    ("full", FA4, Name.STALE_PADDING, zeros_past_the_end, BOTH),
    ("keys", FOLDED, Name.ALIGNMENT, masked(alignment="top_left"), BOTH),
    ("window", FOLDED, Name.WINDOW, masked(window=(7, 0)), BOTH),
    ("window", FOLDED, Name.WINDOW, masked(window=(5, 0)), BOTH),
    ("two-sided", FOLDED, Name.WINDOW, masked(window=(6, 4)), BOTH),
    ("window", FA4, Name.NO_WINDOW, masked(window=None), BOTH),
    ("capped", FOLDED, Name.NO_SOFTCAP, masked(softcap=None), BOTH),
    ("sink", FOLDED, Name.NO_SINK, masked(sink=None), BOTH),
    ("documents", CUDNN, Name.P_SCALE, with_recipe("softmax", p_offset=0), BOTH),
    ("documents", CUDNN, Name.P_SCALE, with_recipe("softmax", p_offset=0), ("staged",)),
    ("documents", CUDNN, Name.P_SCALE, with_recipe("o.left", static_scale=123), BOTH),
    ("documents", CUDNN, Name.P_SCALE, back_with_recipe("gradient", p_offset=4), BOTH),
    ("documents", CUDNN, Name.P_SCALE, back_with_recipe("dv.left", static_scale=127), BOTH),
    ("documents", FOLDED, Name.ROW_SUM, with_recipe("softmax", row_sum_of="codes"), BOTH),
    ("documents", FOLDED, Name.EXP2, with_recipe("softmax", exp2="correct"), ("staged",)),
    ("documents", FOLDED, Name.NOT_NORMALISED, not_normalised, BOTH),
    ("documents", FA4, Name.NOT_NORMALISED, not_normalised, BOTH),
    ("documents", FOLDED, Name.TRUNCATED, cut_off, BOTH),
    ("documents", FOLDED, Name.LSE_BASE, lse_of(lambda lse, sums: lse * LOG2_E), BOTH),
    ("documents", CUDNN, Name.LSE_PART, lse_of(lambda lse, sums: np.log(sums / 16)), BOTH),
    ("tiles", FOLDED, Name.NO_RESCALE, unrescaled, ("final",)),
    ("documents", FOLDED, Name.NO_GROUP_SUM, last_head_of_group, BOTH),
    ("documents", FOLDED, Name.NO_DELTA, no_delta, BOTH),
    ("documents", FA4, Name.NO_DELTA, no_delta, BOTH),
    (
        "documents",
        FOLDED,
        Name.DELTA,
        back_with_recipe("gradient", delta_source="quantized_dout"),
        BOTH,
    ),
    (
        "documents",
        FA4,
        Name.DELTA,
        back_with_recipe("gradient", delta=DeltaSum.HALF_PRODUCTS),
        ("staged",),
    ),
    ("documents", FOLDED, Name.P_SOURCE, back_with_recipe("gradient", p_for_dv="forward"), BOTH),
    ("documents", FOLDED, Name.GRADIENT_SCALE, gradient_times("dq", -1), BOTH),
    ("documents", FOLDED, Name.GRADIENT_SCALE, gradient_times("dk", 1), BOTH),
    ("equal", FOLDED, Name.SWAPPED_GRADIENTS, swapped, BOTH),
    ("documents", FOLDED, Name.NATURAL_EXPONENT, lse_taken_for(LOG2_E), BOTH),
    ("documents", FA4, Name.NATURAL_EXPONENT, lse_taken_for(1 / LOG2_E), BOTH),
    (
        "documents",
        CUDNN,
        Name.GRADIENT_ORDER,
        back_with_recipe("gradient", softmax_scale="in_ds"),
        ("staged",),
    ),
    (
        "wide",
        CUDNN,
        Name.NEIGHBOURING_SCALE,
        read_scales("k.s", "s.k", next_along(2, 1)),
        BOTH,
    ),
    ("wide", CUDNN, Name.NEIGHBOURING_SCALE, read_scales("q.s", "s.q", next_along(2, -1)), BOTH),
    ("wide", SQUARES, Name.NEIGHBOURING_SCALE, read_scales("v", "o.v", next_along(2, 1)), BOTH),
    ("wide", FOLDED, Name.NEIGHBOURING_SCALE, written("k.scales", next_along(0, 1)), ("staged",)),
    ("d128", CUDNN, Name.TILE_SPLIT, written("k.s.scales.tiled.", tiles_split_32x4), ("staged",)),
    ("d128", CUDNN, Name.UNTILED_SCALES, written("k.s.scales.tiled.", rows_not_tiles), ("staged",)),
    ("wide", FP4, Name.SWAPPED_NIBBLES, written("k.s.codes", nibbles), ("staged",)),
    ("square", FOLDED, Name.TRANSPOSED_CODES, written("v.codes", transposed), ("staged",)),
    ("documents", FOLDED, Name.ROUNDING, toward_zero, ("staged",)),
    ("documents", FOLDED, Name.SCALE_RULE, floor_rule, BOTH),
    ("wide", FOLDED, Name.WRONG_AXIS, v_along_tokens, ("final",)),
]


def daily() -> Iterator[tuple[int, str]]:
    """One of each module of mistakes: the rest takes minutes."""
    kinds = {Name.NO_SOFTMAX_SCALE: "staged", Name.NO_MASK: "final", Name.GRADIENT_SCALE: "final"}
    kinds |= {Name.TILE_SPLIT: "staged", Name.ROUNDING: "staged", Name.NOT_NORMALISED: "staged"}
    for name, form in kinds.items():
        yield next(at for at, entry in enumerate(PLANTED) if entry[2] is name), form


DAILY = frozenset(daily())


@pytest.mark.parametrize(
    ("case", "recipe", "name", "plant", "form"),
    [
        pytest.param(
            *entry[:4],
            form,
            id=f"{number}-{entry[2]}-{entry[1]}-{form}",
            marks=() if (number, form) in DAILY else pytest.mark.nightly,
        )
        for number, entry in enumerate(PLANTED)
        for form in entry[4]
    ],
)
def test_a_planted_mistake_is_named(
    case: str, recipe: str, name: Name, plant: Plant, form: str
) -> None:
    of = case_of(case, recipe)
    first, found = diagnosed(of, plant(of), final=form == "final")
    assert found, f"nothing explains {first}"
    # Where two mistakes give the same tensors, both are named.
    equal = [one.mistake for one in found if one.explained == found[0].explained]
    assert name in equal, (first, found)
    assert len(equal) <= 2, (first, found)
    assert found[0].explained >= 0.9 * found[0].failing


@pytest.mark.parametrize("recipe", [CUDNN, pytest.param(FP4, marks=pytest.mark.nightly)])
def test_a_wrong_split_of_more_than_four_blocks_is_named_first(recipe: str) -> None:
    """Six or twelve blocks a row: two or three tiles of columns, each split as 32x4."""
    case = case_of("d192", recipe)
    given = written("k.s.scales.tiled.", tiles_split_32x4)(case)
    first, found = diagnosed(case, given, final=False)
    assert first == "k.s.scales.tiled.0"
    assert case.tensors[first].shape[2] == -(-(192 // (16 if recipe == FP4 else 32)) // 4)
    assert found
    assert found[0].mistake == Name.TILE_SPLIT, found
    assert "holds tiles whose 128 rows are split as 32x4" in found[0].sentence
