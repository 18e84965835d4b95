"""The tiles of a launch against every pair of tokens, and against what attention computes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia_ref import attention
from flamia_ref.attention import RECIPES
from flamia_ref.attention.samples import bell
from flamia_ref.attention.traced import TracedTiles
from flamia_ref.packing import Documents, Mask
from flamia_ref.schedule.work import Pass, Problem, Size, Work, work_of

LENGTHS = st.sampled_from((0, 1, 31, 32, 33, 64, 90, 130))
REACH = st.sampled_from((None, 0, 1, 32, 50))


@st.composite
def masks(draw) -> Mask:
    count = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    sides = [
        Documents((0, *np.cumsum([draw(LENGTHS) for _ in range(count)]).tolist())) for _ in range(2)
    ]
    window = draw(st.none() | st.tuples(REACH, st.just(0) if causal else REACH))
    alignment = draw(st.sampled_from(("bottom_right", "top_left")))
    return Mask.of(*sides, causal=causal, window=window, alignment=alignment)


def by_hand(mask: Mask, launch: Pass, size: Size, heads: int, splits: int) -> list[tuple]:
    """Document, head, block, split, products, masked and guarded of every tile, from every pair."""
    found = []
    own, other = (size.keys, size.queries) if launch.by_keys else (size.queries, size.keys)
    for document in range(len(mask.queries)):
        pairs = mask.visible(document)
        pairs = pairs.T if launch.by_keys else pairs
        for head in range(heads):
            for place, first in enumerate(range(0, len(pairs), own * size.stages)):
                blocks = [
                    pairs[first + own * stage : first + own * (stage + 1)]
                    for stage in range(size.stages)
                ]
                starts = range(0, pairs.shape[1], other)
                met = [at for at in starts if any(x[:, at : at + other].any() for x in blocks)]
                run = list(range(met[0], met[-1] + 1, other)) if met else []
                each = -(-len(run) // splits)
                for split in range(splits):
                    part = run[split * each : (split + 1) * each]
                    tiles = [x[:, at : at + other] for x in blocks for at in part]
                    whole = sum(len(x) > 0 and x.shape[1] == other and x.all() for x in tiles)
                    guarded = sum(guards(x, launch) for x in tiles)
                    counts = (len(tiles), len(tiles) - whole, guarded)
                    found.append((document, head, place, split, *counts))
    return found


def guards(tile: np.ndarray, launch: Pass) -> int:
    """Blocks of 32 by 32 with a visible and a masked pair; a key past the end is masked, a query there does not
    count."""
    tile = tile.T if launch.by_keys else tile
    count = 0
    for query in range(0, tile.shape[0], 32):
        for key in range(0, tile.shape[1], 32):
            block = tile[query : query + 32, key : key + 32]
            count += bool(block.any() and not (block.all() and block.shape[1] == 32))
    return count


def rows(work: Work) -> list[tuple]:
    columns = (
        work.document,
        work.head,
        work.block,
        work.split,
        work.products,
        work.masked,
        work.guarded,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=60)
@given(
    masks(),
    st.sampled_from(Pass),
    st.sampled_from((32, 64)),
    st.sampled_from((32, 96)),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_tile_is_what_all_pairs_say(
    mask: Mask, launch: Pass, queries: int, keys: int, many: int, split: bool
) -> None:
    split = split and launch is Pass.FORWARD
    size, splits = Size(queries, keys, 1 if split else many), many if split else 1
    problem = Problem(mask=mask, heads=2, kv_heads=1, head_dim=64, value_dim=64)
    work = work_of(problem, launch, size, splits=splits)
    assert rows(work) == by_hand(mask, launch, size, 2, splits)


def test_a_triangle_by_hand() -> None:
    # 300 tokens, tiles of 128: blocks of 128, 128 and 44 queries meet 1, 2 and 3 tiles of keys.
    problem = Problem.of([0, 300], heads=1)
    forward = work_of(problem, "forward", Size(128, 128))
    assert forward.products.tolist() == [1, 2, 3]
    assert forward.masked.tolist() == [1, 1, 1]
    assert forward.guarded.tolist() == [4, 4, 2]
    backward = work_of(problem, "backward", Size(128, 128))
    assert backward.products.tolist() == [3, 2, 1]
    # Two query tiles side by side go as far as the second of them.
    assert work_of(problem, "forward", Size(128, 128, 2)).products.tolist() == [4, 6]


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_what_attention_computes(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, heads = (300, 1, 0, 128, 200), 2
    computed: list[tuple[int, int, int, int]] = []
    add = TracedTiles.add

    def seen(self, stages, keys, places) -> None:
        if "p" in stages or "p.dv" in stages:
            computed.extend(keys[place] for place in places)
        add(self, stages, keys, places)

    monkeypatch.setattr(TracedTiles, "add", seen)
    sample = bell(lengths, heads, 1, 32)
    cu_seqlens = np.array([0, *np.cumsum(lengths)], np.int32)
    forward = attention.forward(
        sample.q, sample.k, sample.v, "bf16-fa4", cu_seqlens=cu_seqlens, causal=causal
    )
    of_forward, computed[:] = list(computed), []
    attention.backward(sample.q, sample.k, sample.v, sample.dout, forward)
    problem = Problem.of(cu_seqlens, heads=heads, kv_heads=1, head_dim=32, causal=causal)
    tiles = RECIPES["bf16-fa4"].tiles
    size = Size(tiles.query, tiles.key)
    for launch, own, found in (
        (Pass.FORWARD, 2, of_forward),
        (Pass.BACKWARD_DQ, 2, computed),
        (Pass.BACKWARD, 3, computed),
    ):
        work = work_of(problem, launch, size)
        unit = size.keys if launch.by_keys else size.queries
        counted = Counter((key[0], key[1], key[own] // unit) for key in found)
        coordinates = zip(
            work.document.tolist(), work.head.tolist(), work.block.tolist(), strict=True
        )
        planned = dict(zip(coordinates, work.products.tolist(), strict=True))
        assert len(set(found)) == len(found)
        assert counted == {place: count for place, count in planned.items() if count}


def test_bad_input() -> None:
    problem = Problem.of([0, 300], heads=2)
    for call, message in (
        (lambda: work_of(problem, "forward", Size(100, 128)), "a tile has 100 queries"),
        (lambda: work_of(problem, "forward", Size(128, 0)), "a tile has 0 keys"),
        (lambda: work_of(problem, "forward", Size(128, 128, 0)), "stages is 0"),
        (lambda: work_of(problem, "backward", Size(128, 128), splits=2), "splits is 2 of a backward"),
        (lambda: Problem.of([0, 300], heads=0), "heads is 0"),
        (lambda: Problem.of([0, 300], heads=3, kv_heads=2), "must be a multiple"),
        (lambda: Problem.of([0, 300, 200], heads=3), "it must not decrease"),
        (lambda: Problem.of([0, 10**9], heads=128) and work_of(
            Problem.of([0, 10**9], heads=128), "forward", Size(32, 32)), "tiles; at most"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_nothing_is_no_tiles() -> None:
    for cu_seqlens in ([0, 0], [0, 0, 0]):
        work = work_of(Problem.of(cu_seqlens, heads=2), "backward", Size(128, 128))
        assert len(work) == 0
