"""Row sums of P, each recipe's own order of float32 additions."""

from collections.abc import Sequence

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


def _in_order(terms: Sequence[int]) -> int:
    total = terms[0]
    for x in terms[1:]:
        total = float32.add(total, x)
    return total
