"""Where codes and scales come from."""

import numpy as np

from flamia_ref.golden.copies import HEADS, Copy
from flamia_ref.golden.elements import Elements
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.lineage import Index, Lineage
from flamia_ref.golden.stage import Place, blocks

_GUARDED = {"p.o": "o", "ds.dq": "dq"}
_PRODUCTS = {"o": "O", "dq": "dQ"}


def _source(of: Elements, copy: Copy, index: Index) -> tuple[str, Index]:
    """The tensor and the element that a code is made of."""
    if copy.tensor in HEADS:
        return ("dout" if copy.tensor == "do" else copy.tensor), index
    stage = "ds" if copy.tensor == "ds" else ("p" if copy.name == "p.o" else "p.dv")
    return stage, index


def _unscaled(
    of: Elements, copy: Copy, document: int | None, index: Index
) -> tuple[float | None, tuple[tuple[str, Index], ...]]:
    """What a code is made of, and where the pack has that; None where the value itself is not there."""
    name, at = _source(of, copy, index)
    if copy.tensor in HEADS:
        if copy.source is not None:
            source = next(one for one in of.copies if one.name == copy.source)
            parents: tuple[tuple[str, Index], ...] = ((source.codes, index),)
            return None, parents
        parents = ((name, at),)
        if copy.tensor == "do" and of.recipe.backward.gradient.normalisation == "fold_into_dout":
            return None, (*parents, ("lse", (index[1], index[0])))
        if copy.operand.smoothing != "none":
            return None, parents
        return of.value(name, at), parents
    if copy.name == "p.dv" and of.recipe.backward.gradient.p_for_dv == "forward":
        return None, ((f"p.o.codes.{document}", index),)
    stored = f"{name}.{document}"
    value, parents = of.value(stored, at), ((stored, at),)
    head, query, key = index
    product = {"p.o": "o", "ds.dq": "dq"}.get(copy.name)
    if product is not None and of.guarded(product, document or 0)[query, key]:
        value = 0.0  # the product of this pair is one of bfloat16
    if copy.name == "p.dv":
        value *= 2.0**of.recipe.backward.gradient.p_offset
    for other in of.copies:
        if any(product in copy.products for product in other.folded):
            keys = other.tensor in ("k", "v")
            starts = of.spec.key_starts if keys else of.spec.starts
            token = starts[document or 0] + (key if keys else query)
            place = (token, of.kv_head(head) if keys else head, 0)
            value *= of.value(other.scales, place)
            parents = (*parents, (other.scales, place))
    return value, parents


def code(of: Elements, copy: Copy, place: Place, index: Index) -> Lineage:
    """A code: the value over its scale, rounded."""
    value, parents = _unscaled(of, copy, place.document, index)
    before = value
    words = f"a code of {copy.operand.format}"
    product = {"p.o": "o", "ds.dq": "dq"}.get(copy.name)
    if product is not None and of.guarded(product, place.document or 0)[index[1:]]:
        return Lineage(
            how=f"0: the pair is in a guarded block, whose {_PRODUCTS[product]} is one of bfloat16",
            part=f"{product}.guard_instruction",
            parents=parents,
        )
    if copy.scaled:
        scale = _scale_of(of, copy, place, index)
        parents = (*parents, scale)
        if value is not None:
            scales = [of.value(*scale)]
            if copy.powers:
                token = (copy.token_scales, (index[0], index[1], 0))
                parents = (*parents, token)
                scales.append(of.value(*token))
            with np.errstate(all="ignore"):
                before = float(np.float64(value) / np.prod(scales))
        words = f"the value{_less(copy)} over its scale, rounded to a code of {copy.operand.format}"
        if copy.operand.scope == "largest_score":
            before = None
            words += "; the scale is taken before it is rounded itself"
    elif copy.operand.static_scale is not None:
        power = copy.operand.static_scale - 127
        words = f"rounded to {copy.operand.format}, whose scale is 2^{power}"
        if copy.tensor == "ds" and value is not None:
            before = value * 2.0 ** (127 - copy.operand.static_scale)
    return Lineage(how=words, part=_side(copy), parents=parents, before=before)


def _scale_of(of: Elements, copy: Copy, place: Place, index: Index) -> tuple[str, Index]:
    if place.document is None:
        return copy.scales, of.scale_index(copy, *index)
    rows, columns = copy.operand.block or (1, 1)
    head, query, key = index
    return f"{copy.scales}.{place.document}", (head, query // int(rows), key // int(columns))


def scale(of: Elements, copy: Copy, place: Place, index: Index) -> Lineage:
    """The scale of a block: its parent is the element of the block that is largest."""
    if copy.descaled:
        return _descale(of, copy, index)
    box = _block(of, copy, place, index)
    name, _ = _source(of, copy, index)
    if copy.source is not None:
        source = next(one for one in of.copies if one.name == copy.source)
        first = (box[0].start, index[1], 0)
        return Lineage(
            how=f"the scale of {copy.operand.format} that holds the values of {source.name}",
            part=_side(copy),
            parents=((source.scales, of.scale_index(source, *first)), (source.codes, first)),
        )
    if copy.tensor in HEADS:
        head = index[1]
        part = np.abs(of.numbers(name, (box[0], head, box[1])))
        at = _argmax(part)
        parent = (name, (box[0].start + at[0], head, box[1].start + at[1]))
        folded = (
            copy.tensor == "do" and of.recipe.backward.gradient.normalisation == "fold_into_dout"
        )
        parents = (parent, *((("lse", (head, parent[1][0])),) if folded else ()))
    elif copy.operand.scope == "largest_score":
        return _of_largest_score(of, copy, place, index, box)
    else:
        head = index[0]
        stored = f"{name}.{place.document}"
        if stored not in of.case.tensors:
            return Lineage(how=f"the scale of a block by {copy.operand.format}", part=_side(copy))
        every = [
            (abs(_unscaled(of, copy, place.document, (head, q, k))[0] or 0.0), q, k)
            for q in range(box[0].start, box[0].stop)
            for k in range(box[1].start, box[1].stop)
        ]
        _, query, key = max(every, key=lambda one: (one[0], -one[1], -one[2]))
        parents = _unscaled(of, copy, place.document, (head, query, key))[1]
    return Lineage(
        how=f"the scale of {_size(copy)} by {copy.operand.format}, from the largest magnitude in it{_less(copy)}",
        part=_side(copy),
        parents=tuple(parents),
    )


def _descale(of: Elements, copy: Copy, index: Index) -> Lineage:
    """A descale: its parent is the largest element of its document and key/value head."""
    document, kv_head = index
    rows = of.rows(copy.tensor, document)
    group = of.spec.heads // of.spec.kv_heads if copy.tensor == "q" else 1
    heads = slice(kv_head * group, (kv_head + 1) * group)
    part = np.abs(of.numbers(copy.tensor, (rows, heads)))
    parents: tuple[tuple[str, Index], ...] = ()
    if part.size:
        at = np.unravel_index(int(np.argmax(np.nan_to_num(part, nan=np.inf))), part.shape)
        place = (rows.start + int(at[0]), heads.start + int(at[1]), int(at[2]))
        parents = ((copy.tensor, place),)
    return Lineage(
        how="the largest magnitude of the document and key/value head over 448, 1 for 0",
        part=_side(copy),
        parents=parents,
    )


def _less(copy: Copy) -> str:
    """What is taken off a value before it is quantized, in words."""
    means = {"document_mean": "document", "tile_mean": "query tile"}
    extent = means.get(copy.operand.smoothing)
    return "" if extent is None else f" less the mean of its channel over the {extent}"


def _of_largest_score(
    of: Elements, copy: Copy, place: Place, index: Index, box: tuple[slice, slice]
) -> Lineage:
    """The scale of a block of P: its parent is the largest visible score."""
    document, head = place.document or 0, index[0]
    query, keys = box[0].start, box[1]
    stored = f"s.{document}"
    parents: tuple[tuple[str, Index], ...] = ()
    if stored in of.case.tensors:
        scores = of.numbers(stored, (head, query, keys))
        seen = of.spec.visible(document)[query, keys]
        if seen.any():
            at = int(np.argmax(np.where(seen, np.nan_to_num(scores, nan=-np.inf), -np.inf)))
            parents = ((stored, (head, query, keys.start + at)),)
    token = of.spec.starts[document] + query
    return Lineage(
        how=f"the exponential of the largest visible score of {_size(copy)}, over the largest element",
        part=_side(copy),
        parents=(*parents, ("row_max", (head, token))),
    )


def _block(of: Elements, copy: Copy, place: Place, index: Index) -> tuple[slice, slice]:
    """The rows and columns under a scale."""
    at = dict(zip(place.stage.axes, index, strict=True))
    if place.document is not None:
        rows, columns = copy.operand.block or (1, 1)
        queries = of.spec.lengths[place.document]
        keys = of.spec.lengths_of_keys[place.document]
        first = (index[1] * int(rows), index[2] * int(columns))
        return (
            slice(first[0], min(first[0] + int(rows), queries)),
            slice(first[1], min(first[1] + int(columns), keys)),
        )
    row, size = slice(index[0], index[0] + 1), place.stage.block
    for axis, starts, lengths in (
        ("token_blocks", of.spec.starts, of.spec.lengths),
        ("key_token_blocks", of.spec.key_starts, of.spec.lengths_of_keys),
    ):
        if axis in at:
            count = np.cumsum([0, *(blocks(one, size) for one in lengths)])
            document = int(np.searchsorted(count, at[axis], side="right")) - 1
            start = starts[document] + (at[axis] - int(count[document])) * size
            row = slice(start, min(start + size, starts[document + 1]))
    if "one" in at:
        return row, slice(0, of.spec.head_dim)
    if "head_dim" in at:
        return row, slice(index[2], index[2] + 1)
    return row, slice(index[2] * size, min((index[2] + 1) * size, of.spec.head_dim))


def tiled(of: Elements, place: Place, index: Index) -> Lineage:
    """A byte of a tile of 128x4."""
    from flamia_ref.golden.diagnosis import source_of_tile

    source = source_of_tile(of.case, place, index)
    if source is None:
        return Lineage(how=f"padding of a tile of 128x4: {of.spec.scale_padding}")
    return Lineage(
        how="the same byte in tiles of 128x4", parents=((place.stage.parents[0], source),)
    )


def _side(copy: Copy) -> str:
    """The dotted path of the operand that a copy is made for."""
    product = copy.products[0]
    left = copy.tensor in ("p", "ds") or (product, copy.tensor) in (("s", "q"), ("dp", "do"))
    return f"{product}.{'left' if left else 'right'}"


def _size(copy: Copy) -> str:
    rows, columns = copy.operand.block or (1, 1)
    return f"a block of {rows}x{columns}"


def _argmax(x: Tensor) -> Index:
    found = np.unravel_index(int(np.argmax(np.nan_to_num(x, nan=np.inf))), x.shape)
    return tuple(int(one) for one in found)
