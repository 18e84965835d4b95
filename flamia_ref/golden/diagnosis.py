"""Where in the attention an element of a tensor is, and what stands beside it."""

from collections.abc import Mapping

import numpy as np

from flamia_ref.golden.bitwise import Aligned, as_text
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import BLOCK, Place, View
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.pack import Case
from flamia_ref.report.model import Bits, Difference, Pair

Index = tuple[int, ...]
Where = dict[str, int | str]


def difference(case: Case, name: str, index: Index, aligned: Mapping[str, Aligned]) -> Difference:
    """Describe the element of a tensor at an index.

    `aligned` holds by name every tensor that was given and could be compared, this one among them.
    """
    place = case.places[name]
    scale = code = None
    base = place.stage.name.removesuffix(".tiled")
    if place.stage.scales is not None:
        scale = _pair(case, _named(place.stage.scales, place), _scale_of(place, index), aligned)
    elif base.endswith(".scales"):
        under = _code_under(case.spec, place, index)
        codes = _named(f"{base.removesuffix('.scales')}.codes", place)
        code = None if under is None else _pair(case, codes, under, aligned)
    one = aligned[name]
    return Difference(
        where=coordinates(case, place, index),
        index=index,
        element=Pair(
            expected=_bits(one.expected[index], one.view), actual=_bits(one.actual[index], one.view)
        ),
        scale=scale,
        code=code,
    )


def coordinates(case: Case, place: Place, index: Index) -> Where:
    """Return the place of an element in words: document, head, token, tile, block, element.

    `token` counts over all documents, `query` and `key` within the document. Tiles, which are those
    of the recipe, and blocks of 32 start at the document.
    """
    spec = case.spec
    at = dict(zip(place.stage.axes, index, strict=True))
    if "starts" in at:
        return {"entry": at["starts"]}
    found: Where = {}
    document = place.document
    if place.stage.tiled:
        return _tiled(case, place, at)
    if document is None:
        document = _document(spec, at["tokens"])
    start = spec.starts[document]
    row = at["tokens"] - start if "tokens" in at else at["queries"]
    found["document"] = document
    found["head" if "heads" in at else "kv head"] = at.get("heads", at.get("kv_heads", 0))
    found |= {"token": start + row, "query" if "queries" in at else "position": row}
    if "queries" not in at:
        found["tile"] = row // _rows(case, at)
        if "head_dim" in at:
            channel = at["head_dim"]
            found |= {"block": channel // BLOCK, "channel": channel}
        elif "one" in at:
            found |= {"block": 0, "channels": f"0 to {spec.head_dim - 1}"}
        return found
    key = at["keys"] if "keys" in at else at["key_blocks"] * BLOCK
    tiles = case.recipe
    found |= {"query tile": row // tiles.query_tile, "key tile": key // tiles.key_tile}
    found["block"] = key // BLOCK
    if "keys" in at:
        return found | {"key": key, "key token": start + key}
    last = min(key + BLOCK, spec.lengths[document]) - 1
    return found | {"keys": f"{key} to {last}"}


def _rows(case: Case, at: Mapping[str, int]) -> int:
    """Return the rows of a tile of an operand: K and V are tiled by keys."""
    return case.recipe.key_tile if "kv_heads" in at else case.recipe.query_tile


def _tiled(case: Case, place: Place, at: Mapping[str, int]) -> Where:
    spec = case.spec
    document, row, block = place.document or 0, *_untiled(at)
    heads = "heads" if "heads" in at else "kv_heads"
    found: Where = {"document": document, heads.replace("_", " ")[:-1]: at[heads]}
    if row >= spec.lengths[document] or block >= spec.head_dim // BLOCK:
        return found | {"row": row, "column": block, "in": "the padding"}
    found |= {"token": spec.starts[document] + row, "position": row}
    found["tile"] = row // _rows(case, at)
    return found | {"block": block, "byte": at["bytes"]}


def _untiled(at: Mapping[str, int]) -> tuple[int, int]:
    """Return row and column of a byte in tiles of 128x4: the inverse of the layout's formula."""
    byte = at["bytes"]
    row = at["row_tiles"] * 128 + byte % 16 // 4 * 32 + byte // 16
    return row, at["column_tiles"] * 4 + byte % 4


def _document(case: CaseSpec, token: int) -> int:
    """Return the document that holds a token. Empty documents hold none."""
    return int(np.searchsorted(case.starts, token, side="right")) - 1


def _named(stage: str, place: Place) -> str:
    """Return the tensor of a stage that goes with a place: of its document, if it is a list."""
    if place.document is None or place.stage.tiled:
        return stage
    return f"{stage}.{place.document}"


def _scale_of(place: Place, index: Index) -> Index:
    """Return the index of the scale of a code."""
    return (*index[:2], index[2] // BLOCK if "keys" in place.stage.axes else 0)


def _code_under(case: CaseSpec, place: Place, index: Index) -> Index | None:
    """Return the index of the first code under a scale. None for padding."""
    if not place.stage.tiled:
        return (*index[:2], index[2] * BLOCK)
    document = place.document or 0
    row, block = _untiled(dict(zip(place.stage.axes, index, strict=True)))
    if row >= case.lengths[document] or block >= case.head_dim // BLOCK:
        return None
    return (case.starts[document] + row, index[0], block * BLOCK)


def _pair(case: Case, name: str, index: Index, aligned: Mapping[str, Aligned]) -> Pair | None:
    """Return expected and actual of a tensor beside the one that differs. None: no such tensor."""
    if name not in case.tensors:
        return None
    view = case.places[name].stage.view
    given = aligned[name].actual[index] if name in aligned else None
    return Pair(
        expected=_bits(case.tensors[name][index], view),
        actual=None if given is None else _bits(given, view),
    )


def _bits(element: Tensor, view: View) -> Bits:
    bits, value = as_text(element, view)
    return Bits(bits=bits, value=value)
