"""What blocks of queries see, and blocks of keys are seen by, against every pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flamia_ref.packing import Documents, Mask, key_blocks, query_blocks

lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3)
reach = st.none() | st.integers(0, 5)


@st.composite
def masks(draw) -> Mask:
    """Documents of up to 9 queries and keys with every kind of mask."""
    of = draw(lengths)
    causal = draw(st.booleans())
    right = 0 if causal else draw(reach)
    window = draw(st.none() | st.tuples(reach, st.just(right)))
    queries, keys = (
        Documents((0, *np.cumsum([one[side] for one in of]).tolist())) for side in (0, 1)
    )
    alignment = draw(st.sampled_from(("bottom_right", "top_left")))
    return Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)


def run(flags: np.ndarray) -> tuple[int, int]:
    (found,) = np.nonzero(flags)
    return (int(found[0]), int(found[-1])) if len(found) else (0, -1)


@given(masks(), st.integers(1, 4), st.integers(1, 4))
def test_blocks_are_what_every_pair_says(mask: Mask, size: int, other: int) -> None:
    for make, turned in ((query_blocks, False), (key_blocks, True)):
        found = make(mask, size)
        places = []
        for document in range(len(mask.queries)):
            pairs = mask.visible(document)
            pairs = pairs.T if turned else pairs
            of_document = found.of(document)
            for at, first in enumerate(range(0, len(pairs), size)):
                block = pairs[first : first + size]
                one = [int(column[at]) for column in of_document]
                any_of, all_of = run(block.any(axis=0)), run(block.all(axis=0))
                assert one == [document, first, len(block), *any_of, *all_of]
                tiles = [block[:, key : key + other] for key in range(0, pairs.shape[1], other)]
                met = [place for place, tile in enumerate(tiles) if tile.any()]
                begin, end = (int(x[at]) for x in of_document.tiles(other))
                assert list(range(begin, end)) == met
                whole = [place for place, x in enumerate(tiles) if x.shape[1] == other and x.all()]
                begin, end = (int(x[at]) for x in of_document.whole_tiles(other))
                assert list(range(begin, end)) == whole
                places.append((document, first))
        assert places == list(zip(found.document.tolist(), found.first.tolist(), strict=True))
