"""What a forward and a backward have in common: where arrays are, the copies of the inputs, traced tiles.

Inputs on the host are laid out there into tiles of a few fixed shapes; only tiles enter compiled code, and results are
put back there, so new document lengths compile nothing. Traced inputs, and arrays on an accelerator, are laid out by
gathers with the same index arrays inside the program.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention.copies import Copy, Maker, copy_names, needs_high, taken
from flamia_ref.attention.prepared import Prepared
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import Rows
from flamia_ref.attention.stages import input_of
from flamia_ref.packing import Mask, TileSize
from flamia_ref.packing.tiles import Indices

TILES = 8  # tiles that are computed together, where they are laid out on the host
MORE_TILES = 64  # of 128 by 128, where they are laid out inside the program, or on an accelerator; a power of two


class Late:
    """An array where the numerics are, brought to the layout when it is first wanted there.

    What is laid out on the host meanwhile need not wait for it. `tiles`: how many of its first axis are wanted, their
    rows one after another.
    """

    def __init__(self, run: Run, x: Array, tiles: int | None = None) -> None:
        self._run, self._tiles = run, tiles
        self._given: Array | None = x
        self._found: Array | None = None

    def get(self) -> Array:
        """The array where the layout is."""
        if self._given is not None:
            x = self._run.to_layout(self._given)
            if self._tiles is not None:
                x = x[: self._tiles].reshape(-1, *x.shape[2:])
            self._given, self._found = None, x
        return self._found


def _small_tiles(pairs: int) -> int:
    """How many tiles of `pairs` scores are as much work as one of 128 by 128, rounded down to a power of two."""
    return 1 << max(0, (128 * 128 // pairs).bit_length() - 1)


class Sizes(NamedTuple):
    """The extents of q, k and v."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class Run:
    """Copies of the inputs, and the two array libraries.

    `compute` is the library of the tile numerics; `layout` that of everything around them, numpy wherever the values
    are on the host. `inputs` holds inputs as float32 bits by name, those that are not given as copies.
    """

    def __init__(
        self,
        recipe: Recipe,
        mask: Mask,
        sizes: Sizes,
        layout: ModuleType,
        compute: ModuleType,
        device: object | None,
    ) -> None:
        self.recipe, self.mask = recipe, mask
        self.compute, self.device, self.layout = compute, device, layout
        self.inputs: dict[str, Array] = {}
        self.fixed_shapes = self.layout is not compute
        self.batch = TILES
        if not (self.fixed_shapes or layout is np):
            self.batch = MORE_TILES * _small_tiles(recipe.tiles.query * recipe.tiles.key)
        self.tokens = mask.queries.tokens
        self.heads, self.kv_heads, self.head_dim, self.value_dim = sizes
        self.group = self.heads // self.kv_heads
        # A finite score of masked pairs counts in every column of a tile, so no tile may be smaller.
        self.size = TileSize(
            recipe.tiles.query, recipe.tiles.key, recipe.softmax.mask_value is not None
        )
        arguments = (
            self.layout,
            self.to_compute,
            self.to_layout,
            self.fixed_shapes,
            self.kv_heads,
        )
        queries = Maker(mask.queries, *arguments)
        keys = queries if mask.same_tokens else Maker(mask.keys, *arguments)
        self.makers = {"q": queries, "do": queries, "k": keys, "v": keys}
        self.names = copy_names(recipe)
        self._copies: dict[str, Copy] = {}
        self._high: dict[str, Array] = {}

    def filled(self, count: int) -> int:
        """How many tiles a batch of `count` is filled up to: few shapes, so few programs."""
        if self.layout is np and not self.fixed_shapes:
            return count
        return self.batch if self.fixed_shapes else 1 << (count - 1).bit_length()

    def take(self, prepared: Prepared) -> None:
        """Take copies that were made before."""
        for name, given in prepared.operands.items():
            use = next(use for use, found in self.names.items() if found == name)
            codes, scales, powers = (
                None if x is None else self.of_caller(x)
                for x in (given.codes, given.scales, given.token_scales)
            )
            if scales is not None and scales.dtype == np.float32:
                scales = _backend.bits(scales)
            maker = self.makers[input_of(use)]
            self._copies[name] = maker.given(codes, scales, powers, self.recipe.operand(use))
        for tensor, guard in prepared.guards.items():
            codes = self.of_caller(guard.codes)
            self._high[tensor] = self._with_zeros(codes.reshape(-1, codes.shape[2]))

    def of_caller(self, x: Array) -> Array:
        """An array that a caller gave, where the layout is."""
        return _backend.host(x) if self.layout is np else x

    def to_compute(self, x: Array) -> Array:
        """`x` where the tile numerics are."""
        return _backend.put(x, self.compute, self.device) if self.fixed_shapes else x

    def to_layout(self, x: Array) -> Array:
        """`x` where the layout is."""
        return _backend.host(x) if self.fixed_shapes else x

    def finished(self, x: Array) -> Array:
        """A result as callers get it: uint32 bits as float32, codes as they are, in the library of the inputs."""
        if x.dtype == np.uint32:
            x = _backend.from_bits(x, np.float32)
        return self.to_compute(x)

    def copy(self, use: Use) -> Copy:
        """The copy that a use takes, made at its first use."""
        name = self.names[use]
        if name not in self._copies:
            operand, tensor = self.recipe.operand(use), input_of(use)
            maker = self.makers[tensor]
            if operand.promoted_from is None:
                self._copies[name] = maker.copy(self.inputs[tensor], operand)
            else:
                self._copies[name] = maker.promoted(self.copy(operand.promoted_from), operand)
        return self._copies[name]

    def descales(self, use: Use, documents: Indices, kv_heads: Indices) -> Array | None:
        """The descales [tiles] of one use, of one document and key/value head for each tile; None without any."""
        descales = self.copy(use).descales
        if descales is None:
            return None
        place = documents * self.kv_heads + kv_heads
        return self.to_compute(_backend.gather(descales.reshape(-1), place.astype(np.int32)))

    def rows(self, use: Use, tokens: Indices, heads: Indices) -> Rows:
        """Rows of an input for one use: `tokens` [tiles, rows], -1 for none, of one of its `heads` for each tile."""
        copy = self.copy(use)
        high = self._high_codes(use) if needs_high(self.recipe, use) else None
        return taken(copy, use, self.recipe.operand(use), high, tokens, heads, self.to_compute)

    def _high_codes(self, use: Use) -> Array:
        """What guarded blocks, or the start of a product, take: bfloat16 codes with a last row of zeros."""
        tensor = input_of(use)
        if self.recipe.product(use.split(".")[0]).corrected:
            if tensor not in self._high:
                maker, operand = self.makers[tensor], self.recipe.operand(use)
                codes = maker.correction(self.inputs[tensor], operand)
                self._high[tensor] = self._with_zeros(codes)
            return self._high[tensor]
        name = tensor if self.recipe.guard_operands == "inputs" else self.names[use]
        if name not in self._high:
            maker, inputs = self.makers[tensor], self.recipe.guard_operands == "inputs"
            x = self.inputs[tensor] if inputs else maker.values(self.copy(use))
            self._high[name] = self._with_zeros(maker.high(x))
        return self._high[name]

    def _with_zeros(self, codes: Array) -> Array:
        """Codes with a row of zeros for places past a document's end."""
        zero = self.layout.zeros((1, codes.shape[1]), dtype=codes.dtype)
        return self.layout.concatenate([codes, zero])

    def copy_stage(self, stage: str) -> Array:
        """A traced stage of an input: its codes or its scales."""
        name, _, part = stage.rpartition(".")
        use = next(use for use, copy in self.names.items() if copy == name)
        copy = self.copy(use)
        if part == "token_scales":
            return copy.token_scales
        codes, scales = copy.trace()
        return codes if part == "codes" else scales
