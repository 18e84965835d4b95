"""The legal dependencies: held to exact attention's, which are followed here pair by pair over any mask."""

import itertools

import numpy as np
import pytest

from flamia_ref.leakage.legal import LEGAL, Legal, LegalPairs, Severity, relation
from flamia_ref.packing import Documents, Mask
from tests.leakage.dense import Pack

PACKS = [
    Pack(queries=(9,), keys=(9,)),
    Pack(queries=(9,), keys=(9,), causal=False),
    Pack(queries=(5, 1, 0, 8), keys=(5, 1, 0, 8)),
    Pack(queries=(5, 0, 8), keys=(5, 0, 8), causal=False),
    Pack(queries=(9, 6), keys=(9, 6), window=(2, None)),
    Pack(queries=(9, 6), keys=(9, 6), window=(0, None)),
    Pack(queries=(9, 6), keys=(9, 6), causal=False, window=(2, 1)),
    Pack(queries=(9, 6), keys=(9, 6), causal=False, window=(None, 0)),
    Pack(queries=(9, 6), keys=(9, 6), causal=False, window=(1, None)),
    *(
        Pack(queries=queries, keys=keys, causal=causal, window=window, top_left=top_left)
        for (queries, keys), (causal, window), top_left in itertools.product(
            (((7, 3), (4, 8)), ((2, 9, 4), (9, 0, 4)), ((8,), (3,))),
            (
                (True, (None, None)),
                (True, (2, None)),
                (False, (None, None)),
                (False, (1, 2)),
                (False, (0, 5)),
            ),
            (False, True),
        )
    ),
]


def mask_of(pack: Pack) -> Mask:
    queries, keys = (
        Documents((0, *np.cumsum(lengths).tolist())) for lengths in (pack.queries, pack.keys)
    )
    alignment = "top_left" if pack.top_left else "bottom_right"
    return Mask.of(queries, keys, causal=pack.causal, window=pack.window, alignment=alignment)


def exact_attention(pack: Pack) -> dict[tuple[str, str], set[tuple[int, int]]]:
    """The tokens of the inputs in what each token of an output is made of, by the formulas of exact attention."""
    seen = pack.visible()
    keys_of = {i: set(np.flatnonzero(row).tolist()) for i, row in enumerate(seen)}
    queries_of = {j: set(np.flatnonzero(column).tolist()) for j, column in enumerate(seen.T)}
    found: dict[tuple[str, str], set[tuple[int, int]]] = {
        (output, name): set() for output in LEGAL for name in LEGAL[output]
    }

    def add(output: str, token: int, sources: dict[str, set[int]]) -> None:
        for name, tokens in sources.items():
            found[output, name] |= {(token, other) for other in tokens}

    def p(i: int) -> dict[str, set[int]]:  # S over all its keys, through the softmax
        return {"q": {i}, "k": keys_of[i]}

    def delta(i: int) -> dict[str, set[int]]:
        return {**p(i), "v": keys_of[i], "dout": {i}}

    for i in keys_of:
        if not keys_of[i]:
            continue  # nothing is seen: zeros, and no gradient
        add("lse", i, p(i))
        add("out", i, {**p(i), "v": keys_of[i]})
        add("delta", i, delta(i))
        for j in keys_of[i]:  # dS = P (dO v - delta), times k
            add("dq", i, {**p(i), "v": {j}, "dout": {i}})
            add("dq", i, {"k": {j}})
            add("dq", i, delta(i))
    for j in queries_of:
        for i in queries_of[j]:
            add("dv", j, {**p(i), "dout": {i}})
            add("dk", j, {**p(i), "v": {j}, "dout": {i}})
            add("dk", j, {"q": {i}})
            add("dk", j, delta(i))
    return found


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_every_mask(pack: Pack) -> None:
    legal = LegalPairs(mask_of(pack))
    for (output, name), pairs in exact_attention(pack).items():
        dense = legal.dense(output, name)
        rows = sum(pack.keys if output in ("dk", "dv") else pack.queries)
        columns = sum(pack.keys if name in ("k", "v") else pack.queries)
        assert dense.shape == (rows, columns)
        assert set(map(tuple, np.argwhere(dense).tolist())) == pairs, (output, name)
        spans = legal.spans(output, name)
        assert spans.count == len(pairs)
        assert spans.tokens == columns


def severity(pack: Pack, output: str, out: int, name: str, other: int) -> Severity:
    """By the words of `Severity`."""
    out_side, in_side = ("k" if x in ("dk", "dv", "k", "v") else "q" for x in (output, name))
    (out_document, i), (in_document, j) = pack.tokens(out_side)[out], pack.tokens(in_side)[other]
    if out_document != in_document:
        return Severity.CROSS_DOCUMENT
    if output not in ("out", "lse"):
        return Severity.BACKWARD
    if not pack.causal and pack.window[1] is None:
        return Severity.PAST  # no token is hidden for being later
    if in_side == "k":
        if not pack.top_left:
            i += pack.keys[in_document] - pack.queries[in_document]
        i += 0 if pack.causal else pack.window[1] or 0
    return Severity.FORWARD if j > i else Severity.PAST


@pytest.mark.parametrize("pack", PACKS, ids=str)
def test_severities(pack: Pack) -> None:
    legal = LegalPairs(mask_of(pack))
    for output, name in itertools.product(LEGAL, LEGAL["out"]):
        rows, columns = legal.dense(output, name).shape
        out, other = np.indices((rows, columns))
        found = legal.severity(output, out, name, other)
        assert found.shape == (rows, columns)
        for i, j in itertools.product(range(rows), range(columns)):
            assert found[i, j] is severity(pack, output, i, name, j), (output, i, name, j)


def test_one_severity_is_an_array_too() -> None:
    found = LegalPairs(mask_of(PACKS[0])).severity("out", 2, "v", 5)
    assert found.shape == ()
    assert found.item() is Severity.FORWARD


def test_long_packs_have_spans_and_no_pairs() -> None:
    tokens = 200_000
    legal = LegalPairs(mask_of(Pack(queries=(tokens, 7), keys=(tokens, 7))))
    assert legal.spans("out", "v").count == tokens * (tokens + 1) // 2 + 28
    assert legal.spans("dk", "k").count == tokens**2 + 49


def test_the_table_in_full() -> None:
    rows = {name: [str(legal) for legal in LEGAL[name].values()] for name in LEGAL}
    same, seen, seeing, both, none = (
        str(x)
        for x in (
            Legal.SAME,
            Legal.KEYS_SEEN,
            Legal.QUERIES_SEEING,
            Legal.KEYS_SEEN_TOGETHER,
            Legal.NONE,
        )
    )
    assert list(LEGAL["out"]) == ["q", "k", "v", "dout"]
    assert rows == {
        "out": [same, seen, seen, none],
        "lse": [same, seen, none, none],
        "delta": [same, seen, seen, same],
        "dq": [same, seen, seen, same],
        "dk": [seeing, both, both, seeing],
        "dv": [seeing, both, none, seeing],
    }


def test_unknown_names_are_refused() -> None:
    for output, name in (("o", "q"), ("out", "do")):
        with pytest.raises(ValueError, match=r"unknown (output|input)"):
            relation(output, name)
