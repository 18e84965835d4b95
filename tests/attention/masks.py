"""Masks of packed documents pair by pair, and documents to try them on. Nothing here is the package's."""

import itertools

import numpy as np

from flamia_ref.packing import Documents

DOCUMENTS = [(5, 2), (0, 3), (2, 5), (3, 0), (40, 70), (70, 40), (1, 1), (33, 33)]
"""Queries and keys of each document."""

PAIRS = sorted(set(DOCUMENTS) | set(itertools.product((0, 1, 2, 31, 32, 33), repeat=2)))

PLAIN = {"causal": True, "window": None, "alignment": "bottom_right"}
MASKS = {
    "causal": PLAIN,
    "causal, top-left": PLAIN | {"alignment": "top_left"},
    "full": PLAIN | {"causal": False},
    "left window": PLAIN | {"window": (9, 0)},
    "left window, top-left": PLAIN | {"window": (9, None), "alignment": "top_left"},
    "window, bottom-right": {"causal": False, "window": (12, 4), "alignment": "bottom_right"},
    "window, top-left": {"causal": False, "window": (0, 7), "alignment": "top_left"},
    "right window": {"causal": False, "window": (None, 3), "alignment": "bottom_right"},
}


def packed(lengths) -> Documents:
    """Documents of these lengths."""
    return Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))


def offsets(lengths):
    """`cu_seqlens` of documents of these lengths."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def sees(i: int, j: int, queries: int, keys: int, *, causal: bool, window, alignment: str) -> bool:
    """Whether query i of a document sees key j. Bottom-right, the last query stands at the last key."""
    after = j - i if alignment == "top_left" else (queries - i) - (keys - j)
    left, right = window or (None, None)
    return not (
        (causal and after > 0)
        or (left is not None and -after > left)
        or (right is not None and after > right)
    )


def visible(queries: int, keys: int, **mask):
    """Which key each query of a document sees, [queries, keys]."""
    pairs = [[sees(i, j, queries, keys, **mask) for j in range(keys)] for i in range(queries)]
    return np.array(pairs, dtype=bool).reshape(queries, keys)
