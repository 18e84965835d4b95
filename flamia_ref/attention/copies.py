"""The quantized copies of the inputs (q, k, v, dO): which each use takes, and how they are made, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import copy_numerics, smoothing
from flamia_ref.attention.copy_rows import OVER_CHANNELS as OVER_CHANNELS
from flamia_ref.attention.copy_rows import Copy as Copy
from flamia_ref.attention.copy_rows import Grid as Grid
from flamia_ref.attention.copy_rows import taken as taken
from flamia_ref.attention.copy_rows import unit_code
from flamia_ref.attention.product import Guard, Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import BLOCK, UNIT
from flamia_ref.formats import PRESETS
from flamia_ref.packing import Documents
from flamia_ref.packing.tiles import Indices

_ROWS = 1024  # rows that are quantized together

INPUT_USES: Mapping[str, tuple[Use, ...]] = {
    "q": (Use.S_Q, Use.DK_Q),
    "k": (Use.S_K, Use.DQ_K),
    "v": (Use.O_V, Use.DP_V),
    "do": (Use.DP_DO, Use.DV_DO),
}
"""The uses of each input, in the order of the dataflow."""


def uses_of(recipe: Recipe, tensor: str) -> tuple[Use, ...]:
    """The uses of an input that a recipe has, in the order of the dataflow."""
    return tuple(use for use in INPUT_USES[tensor] if recipe.has_use(use))


def copy_names(recipe: Recipe) -> dict[Use, str]:
    """The copy that each use of an input takes: "q" where all uses of q share one, else "q.s" by its first use."""
    names: dict[Use, str] = {}
    for tensor in INPUT_USES:
        uses = uses_of(recipe, tensor)
        first = {use: recipe.operand(use).same_codes_as or use for use in uses}
        shared = len(set(first.values())) == 1
        for use in uses:
            names[use] = tensor if shared else f"{tensor}.{first[use].split('.')[0]}"
    return names


def needs_high(recipe: Recipe, use: Use) -> bool:
    """Whether a use takes bfloat16 values besides its codes: in guarded blocks, or for the start of its product."""
    if not recipe.has_use(use):
        return False
    product = recipe.product(use.split(".")[0])
    return product.guarded or product.corrected


class Maker:
    """Makes copies of inputs over one set of documents, laid out in one array library, computed in another."""

    def __init__(
        self,
        documents: Documents,
        layout: ModuleType,
        to_compute: Callable[[Array], Array],
        to_layout: Callable[[Array], Array],
        fixed_shapes: bool,
        kv_heads: int = 1,
    ) -> None:
        self.documents, self.grids = documents, {BLOCK: Grid.of(documents)}
        self.layout, self.fixed_shapes = layout, fixed_shapes
        self.to_compute, self.to_layout = to_compute, to_layout
        self.kv_heads = kv_heads

    def copy(self, x: Array, operand: Operand) -> Copy:
        """A copy of float32 bits `x` [tokens, heads, channels] for one use, which is not promoted."""
        tokens, heads, channels = x.shape
        x = smoothing.smoothed(x, operand, self.documents)
        rows = x.reshape(tokens * heads, channels)
        if operand.scope is Scope.HEAD:
            return self._per_head(x, operand)
        if operand.format not in PRESETS:
            codes = self._in_batches((rows,), _ROWS, copy_numerics.scalar, operand=operand)[0]
            return self._filled(codes, None, heads, operand)
        if PRESETS[operand.format].checked_block(operand.block)[0] != 1:
            return self._token_blocks(x, operand)
        if operand.has_token_scales:
            parts = self._in_batches((rows,), _ROWS, copy_numerics.with_powers, operand=operand)
            return self._filled(parts[0], parts[1], heads, operand, parts[2])
        codes, scales = self._in_batches((rows,), _ROWS, copy_numerics.blocks, operand=operand)
        return self._filled(codes, scales, heads, operand)

    def given(
        self, codes: Array, scales: Array | None, token_scales: Array | None, operand: Operand
    ) -> Copy:
        """A copy from what `Copy.trace` and `Copy.token_scales` gave, unchecked."""
        _, heads, channels = codes.shape
        rows = codes.reshape(-1, channels)
        if operand.scope is Scope.HEAD:
            copy = self._filled(rows, None, heads, operand)
            return copy._replace(descales=scales)
        if scales is not None:
            scales = scales.reshape(-1, scales.shape[2])
        powers = None if token_scales is None else token_scales.reshape(-1, 1)
        return self._filled(rows, scales, heads, operand, powers)

    def promoted(self, copy: Copy, operand: Operand) -> Copy:
        """The values of a copy in another operand's element and scale; nothing is quantized from the input."""
        arrays = (copy.codes[:-1], *_scales(copy))
        codes, scales = self._in_batches(
            arrays, _ROWS, copy_numerics.promoted, operand=copy.operand, target=operand
        )
        return self._filled(codes, scales, copy.heads, operand)

    def high(self, x: Array) -> Array:
        """bfloat16 codes [tokens * heads, channels] of float32 bits [tokens, heads, channels]."""
        rows = x.reshape(-1, x.shape[2])
        return self._in_batches((rows,), _ROWS, copy_numerics.high)[0]

    def correction(self, x: Array, operand: Operand) -> Array:
        """bfloat16 codes [tokens * heads, channels] that a use brings to the start of a corrected product."""
        return self.high(smoothing.correction(x, operand, self.documents))

    def grid(self, operand: Operand) -> Grid:
        """The token blocks of an operand: of 32, or of fewer where its scales have fewer."""
        rows = None if operand.block is None else operand.block[0]
        size = rows if isinstance(rows, int) and 1 < rows < BLOCK else BLOCK
        if size not in self.grids:
            self.grids[size] = Grid.of(self.documents, size)
        return self.grids[size]

    def values(self, copy: Copy) -> Array:
        """float32 bits [tokens, heads, channels] of a copy's codes times their scales, rounded once."""
        arrays = (copy.codes[:-1], *_scales(copy))
        values = self._in_batches(arrays, _ROWS, copy_numerics.values, operand=copy.operand)[0]
        return values.reshape(-1, copy.heads, copy.channels)

    def _per_head(self, x: Array, operand: Operand) -> Copy:
        """A copy with one float32 descale for a document and key/value head."""
        tokens, heads, channels = x.shape
        amax = (x & _float32.MAGNITUDE).max(axis=2)  # the largest bits: a NaN's, where there is one
        amax = amax.reshape(tokens, self.kv_heads, heads // self.kv_heads).max(axis=2)
        grid = self.grids[BLOCK]
        zero = self.layout.zeros((1, self.kv_heads), dtype=np.uint32)

        def largest(values: Array, rows: Indices) -> Array:
            """The largest of some rows of `values`, +0 for those that are -1."""
            rows = rows if rows.shape[1] else np.full((len(rows), 1), -1, dtype=np.int32)
            filled = np.where(rows < 0, np.int32(len(values)), rows)
            return _backend.gather(self.layout.concatenate([values, zero]), filled).max(axis=1)

        of_blocks = largest(amax, grid.tokens) if len(grid.tokens) else zero
        of_documents = largest(of_blocks, grid.of_documents(self.documents))
        found = (of_documents.reshape(-1, 1),)
        descales = self._in_batches(found, _ROWS, copy_numerics.descales, operand=operand)[0]
        document = np.repeat(np.arange(len(self.documents)), self.documents.lengths)
        head = np.arange(heads) // (heads // self.kv_heads)
        place = (document[:, None] * self.kv_heads + head).astype(np.int32)
        of_rows = _backend.gather(descales, place.ravel())
        rows = x.reshape(tokens * heads, channels)
        codes = self._in_batches((rows, of_rows), _ROWS, copy_numerics.descaled, operand=operand)
        return self._filled(codes[0], None, heads, operand)._replace(
            descales=descales.reshape(-1, self.kv_heads)
        )

    def _token_blocks(self, x: Array, operand: Operand) -> Copy:
        """A copy whose scales are those of blocks of tokens."""
        xp, grid = self.layout, self.grid(operand)
        tokens, heads, channels = x.shape
        padded = xp.concatenate([x, xp.zeros((1, heads, channels), dtype=np.uint32)])
        tokens_or_last = np.where(grid.tokens < 0, tokens, grid.tokens)
        blocks = _backend.gather(padded, tokens_or_last)  # [blocks, tokens, heads, channels]
        blocks = xp.moveaxis(blocks, 2, 1).reshape(-1, grid.size, channels)
        step = _ROWS // grid.size
        if operand.scope is Scope.PREVIOUS_BLOCK:
            scales = self._in_batches((blocks,), step, copy_numerics.scales, operand=operand)[0]
            scales = self._previous(scales, heads, operand)
            codes = self._in_batches(
                (blocks, scales), step, copy_numerics.by_scales, operand=operand
            )[0]
        else:
            codes, scales = self._in_batches((blocks,), step, copy_numerics.blocks, operand=operand)
        head = np.arange(heads, dtype=np.int32)
        place = (grid.block[:, None] * heads + head) * grid.size + grid.offset[:, None]
        codes = _backend.gather(codes.reshape(-1, channels), place.ravel())
        return self._filled(codes, scales[:, 0], heads, operand)

    def _previous(self, scales: Array, heads: int, operand: Operand) -> Array:
        """The scales [blocks * heads, 1, ...] of the blocks before; `static_scale` for a document's first."""
        first = self.layout.full((1, *scales.shape[1:]), operand.static_scale, dtype=scales.dtype)
        previous = self.grid(operand).previous[:, None]
        head = np.arange(heads, dtype=np.int32)
        index = np.where(previous < 0, np.int32(len(scales)), previous * heads + head)
        return _backend.gather(self.layout.concatenate([scales, first]), index.ravel())

    def _filled(
        self,
        codes: Array,
        scales: Array | None,
        heads: int,
        operand: Operand,
        powers: Array | None = None,
    ) -> Copy:
        """A copy with one more row, for places past a document's end."""

        def with_row(x: Array, value: int) -> Array:
            row = self.layout.full((1, *x.shape[1:]), value, dtype=x.dtype)
            return self.layout.concatenate([x, row])

        copy = Copy(
            with_row(codes, 0),
            None if scales is None else with_row(scales, int(unit_code(operand))),
            heads,
            operand,
            self.grid(operand),
            None if powers is None else with_row(powers, int(UNIT)),
        )
        if not operand.dequantized:
            return copy
        return copy._replace(dequantized=with_row(self.high(self.values(copy)), 0))

    def _in_batches(
        self,
        arrays: tuple[Array, ...],
        step: int,
        function: Callable[..., tuple[Array, ...]],
        **static: Operand,
    ) -> list[Array]:
        """`function` of rows of `arrays`: on the host in batches, of a fixed shape where they are compiled."""
        count = len(arrays[0])
        if self.layout is not np:
            step = max(count, 1)
        given = {name: _numbers(operand) for name, operand in static.items()}
        parts: list[tuple[Array, ...]] = []
        for first in range(0, max(count, 1), step):
            batch = [x[first : first + step] for x in arrays]
            rows = len(batch[0])
            short = step - rows if self.fixed_shapes else 0
            if short:
                batch = [
                    self.layout.concatenate(
                        [x, self.layout.zeros((short, *x.shape[1:]), dtype=x.dtype)]
                    )
                    for x in batch
                ]
            results = function(*map(self.to_compute, batch), **given)
            parts.append(tuple(self.to_layout(result)[:rows] for result in results))
        return [self.layout.concatenate(column) for column in zip(*parts, strict=True)]


def _numbers(operand: Operand) -> Operand:
    """The operand without what its codes and scales do not depend on: one program for all that are alike."""
    return replace(
        operand,
        same_codes_as=None,
        promoted_from=None,
        scale_folded_into=None,
        guard=Guard.NONE,
        dequantized=False,
        smoothing="none",
    )


def _scales(copy: Copy) -> tuple[Array, ...]:
    """Scales and powers of each row of a copy, those that it has."""
    if copy.scales is None:
        return ()
    index = copy.scale_rows()
    scales = copy.scales[:-1] if index is None else _backend.gather(copy.scales, index)
    return (scales,) if copy.powers is None else (scales, copy.powers[:-1])
