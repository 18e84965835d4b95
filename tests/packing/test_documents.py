"""Documents as host data."""

import copy
import pickle

import numpy as np
import pytest

from flamia_ref.packing import Documents


def test_offsets_lengths_and_ranges() -> None:
    documents = Documents.from_cu_seqlens([0, 5, 5, 12], 12)
    assert documents.offsets == (0, 5, 5, 12)
    assert documents.lengths == (5, 0, 7)
    assert documents.tokens == 12
    assert len(documents) == 3
    assert list(documents) == [slice(0, 5), slice(5, 5), slice(5, 12)]


def test_one_document_of_all_tokens() -> None:
    assert Documents.from_cu_seqlens(None, 7) == Documents((0, 7))
    assert Documents.from_cu_seqlens(None, 0).lengths == (0,)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint32, np.uint64])
def test_every_integer_type_gives_the_same(dtype) -> None:
    given = np.array([0, 3, 8], dtype)
    documents = Documents.from_cu_seqlens(given, 8)
    assert documents == Documents((0, 3, 8))
    assert {type(x) for x in documents.offsets} == {int}
    given[1] = 4  # the caller's array is not kept
    assert documents.offsets == (0, 3, 8)


def test_a_jax_array_on_the_host() -> None:
    import jax

    assert Documents.from_cu_seqlens(jax.device_put(np.array([0, 8], np.int32)), 8).tokens == 8


def test_values_are_hashable_and_copied() -> None:
    one, other = (Documents.from_cu_seqlens(x, 4) for x in ([0, 4], np.array([0, 4])))
    assert hash(one) == hash(other)
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_many_documents_are_shown_in_short() -> None:
    assert repr(Documents((0, 2, 5))) == "Documents(lengths=(2, 3))"
    assert len(repr(Documents(tuple(range(10_000))))) < 300


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ([1, 8], ValueError, r"offsets\[0\] is 1; the first document starts at 0"),
        ([0, 5, 3, 8], ValueError, r"offsets\[2\] is 3, less than offsets\[1\] = 5"),
        ([0, 9], ValueError, r"offsets\[1\] is 9, beyond the 8 tokens given"),
        ([0, 5], ValueError, r"offsets ends at 5, but 8 tokens were given"),
        ([0, -1, 8], ValueError, r"offsets\[1\] is -1, less than offsets\[0\] = 0"),
        ([0], ValueError, r"offsets has shape \(1,\)"),
        ([], ValueError, r"offsets has shape \(0,\)"),
        ([[0, 8]], ValueError, r"offsets has shape \(1, 2\)"),
        ([0.0, 8.0], TypeError, "offsets holds float64; it must be an integer array"),
        ([False, True], TypeError, "offsets holds bool"),
        (["0", "8"], TypeError, "offsets holds str"),
        ([[0, 8], [8]], TypeError, "offsets is .* it must be a flat array of integers"),
        (8, ValueError, r"offsets has shape \(\)"),
    ],
)
def test_bad_offsets(given, kind, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        Documents.from_cu_seqlens(given, 8, "offsets")
    assert "\n" not in str(caught.value)
