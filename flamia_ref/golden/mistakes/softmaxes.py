"""Mistakes of the softmax: its scale, its base, P, the row sum, lse, and the normalisation of O."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Variant
from flamia_ref.golden.mistakes.products import unrescaled
from flamia_ref.golden.mistakes.scene import Scene, as_bits, to_bfloat16
from flamia_ref.golden.mistakes.simulated import Change, simulated
from flamia_ref.golden.stage import Place, View

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_LOG2_E = math.log2(math.e)
_SCORES = frozenset(
    {"row_max", "p", "p.o.scales", "p.o.codes", "row_sum", "o", "lse"}
    | {"p.dv", "p.dv.scales", "p.dv.codes", "ds", "ds.scales", "ds.codes"}
    | {"ds.dq.scales", "ds.dq.codes", "ds.dk.scales", "ds.dk.codes"}
)
_P = frozenset(
    {"p", "p.o.scales", "p.o.codes", "row_sum", "o", "p.dv", "p.dv.codes", "p.dv.scales", "dv"}
)


def changed(recipe: "Recipe", path: str, **fields: Any) -> "Recipe":
    """Return a recipe with some fields of one of its parts changed, such as "o.left"."""

    def inner(part: Any, names: list[str]) -> Any:
        if not names:
            return replace(part, **fields)
        return replace(part, **{names[0]: inner(getattr(part, names[0]), names[1:])})

    made: Recipe = inner(recipe, path.split("."))
    return made


def with_recipe(change: Callable[["Recipe"], "Recipe"]) -> Made:
    """Return what comes of another recipe; of one that cannot be, nothing."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        from flamia_ref.attention.computed import check_computed

        try:
            other = change(scene.recipe)
            check_computed(other)
        except ValueError:
            return None
        return None if other == scene.recipe else simulated(scene, place, Change(recipe=other))

    return made


def _with_scale(factor: Callable[[Scene], float]) -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        scale = factor(scene)
        if scale == scene.softmax_scale:
            return None
        return simulated(scene, place, Change(softmax_scale=scale))

    return made


def _no_scale(scene: Scene, place: Place) -> Iterator[Variant]:
    yield Variant(
        sentence="S is not multiplied by the softmax scale.", made=_with_scale(lambda _: 1.0)
    )


def _scale_twice(scene: Scene, place: Place) -> Iterator[Variant]:
    yield Variant(
        sentence="S is multiplied by the softmax scale twice.",
        made=_with_scale(lambda one: one.softmax_scale**2),
    )


def _natural(scene: Scene, place: Place) -> Iterator[Variant]:
    yield Variant(
        sentence="2^x is taken of scores in natural units: log2(e) is missing.",
        made=_with_scale(lambda one: one.softmax_scale / _LOG2_E),
    )
    yield Variant(
        sentence="e^x is taken of scores in log2 units: log2(e) is there twice.",
        made=_with_scale(lambda one: one.softmax_scale * _LOG2_E),
    )
    if place.stage.backward:
        yield Variant(
            sentence="The backward takes the natural lse for one in base 2.",
            made=_other_lse(1 / _LOG2_E),
        )
        yield Variant(
            sentence="The backward multiplies lse by log2(e) twice.", made=_other_lse(_LOG2_E)
        )


def _other_lse(factor: float) -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        lse = scene.expected("lse").astype(np.float64) * factor
        return simulated(scene, place, Change(backward={"lse": lse.astype(np.float32)}))

    return made


def _no_cap(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.case.spec.softcap is not None:
        yield Variant(
            sentence="The soft cap is not applied.",
            made=lambda one, at: simulated(one, at, Change(softcap=None)),
        )


def _no_sink(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.case.spec.sinks:
        yield Variant(
            sentence="The sink is left out.",
            made=lambda one, at: simulated(one, at, Change(sink=None)),
        )


def _p_scale(scene: Scene, place: Place) -> Iterator[Variant]:
    recipe = scene.recipe
    side, words = ("gradient", "dV's P") if place.stage.backward else ("softmax", "P")
    own: int = getattr(recipe, side).p_offset
    other = recipe.softmax.p_offset if side == "gradient" else 0
    if side == "softmax" and recipe.has_backward:
        other = recipe.backward.gradient.p_offset
    tried: dict[int, str] = {0: "is missing"} if own else {}
    tried |= {2 * own: "is there twice"} if own else {}
    tried |= {other: "is that of the other pass"} if other and other != own else {}
    tried |= {wrong: f"is 2^{wrong}" for wrong in (4, 8) if wrong not in (own, *tried)}
    for offset, what in tried.items():
        yield Variant(
            sentence=f"The scale of {words}, 2^{own}, {what}.",
            made=with_recipe(_p_offset(side, offset)),
        )
    product = "dv" if side == "gradient" else "o"
    static: int | None = getattr(recipe, product).left.static_scale
    if static is not None:
        for byte, what in (
            (127, "2^0"),
            (127 - own, f"2^-{own}"),
            (static + own, f"2^{static + own - 127}"),
        ):
            if byte != static and 0 <= byte <= 254:
                yield Variant(
                    sentence=f"The product takes P with the scale {what} instead of 2^{static - 127}.",
                    made=with_recipe(_static(product, byte)),
                )


def _p_offset(side: str, offset: int) -> Callable[["Recipe"], "Recipe"]:
    return lambda recipe: changed(recipe, side, p_offset=offset)


def _static(product: str, byte: int) -> Callable[["Recipe"], "Recipe"]:
    return lambda recipe: changed(recipe, f"{product}.left", static_scale=byte)


def _exp2(scene: Scene, place: Place) -> Iterator[Variant]:
    softmax = scene.recipe.softmax
    models = {
        "correct": "is rounded correctly",
        "polynomial3": "is the polynomial of degree 3",
        "mufu.sm90": "is the special function unit's",
    }
    for model, words in models.items():
        if model != softmax.exp2:
            yield Variant(
                sentence=f"2^x {words}, not {softmax.exp2}.",
                made=with_recipe(partial(changed, path="softmax", exp2=model)),
            )
    if softmax.emulated is not None and not place.stage.backward:
        yield Variant(
            sentence="2^x is emulated in no column.",
            made=with_recipe(lambda recipe: changed(recipe, "softmax", emulated=None)),
        )


def _row_sum(scene: Scene, place: Place) -> Iterator[Variant]:
    own = scene.recipe.softmax.row_sum_of
    other, words = (
        ("codes", "P after it is quantized") if own == "p" else ("p", "P before it is quantized")
    )
    yield Variant(
        sentence=f"The row sum adds {words}.",
        made=with_recipe(lambda recipe: changed(recipe, "softmax", row_sum_of=other)),
    )


def _rescale(scene: Scene, place: Place) -> Iterator[Variant]:
    yield Variant(
        sentence="O's accumulator is not rescaled when the row maximum rises.",
        made=lambda one, at: unrescaled(one, at, row_sum=False),
    )
    yield Variant(
        sentence="Neither O's accumulator nor the row sum is rescaled when the row maximum rises.",
        made=lambda one, at: unrescaled(one, at, row_sum=True),
    )


def _normalisation(scene: Scene, place: Place) -> Iterator[Variant]:
    for power, words in (
        (1, "O is not divided by the row sum."),
        (-1, "O is divided by the row sum twice."),
    ):

        def made(scene: Scene, place: Place, power: int = power) -> Tensor | None:
            return _times_row_sum(scene, place, power)

        yield Variant(sentence=words, made=made)


def _times_row_sum(scene: Scene, place: Place, power: int) -> Tensor | None:
    if place.stage.name not in ("o", "out"):
        return None
    o = scene.expected("o").astype(np.float64)
    sums = scene.expected("row_sum").T[:, :, None].astype(np.float64)
    with np.errstate(all="ignore"):
        found = (o * sums if power == 1 else o / sums).astype(np.float32)
    return as_bits(found, View.F32) if place.stage.name == "o" else to_bfloat16(found)


def _lse(factors: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]) -> Any:
    def variants(scene: Scene, place: Place) -> Iterator[Variant]:
        for words, formula in factors.items():

            def made(
                scene: Scene, place: Place, formula: Callable[..., Tensor] = formula
            ) -> Tensor | None:
                if place.stage.name != "lse":
                    return None
                lse, sums = (scene.expected(one).astype(np.float64) for one in ("lse", "row_sum"))
                scale = float(2.0**scene.recipe.softmax.p_offset)
                with np.errstate(all="ignore"):
                    found = formula(lse, np.log(sums / scale), np.log(scale))
                return as_bits(found.astype(np.float32), View.F32)

            yield Variant(sentence=words, made=made)

    return variants


_BASES = {
    "lse is in base 2, not natural.": lambda lse, log_sum, log_scale: lse * _LOG2_E,
    "lse is multiplied by ln 2 twice.": lambda lse, log_sum, log_scale: lse / _LOG2_E,
}
_PARTS = {
    "lse lacks the row maximum: it is the logarithm of the row sum.": (
        lambda lse, log_sum, log_scale: log_sum
    ),
    "lse lacks the logarithm of the row sum.": lambda lse, log_sum, log_scale: lse - log_sum,
    "lse has P's scale in it.": lambda lse, log_sum, log_scale: lse + log_scale,
    "lse is negated.": lambda lse, log_sum, log_scale: -lse,
}

MISTAKES = (
    Mistake(name=Name.NOT_NORMALISED, shows=frozenset({"o"}), variants=_normalisation),
    Mistake(name=Name.LSE_BASE, shows=frozenset({"lse"}), variants=_lse(_BASES)),
    Mistake(name=Name.LSE_PART, shows=frozenset({"lse"}), variants=_lse(_PARTS)),
    Mistake(name=Name.NO_SOFTMAX_SCALE, shows=_SCORES, variants=_no_scale),
    Mistake(name=Name.SOFTMAX_SCALE_TWICE, shows=_SCORES, variants=_scale_twice),
    Mistake(
        name=Name.NATURAL_EXPONENT,
        shows=_SCORES | {"do.scales", "do.codes", "delta", "scales", "codes"},
        variants=_natural,
    ),
    Mistake(name=Name.NO_SOFTCAP, shows=_SCORES, variants=_no_cap),
    Mistake(name=Name.NO_SINK, shows=_SCORES, variants=_no_sink),
    Mistake(name=Name.P_SCALE, shows=_P, variants=_p_scale),
    Mistake(name=Name.ROW_SUM, shows=frozenset({"row_sum"}), variants=_row_sum),
    Mistake(name=Name.EXP2, shows=_P, variants=_exp2),
    Mistake(name=Name.NO_RESCALE, shows=frozenset({"o", "row_sum"}), variants=_rescale),
)
