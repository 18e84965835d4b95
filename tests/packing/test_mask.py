"""Which keys each query sees, against a predicate of one pair."""

import copy
import itertools
import pickle

import numpy as np
import pytest

from flamia_ref.packing import Documents, Mask

LENGTHS = list(itertools.product(range(7), repeat=2))  # queries and keys of each document
WINDOWS = list(itertools.product((None, 0, 1, 3), repeat=2))
SETTINGS = [
    (causal, window, alignment)
    for causal, window, alignment in itertools.product(
        (True, False), WINDOWS, ("bottom_right", "top_left")
    )
    if not (causal and window[1])
]


def sees(i: int, j: int, queries: int, keys: int, causal: bool, window, alignment: str) -> bool:
    """Whether query i sees key j. Bottom-right, the last query stands at the last key."""
    queries_left, keys_left = queries - 1 - i, keys - 1 - j
    after = j - i if alignment == "top_left" else queries_left - keys_left
    left, right = window
    return not (
        (causal and after > 0)
        or (left is not None and -after > left)
        or (right is not None and after > right)
    )


def packed(lengths) -> Documents:
    return Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))


def mask(lengths=LENGTHS, causal=True, window=None, alignment="bottom_right") -> Mask:
    queries, keys = (packed(column) for column in zip(*lengths, strict=True))
    return Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)


@pytest.mark.parametrize(("causal", "window", "alignment"), SETTINGS)
def test_all_small_documents(causal: bool, window, alignment: str) -> None:
    found = mask(LENGTHS, causal, window, alignment)
    dead, begin = found.dead(), 0
    for document, (queries, keys) in enumerate(LENGTHS):
        expected = np.array(
            [
                [sees(i, j, queries, keys, causal, window, alignment) for j in range(keys)]
                for i in range(queries)
            ],
            dtype=bool,
        ).reshape(queries, keys)
        assert (found.visible(document) == expected).all(), (queries, keys)
        first, last = found.document_bounds(document)
        assert first.dtype == last.dtype == np.int32
        for row, low, high in zip(expected, first, last, strict=True):
            places = np.flatnonzero(row).tolist()
            assert (low, high) == ((places[0], places[-1]) if places else (0, -1))
            assert places == list(range(low, high + 1))
        assert (dead[begin : begin + queries] == ~expected.any(axis=1)).all()
        begin += queries
    assert len(dead) == begin


def test_bounds_broadcast_and_places_outside_see_nothing() -> None:
    found = mask([(3, 5), (4, 2)], causal=False)
    document = np.array([[0], [1]], dtype=np.int32)
    place = np.arange(-1, 5, dtype=np.int32)
    first, last = found.bounds(document, place)
    assert first.tolist() == [[0] * 6] * 2
    assert last.tolist() == [[-1, 4, 4, 4, -1, -1], [-1, 1, 1, 1, 1, -1]]


def test_alignment_where_lengths_differ() -> None:
    # facts/bug-log B29: two queries of five keys, and five queries of two.
    found = mask([(2, 5), (5, 2)])
    assert found.visible(0).astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert found.visible(1).astype(int).tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert found.dead().tolist() == [False, False, True, True, True, False, False]
    assert (found.shift(0), found.shift(1)) == (3, -3)
    found = mask([(2, 5), (5, 2)], alignment="top_left")
    assert found.visible(0).astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert found.visible(1).astype(int).tolist() == [[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]]
    assert (found.shift(0), found.shift(1)) == (0, 0)


def test_a_window_counts_the_keys_beside_the_own() -> None:
    # facts/bug-log B33.
    found = mask([(5, 5)], window=(2, 0))
    assert found.visible(0).sum(axis=1).tolist() == [1, 2, 3, 3, 3]
    plain = mask([(5, 5)]).visible(0)
    for left in (4, 5):
        assert (mask([(5, 5)], window=(left, 0)).visible(0) == plain).all()
    assert (mask([(5, 5)], window=(3, 0)).visible(0) != plain).sum() == 1
    found = mask([(5, 5)], causal=False, window=(0, 1))
    assert found.visible(0).sum(axis=1).tolist() == [2, 2, 2, 2, 1]


def test_documents_without_queries_or_keys() -> None:
    # facts/bug-log B35.
    found = mask([(0, 2), (3, 3)])
    assert list(found) == [(slice(0, 0), slice(0, 2)), (slice(0, 3), slice(2, 5))]
    assert found.visible(0).shape == (0, 2)
    assert found.visible(1).sum(axis=1).tolist() == [1, 2, 3]
    found = mask([(2, 0), (3, 3)])
    assert found.visible(0).shape == (2, 0)
    assert found.dead().tolist() == [True, True, False, False, False]
    found = mask([(0, 0)])
    assert found.dead().shape == (0,)
    assert found.document_bounds(0)[0].shape == (0,)


def test_no_limit_is_written_in_three_ways() -> None:
    settings = (None, (None, None), (-1, -1), [-1, None], (np.int32(-1), np.int64(-1)))
    assert len({mask([(4, 6)], causal=False, window=window) for window in settings}) == 1
    assert mask(window=(np.int8(3), 0)) == mask(window=(3, 0))


def test_what_kind_of_mask_it_is() -> None:
    same, other = [(4, 4), (3, 3)], [(4, 3), (3, 4)]
    assert mask(same).same_tokens
    assert not mask(other).same_tokens
    assert mask(same).plain
    assert mask(same, causal=False).plain
    assert not mask(same, window=(2, None)).plain
    assert not mask(other).plain


def test_values_are_hashable_and_copied() -> None:
    one = mask(window=(3, 0))
    assert hash(one) == hash(mask(window=(3, 0)))
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != mask(window=(3, None))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"causal": None}, TypeError, "causal is None; it must be True or False"),
        ({"causal": 1}, TypeError, "causal is 1; it must be True or False"),
        ({"alignment": "bottom_left"}, ValueError, "bottom_left"),
        ({"alignment": None}, ValueError, "bottom_right"),
        ({"window": 3}, TypeError, r"window is 3; it must be \(left, right\)"),
        ({"window": "ab"}, TypeError, r"it must be \(left, right\)"),
        ({"window": (1,)}, TypeError, r"it must be \(left, right\)"),
        ({"window": (1, 0, 0)}, TypeError, r"it must be \(left, right\)"),
        ({"window": (-2, 0)}, ValueError, "its sides must be 0 or more"),
        ({"window": (0, -2), "causal": False}, ValueError, "its sides must be 0 or more"),
        ({"window": (1.0, 0)}, TypeError, "its sides must be whole numbers"),
        ({"window": (True, 0)}, TypeError, "its sides must be whole numbers"),
        ({"window": (2, 1)}, ValueError, r"window is \(2, 1\) with causal=True"),
    ],
)
def test_bad_masks(change, kind, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        mask([(4, 4)], **change)
    assert "\n" not in str(caught.value)


def test_as_many_documents_of_queries_as_of_keys() -> None:
    with pytest.raises(ValueError, match="cu_seqlens has 2 documents and cu_seqlens_k 1"):
        Mask.of(
            Documents((0, 2, 4)),
            Documents((0, 4)),
            causal=True,
            window=None,
            alignment="bottom_right",
        )


@pytest.mark.parametrize("side", [2**31 - 1, 2**31, 2**63 - 1, 10**30])
def test_a_window_wider_than_any_document(side: int) -> None:
    assert (mask(window=(side, 0)).visible(48) == mask().visible(48)).all()
    full = mask(causal=False)
    assert (mask(causal=False, window=(side, side)).visible(48) == full.visible(48)).all()
