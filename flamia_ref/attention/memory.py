"""How many bytes the backward of a recipe needs kept: copies, what guards them, what the forward saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flamia_ref._errors import Registry, unknown_name
from flamia_ref.attention import inputs
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS, copy_names, needs_high
from flamia_ref.attention.copy_rows import channel_block
from flamia_ref.attention.kernel_layouts import ROWS
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.protection import documents_of
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import BLOCK, taken_format
from flamia_ref.formats import FORMATS
from flamia_ref.packing import Documents

_FORWARD_ONLY = (Use.O_V,)
_HIGH_BYTES = 2  # bfloat16
_TILE_COLUMNS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyBytes:
    """One copy of an input that the backward reads, in bytes of all tokens and heads.

    Attributes:
        name: the copy, as its stages are called.
        tensor: "q", "k", "v" or "do"; dO's copies are made in the backward and kept by nobody before.
        rows: tokens times heads.
        payload, scales: codes and scales once, without padding.
        padded_payload, padded_scales: of every orientation that the backward reads, as `prepare` lays them out.
        follows: whether it follows from an earlier copy of the tensor, so that it need not be kept: it is promoted from
            that, or both are the same bfloat16 values.
    """

    name: str
    tensor: str
    rows: int
    payload: int
    scales: int
    padded_payload: int
    padded_scales: int
    follows: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesKept:
    """What the backward of a recipe reads besides its incoming gradient, in bytes.

    Attributes:
        copies: the copies of q, k, v and dO, each once.
        guards: bfloat16 values of whole inputs for guarded blocks, by input.
        saved: what the forward saves, by name: "out", "lse", and where the recipe keeps them "o" and "row_base".
    """

    copies: tuple[CopyBytes, ...]
    guards: Mapping[str, int]
    saved: Mapping[str, int]

    @property
    def kept(self) -> int:
        """Payload and scales of q, k and v without padding, kept from the forward."""
        return sum(copy.payload + copy.scales for copy in self._kept())

    @property
    def kept_padded(self) -> int:
        """Payloads and scale tensors of q, k and v in all orientations, padded."""
        return sum(copy.padded_payload + copy.padded_scales for copy in self._kept())

    def _kept(self) -> tuple[CopyBytes, ...]:
        return tuple(x for x in self.copies if x.tensor != "do" and not x.follows)

    def per_token_and_head(self, tensor: str) -> float:
        """Payload and scales of one tensor without padding, for one token and one of its heads."""
        if tensor not in INPUT_USES:
            raise unknown_name("input", tensor, INPUT_USES)
        copies = [x for x in self.copies if x.tensor == tensor and not x.follows]
        rows = copies[0].rows
        return sum(x.payload + x.scales for x in copies) / rows if rows else 0.0


class _Tensor(NamedTuple):
    documents: Documents
    heads: int
    channels: int

    @property
    def rows(self) -> int:
        return self.documents.tokens * self.heads

    def of(self, unit: int) -> int:
        """Runs of `unit` tokens in all documents, the last of each filled up."""
        return sum(-(-length // unit) for length in self.documents.lengths)


def bytes_kept(
    recipe: Recipe | str,
    *,
    lengths: Sequence[int],
    head_dim: int,
    value_dim: int | None = None,
    heads: int = 1,
    kv_heads: int = 1,
    key_lengths: Sequence[int] | None = None,
) -> BytesKept:
    """The bytes that the backward of a recipe reads, for documents of these lengths.

    Args:
        recipe: a `Recipe`, or a name in `RECIPES`.
        lengths, key_lengths: queries and keys of each document; None for as many keys as queries.
        head_dim, value_dim: channels of q and k, and of v and dO; None for equally many.
        heads, kv_heads: heads of q and dO, and of k and v.

    Raises: ValueError or TypeError of one line, for a recipe without a backward too.
    """
    chosen = computed_recipe(recipe)
    chosen.backward  # ValueError for a recipe without one  # noqa: B018
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "heads": heads, "kv_heads": kv_heads}
    for name, size in sizes.items():
        inputs.checked_size(name, size)
    if heads % kv_heads:
        raise ValueError(
            f"heads is {heads} and kv_heads {kv_heads}; the first must be a multiple of the second"
        )
    queries, keys = documents_of(lengths, key_lengths)
    tensors = {
        "q": _Tensor(queries, heads, head_dim),
        "k": _Tensor(keys, kv_heads, head_dim),
        "v": _Tensor(keys, kv_heads, value_dim),
        "do": _Tensor(queries, heads, value_dim),
    }
    guards = {
        name: x.rows * x.channels * _HIGH_BYTES
        for name, x in tensors.items()
        if chosen.guard_operands == "inputs" and _guarded(chosen, name)
    }
    return BytesKept(
        copies=tuple(copy for name, x in tensors.items() for copy in _copies(chosen, name, x)),
        guards=Registry("guarded input", guards.items()),
        saved=Registry("saved array", _saved(chosen, tensors).items()),
    )


def _guarded(recipe: Recipe, tensor: str) -> bool:
    """Whether guarded blocks read bfloat16 values of an input that no copy is."""
    uses = [use for use in INPUT_USES[tensor] if use not in _FORWARD_ONLY]
    plain = any(_is_plain(recipe.operand(use)) for use in uses)
    return not plain and any(needs_high(recipe, use) for use in uses)


def _saved(recipe: Recipe, tensors: Mapping[str, _Tensor]) -> dict[str, int]:
    out, keys = tensors["do"], tensors["k"].documents
    saved = {
        "out": out.rows * out.channels * FORMATS[recipe.output].bits // 8,
        "lse": out.rows * 4,
    }
    if recipe.backward.gradient.delta_source == "unrounded_out":
        saved["o"] = out.rows * out.channels * 4
    if recipe.backward.gradient.delta_source == "high_precision_out":
        saved["high_precision_out"] = out.rows * out.channels * _HIGH_BYTES
    if recipe.backward.gradient.p_for_dv == "forward":
        pairs = zip(out.documents.lengths, keys.lengths, strict=True)
        tiles = sum(rows * -(-length // recipe.tiles.key) for rows, length in pairs)
        saved["row_base"] = tiles * out.heads * 4
    return saved


def _copies(recipe: Recipe, tensor: str, x: _Tensor) -> list[CopyBytes]:
    names = copy_names(recipe)
    uses = [use for use in INPUT_USES[tensor] if use not in _FORWARD_ONLY]
    found: list[CopyBytes] = []
    plain = False
    for name in dict.fromkeys(names[use] for use in uses):
        mine = [use for use in uses if names[use] == name]
        operand = recipe.operand(mine[0])
        orientations = {use in OVER_CHANNELS for use in mine}
        laid_out = [(_row_wise if over else _column_wise)(operand, x) for over in orientations]
        found.append(
            CopyBytes(
                name=name,
                tensor=tensor,
                rows=x.rows,
                payload=x.rows * -(-x.channels * _bits(operand) // 8),
                scales=_scales(operand, x),
                padded_payload=sum(payload for payload, _ in laid_out),
                padded_scales=sum(scales for _, scales in laid_out),
                follows=operand.promoted_from is not None or (_is_plain(operand) and plain),
            )
        )
        plain = plain or _is_plain(operand)
    return found


def _is_plain(operand: Operand) -> bool:
    """Whether a copy is the input itself, in bfloat16."""
    return operand.plain


def _bits(operand: Operand) -> int:
    return FORMATS[taken_format(operand)].bits


def _scales(operand: Operand, x: _Tensor) -> int:
    """Scale bytes that follow from the values, each once; none of a dequantized operand, which is kept in bfloat16."""
    if operand.block is None or operand.dequantized:
        return 0
    rows, columns = operand.block
    across = 1 if columns == "all" else -(-x.channels // int(columns))
    down = x.rows if rows == 1 else x.of(BLOCK) * x.heads
    return down * across + (x.rows if operand.has_token_scales else 0)


def _row_wise(operand: Operand, x: _Tensor) -> tuple[int, int]:
    step = 64 if _bits(operand) == 4 else BLOCK
    rows = x.of(ROWS) * ROWS * x.heads
    payload = rows * -(-(-(-x.channels // step) * step * _bits(operand)) // 8)
    if operand.scope in (Scope.UNIT, Scope.HEAD) or operand.dequantized:
        return payload, 0
    blocks = -(-x.channels // channel_block(operand))
    columns = -(-blocks // _TILE_COLUMNS) * _TILE_COLUMNS
    return payload, rows * columns + (rows if operand.has_token_scales else 0)


def _column_wise(operand: Operand, x: _Tensor) -> tuple[int, int]:
    rows = x.of(ROWS) * ROWS * x.heads
    payload = -(-rows * x.channels * _bits(operand) // 8)
    if operand.scope in (Scope.UNIT, Scope.HEAD) or operand.dequantized:
        return payload, 0
    scales = rows // BLOCK * -(-x.channels // ROWS) * ROWS
    folded = operand.block is not None and operand.block[0] == 1
    return payload, scales + (rows if folded else 0)
