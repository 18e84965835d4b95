"""Mistakes of heads and of the backward: the group's sum, delta, the softmax scale of dQ and dK, the order."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Needs, Variant
from flamia_ref.golden.mistakes.scene import Scene, to_bfloat16, wide
from flamia_ref.golden.mistakes.simulated import Change, simulated
from flamia_ref.golden.mistakes.softmaxes import changed, with_recipe
from flamia_ref.golden.stage import Place

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_GRADIENTS = ("dq", "dk", "dv")
_DS = frozenset(
    {"ds", "ds.scales", "ds.codes", "ds.dq.scales", "ds.dq.codes", "ds.dk.scales", "ds.dk.codes"}
)
_HEADS = (
    frozenset({"s", "o", "row_max", "p", "p.o.scales", "p.o.codes", "dp", "p.dv", *_GRADIENTS})
    | _DS
)


def _values(scene: Scene, name: str) -> Tensor:
    return wide(scene.expected(name)).view(np.float32).astype(np.float64)


def _modulo(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.group > 1 and len(scene.kv_heads) > 1:
        yield Variant(
            sentence="Query head h takes key/value head h modulo their number, not h divided by the group.",
            made=_mapped(lambda head, kv_heads, group: head % kv_heads),
        )


def _one_head(scene: Scene, place: Place) -> Iterator[Variant]:
    if len(scene.kv_heads) > 1:
        yield Variant(
            sentence="Every query head takes key/value head 0.",
            made=_mapped(lambda head, kv_heads, group: 0),
        )
        yield Variant(
            sentence="Every query head takes the key/value head after its own.",
            made=_mapped(lambda head, kv_heads, group: min(head // group + 1, kv_heads - 1)),
        )


def _mapped(of: "Callable[[int, int, int], int]") -> Made:
    """What comes of other key/value heads for the query heads. K and V are taken as if each had its own."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        stage = place.stage
        if stage.tiled or (stage.of_keys and stage.name not in ("dk", "dv")):
            return None
        count = len(scene.kv_heads)
        taken = [of(head, count, scene.group) for head in range(len(scene.heads))]
        if taken == [head // scene.group for head in range(len(scene.heads))]:
            return None
        inputs = {name: scene.expected(name)[:, taken] for name in ("k", "v")}
        found = simulated(scene, place, Change(inputs=inputs))
        if found is None or stage.name not in ("dk", "dv"):
            return found
        # Each query head had keys of its own: the sums of those that share a head, rounded once more.
        parts = wide(found).view(np.float32).astype(np.float64)
        sums = np.zeros((len(parts), count, parts.shape[2]))
        for head, one in enumerate(taken):
            sums[:, one] += parts[:, head]
        return to_bfloat16(sums)

    return made


def _group(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.group < 2 or place.stage.name not in ("dk", "dv"):
        return
    for at, words in ((-1, "last"), (0, "first")):
        yield Variant(
            sentence=f"{_WORDS[place.stage.name]} is that of the {words} query head of each group, not the sum.",
            made=_of_one_head(at),
        )

    def mean(scene: Scene, place: Place) -> Tensor | None:
        return to_bfloat16(_values(scene, place.name) / scene.group)

    yield Variant(
        sentence=f"{_WORDS[place.stage.name]} is the mean over the group, not the sum.", made=mean
    )


_WORDS = {"dq": "dQ", "dk": "dK", "dv": "dV"}


def _of_one_head(at: int) -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        heads = np.arange(len(scene.heads)).reshape(-1, scene.group)[:, at]
        inputs = {name: scene.expected(name)[:, heads] for name in ("q", "dout")}
        backward = {"out": scene.expected("out")[:, heads], "lse": scene.expected("lse")[heads]}
        change = Change(inputs=inputs, backward=backward)
        if scene.case.spec.sinks:
            change = replace(change, sink=scene.expected("sink")[heads])
        return simulated(scene, place, change)

    return made


def _no_delta(scene: Scene, place: Place) -> Iterator[Variant]:
    def made(scene: Scene, place: Place) -> Tensor | None:
        zeros = np.zeros((len(scene.heads), sum(scene.lengths)), np.float32)
        if place.stage.name == "delta":
            return zeros.view(np.uint32)
        return simulated(scene, place, Change(backward={"delta": zeros}))

    yield Variant(sentence="delta is left out: dS is P times dP.", made=made)

    def negated(scene: Scene, place: Place) -> Tensor | None:
        if "delta" not in scene.case.places:
            return None
        delta = -scene.expected("delta")
        if place.stage.name == "delta":
            return delta.view(np.uint32)
        return simulated(scene, place, Change(backward={"delta": delta}))

    yield Variant(sentence="delta is added to dP, not subtracted.", made=negated)


_SOURCES = {
    "returned_out": "dO times the returned O",
    "unrounded_out": "dO times O before its output rounding",
    "high_precision_out": "dO times O of P in bfloat16",
    "quantized_dout": "the values of dO's codes times O",
    "p_dp": "the sum of P dP",
}


def _delta(scene: Scene, place: Place) -> Iterator[Variant]:
    from flamia_ref.attention.knobs import DeltaSum

    gradient = scene.recipe.backward.gradient
    for source, words in _SOURCES.items():
        if source != gradient.delta_source:
            yield Variant(
                sentence=f"delta is {words}.",
                made=with_recipe(partial(changed, path="gradient", delta_source=source)),
            )
    for order in DeltaSum:
        if order != gradient.delta:
            yield Variant(
                sentence=f"delta is added up in another order, {order.value}.",
                made=with_recipe(partial(changed, path="gradient", delta=order)),
            )
    if gradient.normalisation == "fold_into_dout":

        def unfolded(scene: Scene, place: Place) -> Tensor | None:
            if "delta" not in scene.case.places:
                return None
            delta: Tensor = (
                (_values(scene, "dout") * _values(scene, "out")).sum(axis=2).T.astype(np.float32)
            )
            if place.stage.name == "delta":
                return delta.view(np.uint32)
            return simulated(scene, place, Change(backward={"delta": delta}))

        yield Variant(
            sentence="delta is made of dO, not of dO' that the normalisation is in.", made=unfolded
        )


def _gradient_scale(scene: Scene, place: Place) -> Iterator[Variant]:
    name = place.stage.name
    if name not in ("dq", "dk"):
        return
    for power, words in ((-1, "lacks the softmax scale"), (1, "has the softmax scale twice")):

        def made(scene: Scene, place: Place, power: int = power) -> Tensor | None:
            with np.errstate(all="ignore"):
                return to_bfloat16(_values(scene, place.name) * scene.softmax_scale**power)

        yield Variant(sentence=f"{_WORDS[name]} {words}.", made=made)
    for factor, words in ((np.log(2), "ln 2"), (np.log2(np.e), "log2(e)"), (-1.0, "-1")):

        def scaled(scene: Scene, place: Place, factor: float = factor) -> Tensor | None:
            return to_bfloat16(_values(scene, place.name) * factor)

        yield Variant(sentence=f"{_WORDS[name]} is multiplied by {words}.", made=scaled)


def _swapped(scene: Scene, place: Place) -> Iterator[Variant]:
    name = place.stage.name
    if name not in _GRADIENTS:
        return
    for other in _GRADIENTS:
        if other == name:
            continue

        def made(scene: Scene, place: Place, other: str = other) -> Tensor | None:
            found = scene.expected(other)
            return found if found.shape == scene.expected(place.name).shape else None

        yield Variant(sentence=f"{_WORDS[name]} holds {_WORDS[other]}.", made=made)


def _order(scene: Scene, place: Place) -> Iterator[Variant]:
    recipe, name = scene.recipe, place.stage.name
    own = recipe.backward.gradient.softmax_scale
    other, words = ("in_ds", "dS") if own == "epilogue" else ("epilogue", "dQ and dK")
    yield Variant(
        sentence=f"The softmax scale multiplies {words}.",
        made=with_recipe(_with("gradient", "softmax_scale", other)),
    )
    if name not in _GRADIENTS:
        return
    for order in ("ascending", "descending", "shifted"):

        def with_order(recipe: "Recipe", order: str = order) -> "Recipe":
            if name == "dq":
                return changed(recipe, "dq", tile_order=order)
            return changed(changed(recipe, "dk", tile_order=order), "dv", tile_order=order)

        yield Variant(
            sentence=f"{_WORDS[name]} adds its tiles in another order, {order}.",
            made=with_recipe(with_order),
        )
    for part, field, values in (
        ("gradient", "heads_order", ("ascending", "descending")),
        ("gradient", "heads", ("float32_sum", "one_chain")),
        (name, "accumulation", ("chained", "float32_partials")),
        (name, "k_order", ("ascending", "descending")),
    ):
        own = getattr(getattr(recipe, part), field)
        for value in values:
            if value != own:
                yield Variant(
                    sentence=f"{_WORDS[name]} is added up with {field.replace('_', ' ')} {value.replace('_', ' ')}.",
                    made=with_recipe(_with(part, field, value)),
                )


def _with(part: str, field: str, value: str) -> "Callable[[Recipe], Recipe]":
    return lambda recipe: changed(recipe, part, **{field: value})


def _p_source(scene: Scene, place: Place) -> Iterator[Variant]:
    own = scene.recipe.backward.gradient.p_for_dv
    other = "forward" if own == "recomputed" else "recomputed"
    words = "the forward's rounded P" if other == "forward" else "a P computed again"
    yield Variant(
        sentence=f"dV takes {words}.",
        made=with_recipe(lambda recipe: changed(recipe, "gradient", p_for_dv=other)),
    )


MISTAKES = (
    Mistake(name=Name.SWAPPED_GRADIENTS, shows=frozenset(_GRADIENTS), variants=_swapped),
    Mistake(name=Name.GRADIENT_SCALE, shows=frozenset({"dq", "dk"}), variants=_gradient_scale),
    Mistake(name=Name.NO_GROUP_SUM, shows=frozenset({"dk", "dv"}), variants=_group),
    Mistake(name=Name.HEADS_BY_MODULO, shows=_HEADS, variants=_modulo, needs=Needs.HEADS),
    Mistake(name=Name.ONE_HEAD, shows=_HEADS, variants=_one_head, needs=Needs.HEADS),
    Mistake(name=Name.NO_DELTA, shows=_DS | {"delta"}, variants=_no_delta),
    Mistake(name=Name.DELTA, shows=_DS | {"delta"}, variants=_delta),
    Mistake(
        name=Name.P_SOURCE, shows=frozenset({"p.dv.scales", "p.dv.codes", "dv"}), variants=_p_source
    ),
    Mistake(name=Name.GRADIENT_ORDER, shows=frozenset(_GRADIENTS) | _DS, variants=_order),
)
