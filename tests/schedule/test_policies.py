"""The order of every policy on tiny cases, worked out by hand from the formulas of its source."""

import dataclasses

import numpy as np
import pytest

from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.work import Problem, Size, Work, work_of

TILE = Size(128, 128)
B200 = GPUS["B200"]


def packed(
    lengths: tuple[int, ...],
    heads: int = 2,
    kv_heads: int | None = None,
    *,
    launch: str = "forward",
    size: Size = TILE,
    head_dim: int = 128,
    causal: bool = True,
    window=None,
) -> Work:
    problem = Problem.of(
        [0, *np.cumsum(lengths).tolist()],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        window=window,
    )
    return work_of(problem, launch, size)


def taken(name: str, work: Work, gpu=B200) -> list[tuple[int, int, int]]:
    """Document, head and block of the tiles as they are taken."""
    order = POLICIES[name].of(work, gpu, work.products * 1.0)
    tiles = work.take(order.places)
    return list(
        zip(tiles.document.tolist(), tiles.head.tolist(), tiles.block.tolist(), strict=True)
    )


def test_natural_and_static() -> None:
    work = packed((256, 128))
    natural = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)]
    assert taken("natural", work) == taken("static", work) == natural
    order = POLICIES["static"].of(packed((128,) * 150, 1), B200, np.ones(150))
    assert order.sm is not None
    assert order.sm.tolist() == [*range(148), 0, 1]
    assert POLICIES["natural"].of(work, B200, np.ones(6)).sm is None


def fa4_lpt(heads: int, blocks: int, width: int) -> list[tuple[int, int]]:
    """(head, block) by the formula of SingleTileLPTScheduler."""
    found = []
    for tile in range(heads * blocks):
        section, inside = divmod(tile, width * blocks)
        own = heads % width if section >= heads // width else width
        found.append((section * width + inside % own, blocks - 1 - inside // own))
    return found


def test_fa4_lpt() -> None:
    # 32768 tokens of 128 + 128 channels in bfloat16 are 16 MiB: 3 fit 50 MiB, so sections of 2 heads.
    length = 32768
    for heads in (4, 5):
        found = taken("fa4-lpt", packed((length,), heads, size=Size(4096, 4096)))
        assert [(head, block) for _, head, block in found] == fa4_lpt(heads, 8, 2)
    # 12.5 MiB: just 4.
    found = taken("fa4-lpt", packed((25600,), 8, size=Size(12800, 12800)))
    assert [(head, block) for _, head, block in found] == fa4_lpt(8, 2, 4)
    # Twice as many bytes, sections of one head; heads of several documents count on.
    found = taken("fa4-lpt", packed((length,) * 2, 2, head_dim=256, size=Size(16384, 16384)))
    assert found == [(d, h, b) for d in (0, 1) for h in (0, 1) for b in (1, 0)]
    # Small ones all fit one section: the longest blocks of all heads and documents first.
    found = taken("fa4-lpt", packed((256, 256), 2))
    assert found == [(d, h, b) for b in (1, 0) for d in (0, 1) for h in (0, 1)]
    with pytest.raises(ValueError, match="these have 128 to 256 tokens"):
        taken("fa4-lpt", packed((256, 128)))


def test_fa4_varlen() -> None:
    # Documents as they come; all heads of a document together, its longest blocks first.
    work = packed((128, 384), 2)
    assert taken("fa4-varlen", work) == [
        (0, 0, 0),
        (0, 1, 0),
        *((1, head, block) for block in (2, 1, 0) for head in (0, 1)),
    ]
    # A key tile of 128 is 64 KiB: 800 fit. 65536 tokens are 512 of them: one head at a time. 51200 are 400: two.
    for length, width in ((65536, 1), (51200, 2), (51201, 1)):
        found = taken("fa4-varlen", packed((length,), 3, size=Size(128, 128)))
        sections = [range(first, min(first + width, 3)) for first in range(0, 3, width)]
        count = -(-length // 128)
        assert found == [
            (0, head, block)
            for section in sections
            for block in reversed(range(count))
            for head in section
        ]
    # A tile of 96 + 96 channels is 48 KiB: 1066 fit, two heads of 533. Whole tiles of 256 queries count, which are 534.
    for stages, width in ((1, 2), (2, 1)):
        found = taken(
            "fa4-varlen", packed((533 * 128,), 2, head_dim=96, size=Size(128, 128, stages))
        )
        assert [head for _, head, _ in found[:2]] == [0, width - 1]
    # No mask, no reversal; a backward that is not deterministic takes the grid as it is.
    for work in (packed((128, 384), causal=False), packed((128, 384), launch="backward")):
        assert taken("fa4-varlen", work) == taken("natural", work)


def test_fa3_does_not_sort_packed_training() -> None:
    # The key is key tiles less query tiles, in tokens: 0 for every document as tiles are square.
    lengths = (128, 384, 256)
    documents = [document for document, _, _ in taken("fa3-varlen", packed(lengths, 1))]
    assert documents == [0, 1, 1, 1, 2, 2]
    # Tiles of 128 by 96: what rounding leaves. 128 -> 192 - 128 = 64, 384 -> 384 - 384 = 0, 256 -> 288 - 256 = 32.
    found = taken("fa3-varlen", packed(lengths, 1, size=Size(128, 96)))
    assert list(dict.fromkeys(document for document, _, _ in found)) == [0, 2, 1]
    # Without a mask the key is the key tiles alone, so there the longest come first, in natural order inside.
    found = taken("fa3-varlen", packed(lengths, 1, causal=False))
    assert found == [(1, 0, 0), (1, 0, 1), (1, 0, 2), (2, 0, 0), (2, 0, 1), (0, 0, 0)]
    # With a window nothing is sorted.
    found = taken("fa3-varlen", packed(lengths, 1, size=Size(128, 96), window=(64, 0)))
    assert list(dict.fromkeys(document for document, _, _ in found)) == [0, 1, 2]
    # Blocks of a document from the last on.
    assert taken("fa3-varlen", packed((384,), 1)) == [(0, 0, 2), (0, 0, 1), (0, 0, 0)]


def test_fa3_head_sections() -> None:
    # 8 MiB hold 128 key tiles of 64 KiB: two heads of 8192 tokens, times the query heads of a key/value head.
    one = taken("fa3-varlen", packed((8192,), 4, size=Size(4096, 128)))
    assert [head for _, head, _ in one] == [0, 1, 0, 1, 2, 3, 2, 3]
    grouped = taken("fa3-varlen", packed((8192,), 4, 2, size=Size(4096, 128)))
    assert [head for _, head, _ in grouped] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_cudnn_lpt() -> None:
    found = taken("cudnn-lpt", packed((384, 384), 2))
    # row = 2 - t // 4, head = t mod 2, batch above.
    assert found == [((t % 4) // 2, t % 2, 2 - t // 4) for t in range(12)]


def test_cudnn_lpt_l2() -> None:
    # An L2 cache of three key/value heads and a half; of 4 groups two are active, so that both rounds are alike.
    work = packed((256,), 8, 4)
    one = 256 * (128 + 128) * 2
    gpu = dataclasses.replace(
        B200, l2_bytes=dataclasses.replace(B200.l2_bytes, value=int(3.5 * one))
    )
    groups, active, per_group, rows = 4, 2, 2, 2
    wanted = []
    for tile in range(len(work)):
        block, inside = divmod(tile, active * per_group * rows)
        row, place = divmod(inside, active * per_group)
        group = block * active + place % active
        assert group < groups
        wanted.append((0, group * per_group + place // active, rows - 1 - row))
    assert taken("cudnn-lpt-l2", work, gpu) == wanted
    # With room for all the longest blocks of all heads come first.
    blocks = [block for _, _, block in taken("cudnn-lpt-l2", work)]
    assert blocks == [1] * 8 + [0] * 8


def test_cudnn_thd() -> None:
    # Longest documents first, ties as they come; head after head, the last block first.
    assert taken("cudnn-thd", packed((128, 256, 128), 2)) == [
        (1, 0, 1),
        (1, 0, 0),
        (1, 1, 1),
        (1, 1, 0),
        (0, 0, 0),
        (0, 1, 0),
        (2, 0, 0),
        (2, 1, 0),
    ]


def test_lpt() -> None:
    found = taken("lpt", packed((256, 384), 1))
    assert found == [(1, 0, 2), (0, 0, 1), (1, 0, 1), (0, 0, 0), (1, 0, 0)]


def test_tiles_of_keys_are_longest_first_as_they_are() -> None:
    work = packed((384, 384), 1, launch="backward")
    blocks = [block for _, _, block in taken("cudnn-lpt", work)]
    assert blocks == [0, 0, 1, 1, 2, 2]


def test_every_policy_says_whose_it_is() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name
        assert policy.about
        assert policy.source == "-" if name == "lpt" else "/" in policy.source
