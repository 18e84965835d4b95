"""Which results a change of tokens may not move, against tables written by hand."""

import numpy as np
import pytest

from flamia_ref.leakage.legal import LegalPairs, Severity
from flamia_ref.packing import Documents, Mask
from flamia_ref.properties.perturbing import INSIDE, forbidden

FORWARD, PAST, CROSS, BACKWARD = (
    frozenset({one})
    for one in (Severity.FORWARD, Severity.PAST, Severity.CROSS_DOCUMENT, Severity.BACKWARD)
)


@pytest.mark.parametrize(
    ("lengths", "window", "output", "changed", "severities", "rows"),
    [
        # One document of five tokens: of q a row sees its own.
        ((5,), None, "out", {"q": [1, 3]}, FORWARD, [0]),
        ((5,), None, "out", {"q": [1, 3]}, PAST, [4]),  # to row 2 one is later, one earlier
        ((5,), None, "out", {"q": [1, 3]}, INSIDE, [0, 2, 4]),
        ((5,), None, "out", {"v": [2]}, FORWARD, [0, 1]),
        ((5,), None, "out", {"v": [2]}, PAST, []),
        ((5,), None, "lse", {"v": [2]}, PAST, [2, 3, 4]),  # no v is in lse
        ((5,), None, "lse", {"v": [2]}, FORWARD, [0, 1]),
        ((5,), None, "out", {"v": [2], "k": [4]}, FORWARD, [0, 1]),
        ((5,), None, "out", {"v": [2], "q": [1]}, FORWARD, [0]),
        # A window of one earlier key: key 1 is seen by rows 1 and 2.
        ((5,), 1, "out", {"k": [1]}, PAST, [3, 4]),
        ((5,), 1, "out", {"k": [1]}, FORWARD, [0]),
        # Gradients: of keys from the queries that see them, of queries from their own dout.
        ((5,), None, "dq", {"dout": [2]}, BACKWARD, [0, 1, 3, 4]),
        ((5,), None, "dk", {"dout": [2]}, BACKWARD, [3, 4]),
        ((5,), None, "dv", {"v": [2]}, BACKWARD, [0, 1, 2, 3, 4]),
        ((5,), None, "dq", {"k": [2]}, BACKWARD, [0, 1]),
        # Documents of 2, 0 and 3 tokens.
        ((2, 0, 3), None, "out", {"v": [2, 3]}, CROSS, [0, 1]),
        ((2, 0, 3), None, "out", {"v": [2, 3]}, FORWARD, []),
        ((2, 0, 3), None, "out", {"v": [1, 3]}, CROSS, []),  # each document sees one of both
        ((2, 0, 3), None, "dk", {"q": [0]}, CROSS, [2, 3, 4]),
        ((2, 0, 3), None, "out", {}, INSIDE, []),
    ],
)
def test_what_may_not_move(lengths, window, output, changed, severities, rows) -> None:
    documents = Documents((0, *(int(x) for x in np.cumsum(lengths))))
    sides = (None, None) if window is None else (window, 0)
    pairs = LegalPairs(Mask(documents, documents, True, sides))
    tokens = {name: np.array(at) for name, at in changed.items()}
    assert np.flatnonzero(forbidden(pairs, output, tokens, severities)).tolist() == rows
