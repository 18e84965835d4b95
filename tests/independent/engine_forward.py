"""The forward pass of one query head of one document, for any recipe.

Where the description is silent:

- P of a column beyond the document's end, which only a mask value makes other than 0, counts in the scale of its block.
- A NaN or +inf of S' c makes an integer base NaN whatever the rescale threshold is.
- A row that sees no key ends as if it had no column, also where a mask value gave it some: with the start values of m
  and l, and, with a sink, with the lse of that alone.
- lse is -inf beside a row sum that is 0 or NaN with the base "raw_max", whatever normalises.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from tests.independent import chains, copies, endings, float32, fp4, matrices
from tests.independent.copies import Copies
from tests.independent.masks import Mask, Tiling, ordered, runs
from tests.independent.matrices import Integers
from tests.independent.online import BASES, Online, whole
from tests.independent.operands import Matrix, narrow
from tests.independent.quantized import UNIT_SCALE, Quantized
from tests.independent.scores import Scores

Recipe = Mapping[str, Any]
_HALF = {"scope": "unit", "format": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Head:
    """A query head of a document with its key/value head: bfloat16 bits [token, channel] and copies."""

    recipe: Recipe
    mask: Mask
    tiling: Tiling
    scores: Scores
    q: Integers
    k: Integers
    v: Integers
    dout: Integers | None
    q_copies: Copies
    k_copies: Copies
    v_copies: Copies
    sink: int | None

    @cached_property
    def s(self) -> Matrix:
        """S of all pairs."""
        product = self.recipe["s"]
        left, right = self.q_copies.by_use["s.q"], self.k_copies.by_use["s.k"]
        halves = self.half(self.q, left), self.half(self.k, right)
        s = chains.over_channels(product, left, right, halves, self.mask)
        return fp4.with_token_scales(s, left, right)

    @cached_property
    def score(self) -> Matrix:
        """S' of all pairs."""
        return self.scores.score_matrix(self.s)

    def half(self, inputs: Integers, copy: Quantized) -> Integers:
        """The bfloat16 operand of guarded blocks: the input, or the values of its copy."""
        if self.recipe["guard_operands"] == "codes":
            return copies.half_values(copy, inputs.shape[1])
        return inputs

    @property
    def mask_value(self) -> int | None:
        """float32 bits of the score of masked pairs, None where they are selected out."""
        value = self.recipe["softmax"]["mask_value"]
        return None if value is None else float32.nearest(Fraction(value))


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward of a head: bfloat16 bits of out, float32 bits of the rest."""

    out: Matrix
    lse: list[int]
    o: Matrix
    z: Matrix  # P as O's product took it, without a scale that it took over
    high: Matrix  # bfloat16 bits of O of P in bfloat16, where delta takes that
    bases: Matrix  # [query][key tile], what the z of a tile are relative to
    bases_in_log2: Matrix
    stages: dict[str, Any]


class _Pairs:
    """The stages of P, filled tile by tile."""

    def __init__(self, head: Head) -> None:
        rows, columns = head.mask.queries, head.mask.keys
        operand = copies.operand(head.recipe, "o.p")
        self.p = np.zeros((rows, columns), np.uint32)
        self.z = np.zeros((rows, columns), np.int64)
        self.codes = np.zeros((rows, columns), np.int64)
        self.scales: Integers | None = None
        if operand["block"] is not None:
            height, width = operand["block"]
            self.scales = matrices.zeros(-(-rows // height), -(-columns // width))
        self.is_half = operand["format"] == "bf16"

    def fill(self, queries: range, keys: range, p: Matrix, z: Matrix, codes: Quantized) -> None:
        place = np.s_[queries.start : queries.stop, keys.start : keys.stop]
        width = len(p[0])
        self.p[place] = matrices.integers(p, width)[:, : len(keys)]
        self.z[place] = matrices.integers(z, width)[:, : len(keys)]
        self.codes[place] = codes.codes[:, : len(keys)]
        if self.scales is not None and codes.scales is not None:
            top, left = queries.start // codes.rows, keys.start // codes.columns
            part = self.scales[top:, left:][: len(codes.scales), : codes.scales.shape[1]]
            part[:] = codes.scales[:, : part.shape[1]]

    def stages(self) -> dict[str, Any]:
        found = {
            "p": self.p,
            "p.o.codes": self.codes.astype(np.uint16 if self.is_half else np.uint8),
        }
        if self.scales is not None:
            found["p.o.scales"] = self.scales.astype(np.uint8)
        return found


def forward(head: Head) -> Forward:
    """Run the forward pass."""
    recipe, mask, tiling = head.recipe, head.mask, head.tiling
    softmax = recipe["softmax"]
    c = head.scores.factor(softmax["score_factor"])
    splits = recipe["tiles"]["splits"]
    width = head.v.shape[1]
    is_high = recipe["gradient"]["delta_source"] == "high_precision_out"
    pairs = _Pairs(head)
    bases = [[0] * len(tiling.key_tiles) for _ in range(mask.queries)]
    bases_in_log2 = [list(row) for row in bases]
    o: Matrix = []
    lse: list[int] = []
    ends: list[list[endings.End]] = []  # [query][split]
    for queries in tiling.query_tiles:
        parts = []
        for number, tiles in enumerate(runs(tiling.worked_on(queries), splits)):
            natural = head.scores.natural
            rows: list[Online] = [BASES[softmax["base"]](softmax, c, natural) for _ in queries]
            has_sink = splits == 1 or (number == 0 and softmax["combine"] != "divide_last")
            if has_sink and head.sink is not None:
                for row in rows:
                    row.begin_with(head.sink)
            # O of P in bfloat16 stands beside O, since rows end alike.
            accumulator = matrices.zeros(len(queries), width * (2 if is_high else 1))
            for tile in ordered(tiles, recipe["o"]["tile_order"], causal=mask.is_local):
                keys = tiling.key_tiles[tile]
                accumulator = _add_tile(head, rows, queries, keys, accumulator, pairs)
                for i, row in zip(queries, rows, strict=True):
                    bases[i][tile], bases_in_log2[i][tile] = row.saved_base, row.base_in_log2
            lines = zip(queries, rows, accumulator.tolist(), strict=True)
            parts.append([_finished(head, tiles, *line, has_sink=has_sink) for line in lines])
        for row_parts in zip(*parts, strict=True):
            ends.append(list(row_parts))
            if splits == 1:
                o.append(row_parts[0].o)
                lse.append(row_parts[0].lse)
                continue
            state = BASES[softmax["base"]](softmax, c)
            row_o, row_lse = endings.combine(row_parts, softmax["combine"], state, head.sink)
            o.append(row_o)
            lse.append(row_lse)
    row_max = np.array([[x.m for x in row] for row in ends], np.uint32).reshape(-1, splits).T
    row_sum = np.array([[x.l for x in row] for row in ends], np.uint32).reshape(-1, splits).T
    high = narrow([row[width:] for row in o])
    o = [row[:width] for row in o]
    stages = {
        "s": matrices.integers(head.s, mask.keys).astype(np.uint32),
        **pairs.stages(),
        "row_max": row_max if splits > 1 else row_max[0],
        "row_sum": row_sum if splits > 1 else row_sum[0],
        "o": matrices.integers(o, width).astype(np.uint32),
    }
    return Forward(
        out=narrow(o),
        lse=lse,
        o=o,
        z=pairs.z.tolist(),
        high=high,
        bases=bases,
        bases_in_log2=bases_in_log2,
        stages=stages,
    )


def _finished(
    head: Head, tiles: list[int], query: int, row: Online, accumulator: list[int], *, has_sink: bool
) -> endings.End:
    """The end of a row after a run of key tiles."""
    keys = [j for tile in tiles for j in head.tiling.key_tiles[tile]]
    is_dead = not any(head.mask.sees(query, j) for j in keys)
    if is_dead and head.mask_value is not None:
        row = type(row)(row.softmax, row.c, row.natural)
    return endings.finish(row, accumulator, sink=head.sink if has_sink else None, is_dead=is_dead)


def _add_tile(
    head: Head,
    rows: list[Online],
    queries: range,
    keys: range,
    accumulator: Integers,
    pairs: _Pairs,
) -> Integers:
    """Take a key tile into the rows of a query tile; the accumulators with its products."""
    product, size = head.recipe["o"], head.tiling.key_size
    columns = [_columns(head, i, keys) for i in queries]
    rescalings = [row.move(line) for row, line in zip(rows, columns, strict=True)]
    p = [row.powers(line) for row, line in zip(rows, columns, strict=True)]
    v_copy = head.v_copies.by_use["o.v"]
    folds = chains.folds(product)
    shifts = [v_copy.scale(j, 0) - UNIT_SCALE if folds else 0 for j in keys]
    shifts += [0] * (size - len(keys))
    guarded = [
        [chains.is_guarded(product) and head.mask.is_guarded(i, j) for j in _places(keys, size)]
        for i in queries
    ]
    weights = [
        [
            0 if is_cut else (float32.shift(x, shift) if shift else x)
            for x, shift, is_cut in zip(line, shifts, cut, strict=True)
        ]
        for line, cut in zip(p, guarded, strict=True)
    ]
    softmax = head.recipe["softmax"]
    divided = softmax["p_scaling"] == "static_scale"
    if softmax["p_overflow"] == "zero":
        lift = UNIT_SCALE - product["left"]["static_scale"] if divided else 0
        weights = [[_in_range(x, lift) for x in line] for line in weights]
    codes = copies.pair_operand(weights, size, product["left"], is_p=not divided)
    z = [
        [
            float32.from_bfloat16(float32.to_bfloat16(x))
            if is_cut
            else (float32.shift(value, -shift) if shift else value)
            for x, value, shift, is_cut in zip(*line, shifts, cut, strict=True)
        ]
        for *line, cut in zip(p, codes.values(), guarded, strict=True)
    ]
    pairs.fill(queries, keys, p, z, codes)
    terms = p if head.recipe["softmax"]["row_sum_of"] == "p" else z
    for row, line, rescaling in zip(rows, terms, rescalings, strict=True):
        row.sum.add(line, rescaling)
    accumulator = matrices.integers(
        [
            [rescaling.apply(x) for x in line]
            for rescaling, line in zip(rescalings, accumulator.tolist(), strict=True)
        ],
        accumulator.shape[1],
    )
    is_partial = product["accumulation"] == "float32_partials"
    start = matrices.zeros(*accumulator.shape) if is_partial else accumulator
    width = head.v.shape[1]
    values = v_copy.part(keys, range(width)).column_side(size, unit=folds)
    result = chains.over_tokens(product, codes.row_side(size), values, start[:, :width])
    if start.shape[1] > width:
        rounded = copies.pair_operand(p, size, _HALF, is_p=True)
        more = chains.over_tokens(product, rounded.row_side(size), values, start[:, width:])
        result = np.concatenate([result, more], axis=1)
    half = head.half(head.v, v_copy)
    result = chains.add_guarded(product, p, half, result, (queries, keys), head.mask)
    return chains.add(accumulator, result) if is_partial else result


def _in_range(p: int, lift: int) -> int:
    """P, 0 where P times 2**lift would round beyond 448."""
    return 0 if float32.exceeds(float32.shift(p, lift), whole(464)) else p


def _places(keys: range, size: int) -> range:
    """The positions of all columns of a key tile."""
    return range(keys.start, keys.start + size)


def _columns(head: Head, query: int, keys: range) -> list[int | None]:
    """The scores of all columns of a key tile for a query."""
    return [
        head.score[query][j] if head.mask.sees(query, j) else head.mask_value
        for j in _places(keys, head.tiling.key_size)
    ]
