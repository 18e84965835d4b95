"""Row sums of P, each recipe's own order of float32 additions."""

from collections.abc import Callable, Sequence

from tests.independent import float32

LANES = 8
CHUNK = 64


def eight_lanes(start: int, p: Sequence[int]) -> int:
    """start plus one key tile: lane r adds columns r, r + 8, ..., lane 0 starts at ``start``."""
    lanes = [start] + [0] * (LANES - 1)
    for column, x in enumerate(p):
        lanes[column % LANES] = float32.add(lanes[column % LANES], x)
    add = float32.add
    even = add(add(lanes[0], lanes[2]), add(lanes[4], lanes[6]))
    odd = add(add(lanes[1], lanes[3]), add(lanes[5], lanes[7]))
    return add(even, odd)


def two_lanes(p: Sequence[int]) -> tuple[int, int]:
    """The even and the odd columns of a tile of 128: two chunks of 64, added lane by lane."""
    even, odd = (
        float32.add(_in_order(p[parity:CHUNK:2]), _in_order(p[CHUNK + parity :: 2]))
        for parity in (0, 1)
    )
    return even, odd


def in_bfloat16(p: Sequence[int]) -> int:
    """32 columns rounded to bfloat16 and added in it; float32 bits. Every column adds what another one holds."""
    assert len(p) == 32
    columns = [float32.to_bfloat16(x) for x in p]
    for distance in (1, 4, 2, 16, 8):
        columns = [_bfloat16_sum(x, columns[j ^ distance]) for j, x in enumerate(columns)]
    assert len(set(columns)) == 1, "all columns end with the same sum"
    return float32.from_bfloat16(columns[0])


def _bfloat16_sum(a: int, b: int) -> int:
    """The sum of two bfloat16, rounded once."""
    wide = [float32.from_bfloat16(x) for x in (a, b)]
    if any(float32.is_nan(x) or float32.is_infinite(x) for x in wide):
        return float32.to_bfloat16(float32.add(*wide))
    total = sum(float32.value(x) for x in wide)
    if total == 0:
        return float32.to_bfloat16(float32.add(*wide))
    magnitude = abs(total)
    unit = max(float32.floor_log2(magnitude) - 7, -133)  # a bfloat16 has 8 significant bits
    steps = float32.nearest_even_integer(magnitude / float32.power_of_two(unit))
    if steps * float32.power_of_two(unit) >= float32.power_of_two(128):
        return 0xFF80 if total < 0 else 0x7F80
    rounded = float32.nearest(steps * float32.power_of_two(unit))
    return rounded >> 16 | (0x8000 if total < 0 else 0)


def _in_order(terms: Sequence[int], add: Callable[[int, int], int] = float32.add) -> int:
    total = terms[0]
    for x in terms[1:]:
        total = add(total, x)
    return total


def reduced(
    terms: Sequence[int],
    *,
    lanes: int,
    vector: int = 1,
    grouped: bool = False,
    chunk: int | None = None,
    begins: str = "zero",
    exchanges: Sequence[int] | None = None,
    ftz: bool = False,
    start: Sequence[int] | None = None,
) -> tuple[int, list[int]]:
    """The sum of terms dealt to lanes by vectors, and the lanes, in any order of its kind.

    ``grouped``: a lane adds up each vector by itself first. ``chunk``: lanes start afresh after so
    many terms, and are added to what they were. ``begins``: lanes begin with "zero" or a "term";
    ``start``: with these sums. ``exchanges``: the distances of a butterfly; None: lane by lane.
    """

    def add(a: int, b: int) -> int:
        return float32.add(a, b, ftz=ftz)

    total: list[int] | None = None
    size = chunk or max(len(terms), 1)
    for first in range(0, max(len(terms), 1), size):
        sums: list[int | None] = [None] * lanes if begins == "term" else [*(start or [0] * lanes)]
        part = terms[first : first + size]
        for k in range(0, len(part), vector):
            lane, taken = k // vector % lanes, list(part[k : k + vector])
            if grouped:
                taken = [_in_order([0, *taken], add)]
            held = sums[lane]
            sums[lane] = _in_order(taken if held is None else [held, *taken], add)
        whole = [x for x in sums if x is not None]
        total = whole if total is None else [add(x, y) for x, y in zip(total, whole, strict=True)]
    assert total is not None
    if exchanges is None:
        return _in_order(total, add), total
    threads = total
    for distance in exchanges:
        threads = [add(x, threads[lane ^ distance]) for lane, x in enumerate(threads)]
    assert len(set(threads)) == 1, "the lanes of a butterfly end with the same sum"
    return threads[0], total
