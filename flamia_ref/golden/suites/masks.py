"""Cases for masks: other keys than queries, windows, heads that share keys."""

from typing import Any

from flamia_ref.golden.case_fields import Fill
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.suites.synthetic import DOUBLE, ONE, box, synthetic

# Q is zero, so that every key that is seen weighs the same; V is 1, 2, 4, 8, 16 and then 1, 3.
_BY_HAND = (
    box("q", 0, tokens=(0, 7)),
    box("v", ONE, tokens=(0, 5), steps=(DOUBLE, 0, 0)),
    box("v", ONE, tokens=(5, 6)),
    box("v", 0x4040, tokens=(6, 7)),
)
_QUERIES, _KEYS = (2, 5, 33, 0, 4, 40), (5, 2, 70, 3, 0, 8)


def _aligned(name: str, alignment: str, why: str, seed: int) -> CaseSpec:
    return synthetic(
        name,
        why,
        lengths=_QUERIES,
        key_lengths=_KEYS,
        alignment=alignment,
        seed=seed,
        fills=_BY_HAND,
    )


def _window(name: str, why: str, seed: int, *, length: int = 40, **fields: Any) -> CaseSpec:
    return synthetic(name, why, lengths=(5, length), seed=seed, heads=(2, 1), **fields)


def _one_head(tensor: str, head: int, bits: int, tokens: int) -> Fill:
    return box(tensor, bits, tokens=(0, tokens), heads=(head, head + 1))


MASKS: tuple[CaseSpec, ...] = (
    _aligned(
        "aligned-bottom-right",
        "bottom_right",
        "two queries of five keys see four and five of them, O 3.75 and 6.2; of five queries over two "
        "keys three see none; documents without queries and without keys; the last query of a document "
        "stands at its last key",
        51,
    ),
    _aligned(
        "aligned-top-left",
        "top_left",
        "the same with the first query at the first key: O 1 and 1.5",
        51,
    ),
    synthetic(
        "decode-steps",
        "one query over 129 and 32 keys, two over 64: what a kernel does that splits the keys",
        lengths=(1, 1, 2),
        key_lengths=(129, 32, 64),
        seed=52,
        heads=(4, 2),
    ),
    synthetic(
        "full-different-lengths",
        "no causal mask: every query sees every key, more of them and fewer",
        lengths=(33, 3, 0),
        key_lengths=(7, 65, 4),
        causal=False,
        seed=53,
        heads=(2, 1),
    ),
    _window("window-2", "two keys before the own one: one to three a row", 54, window=(2, 0)),
    _window("window-0", "the own key alone: out is V", 54, window=(0, 0)),
    _window("window-none", "no window, beside those that hide nothing", 54),
    _window("window-s-1", "39 keys before the own one of 40 hide nothing", 54, window=(39, 0)),
    _window("window-s", "40 hide nothing", 54, window=(40, 0)),
    _window("window-larger", "nor do many more than there are", 54, window=(1 << 20, None)),
    _window(
        "window-both-sides",
        "three keys before and two after, without a causal mask",
        55,
        window=(3, 2),
        causal=False,
    ),
    synthetic(
        "window-tiles",
        "a window of 100 keys cuts the first tile for the rows of the second: some rows see two tiles, "
        "the last see one",
        lengths=(250,),
        window=(100, 0),
        seed=56,
        exponent=-7,
    ),
    synthetic(
        "window-different-lengths",
        "a window that stands at the end of more keys, and rows that see none",
        lengths=(5, 40),
        key_lengths=(40, 20),
        window=(3, 0),
        seed=57,
    ),
    synthetic(
        "heads-by-value",
        "six heads over two, V is 1 in the one and 2 in the other: out says which one a head took, and "
        "dV of one token is 3, the sum over three heads",
        lengths=(1, 33),
        heads=(6, 2),
        seed=58,
        fills=(
            *(_one_head("v", head, (ONE, 0x4000)[head], 34) for head in range(2)),
            *(_one_head("dout", head, ONE, 34) for head in range(6)),
        ),
    ),
    synthetic(
        "heads-eight-over-one",
        "eight query heads over one: dK and dV add up eight",
        lengths=(40, 7),
        heads=(8, 1),
        seed=59,
    ),
    synthetic(
        "heads-five-each",
        "five heads with keys of their own: no power of two",
        lengths=(33,),
        heads=(5, 5),
        seed=60,
    ),
)
