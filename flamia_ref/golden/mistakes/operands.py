"""Mistakes of the operands: their scales and codes, in what is written and in what a product reads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.layouts import (
    Order,
    code_orders,
    row_orders,
    scale_orders,
    tile_orders,
)
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Variant
from flamia_ref.golden.mistakes.products import of_permuted
from flamia_ref.golden.mistakes.scene import Scene
from flamia_ref.golden.mistakes.simulated import Change, Codes, is_scale, simulated
from flamia_ref.golden.stage import BLOCK, Place, View, blocks

if TYPE_CHECKING:
    from flamia_ref.attention import Operand, Recipe, Use

_READ = frozenset(
    {
        "s",
        "o",
        "dp",
        "dv",
        "dq",
        "dk",
        "p.o.scales",
        "p.o.codes",
        "p.dv.scales",
        "p.dv.codes",
        "p.dv",
    }
    | {"ds.dq.scales", "ds.dq.codes", "ds.dk.scales", "ds.dk.codes", "ds.scales", "ds.codes"}
)
_WRITTEN = frozenset({"scales", "token_scales", "tiled"})
_TENSORS = {"q": "Q", "k": "K", "v": "V", "do": "dO", "p": "P", "ds": "dS"}
_PRODUCTS = {"s": "S", "o": "O", "dp": "dP", "dv": "dV", "dq": "dQ", "dk": "dK"}
_FORWARD = ("s", "o")


def _orders(name: Name) -> Callable[[Scene, Place], Iterator[Variant]]:
    """The variants of a mistake of order: in the tensor itself, and in what products read."""

    def variants(scene: Scene, place: Place) -> Iterator[Variant]:
        stage = place.stage
        if stage.tiled:
            for order in _named(tile_orders(), name):
                yield Variant(
                    sentence=f"{stage.name} holds {order.words}.",
                    made=_written(order, ("tiles",)),
                )
        elif is_scale(stage.view):
            for order in _named([*scale_orders(), *row_orders()], name):
                yield Variant(
                    sentence=f"{stage.name} holds {order.words}.", made=_written(order, ("scales",))
                )
        if not is_scale(stage.view) or stage.name.split(".")[0] in ("p", "ds"):
            yield from _read(scene, place, name)

    return variants


def _named(orders: Any, name: Name) -> Iterator[Order]:
    return (order for order in orders if order.name is name)


def _written(order: Order, kind: tuple[str, ...]) -> Made:
    """What comes of a tensor written in another order, document by document and head by head."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        expected = scene.expected(place.name)
        found = _by_matrix(scene, place, expected, order.moved)
        return None if found is None or np.array_equal(found, expected) else found

    return made


def _by_matrix(
    scene: Scene, place: Place, x: Tensor, moved: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Move the elements of each [rows, columns] of a tensor."""
    if place.document is not None:
        return moved(x)
    of_keys = place.stage.of_keys
    found = np.empty_like(x)
    for rows in _token_rows(scene, place.stage.axes[0], of_keys):
        found[rows] = np.moveaxis(moved(np.moveaxis(x[rows], 0, 1)), 0, 1)
    return found


def _token_rows(scene: Scene, axis: str, of_keys: bool) -> list[slice]:
    lengths = scene.key_lengths if of_keys else scene.lengths
    counts = [blocks(one) if axis.endswith("blocks") else one for one in lengths]
    ends = np.cumsum([0, *counts])
    return [slice(int(ends[one]), int(ends[one + 1])) for one in range(len(counts))]


def _uses(scene: Scene, place: Place) -> "Iterator[tuple[Use, Operand]]":
    """The uses of quantized inputs that a stage can depend on, those of its own pass."""
    for use, operand in scene.recipe.uses():
        product, tensor = use.split(".")
        if tensor not in ("q", "k", "v", "do") or operand.block is None:
            continue
        if place.stage.backward or product in _FORWARD:
            yield use, operand


def _read(scene: Scene, place: Place, name: Name) -> Iterator[Variant]:
    for use, operand in _uses(scene, place):
        product, tensor = use.split(".")
        folded = operand.scale_folded_into is not None
        for order in _named(row_orders() if folded else scale_orders(), name):
            yield Variant(
                sentence=f"{_PRODUCTS[product]} takes, of {_TENSORS[tensor]}, {order.words}.",
                made=_reading(use, order),
            )
    words = {"o": "P", "dv": "P", "dq": "dS", "dk": "dS", "out": "P"}
    if place.stage.name in words:
        for order in _named(scale_orders(), name):
            yield Variant(
                sentence=f"{_PRODUCTS.get(place.stage.name, 'O')} takes, of {words[place.stage.name]}, {order.words}.",
                made=partial(of_permuted, permute=order.moved),
            )


def _reading(use: "Use", order: Order) -> Made:
    """What comes of a product that reads the scales of an input in another order."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        operand = scene.recipe.operand(use)
        given = given_codes(scene, use)
        moved = _moved_scales(scene, use, operand, given, order)
        if moved is None:
            return None
        scales, block = moved
        change = with_own_copy(scene, use, Codes(given.codes, scales, given.token_scales), block)
        return simulated(scene, place, change)

    return made


def given_codes(scene: Scene, use: "Use") -> Codes:
    """The codes and scales of the copy that a use takes, from the pack."""
    from flamia_ref.attention.copies import copy_names

    name = copy_names(scene.recipe)[use]
    known = scene.case.places
    if f"{name}.codes" not in known:  # bfloat16: the input itself
        return Codes(scene.expected("dout" if name.startswith("do") else name.split(".")[0]))
    parts = (f"{name}.{part}" for part in ("codes", "scales", "token_scales"))
    return Codes(*(scene.expected(part) if part in known else None for part in parts))  # type: ignore[arg-type]


def _moved_scales(
    scene: Scene, use: "Use", operand: "Operand", given: Codes, order: Order
) -> tuple[Tensor, tuple[int, Any]] | None:
    """The scales of a copy as the order has them, and the block that they then belong to. None: nothing moves."""
    product, tensor = use.split(".")
    scales = given.scales
    if scales is None:
        return None
    channels, of_keys = given.codes.shape[2], tensor in ("k", "v")
    block: tuple[int, Any]
    rows = _token_rows(scene, "tokens", of_keys)
    block_rows = _token_rows(scene, "blocks", of_keys)
    neighbour = order.name is Name.NEIGHBOURING_SCALE
    if neighbour:  # of the blocks themselves, before their scales are repeated
        moved = np.empty_like(scales)
        for each in rows if operand.block is None or operand.block[0] == 1 else block_rows:
            moved[each] = np.moveaxis(order.moved(np.moveaxis(scales[each], 0, 1)), 0, 1)
        if np.array_equal(moved, scales):
            return None
        scales = moved
    if operand.scale_folded_into is not None:
        found, block = scales, (1, "all")
    elif product in ("s", "dp"):
        size = 16 if operand.block == (1, 16) else BLOCK
        found, block = scales, (1, size)
        if operand.block == (1, "all"):
            found = np.repeat(scales, channels // BLOCK, axis=2)
        elif operand.block == (BLOCK, BLOCK):
            parts = [
                np.repeat(scales[ones], BLOCK, axis=0)[: each.stop - each.start]
                for ones, each in zip(block_rows, rows, strict=True)
            ]
            found = np.concatenate(parts)
        elif operand.block not in ((1, BLOCK), (1, 16)):
            return None
    else:
        found, block, rows = scales, (BLOCK, 1), block_rows
        if operand.block == (BLOCK, BLOCK):
            found = np.repeat(scales, BLOCK, axis=2)
        elif operand.block != (BLOCK, 1):
            return None
    if neighbour:
        return found, block
    moved = np.empty_like(found)
    for each in rows:
        matrix = np.moveaxis(found[each], 0, 1)  # [heads, tokens, channel blocks]
        if block == (BLOCK, 1):  # kernels have channels in rows there
            matrix = np.swapaxes(order.moved(np.swapaxes(matrix, 1, 2)), 1, 2)
        else:
            matrix = order.moved(matrix)
        moved[each] = np.moveaxis(matrix, 0, 1)
    return None if np.array_equal(moved, found) else (moved, block)


def with_own_copy(
    scene: Scene, use: "Use", codes: Codes, block: tuple[int, Any] | None = None
) -> Change:
    """A change where a use takes codes of its own, and the other uses of the input those of the pack."""
    from flamia_ref.attention.copies import INPUT_USES, copy_names
    from flamia_ref.attention.product import Scope

    recipe = scene.recipe
    uses = next(ones for ones in INPUT_USES.values() if use in ones)
    operands = {}
    for one in uses:
        operand = replace(recipe.operand(one), same_codes_as=None, promoted_from=None)
        if one == use and block is not None and block != operand.block:
            operand = replace(operand, block=block, scope=Scope.BLOCK)
        operands[one] = operand
    other = recipe
    for one, operand in operands.items():
        other = with_operand(other, one, operand)
    names = copy_names(other)
    given = {names[one]: given_codes(scene, one) for one in uses} | {names[use]: codes}
    return Change(recipe=other, operands=given)


def with_operand(recipe: "Recipe", use: "Use", operand: "Operand") -> "Recipe":
    """A recipe with another operand for a use."""
    product = use.split(".")[0]
    side = "left" if use in ("s.q", "dp.do") or use.endswith((".p", ".ds")) else "right"
    return replace(recipe, **{product: replace(getattr(recipe, product), **{side: operand})})


def _codes(name: Name) -> Callable[[Scene, Place], Iterator[Variant]]:
    def variants(scene: Scene, place: Place) -> Iterator[Variant]:
        stage = place.stage
        if stage.name.endswith(".codes") and (
            name is not Name.SWAPPED_NIBBLES or stage.view is View.F4_E2M1
        ):
            for order in _named(code_orders(), name):
                yield Variant(
                    sentence=f"{stage.name} holds {order.words}.", made=_written(order, ("codes",))
                )
        if is_scale(stage.view):
            return
        for use, operand in _uses(scene, place):
            product, tensor = use.split(".")
            fp4 = operand.block == (1, 16)
            if name is Name.SWAPPED_NIBBLES and not fp4:
                continue
            for order in _named(code_orders(), name):
                yield Variant(
                    sentence=f"{_PRODUCTS[product]} takes, of {_TENSORS[tensor]}, {order.words}.",
                    made=_code_reading(use, order),
                )

    return variants


def _code_reading(use: "Use", order: Order) -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        given = given_codes(scene, use)
        moved = np.empty_like(given.codes)
        for rows in _token_rows(scene, "tokens", use.split(".")[1] in ("k", "v")):
            moved[rows] = np.moveaxis(order.moved(np.moveaxis(given.codes[rows], 0, 1)), 0, 1)
        if np.array_equal(moved, given.codes):
            return None
        return simulated(scene, place, with_own_copy(scene, use, given._replace(codes=moved)))

    return made


def _unscaled(scene: Scene, place: Place) -> Iterator[Variant]:
    if is_scale(place.stage.view) and place.stage.name.split(".")[0] not in ("p", "ds"):
        return
    for use, operand in _uses(scene, place):
        product, tensor = use.split(".")
        if operand.block == (1, 16) and operand.format.startswith("flashinfer"):
            continue
        yield Variant(
            sentence=f"{_PRODUCTS[product]} takes the codes of {_TENSORS[tensor]} without their scales.",
            made=_without_scales(use),
        )


def _without_scales(use: "Use") -> Made:
    def made(scene: Scene, place: Place) -> Tensor | None:
        given = given_codes(scene, use)
        if given.scales is None or given.token_scales is not None:
            return None
        unit = np.full_like(given.scales, 127)
        return simulated(scene, place, with_own_copy(scene, use, given._replace(scales=unit)))

    return made


MISTAKES = (
    Mistake(
        name=Name.NEIGHBOURING_SCALE,
        shows=_WRITTEN | _READ,
        variants=_orders(Name.NEIGHBOURING_SCALE),
    ),
    *(
        Mistake(name=name, shows=_WRITTEN | _READ, variants=_orders(name))
        for name in (
            Name.TRANSPOSED_SCALES,
            Name.UNTILED_SCALES,
            Name.TILED_SCALES,
            Name.TILE_SPLIT,
            Name.PLANE_ORDER,
        )
    ),
    *(
        Mistake(name=name, shows=frozenset({"codes"}) | _READ, variants=_codes(name))
        for name in (Name.SWAPPED_NIBBLES, Name.TRANSPOSED_CODES)
    ),
    Mistake(name=Name.NO_SCALE, shows=_READ, variants=_unscaled),
)
