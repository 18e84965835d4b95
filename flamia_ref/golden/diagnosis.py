"""Where in the attention an element of a tensor is, and what stands beside it."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flamia_ref.golden.bitwise import Aligned, as_text
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import BLOCK, TILE_COLUMNS, TILE_ROWS, Place, Stage, View, blocks
from flamia_ref.report.model import Bits, Difference, Pair

Index = tuple[int, ...]
At = Mapping[str, int]  # an index by the names of the axes
Where = dict[str, int | str]


def difference(case: Case, name: str, index: Index, aligned: Mapping[str, Aligned]) -> Difference:
    """Describe the element of a tensor at an index.

    `aligned` holds by name every tensor that was given and could be compared, this one among them.
    """
    place = case.places[name]
    stage = place.stage
    scale = code = None
    if stage.scales is not None:
        scales = case.recipe.dataflow.stages[stage.scales]
        at = _scale_of(case.spec, _at(stage, index), scales)
        scale = _pair(case, _named(stage.scales, place), at, aligned)
    elif stage.view in (View.F8_E8M0, View.F8_UE4M3):
        source = stage.parents[0] if stage.tiled else stage.name
        codes = f"{source.removesuffix('.token_scales').removesuffix('.scales')}.codes"
        under = _code_under(case, place, index)
        code = None if under is None else _pair(case, _named(codes, place), under, aligned)
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

    `token` counts over all documents, `position`, `query` and `key` within the document. Tiles,
    which are those of the recipe, and blocks of 32 start at the document. `block` is one of channels,
    16 of them in FP4, or of keys, likewise; `token block` and `query block` are named where the scale is that of
    such a block.
    """
    spec = _Packed.of(case.spec, place.stage)
    at = _at(place.stage, index)
    if "starts" in at:
        return {"entry": at["starts"]}
    if "sinks" in at:
        return {"head": at["sinks"]}
    if "documents" in at:
        return {"document": at["documents"], "kv head": at["kv_heads"]}
    if place.stage.tiled:
        return _tiled(case, place, at)
    document = _document(spec, at) if place.document is None else place.document
    found: Where = {"document": document}
    found["head" if "heads" in at else "kv head"] = at.get("heads", at.get("kv_heads", 0))
    if place.document is None:
        channels = _channels(case.spec, at, place.stage.block)
        return found | _row(case, spec, document, at) | channels
    return found | _pair_of(case, document, at, place.stage.block)


class _Packed(NamedTuple):
    """Where documents start among the tokens that an axis counts, the queries or the keys, how long they are, and how
    many tokens a block of them has."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    block: int

    @classmethod
    def of(cls, spec: CaseSpec, stage: Stage) -> "_Packed":
        if stage.of_keys or stage.name == "cu_seqlens_k":
            return cls(spec.key_starts, spec.lengths_of_keys, stage.block)
        return cls(spec.starts, spec.lengths, stage.block)


def _at(stage: Stage, index: Index) -> At:
    """Return an index by the names of the axes, those of keys like those of queries."""
    return {
        axis.removeprefix("key_") if axis.startswith("key_token") else axis: at
        for axis, at in zip(stage.axes, index, strict=True)
    }


def _document(spec: _Packed, at: At) -> int:
    """Return the document that holds a token, or a block of tokens. Empty documents hold none."""
    if "tokens" in at:
        starts, of = spec.starts, at["tokens"]
    else:
        starts, of = _block_starts(spec), at["token_blocks"]
    return int(np.searchsorted(starts, of, side="right")) - 1


def _block_starts(spec: _Packed) -> tuple[int, ...]:
    """Return the first token block of each document, and their number."""
    starts = [0]
    for length in spec.lengths:
        starts.append(starts[-1] + blocks(length, spec.block))
    return tuple(starts)


def _row(case: Case, spec: _Packed, document: int, at: At) -> Where:
    start, length = spec.starts[document], spec.lengths[document]
    if "tokens" in at:
        row = at["tokens"] - start
        return {"token": start + row, "position": row, "tile": row // _rows(case, at)}
    block = at["token_blocks"] - _block_starts(spec)[document]
    row, last = block * spec.block, min((block + 1) * spec.block, length) - 1
    return {
        "tokens": f"{start + row} to {start + last}",
        "tile": row // _rows(case, at),
        "token block": block,
    }


def _channels(spec: CaseSpec, at: At, size: int) -> Where:
    if "head_dim" in at:
        return {"block": at["head_dim"] // size, "channel": at["head_dim"]}
    if "channel_blocks" in at:
        block = at["channel_blocks"]
        return {"block": block, "channels": f"{block * size} to {(block + 1) * size - 1}"}
    if "one" in at:
        return {"block": 0, "channels": f"0 to {spec.head_dim - 1}"}
    return {}


def _pair_of(case: Case, document: int, at: At, size: int) -> Where:
    start, length = case.spec.starts[document], case.spec.lengths[document]
    key_start, keys = case.spec.key_starts[document], case.spec.lengths_of_keys[document]
    found: Where = {}
    if "queries" in at:
        query = at["queries"]
        found = {"token": start + query, "query": query}
    else:
        query = at["query_blocks"] * BLOCK
        found = {
            "query block": at["query_blocks"],
            "queries": f"{query} to {min(query + BLOCK, length) - 1}",
        }
    key = at["keys"] if "keys" in at else at["key_blocks"] * size
    found |= {
        "query tile": query // case.recipe.query_tile,
        "key tile": key // case.recipe.key_tile,
        "block": key // size,
    }
    if "keys" in at:
        return found | {"key": key, "key token": key_start + key}
    return found | {"keys": f"{key} to {min(key + size, keys) - 1}"}


def _rows(case: Case, at: At) -> int:
    """Return the rows of a tile of an operand: K and V are tiled by keys."""
    return case.recipe.key_tile if "kv_heads" in at else case.recipe.query_tile


def _tiled(case: Case, place: Place, at: At) -> Where:
    spec, document = _Packed.of(case.spec, place.stage), place.document or 0
    heads = "heads" if "heads" in at else "kv_heads"
    found: Where = {"document": document, heads.replace("_", " ")[:-1]: at[heads]}
    row, column = _untiled(at)
    if not _inside(case.spec, place.stage, document, at):
        return found | {"row": row, "column": column, "in": "the padding"}
    start = spec.starts[document]
    if "token_tiles" in at:
        found |= {"token": start + row, "position": row, "tile": row // _rows(case, at)}
        return found | {"block": column, "byte": at["bytes"]}
    first, last = column * BLOCK, min((column + 1) * BLOCK, spec.lengths[document]) - 1
    found |= {
        "tokens": f"{start + first} to {start + last}",
        "tile": first // _rows(case, at),
        "token block": column,
    }
    return found | {"block": row // BLOCK, "channel": row, "byte": at["bytes"]}


def _untiled(at: At) -> tuple[int, int]:
    """Return row and column of a byte in tiles of 128x4: the inverse of the layout's formula."""
    byte = at["bytes"]
    down = at["token_tiles"] if "token_tiles" in at else at["channel_tiles"]
    across = at["channel_block_tiles"] if "token_tiles" in at else at["token_block_tiles"]
    row = down * TILE_ROWS + byte % 16 // 4 * 32 + byte // 16
    return row, across * TILE_COLUMNS + byte % 4


def source_of_tile(case: Case, place: Place, index: Index) -> Index | None:
    """Return the index of the scale that a byte of a tile holds. None for padding."""
    at = dict(zip(place.stage.axes, index, strict=True))
    spec, document = case.spec, place.document or 0
    if not _inside(spec, place.stage, document, at):
        return None
    row, column = _untiled(at)
    source = case.recipe.dataflow.stages[place.stage.parents[0]]
    token, channel, size = row, column * place.stage.block, place.stage.block
    if "channel_tiles" in at:
        token, channel = column * BLOCK, row
    tokens = _Packed.of(spec, source)
    known = {
        "tokens": tokens.starts[document] + token,
        "token_blocks": _block_starts(tokens)[document] + token // tokens.block,
        "head_dim": channel,
        "channel_blocks": channel // size,
        "one": 0,
    }
    first, _, last = (axis.removeprefix("key_") for axis in source.axes)
    return (known[first], index[0], known[last])


def _inside(spec: CaseSpec, stage: Stage, document: int, at: At) -> bool:
    """Return whether a byte of a tile is a scale, not padding."""
    row, column = _untiled(at)
    length = _Packed.of(spec, stage).lengths[document]
    rows, columns = length, blocks(spec.head_dim, stage.block)
    if "channel_tiles" in at:
        rows, columns = spec.head_dim, blocks(length)
    return row < rows and column < columns


def _named(stage: str, place: Place) -> str:
    """Return the tensor of a stage that goes with a place: of its document, if it is a list."""
    if place.document is None or place.stage.tiled:
        return stage
    return f"{stage}.{place.document}"


def _scale_of(spec: CaseSpec, at: At, scales: Stage) -> Index:
    """Return the index of the scale of a code."""
    known = dict(at) | {"one": 0}
    if "documents" in scales.axes:  # a descale, which the query heads of a group share
        starts = spec.starts if "heads" in at else spec.key_starts
        document = int(np.searchsorted(starts, at["tokens"], side="right")) - 1
        return (document, at.get("kv_heads", at.get("heads", 0) // (spec.heads // spec.kv_heads)))
    for axis, by, size in (
        ("queries", "query_blocks", BLOCK),
        ("keys", "key_blocks", scales.block),
        ("head_dim", "channel_blocks", scales.block),
    ):
        if axis in at:
            known[by] = at[axis] // size
    if "tokens" in at:
        tokens = _Packed.of(spec, scales)
        document = _document(tokens, at)
        row = at["tokens"] - tokens.starts[document]
        known["token_blocks"] = _block_starts(tokens)[document] + row // tokens.block
    return tuple(known[axis] for axis in _at(scales, (0,) * len(scales.axes)))


def _code_under(case: Case, place: Place, index: Index) -> Index | None:
    """Return the index of the first code under a scale. None for padding."""
    spec, size = _Packed.of(case.spec, place.stage), place.stage.block
    at = _at(place.stage, index)
    if place.stage.tiled:
        document = place.document or 0
        if not _inside(case.spec, place.stage, document, at):
            return None
        row, column = _untiled(at)
        token, channel = (row, column * size)
        if "channel_tiles" in at:
            token, channel = column * BLOCK, row
        return (spec.starts[document] + token, index[0], channel)
    if place.document is None:
        token = at.get("tokens", 0)
        if "token_blocks" in at:
            document = _document(spec, at)
            block = at["token_blocks"] - _block_starts(spec)[document]
            token = spec.starts[document] + block * spec.block
        channel = at.get("head_dim", at.get("channel_blocks", 0) * size)
        return (token, index[1], channel)
    query = at.get("queries", at.get("query_blocks", 0) * BLOCK)
    return (index[0], query, at.get("keys", at.get("key_blocks", 0) * size))


def _pair(case: Case, name: str, index: Index, aligned: Mapping[str, Aligned]) -> Pair | None:
    """Return expected and actual of a tensor beside the one that differs. None: no such tensor."""
    if name not in case.tensors:
        return None
    view = case.places[name].stage.view
    given = aligned[name].actual[index] if name in aligned else None
    expected = np.asarray(case.tensors[name][index])
    return Pair(
        expected=_bits(expected.view(np.uint32) if view is View.F32 else expected, view),
        actual=None if given is None else _bits(given, view),
    )


def _bits(element: Tensor, view: View) -> Bits:
    bits, value = as_text(element, view)
    return Bits(bits=bits, value=value)
