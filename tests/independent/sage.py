"""`sage3-nvfp4`: q and k less their means, everything in NVFP4, P by two levels. The forward alone.

Where the description is silent:

- A maximum over a tile runs over its 128 columns, masked ones and those past the document's end at -inf: only a tile of
  128 visible NaN has the maximum NaN. That of 16 keys begins at -inf.
- Sums and differences in bfloat16 are those of the exact values, rounded once; mean and difference of q are float32's
  before they are rounded to bfloat16.
- In tiles that are skipped the traced codes and scales of P are 0.
- lse is -inf where l is 0 or NaN.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, reduce
from typing import ClassVar

import numpy as np

from tests.independent import codes, factors, float32, matrices, mufu
from tests.independent.heads import TILE, Head
from tests.independent.matrices import Side
from tests.independent.operands import Matrix, columns, widen
from tests.independent.passes import Backward, Forward, Stages, bits8, bits32, zeros
from tests.independent.softmaxes import LN2
from tests.independent.tensor_cores import INSTRUCTIONS

GROUP = 16
SIX = float32.nearest(Fraction(6))
LOG2_2688 = 0x413646EF  # float32 of 11.3923174
LOG2_6 = 0x40257007  # float32 of 2.5849625
NVFP4 = INSTRUCTIONS["sm120.mma.mxf4nvf4"].rules
BF16 = INSTRUCTIONS["sm120.mma.bf16"].rules


def rounded(bits: int) -> int:
    """float32 bits of a float32 rounded to bfloat16."""
    return float32.from_bfloat16(float32.to_bfloat16(bits))


def add_bfloat16(a: int, b: int) -> int:
    """The sum of two bfloat16 values in float32 bits, rounded once to bfloat16."""
    plain = float32.add(a, b)
    if any(float32.is_nan(x) or float32.is_infinite(x) for x in (a, b)):
        return plain
    total = float32.value(a) + float32.value(b)
    if not total:
        return plain
    magnitude = abs(total)
    unit = max(float32.floor_log2(magnitude), -126) - 7  # of eight significant bits
    steps = float32.nearest_even_integer(magnitude / float32.power_of_two(unit))
    found = steps * float32.power_of_two(unit)
    return float32.nearest(found if total > 0 else -found)


def tile_sum(column: Sequence[int], distances: Sequence[int]) -> int:
    """The bfloat16 sum of 128 tokens: each adds what the token at a distance holds, distance after distance.

    Both then hold the same, so the one with the smaller number goes on.
    """
    assert len(column) == TILE
    held = dict(enumerate(column))
    for distance in distances:
        held = {
            place: add_bfloat16(x, held[place + distance])
            for place, x in held.items()
            if not place & distance
        }
    assert list(held) == [0]
    return held[0]


def tile_mean(rows: Matrix, width: int) -> list[int]:
    """The mean of the rows of a query tile, up to 128 of them, missing ones 0; float32 bits."""
    distances = (16, 32, 64, 2, 1, 8, 4) if width <= 64 else (8, 16, 32, 64, 1, 4, 2)
    filled = rows + zeros(TILE - len(rows), width)
    sums = [tile_sum(column, distances) for column in columns(filled, width)]
    return [float32.shift(x, -7) for x in sums]


def document_mean(rows: Matrix, width: int) -> list[int]:
    """The mean of all rows of a document, rounded to bfloat16; float32 bits."""
    if not rows:
        return [0] * width
    inverse = float32.nearest(Fraction(1, len(rows)))
    found = []
    for column in columns(rows, width):
        parts = [reduce(float32.add, column[at : at + TILE], 0) for at in range(0, len(rows), TILE)]
        found.append(rounded(float32.multiply(reduce(float32.add, parts, 0), inverse)))
    return found


def less(rows: Matrix, mean: Sequence[int]) -> Matrix:
    """Rows minus a mean, rounded to bfloat16; float32 bits."""
    return [
        [rounded(float32.subtract(x, m)) for x, m in zip(row, mean, strict=True)] for row in rows
    ]


def nvfp4(block: Sequence[int]) -> tuple[list[int], int]:
    """One block: e2m1 codes and the UE4M3 scale code."""
    amax = max((x & 0x7FFFFFFF for x in block if not float32.is_nan(x)), default=0)
    scale = codes.encode(float32.divide(amax, SIX), codes.E4M3)
    value = codes.decode(scale, codes.E4M3)
    inverse = float32.nearest(1 / value) if value else 0
    return [codes.encode(float32.multiply(x, inverse), codes.E2M1) for x in block], scale


def side(lines: Matrix, width: int) -> tuple[Side, Matrix, Matrix]:
    """Lines in blocks of 16 along them: a side of a product, the codes and the scales."""
    found = [[nvfp4(line[at : at + GROUP]) for at in range(0, len(line), GROUP)] for line in lines]
    of_codes = [[code for block, _ in row for code in block] for row in found]
    scales = [[scale for _, scale in row] for row in found]
    return _side(of_codes, scales, width), of_codes, scales


def _side(of_codes: Matrix, scales: Matrix, width: int) -> Side:
    return Side(
        codes=matrices.integers(of_codes, width),
        element=codes.E2M1,
        scales=matrices.integers(scales, -(-width // GROUP)),
        scale_format="ue4m3",
        block=GROUP,
    )


class Row:
    """One query: its maximum, four sums and the accumulator."""

    def __init__(self) -> None:
        """Before its first key tile."""
        self.m = float32.MINUS_INFINITY
        self.lanes: list[int] = [0] * 4
        self.o: list[int] | None = None

    @property
    def total(self) -> int:
        """l."""
        a, b, c, d = self.lanes
        return float32.add(float32.add(a, b), float32.add(c, d))


class Sage:
    """The forward of one query head."""

    chained: ClassVar[bool] = False

    def __init__(self, head: Head) -> None:
        """Steps 1 to 3."""
        self.head = head
        scale = float(np.float32(head.softmax_scale))
        self.c = float32.nearest(Fraction(scale * factors.LOG2_E_FLOAT64))
        width = head.head_dim
        k = widen(head.k)
        self.k = less(k, document_mean(k, width))
        q = widen(head.q)
        self.means: Matrix = []
        smooth: Matrix = []
        for rows in head.tiles():
            part = q[rows.start : rows.stop]
            self.means.append(tile_mean(part, width))
            smooth += less(part, self.means[-1])
        self.q_side, self.q_codes, self.q_scales = side(smooth, width)
        self.k_side, self.k_codes, self.k_scales = side(self.k, width)
        values = columns(widen(head.v), width)
        self.v_side, self.v_codes, self.v_scales = side(values, head.length)

    @cached_property
    def scores(self) -> Matrix:
        """Step 4: S of all pairs."""
        head = self.head
        start = matrices.zeros(head.length, head.length)
        for rows, mean in zip(head.tiles(), self.means, strict=True):
            start[rows.start : rows.stop] = self._delta(mean)
        found: Matrix = matrices.contract(self.q_side, self.k_side, start, NVFP4).tolist()
        return found

    def _delta(self, mean: Sequence[int]) -> list[int]:
        """The products of a mean and every key, in bfloat16; float32 bits."""
        width = self.head.head_dim
        a, b = (
            Side(
                codes=matrices.integers(
                    [[float32.to_bfloat16(x) for x in row] for row in rows], width
                ),
                element=codes.BF16,
            )
            for rows in ([list(mean)], self.k)
        )
        products = matrices.contract(a, b, matrices.zeros(1, self.head.length), BF16)
        return [rounded(x) for x in products.tolist()[0]]

    def forward(self) -> Forward:
        """Steps 4 to 9."""
        head = self.head
        length, groups = head.length, -(-head.length // GROUP)
        p, p_codes = zeros(length, length), zeros(length, length)
        p_scales = zeros(length, groups)
        rows: list[Row] = []
        for query in range(length):
            rows.append(Row())
            for keys in head.key_tiles(query)[::-1]:
                self._take_in(rows[-1], query, keys, p[query], p_codes[query], p_scales[query])
        o = [self._normalised(row) for row in rows]
        stages: Stages = {
            "q.codes": bits8(self.q_codes, head.head_dim),
            "q.scales": bits8(self.q_scales, -(-head.head_dim // GROUP)),
            "k.codes": bits8(self.k_codes, head.head_dim),
            "k.scales": bits8(self.k_scales, -(-head.head_dim // GROUP)),
            "v.codes": bits8(columns(self.v_codes, length), head.head_dim),
            "v.scales": bits8(columns(self.v_scales, groups), head.head_dim),
            "s": bits32(self.scores, length),
            "p": bits32(p, length),
            "p.o.codes": bits8(p_codes, length),
            "p.o.scales": bits8(p_scales, groups),
            "row_max": np.array([row.m for row in rows], np.uint32),
            "row_sum": np.array([row.total for row in rows], np.uint32),
            "o": bits32(o, head.head_dim),
        }
        out = [[float32.to_bfloat16(x) for x in row] for row in o]
        return Forward(out=out, lse=[self._lse(row) for row in rows], stages=stages)

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """There is none."""
        raise ValueError("sage3-nvfp4 has no backward: none is public")

    def _take_in(
        self,
        row: Row,
        query: int,
        keys: range,
        p: list[int],
        p_codes: list[int],
        p_scales: list[int],
    ) -> None:
        """Steps 5 to 8 for a key tile; P, its codes and its scales go into their rows."""
        head, first = self.head, row.o is None
        scores = [
            self.scores[query][key] if head.sees(query, key) else None
            for key in range(keys.start, keys.start + TILE)
        ]
        seen = [float32.MINUS_INFINITY if x is None else x for x in scores]
        largest = reduce(float32.maxnum, seen)
        old = row.m
        row.m = largest if first else float32.maxnum(old, largest)
        safe = 0 if row.m == float32.MINUS_INFINITY else row.m
        a = 0
        if not first:
            a = mufu.exp2(float32.multiply(float32.subtract(old, safe), self.c))
        base = float32.fused_multiply_add(safe, self.c, float32.negate(LOG2_2688))
        offset = float32.negate(base)
        tile = [
            0 if x is None else mufu.exp2(float32.fused_multiply_add(x, self.c, offset))
            for x in scores
        ]
        self._add_up(row, tile, a)
        of_codes, scales = self._quantized(seen, tile, offset)
        count = len(keys)
        p[keys.start : keys.stop] = tile[:count]
        p_codes[keys.start : keys.stop] = of_codes[:count]
        group, held = keys.start // GROUP, -(-count // GROUP)
        p_scales[group : group + held] = scales[:held]
        left = _side([of_codes[:count]], [scales[:held]], count)
        right = _side(
            [line[keys.start : keys.stop] for line in self.v_codes],
            [line[group : group + held] for line in self.v_scales],
            count,
        )
        start = matrices.zeros(1, head.head_dim)
        partial: list[int] = matrices.contract(left, right, start, NVFP4).tolist()[0]
        if row.o is None:
            row.o = partial
        else:
            row.o = [
                float32.fused_multiply_add(x, a, t) for x, t in zip(row.o, partial, strict=True)
            ]

    def _quantized(
        self, scores: Sequence[int], tile: Sequence[int], offset: int
    ) -> tuple[list[int], list[int]]:
        """Step 6: codes and scales of the P of a key tile."""
        of_codes: list[int] = []
        scales: list[int] = []
        for at in range(0, TILE, GROUP):
            most = reduce(float32.maxnum, scores[at : at + GROUP], float32.MINUS_INFINITY)
            x = float32.fused_multiply_add(most, self.c, offset)
            divisor = mufu.exp2(float32.subtract(x, LOG2_6))
            inverse = mufu.reciprocal(divisor)
            scales.append(codes.encode(divisor, codes.E4M3))
            of_codes += [
                codes.encode(float32.multiply(y, inverse), codes.E2M1)
                for y in tile[at : at + GROUP]
            ]
        return of_codes, scales

    @staticmethod
    def _add_up(row: Row, tile: Sequence[int], a: int) -> None:
        """Step 7: each lane takes its columns in."""
        for lane in range(4):
            mine = [x for column, x in enumerate(tile) if column % 32 // 8 == lane]
            total = float32.fused_multiply_add(row.lanes[lane], a, mine[0])
            row.lanes[lane] = reduce(float32.add, mine[1:], total)

    @staticmethod
    def _normalised(row: Row) -> list[int]:
        """Step 9: o."""
        total = row.total
        lost = float32.is_nan(total) or float32.is_zero(total)
        inverse = 0 if lost else mufu.reciprocal(total)
        return [float32.multiply(x, inverse) for x in row.o or []]

    def _lse(self, row: Row) -> int:
        total = row.total
        if float32.is_nan(total) or float32.is_zero(total):
            return float32.MINUS_INFINITY
        log2 = float32.subtract(mufu.log2(total), LOG2_2688)
        return float32.multiply(float32.fused_multiply_add(row.m, self.c, log2), LN2)
