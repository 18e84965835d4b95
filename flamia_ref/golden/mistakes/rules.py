"""Mistakes of quantization: another scale rule, rounding or overflow, the wrong axis, no guard."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Variant
from flamia_ref.golden.mistakes.operands import with_operand
from flamia_ref.golden.mistakes.scene import Scene, as_bits, to_bfloat16
from flamia_ref.golden.mistakes.simulated import Change, is_scale, simulated
from flamia_ref.golden.mistakes.softmaxes import with_recipe
from flamia_ref.golden.stage import Place, View

if TYPE_CHECKING:
    from flamia_ref.attention import Operand, Recipe, Use

_CODED = frozenset({"scales", "token_scales", "codes"})
_RULES = (
    ("ocp-mx-floor", "rounds the scale down (OCP)"),
    ("te-mx", "rounds the scale up (RCEIL)"),
    ("torchao-mx-ceil", "takes the ceiling of log2 of the largest"),
    ("torchao-mx-even", "rounds the largest to the element's mantissa first (even)"),
    ("cudnn-mx", "is cuDNN's"),
    ("microxcaling-mx-nearest", "rounds log2 of the largest to nearest"),
    ("triton-mx-rounddown", "is Triton's that rounds down"),
    ("jax-mx", "is JAX's"),
    ("flashinfer-nvfp4", "is FlashInfer's"),
    ("sage3-nvfp4", "is SageAttention3's"),
    ("torchao-nvfp4-onelevel", "is torchao's of one level"),
)


def _coded(recipe: "Recipe") -> "list[tuple[Use, Operand]]":
    return [(use, operand) for use, operand in recipe.uses() if operand.block is not None]


def _rule(scene: Scene, place: Place) -> Iterator[Variant]:
    from flamia_ref.formats import PRESETS

    uses = _coded(scene.recipe)
    stage = place.stage
    direct = (is_scale(stage.view) or stage.name.endswith(".codes")) and stage.view is not View.BF16
    if direct:
        tensor = stage.name.split(".")[0]
        if tensor in ("p", "ds"):
            return  # pairs encodes them again from the P or dS that was given
        uses = [one for one in uses if one[0].split(".")[1] == tensor]
    if not stage.backward:
        uses = [one for one in uses if one[0] != "dv.p"]
    elements = {PRESETS[operand.format].element.name for _, operand in uses}
    for prefix, words in _RULES:
        for element in sorted(elements):
            name = f"{prefix}-{element}" if "nvfp4" not in prefix else prefix
            if name not in PRESETS or PRESETS[name].element.name != element:
                continue
            yield Variant(
                sentence=f"The scale rule {words}, preset {name}.",
                made=with_recipe(_with_rule(name, [use for use, _ in uses])),
            )
            if direct:
                continue
            inputs = [use for use, _ in uses if use.split(".")[1] in ("q", "k", "v", "do")]
            if len(inputs) < len(uses):
                yield Variant(
                    sentence=f"The scale rule of the inputs {words}, preset {name}.",
                    made=with_recipe(_with_rule(name, inputs)),
                )
            for tensor in dict.fromkeys(use.split(".")[1] for use, _ in uses):
                yield Variant(
                    sentence=f"The scale rule of {_WORDS[tensor]} {words}, preset {name}.",
                    made=with_recipe(
                        _with_rule(name, [use for use, _ in uses if use.split(".")[1] == tensor])
                    ),
                )


_WORDS = {"q": "Q", "k": "K", "v": "V", "do": "dO", "p": "P", "ds": "dS"}


def _with_rule(name: str, uses: "list[Use]") -> "Callable[[Recipe], Recipe]":
    def change(recipe: "Recipe") -> "Recipe":
        from flamia_ref.formats import PRESETS

        for use in uses:
            operand = recipe.operand(use)
            own = PRESETS[operand.format]
            if (own.element, own.scale) == (PRESETS[name].element, PRESETS[name].scale):
                recipe = with_operand(recipe, use, replace(operand, format=name))
        return recipe

    return change


_ROUNDINGS = {
    "toward_zero": "toward zero",
    "nearest_away": "to nearest, ties away from zero",
    "up": "up",
    "down": "down",
}


def _rounding(scene: Scene, place: Place) -> Iterator[Variant]:
    if place.stage.scales is None:
        return
    for rounding, words in _ROUNDINGS.items():
        yield Variant(
            sentence=f"{place.stage.name} is rounded {words}, not to nearest even.",
            made=_encoded(rounding=rounding),
        )


def _overflow(scene: Scene, place: Place) -> Iterator[Variant]:
    if place.stage.view is not View.F8_E4M3:
        return
    yield Variant(
        sentence=f"{place.stage.name} overflows to NaN instead of to the largest value.",
        made=_encoded(overflow="native"),
    )
    for prefix, words in (("ocp-mx-floor", "down"),):

        def made(scene: Scene, place: Place, prefix: str = prefix) -> Tensor | None:
            return _encoded(overflow="native", rule=f"{prefix}-e4m3")(scene, place)

        yield Variant(
            sentence=f"{place.stage.name} has scales rounded {words} and overflows to NaN.",
            made=made,
        )


def _encoded(*, rounding: str = "nearest_even", overflow: str = "saturate", rule: str = "") -> Made:
    """What the codes of an input are where its elements are encoded otherwise, under the right scales."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        from flamia_ref.formats import FORMATS, decode, encode

        stage = place.stage
        tensor = stage.name.split(".")[0]
        if tensor not in ("q", "k", "v") or stage.scales is None or stage.view is View.F4_E2M1:
            return None
        if rule:
            uses = [use for use, _ in _coded(scene.recipe) if use.split(".")[1] == tensor]
            scales = simulated(
                scene,
                scene.case.places[stage.scales],
                Change(recipe=_with_rule(rule, uses)(scene.recipe)),
            )
        else:
            scales = scene.expected(stage.scales)
        if scales is None:
            return None
        spread = _spread(scene, place, scales)
        bits = scene.expected(tensor).astype(np.uint32) << np.uint32(16)
        x = bits.view(np.float32).astype(np.float64)
        power = decode(spread, FORMATS["e8m0"], np.float64)
        with np.errstate(all="ignore"):
            scaled = x / power
        codes: Tensor = np.asarray(encode(scaled, "e4m3", rounding=rounding, overflow=overflow))
        return None if np.array_equal(codes, scene.expected(place.name)) else codes

    return made


def _spread(scene: Scene, place: Place, scales: Tensor) -> Tensor:
    """The scales of an input repeated for each of its elements."""
    from flamia_ref.golden.stage import BLOCK

    axes = scene.case.recipe.dataflow.stages[place.stage.scales or ""].axes
    if axes[0].endswith("blocks"):
        lengths = scene.key_lengths if place.stage.of_keys else scene.lengths
        parts, first = [], 0
        for length in lengths:
            count = -(-length // BLOCK)
            parts.append(np.repeat(scales[first : first + count], BLOCK, axis=0)[:length])
            first += count
        scales = np.concatenate(parts)
    channels = scene.case.spec.head_dim
    return np.repeat(scales, -(-channels // scales.shape[2]), axis=2)[:, :, :channels]


def _axis(scene: Scene, place: Place) -> Iterator[Variant]:
    for tensor in ("v", "k", "q", "do"):
        if tensor == "do" and not place.stage.backward:
            continue
        if any(use.split(".")[1] == tensor for use, _ in _coded(scene.recipe)):
            for block, words in (((32, 1), "tokens"), ((1, 32), "channels")):
                yield Variant(
                    sentence=f"{_WORDS[tensor]} is quantized in blocks along {words}.",
                    made=_along(tensor, block),
                )


def _along(tensor: str, block: tuple[int, int]) -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        from flamia_ref.formats import PRESETS, dequantize, quantize

        operands = [one for use, one in _coded(scene.recipe) if use.split(".")[1] == tensor]
        if all(one.block == block for one in operands):
            return None
        name = operands[0].format
        if PRESETS[name].element.name != "e4m3":
            name = "te-mx-e4m3"
        source = "dout" if tensor == "do" else tensor
        bits = scene.expected(source).astype(np.uint32) << np.uint32(16)
        x, found = bits.view(np.float32), np.zeros(bits.shape, np.uint8)
        values = np.zeros(bits.shape, np.float32)
        for rows in scene.rows(length_of_keys=tensor in ("k", "v")):
            part = np.moveaxis(x[rows], 1, 0)
            if part.size:
                blocked = quantize(part, name, block=block)
                found[rows] = np.moveaxis(np.asarray(blocked.codes), 0, 1)
                values[rows] = np.moveaxis(np.asarray(dequantize(blocked)), 0, 1)
        if place.stage.name.split(".")[0] == tensor:
            return found if place.stage.name.endswith(".codes") else None
        rounded = to_bfloat16(values)
        return simulated(scene, place, Change(inputs={source: rounded}))

    return made


def _guard(scene: Scene, place: Place) -> Iterator[Variant]:
    from flamia_ref.attention.product import Guard

    recipe = scene.recipe
    guarded = [
        name for name, product in recipe.products() if product.guarded and name not in ("dv", "dk")
    ]
    if not guarded:
        return

    def plain(recipe: "Recipe", name: str) -> "Recipe":
        product = getattr(recipe, name)
        sides = {
            side: replace(getattr(product, side), guard=Guard.NONE) for side in ("left", "right")
        }
        return replace(recipe, **{name: replace(product, **sides, guard_instruction=None)})

    for name in guarded:
        yield Variant(
            sentence=f"{_PRODUCTS[name]} has no guarded blocks.",
            made=with_recipe(partial(plain, name=name)),
        )

    def every(recipe: "Recipe") -> "Recipe":
        for name in guarded:
            recipe = plain(recipe, name)
        return recipe

    yield Variant(sentence="No block is guarded.", made=with_recipe(every))
    yield Variant(
        sentence="Guarded blocks take the values of the codes.",
        made=with_recipe(lambda recipe: replace(recipe, guard_operands="codes")),
    )


_PRODUCTS = {"s": "S", "o": "O", "dp": "dP", "dq": "dQ"}
_GUARDED = frozenset(
    {"s", "o", "dp", "dq", "p.o.codes", "ds.dq.codes", "ds.dq.scales", "row_max", "p", "p.dv"}
)


def _truncated(scene: Scene, place: Place) -> Iterator[Variant]:
    if place.stage.name == "out":

        def made(scene: Scene, place: Place) -> Tensor | None:
            bits = as_bits(scene.expected("o"), View.F32)
            return (bits >> np.uint32(16)).astype(np.uint16)

        yield Variant(sentence="out is o cut to bfloat16, not rounded to nearest even.", made=made)


def _subnormals(scene: Scene, place: Place) -> Iterator[Variant]:
    view = place.stage.view
    if view not in (View.F32, View.BF16):
        return

    def made(scene: Scene, place: Place) -> Tensor | None:
        expected = as_bits(scene.expected(place.name), view)
        if view is View.F32:
            expected = expected.view(np.uint32)
        sign, fraction = (0x80000000, 23) if view is View.F32 else (0x8000, 7)
        tiny = (expected & expected.dtype.type(sign - 1)) >> fraction == 0
        return np.where(tiny, expected & expected.dtype.type(sign), expected)

    yield Variant(
        sentence=f"{place.stage.name} below 2^-126 is 0: subnormals are flushed.", made=made
    )


_FLOATS = frozenset(
    {"s", "p", "row_sum", "o", "lse", "delta", "dp", "p.dv", "ds", "out", "dq", "dk", "dv"}
)

MISTAKES = (
    Mistake(name=Name.SUBNORMALS, shows=_FLOATS, variants=_subnormals, zeros=True),
    Mistake(name=Name.SCALE_RULE, shows=_CODED, variants=_rule),
    Mistake(name=Name.ROUNDING, shows=frozenset({"codes"}), variants=_rounding),
    Mistake(name=Name.OVERFLOW, shows=frozenset({"codes"}), variants=_overflow),
    Mistake(
        name=Name.WRONG_AXIS,
        shows=frozenset({"codes", "s", "o", "dp", "dq", "dk", "dv"}),
        variants=_axis,
    ),
    Mistake(name=Name.NO_GUARD, shows=_GUARDED, variants=_guard),
    Mistake(name=Name.TRUNCATED, shows=frozenset({"out"}), variants=_truncated),
)
