"""`fp8-fa4`, `fp8-fa3` and `cutlass-fp8`: attention on e4m3 codes. The forward alone.

Where the descriptions are silent:

- A maximum over a tile runs over all its columns, masked ones and those past the document's end at -inf: only a tile of
  visible NaN alone has the maximum NaN.
- An amax that is NaN makes its descale NaN, and that makes all codes NaN.
- The codes of P in tiles that are skipped are 0.
- A row that sees a key and has l = 0 or NaN ends by its formulas, in `cutlass-fp8` as a product with rcp(l).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, reduce
from typing import ClassVar

import numpy as np

from tests.independent import codes, factors, float32, matrices, mufu, polynomial, sums
from tests.independent.heads import TILE, Head, spans
from tests.independent.matrices import Integers, Side
from tests.independent.operands import Matrix, columns, widen
from tests.independent.passes import Backward, Forward, Stages, bits8, bits32, zeros
from tests.independent.softmaxes import LN2
from tests.independent.tensor_cores import INSTRUCTIONS

EIGHT, MINUS_EIGHT = 0x41000000, 0xC1000000
HALF = 0x3F000000
TWO_TO_MINUS_EIGHT = 0x3B800000
LARGEST = 0x43E00000  # 448


def descale(matrices_of_head: Sequence[Matrix]) -> int:
    """fl(amax / 448) over all values of some matrices of float32 bits; 1 for an amax of 0 or nothing."""
    values = [x & 0x7FFFFFFF for matrix in matrices_of_head for row in matrix for x in row]
    if any(float32.is_nan(x) for x in values):
        return float32.NAN
    amax = max(values, default=0)
    return float32.divide(amax, LARGEST) if amax else float32.ONE


def encoded(rows: Matrix, divisor: int | None) -> Matrix:
    """e4m3 of each value, over the divisor where there is one."""
    return [
        [
            codes.encode(x if divisor is None else float32.divide(x, divisor), codes.E4M3)
            for x in row
        ]
        for row in rows
    ]


def e4m3(rows: Matrix, width: int) -> Side:
    """Codes as a side of a product."""
    return Side(codes=matrices.integers(rows, width), element=codes.E4M3)


class Row(ABC):
    """One query: its maximum, its sum and its accumulator."""

    def __init__(self, c: int) -> None:
        """Before its first key tile; ``c`` is the factor of the scores."""
        self.c = c
        self.m = float32.MINUS_INFINITY
        self.is_first = True
        self.accumulator: list[int] | None = None

    def advance(self, scores: Sequence[int | None]) -> int:
        """Let m follow the columns of a tile, None where masked; a, or 0 in the first tile."""
        largest = reduce(
            float32.maxnum, [float32.MINUS_INFINITY if x is None else x for x in scores]
        )
        old, was_first = self.m, self.is_first
        self.m = largest if was_first else float32.maxnum(old, largest)
        self.is_first = False
        if was_first:
            return 0
        return mufu.exp2(float32.multiply(float32.subtract(old, self.safe), self.c))

    @property
    def safe(self) -> int:
        """ms."""
        return 0 if self.m == float32.MINUS_INFINITY else self.m

    @property
    @abstractmethod
    def offset(self) -> int:
        """What S c is added to in the exponent."""

    @property
    @abstractmethod
    def total(self) -> int:
        """l."""

    @abstractmethod
    def add(self, p: Sequence[int], a: int) -> None:
        """Take the columns of a tile into the sum."""

    @abstractmethod
    def factor(self, v_descale: int) -> int:
        """What O is multiplied by at the end."""

    @abstractmethod
    def lse(self, softmax_scale: float) -> int:
        """The log-sum-exp."""

    @property
    def is_lost(self) -> bool:
        """Whether l is 0 or NaN."""
        return float32.is_nan(self.total) or float32.is_zero(self.total)


class EightLanes(Row):
    """The sum of FlashAttention-4."""

    def __init__(self, c: int) -> None:
        """Nothing so far."""
        super().__init__(c)
        self._total = 0

    @property
    def total(self) -> int:
        """l."""
        return self._total

    @property
    def offset(self) -> int:
        """Two roundings."""
        return float32.subtract(EIGHT, float32.multiply(self.safe, self.c))

    def add(self, p: Sequence[int], a: int) -> None:
        """Lane 0 goes on from the sum."""
        self._total = sums.eight_lanes(float32.multiply(self._total, a), p)

    def factor(self, v_descale: int) -> int:
        """Step 8."""
        inverse = mufu.reciprocal(float32.ONE if self.is_lost else self.total)
        return float32.multiply(inverse, v_descale)

    def lse(self, softmax_scale: float) -> int:
        """Step 8."""
        if self.is_lost:
            return float32.MINUS_INFINITY
        log = float32.subtract(mufu.log2(self.total), EIGHT)
        return float32.multiply(float32.fused_multiply_add(self.m, self.c, log), LN2)


class Quads(Row):
    """The four threads of FlashAttention-3."""

    def __init__(self, c: int) -> None:
        """Nothing so far."""
        super().__init__(c)
        self.threads = [0] * 4

    @property
    def total(self) -> int:
        """Each thread adds what the one two further holds, then the next one's."""
        held = self.threads
        for distance in (2, 1):
            held = [float32.add(x, held[thread ^ distance]) for thread, x in enumerate(held)]
        assert len(set(held)) == 1, "all threads end with the same sum"
        return held[0]

    @property
    def offset(self) -> int:
        """One rounding."""
        return float32.negate(float32.fused_multiply_add(self.safe, self.c, MINUS_EIGHT))

    def add(self, p: Sequence[int], a: int) -> None:
        """A thread has two neighbouring columns of each eight."""
        for thread, so_far in enumerate(self.threads):
            mine = [x for column, x in enumerate(p) if column % 8 // 2 == thread]
            total = float32.fused_multiply_add(so_far, a, mine[0])
            self.threads[thread] = reduce(float32.add, mine[1:], total)

    def factor(self, v_descale: int) -> int:
        """Step 8."""
        return float32.multiply(0 if self.is_lost else mufu.reciprocal(self.total), v_descale)

    def lse(self, softmax_scale: float) -> int:
        """Step 8."""
        if self.is_lost:
            return float32.MINUS_INFINITY
        log2 = mufu.log2(float32.multiply(self.total, TWO_TO_MINUS_EIGHT))
        log = float32.multiply(log2, LN2)
        return float32.fused_multiply_add(self.m, float32.multiply(self.c, LN2), log)


class HalvedLanes(EightLanes):
    """CUTLASS: half of the sum goes on in each of two lanes."""

    @property
    def offset(self) -> int:
        """There is no offset of P."""
        return float32.negate(float32.multiply(self.safe, self.c))

    def add(self, p: Sequence[int], a: int) -> None:
        """Four pairs of lanes."""
        half = float32.multiply(self._total, float32.multiply(HALF, a))
        pairs = [[half, half], [0, 0], [0, 0], [0, 0]]
        for column, x in enumerate(p):
            pair, lane = column % 8 // 2, column % 2
            pairs[pair][lane] = float32.add(pairs[pair][lane], x)

        def both(one: list[int], other: list[int]) -> list[int]:
            return [float32.add(x, y) for x, y in zip(one, other, strict=True)]

        even, odd = both(both(pairs[0], pairs[1]), both(pairs[2], pairs[3]))
        self._total = float32.add(even, odd)

    def factor(self, v_descale: int) -> int:
        """Step 8; there is no descale."""
        return mufu.reciprocal(self.total)

    def lse(self, softmax_scale: float) -> int:
        """Step 8."""
        log = float32.multiply(mufu.log2(self.total), LN2)
        return float32.fused_multiply_add(self.m, factors.rounded(softmax_scale), log)


class Fp8:
    """The forward of one query head."""

    chained: ClassVar[bool] = False
    instruction: ClassVar[str]
    row: ClassVar[type[Row]]
    key_tile: ClassVar[int] = TILE
    is_descaled: ClassVar[bool] = True
    ascends: ClassVar[bool] = False

    def __init__(self, head: Head) -> None:
        """Step 1."""
        self.head = head
        q, k, v = (widen(x) for x in (head.q, head.k, head.v))
        group = [widen(x) for x in head.group_q or (head.q,)]
        self.descales = (descale(group), descale([k]), descale([v])) if self.is_descaled else None
        of_q, of_k, self.of_v = self.descales or (None, None, None)
        self.codes = [encoded(q, of_q), encoded(k, of_k), encoded(v, self.of_v)]
        self.c = self.score_factor(head.softmax_scale)
        if of_q is not None and of_k is not None:
            self.c = float32.multiply(self.c, float32.multiply(of_q, of_k))
        self.rules = INSTRUCTIONS[self.instruction].rules

    @staticmethod
    def score_factor(softmax_scale: float) -> int:
        """softmax_scale log2(e)."""
        return factors.float32_product(softmax_scale)

    @staticmethod
    def is_emulated(column: int) -> bool:
        """Whether a column of the tile takes the polynomial."""
        return False

    @cached_property
    def scores(self) -> Matrix:
        """Step 2: S of all pairs."""
        width, length = self.head.head_dim, self.head.length
        start = matrices.zeros(length, length)
        q, k, _ = self.codes
        found: Matrix = matrices.contract(
            e4m3(q, width), e4m3(k, width), start, self.rules
        ).tolist()
        return found

    @cached_property
    def _values(self) -> Matrix:
        """Codes of v [channel][key]."""
        return columns(self.codes[2], self.head.head_dim)

    def forward(self) -> Forward:
        """Steps 2 to 8."""
        head, length = self.head, self.head.length
        p, p_codes = zeros(length, length), zeros(length, length)
        rows: list[Row] = []
        for query in range(length):
            rows.append(self.row(self.c))
            queries = head.tiles()[query // TILE]
            tiles = [x for x in spans(length, self.key_tile) if head.meet(queries, x)]
            for keys in tiles if self.ascends else tiles[::-1]:
                self._take_in(rows[-1], query, keys, p[query], p_codes[query])
        v_descale = float32.ONE if self.of_v is None else self.of_v
        o = [
            [float32.multiply(x, row.factor(v_descale)) for x in row.accumulator or []]
            for row in rows
        ]
        stages: Stages = {
            "s": bits32(self.scores, length),
            "p": bits32(p, length),
            "p.o.codes": bits8(p_codes, length),
            "row_max": np.array([row.m for row in rows], np.uint32),
            "row_sum": np.array([row.total for row in rows], np.uint32),
            "o": bits32(o, head.head_dim),
        }
        for name, of_codes in zip("qkv", self.codes, strict=True):
            stages[f"{name}.codes"] = bits8(of_codes, head.head_dim)
        for name, x in zip("qkv", self.descales or (), strict=self.descales is not None):
            stages[f"{name}.scales"] = np.array([x], np.uint32)
        out = [[float32.to_bfloat16(x) for x in line] for line in o]
        lse = [row.lse(head.softmax_scale) for row in rows]
        return Forward(out=out, lse=lse, stages=stages)

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """There is none."""
        raise ValueError("FP8 paths have no backward here: none is public for these inputs")

    def _take_in(self, row: Row, query: int, keys: range, p: list[int], p_codes: list[int]) -> None:
        """Steps 4 to 7 for a key tile; P and its codes go into their rows."""
        head, size = self.head, self.key_tile
        scores = [
            self.scores[query][key] if head.sees(query, key) else None
            for key in range(keys.start, keys.start + size)
        ]
        was_first = row.is_first
        a = row.advance(scores)
        tile = [
            0 if score is None else self._power(score, row, column)
            for column, score in enumerate(scores)
        ]
        row.add(tile, a)
        of_codes = [codes.encode(x, codes.E4M3) for x in tile]
        p[keys.start : keys.stop] = tile[: len(keys)]
        p_codes[keys.start : keys.stop] = of_codes[: len(keys)]
        accumulator = row.accumulator or [0] * head.head_dim
        if not was_first:
            accumulator = [float32.multiply(x, a) for x in accumulator]
        values = [line[keys.start : keys.stop] for line in self._values]
        row.accumulator = self._added(of_codes, values, accumulator)

    def _power(self, score: int, row: Row, column: int) -> int:
        """Step 5."""
        x = float32.fused_multiply_add(score, self.c, row.offset)
        return polynomial.exp2(x) if self.is_emulated(column) else mufu.exp2(x)

    def _added(self, of_codes: list[int], values: Matrix, start: list[int]) -> list[int]:
        """Step 7: the products of a row of a tile, onto the accumulator."""
        size = self.key_tile
        left = e4m3([of_codes], size)
        right = e4m3(values, len(values[0]) if values else 0).padded(size)
        begin: Integers = matrices.integers([start], len(start))
        found: list[list[int]] = matrices.contract(left, right, begin, self.rules).tolist()
        return found[0]


class FlashAttention4(Fp8):
    """`fp8-fa4`."""

    instruction = "sm100.tcgen05.f8f6f4"
    row = EightLanes

    @staticmethod
    def is_emulated(column: int) -> bool:
        """Four of each eight in the two quarters in the middle."""
        return 32 <= column < 96 and column % 8 >= 4


class FlashAttention3(Fp8):
    """`fp8-fa3`."""

    instruction = "sm90.wgmma.fp8"
    row = Quads
    key_tile = 224

    @staticmethod
    def score_factor(softmax_scale: float) -> int:
        """The float32 scale times the float64 logarithm, rounded."""
        scale = float(np.float32(softmax_scale))
        return float32.nearest(Fraction(scale * factors.LOG2_E_FLOAT64))


class Cutlass(Fp8):
    """`cutlass-fp8`."""

    instruction = "sm100.tcgen05.f8f6f4"
    row = HalvedLanes
    is_descaled = False
    ascends = True
