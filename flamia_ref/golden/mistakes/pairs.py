"""Mistakes of the codes of P and dS: encoded again from the values that were given, by another rule or format."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Variant
from flamia_ref.golden.mistakes.products import Encoded, of_pairs
from flamia_ref.golden.mistakes.scene import Scene
from flamia_ref.golden.mistakes.simulated import is_scale
from flamia_ref.golden.mistakes.softmaxes import changed, with_recipe
from flamia_ref.golden.stage import BLOCK, Place

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe, Use
    from flamia_ref.formats import BlockFormat, ScalarFormat

_CODES = frozenset(
    f"{name}.{kind}"
    for name in ("p.o", "p.dv", "ds", "ds.dq", "ds.dk")
    for kind in ("scales", "codes")
)
RULES = (
    ("ocp-mx-floor", "is rounded down (OCP), preset ocp-mx-floor-e4m3"),
    ("te-mx", "is rounded up (RCEIL), preset te-mx-e4m3"),
    ("torchao-mx-ceil", "is the ceiling of log2 of the largest, preset torchao-mx-ceil-e4m3"),
    (
        "torchao-mx-even",
        "is even: the largest is first rounded to 3 bits, preset torchao-mx-even-e4m3",
    ),
    ("microxcaling-mx-even", "is even, preset microxcaling-mx-even-e4m3"),
    ("microxcaling-mx-nearest", "is to nearest, preset microxcaling-mx-nearest-e4m3"),
    ("triton-mx-rounddown", "is rounded down, preset triton-mx-rounddown-e4m3"),
    ("cudnn-mx", "is cuDNN's, preset cudnn-mx-e4m3"),
    ("jax-mx", "is JAX's, preset jax-mx-e4m3"),
)
"""Presets of scale rules that P and dS may be encoded by, and what a scale is then."""
_WORDS = {"p": "P", "ds": "dS"}
_PRODUCTS = {"o": "O", "dv": "dV", "dq": "dQ", "dk": "dK"}


def use_of(scene: Scene, place: Place) -> "Use | None":
    """The use of P or dS that a tensor is of, or that its product takes; None where there is none."""
    from flamia_ref.attention.stages import pair_names

    name = "o" if place.stage.name == "out" else place.stage.name
    for use, stage in pair_names(scene.recipe).items():
        if name in (use.split(".")[0], f"{stage}.scales", f"{stage}.codes"):
            return use
    return None


def encoded(
    scene: Scene, use: "Use", document: int, form: "BlockFormat | ScalarFormat"
) -> Encoded | None:
    """Return P or dS of a document, as it was given, in the codes of a format.

    The blocks are those of the use, whether or not a library has the preset for them. None where the values that are
    encoded are in no stage: with guarded blocks, and for the forward's P in dV. Blocks that no query sees stay those
    of the pack.
    """
    from flamia_ref.attention import sides
    from flamia_ref.attention.stages import pair_names
    from flamia_ref.formats import Overflow, ScalarFormat, encode_bits, quantize_bits

    recipe = scene.recipe
    product, tensor = use.split(".")
    if getattr(recipe, product).guarded or recipe.softmax.mask_value is not None:
        return None
    if product == "dv" and recipe.backward.gradient.p_for_dv == "forward":
        return None
    operand = recipe.operand(use)
    source = f"{'p.dv' if product == 'dv' else tensor}.{document}"
    stage = pair_names(recipe)[use]
    seen = scene.mask.visible(scene.documents.index(document))
    values = np.where(seen, scene.given(source), scene.expected(source))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if product == "dv" and recipe.backward.gradient.p_offset:
        bits = _shifted(bits, np.int32(recipe.backward.gradient.p_offset))
    if tensor == "ds":
        bits = np.asarray(sides.in_static_units(bits, operand))
    fold = _fold(scene, use, document)
    if fold is not None:
        bits = _shifted(bits, fold.astype(np.int32) - 127)
    own = scene.expected(f"{stage}.codes.{document}")
    if isinstance(form, ScalarFormat):
        codes = np.asarray(encode_bits(bits, form, overflow=Overflow.SATURATE))
        return Encoded(np.where(seen, codes, own), None)
    block = operand.block
    if block is None or "all" in block:
        return None
    widths = [(0, -size % BLOCK) for size in bits.shape[1:]]
    found = quantize_bits(np.pad(bits, ((0, 0), *widths)), form, block)
    codes, scales = (np.asarray(one) for one in found)
    codes = codes[:, : own.shape[1], : own.shape[2]]
    rows, keys = (int(size) for size in block)
    filled = np.pad(seen, widths)
    blocks = np.asarray(filled.reshape(len(filled) // rows, rows, -1, keys).any(axis=(1, 3)))
    right = scene.expected(f"{stage}.scales.{document}")
    scales = np.where(blocks, scales, 0)[:, : right.shape[1], : right.shape[2]]
    blocks = blocks[: right.shape[1], : right.shape[2]]
    return Encoded(np.where(seen, codes, own), np.where(blocks, scales, right).astype(right.dtype))


def _shifted(bits: Tensor, powers: Any) -> Tensor:
    from flamia_ref import _float32

    return np.asarray(_float32.shift(bits, np.broadcast_to(powers, bits.shape)))


def _fold(scene: Scene, use: "Use", document: int) -> Tensor | None:
    """The scales that the values take in, which broadcast against [heads, queries, keys]."""
    from flamia_ref.attention.copies import copy_names

    recipe = scene.recipe
    for other, operand in recipe.uses():
        if operand.scale_folded_into != use:
            continue
        of_keys = other.split(".")[1] in ("k", "v")
        rows = scene.rows(length_of_keys=of_keys)[scene.documents.index(document)]
        scales = scene.expected(f"{copy_names(recipe)[other]}.scales")[rows, :, 0].T
        if of_keys:
            return np.repeat(scales, scene.group, axis=0)[:, None, :]
        return scales[:, :, None]
    return None


def _made(form: "BlockFormat | ScalarFormat") -> Made:
    """What comes of codes in a format: the codes, their scales, or the product that takes them."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        use = use_of(scene, place)
        if use is None:
            return None
        if place.document is None:
            element = getattr(form, "element", form).name
            return of_pairs(
                scene, place, lambda document: encoded(scene, use, document, form), element=element
            )
        found = encoded(scene, use, place.document, form)
        if found is None:
            return None
        return found.scales if is_scale(place.stage.view) else found.codes

    return made


def _rules(scene: Scene, place: Place) -> Iterator[Variant]:
    from flamia_ref.formats import PRESETS, Rounding

    use = use_of(scene, place)
    if use is None or not scene.recipe.operand(use).format.endswith("-mx-e4m3"):
        return
    own = PRESETS[scene.recipe.operand(use).format]
    product, tensor = use.split(".")
    down = replace(
        PRESETS["cutlass-mx-e4m3"],
        name="down",
        scale_rounding=Rounding.TOWARD_ZERO,
        evidence=own.evidence,
    )
    forms = [("is the largest over 448, rounded down and not up", down)]
    forms += [(words, PRESETS[f"{prefix}-e4m3"]) for prefix, words in RULES]
    for words, form in forms:
        if form.name != own.name:
            yield Variant(
                sentence=f"The scale of {_WORDS[tensor]} in {_PRODUCTS[product]} {words}.",
                made=_made(form),
            )


def _formats(scene: Scene, place: Place) -> Iterator[Variant]:
    """P or dS in e5m2 instead of e4m3, with scales of that format where they follow from the values."""
    from flamia_ref.formats import FORMATS, PRESETS

    use = use_of(scene, place)
    if use is None:
        return
    operand = scene.recipe.operand(use)
    product, tensor = use.split(".")
    words = f"{_WORDS[tensor]} in {_PRODUCTS[product]} is e5m2, not e4m3"
    if operand.format == "e4m3":
        yield Variant(sentence=f"{words}.", made=_made(FORMATS["e5m2"]))
    elif operand.format.endswith("-e4m3"):
        form = "te-mx-e5m2"
        yield Variant(sentence=f"{words}, preset {form}.", made=_made(PRESETS[form]))
        if place.document is None:

            def other(recipe: "Recipe") -> "Recipe":
                return changed(recipe, f"{product}.left", format=form)

            yield Variant(sentence=f"{words}, preset {form}.", made=with_recipe(other))


_OUTPUTS = frozenset({"o", "dv", "dq", "dk"})

MISTAKES = (
    Mistake(name=Name.SCALE_RULE, shows=_CODES | _OUTPUTS, variants=_rules),
    Mistake(name=Name.PAIR_FORMAT, shows=_CODES | _OUTPUTS, variants=_formats),
)
