"""Products computed again from the codes of the pack, with scales read from another place, or without a rescale."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.scene import Scene, as_bits, to_bfloat16
from flamia_ref.golden.stage import BLOCK, Place, View

Permutation = Callable[[Tensor], Tensor]


class Encoded(NamedTuple):
    """Codes of pairs and their scales, as the stages of one document have them; None for no scales."""

    codes: Tensor
    scales: Tensor | None


def of_permuted(scene: Scene, place: Place, permute: Permutation) -> Tensor | None:
    """Return O, dQ, dK or dV with the scales of P or dS, [heads, ..., ...], read through a permutation."""
    product = getattr(scene.recipe, _product_name(place), None)
    if product is None or product.left.block is None:
        return None
    stage = _pair_stage(scene, _product_name(place))

    def moved(document: int) -> Encoded:
        scales = permute(scene.expected(f"{stage}.scales.{document}"))
        return Encoded(scene.expected(f"{stage}.codes.{document}"), scales)

    return of_pairs(scene, place, moved)


def of_pairs(
    scene: Scene, place: Place, other: Callable[[int], Encoded | None], element: str | None = None
) -> Tensor | None:
    """Return O, dQ, dK or dV with other codes and scales of P or dS, given by document.

    `element`: their element format, where it may be another than the recipe's. None where the product has guarded
    blocks, where nothing is other, and for O of more than one key tile where S does not tell its bases.
    """
    name = _product_name(place)
    product = getattr(scene.recipe, name) if name in ("o", "dv", "dq", "dk") else None
    if product is None or product.guarded:
        return None
    if (
        product.accumulation != "chained"
        or product.tile_order.under(scene.mask.bounded) != "ascending"
    ):
        return None
    factors = None
    if name == "o" and max(scene.key_lengths, default=0) > scene.recipe.tiles.key:
        factors = _rescales(scene)
        if factors is None:
            return None
    changed = _with_element(product, element)
    same = True
    parts: list[Tensor] = []
    right_parts: list[Tensor] = []
    for at, document in enumerate(scene.documents):
        right, taken = _own_pairs(scene, name, document), other(document)
        if right is None or taken is None:
            return None
        if taken.scales is None:
            taken = taken._replace(scales=right.scales)
        same &= _equal(taken, right)
        if factors is not None:
            parts.append(_in_tiles(scene, at, factors[at], taken, changed))
            right_parts.append(_in_tiles(scene, at, factors[at], right, product))
            continue
        parts.append(_accumulated(scene, name, at, taken, changed))
        if name == "o":
            right_parts.append(_accumulated(scene, name, at, right, product))
    if same:
        return None
    sums = np.concatenate(parts, axis=1)
    if name != "o":
        return _finished(scene, name, sums)
    with np.errstate(all="ignore"):
        old, new = _numbers(np.concatenate(right_parts, axis=1)), _numbers(sums)
        ratio = np.where(new == old, 1, new / old)  # also of zeros
        o = scene.expected("o").astype(np.float64) * np.swapaxes(ratio, 0, 1)
    found = o.astype(np.float32)
    return as_bits(found, View.F32) if place.stage.name == "o" else to_bfloat16(found)


def _equal(one: Encoded, other: Encoded) -> bool:
    scales = np.array_equal(np.asarray(one.scales), np.asarray(other.scales))
    return scales and bool(np.array_equal(one.codes, other.codes))


def _product_name(place: Place) -> str:
    return "o" if place.stage.name == "out" else place.stage.name


def _with_element(product: Any, element: str | None) -> Any:
    """A product whose left side has another element: of a preset, only the element counts here."""
    from flamia_ref.attention.sides import element as element_of

    left = product.left
    if element is None or element == element_of(left):
        return product
    name = element if left.block is None else f"te-mx-{element}"
    return replace(product, left=replace(left, format=name))


def _numbers(sums: Tensor) -> Tensor:
    return _values(sums) if sums.dtype == np.uint32 else sums


def _own_pairs(scene: Scene, name: str, document: int) -> Encoded | None:
    """The codes and scales of the pack; a static scale for each block. None without either."""
    product, stage = getattr(scene.recipe, name), _pair_stage(scene, name)
    if f"{stage}.codes.{document}" not in scene.case.places:
        return None
    codes = scene.expected(f"{stage}.codes.{document}")
    if product.left.block is not None:
        return Encoded(codes, scene.expected(f"{stage}.scales.{document}"))
    if product.left.static_scale is None:
        return None
    heads, queries, keys = codes.shape
    over_keys = name in ("o", "dq")
    shape = (
        (heads, queries, -(-keys // BLOCK)) if over_keys else (heads, -(-queries // BLOCK), keys)
    )
    return Encoded(codes, np.full(shape, product.left.static_scale, np.uint8))


def _pair_stage(scene: Scene, name: str) -> str:
    from flamia_ref.attention.stages import pair_names

    return next(
        stage for use, stage in pair_names(scene.recipe).items() if use.split(".")[0] == name
    )


def _values(bits: Tensor) -> Tensor:
    return bits.view(np.float32).astype(np.float64)


def _right(scene: Scene, name: str, at: int) -> Any:
    """The operand of a product that is an input, rows first, for each query head."""
    from flamia_ref.attention.copies import copy_names
    from flamia_ref.attention.sides import Rows

    recipe = scene.recipe
    use = next(
        one
        for one, _ in recipe.uses()
        if one.split(".")[0] == name
        and one.split(".")[1] in "qkvdo"
        and one.split(".")[1] not in ("ds", "p")
    )
    operand, stage = recipe.operand(use), copy_names(recipe)[use]
    of_keys = use.split(".")[1] in ("k", "v")
    rows = scene.rows(length_of_keys=of_keys)[at]
    codes = scene.expected(f"{stage}.codes")[rows]
    scales = None
    if operand.block is not None and operand.scale_folded_into is None:
        blocks = scene.expected(f"{stage}.scales")
        first = sum(
            -(-one // BLOCK) for one in (scene.key_lengths if of_keys else scene.lengths)[:at]
        )
        scales = blocks[first : first + -(-(rows.stop - rows.start) // BLOCK)]
        scales = np.repeat(scales, codes.shape[2] // scales.shape[2], axis=2)
    if of_keys:
        codes = np.repeat(codes, scene.group, axis=1)
        scales = None if scales is None else np.repeat(scales, scene.group, axis=1)
    return Rows(_padded(codes, 0), scales)


def _padded(x: Tensor, axis: int, multiple: int = BLOCK) -> Tensor:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return np.pad(x, widths)


def _accumulated(scene: Scene, name: str, at: int, pairs: Encoded, product: Any) -> Tensor:
    """The accumulator, float32 bits [heads, rows, channels], of one document."""
    from flamia_ref.attention import sides

    over_keys = name in ("o", "dq")
    codes, scales = _padded(pairs.codes, 2 if over_keys else 1), np.asarray(pairs.scales)
    if product.left.block == (BLOCK, BLOCK):  # a scale is repeated over the rows that share it
        axis = 1 if over_keys else 2
        scales = np.repeat(scales, BLOCK, axis=axis).take(range(codes.shape[axis]), axis=axis)
    axis = 2 if over_keys else 1
    left = sides.Left(np.moveaxis(codes, axis, 0), np.moveaxis(scales, axis, 0))
    right = _right(scene, name, at)
    group = scene.group
    if not over_keys and scene.recipe.backward.gradient.heads == "one_chain":
        left = sides.Left(_chained(left.codes, group), _chained(left.scales, group))
        right = sides.Rows(_chained(right.codes, group), _chained(right.scales, group))
    shape = (left.codes.shape[1], left.codes.shape[2], right.codes.shape[2])
    found: Tensor = sides.over_rows(left, right, np.zeros(shape, np.uint32), product)
    return found


def _chained(x: Tensor | None, group: int) -> Tensor | None:
    """[rows, heads, others] with the rows of a group's heads one after another."""
    if x is None:
        return None
    rows, heads, others = x.shape
    parts = x.reshape(rows, heads // group, group, others)
    return np.moveaxis(parts, 2, 0).reshape(group * rows, heads // group, others)


def _finished(scene: Scene, name: str, sums: Tensor) -> Tensor:
    from flamia_ref.attention import backward_tile

    gradient = scene.recipe.backward.gradient
    rows = np.swapaxes(sums, 0, 1)
    tokens, heads, channels = rows.shape
    kept = heads if name == "dq" else len(scene.kv_heads)
    scale = np.uint32(np.float32(scene.softmax_scale).view(np.uint32))
    return np.asarray(
        backward_tile.finished(
            rows.reshape(tokens * kept, heads // kept, channels),
            scale,
            scaled=name != "dv" and gradient.softmax_scale == "epilogue",
            descending=gradient.heads_order == "descending",
        )
    ).reshape(tokens, kept, channels)


def unrescaled(scene: Scene, place: Place, *, row_sum: bool) -> Tensor | None:
    """Return O, its output or the row sum as they are where nothing follows a rising maximum.

    None with one key tile, with guarded blocks, and where the base is no integer, so that S does not tell it.
    """
    if place.stage.name not in (("o", "out", "row_sum", "lse") if row_sum else ("o", "out")):
        return None
    size = scene.recipe.tiles.key
    if max(scene.key_lengths, default=0) <= size:
        return None
    factors = None if scene.recipe.o.guarded else _rescales(scene)
    if factors is None or all((one == 1).all() for one in factors):
        return None
    sums = scene.expected("row_sum").astype(np.float64)
    new_sums, new_o = sums.copy(), scene.expected("o").astype(np.float64)
    for at, document in enumerate(scene.documents):
        rows = scene.rows()[at]
        if row_sum:
            new_sums[:, rows] = scene.expected(f"p.{document}").sum(axis=2, dtype=np.float64)
        with np.errstate(all="ignore"):
            ratio = _in_tiles(scene, at, None) / _in_tiles(scene, at, factors[at])
            both = np.swapaxes(ratio, 0, 1) * (sums[:, rows] / new_sums[:, rows]).T[:, :, None]
            new_o[rows] *= np.where(np.isnan(both), 1, both)
    if place.stage.name == "row_sum":
        return as_bits(new_sums.astype(np.float32), View.F32)
    if place.stage.name == "lse":
        lse = scene.expected("lse").astype(np.float64) + np.log(new_sums / sums)
        return as_bits(lse.astype(np.float32), View.F32)
    found = new_o.astype(np.float32)
    return as_bits(found, View.F32) if place.stage.name == "o" else to_bfloat16(found)


def _in_tiles(
    scene: Scene,
    at: int,
    factors: Tensor | None,
    pairs: Encoded | None = None,
    product: Any = None,
) -> Tensor:
    """O's accumulator in float64 [heads, queries, channels], key tile after key tile.

    `factors` [heads, queries, key tiles] bring what a tile adds to the last base; None: nothing does. `pairs` and
    `product`: P and the product, where they are not those of the pack.
    """
    from flamia_ref.attention import sides

    recipe, document = scene.recipe, scene.documents[at]
    product = product or recipe.o
    if pairs is None:
        own = _own_pairs(scene, "o", document)
        pairs = own or Encoded(scene.expected(f"p.o.codes.{document}"), None)
    codes, scales = pairs
    right, size = _right(scene, "o", at), recipe.tiles.key
    codes = np.moveaxis(_padded(codes, 2), 2, 0)
    scales = None if scales is None else np.moveaxis(scales, 2, 0)
    found = np.zeros((*codes.shape[1:], right.codes.shape[2]), np.uint32)
    for index, first in enumerate(range(0, len(codes), size)):
        rows, columns = slice(first, first + size), slice(first // BLOCK, (first + size) // BLOCK)
        left = sides.Left(codes[rows], None if scales is None else scales[columns])
        beside = sides.Rows(
            right.codes[rows], None if right.scales is None else right.scales[columns]
        )
        if factors is not None and index:
            step = factors[:, :, index - 1] / factors[:, :, index]
            found = (found.view(np.float32) * step[:, :, None]).astype(np.float32).view(np.uint32)
        found = sides.over_rows(left, beside, found, product)
    return _values(found)


def _rescales(scene: Scene) -> list[Tensor] | None:
    """What brings the P of each key tile to the row's last base: [heads, queries, key tiles] of each document."""
    softmax = scene.recipe.softmax
    if softmax.base != "integer_max" or scene.case.spec.softcap is not None:
        return None
    size, c = scene.recipe.tiles.key, scene.softmax_scale * np.log2(np.e)
    found = []
    for at, document in enumerate(scene.documents):
        s = scene.expected(f"s.{document}").astype(np.float64) * c
        seen = scene.mask.visible(at)
        n = np.where(seen, np.ceil(s), -np.inf)
        last = scene.expected("row_max")[:, scene.rows()[at]].astype(np.float64)
        tiles = [n[:, :, first : first + size].max(axis=2) for first in range(0, n.shape[2], size)]
        bases = np.maximum.accumulate(np.stack(tiles, axis=2), axis=2)
        with np.errstate(all="ignore"):
            found.append(np.nan_to_num(np.exp2(bases - last[:, :, None]), nan=1.0))
    return found
