"""The hunt finds every planted leak within a budget, shrinks it to one token, and finds nothing in the safe kernels.

Which of them leak is written down in `tests.leakage.planted`, from the table of uses and blockings.
"""

import time
from typing import Any

import numpy as np
import pytest

from flamia_ref.leakage import HuntReport, Severity, hunt
from tests.leakage.planted import BLOCKS, FORWARD_USES, LEAKY, USES, planted

CALLS = 200
HEAD_DIM = 32
DAILY = {
    ("s.q", "tile"),
    ("s.k", "col"),
    ("o.p", "tile"),
    ("o.v", "col"),
    ("dp.do", "col"),
    ("dv.p", "tile"),
    ("dq.ds", "col"),
    ("dk.q", "tile"),
}
SAFE = sorted({(use, blocking) for use in USES for blocking in BLOCKS} - LEAKY)


def first_leak(lengths: tuple[int, ...] = (64,), backward: bool = True, **plant: Any) -> HuntReport:
    """The hunt in a planted kernel up to its first witness."""
    return hunt(
        planted(**plant),
        lengths=lengths,
        head_dim=HEAD_DIM,
        backward=backward,
        enough=1,
        calls=CALLS,
    )


@pytest.mark.parametrize(
    ("use", "blocking"),
    [
        pytest.param(*one, marks=() if one in DAILY else pytest.mark.nightly)
        for one in sorted(LEAKY)
    ],
)
def test_every_leaking_use_is_found_and_shrunk_to_one_token(use: str, blocking: str) -> None:
    report = first_leak(uses={use: blocking})
    (witness,) = report.witnesses
    assert report.leaks
    assert report.calls <= CALLS
    assert len(witness.edit.changed_tokens) == 1
    assert (witness.severity is Severity.BACKWARD) == (use not in FORWARD_USES)
    assert witness.reproduce(planted({use: blocking}))
    assert not witness.reproduce(planted())


@pytest.mark.parametrize("blocking", ["col", "tile"])
def test_blocks_of_v_are_found_within_a_second_as_one_element(blocking: str) -> None:
    start = time.process_time()
    report = first_leak(uses={"o.v": blocking}, backward=False)
    assert time.process_time() - start < 1
    assert report.calls < 100
    assert report.witnesses[0].sentence == (
        "v[1, head 0, channel 0] from 0x0000 (0.0) to 0x3f80 (1.0) changes out[0, head 0, channel 0] from 0x3580"
        " (2^-20) to 0x0000 (0.0): forward, token 1 is later than token 0"
    )


DOCUMENTS = (40, 24)
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, ...], set[Severity]]] = {
    "one scale for all of v": ({"uses": {"o.v": "tensor"}}, (64,), {Severity.FORWARD}),
    "one scale for all of q": (
        {"uses": {"s.q": "tensor"}},
        DOCUMENTS,
        {Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.PAST, Severity.BACKWARD},
    ),
    "the block before, across documents": (
        {"uses": {"o.v": "previous_packed"}},
        DOCUMENTS,
        {Severity.CROSS_DOCUMENT},
    ),
    "the block before, of queries": (
        {"uses": {"s.q": "previous"}},
        (64,),
        {Severity.PAST, Severity.BACKWARD},
    ),
    "blocks counted from the pack": (
        {"uses": {"o.v": "col"}, "grid": "packed"},
        DOCUMENTS,
        {Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD},
    ),
    "k less its mean over the document": (
        {"uses": {"s.k": "tok"}, "smooth_k": "document"},
        (64,),
        {Severity.FORWARD, Severity.BACKWARD},
    ),
    "k less its mean over the pack": (
        {"uses": {"s.k": "tok"}, "smooth_k": "pack"},
        DOCUMENTS,
        {Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD},
    ),
    "rescaling where a row of the tile asks": (
        {"decision": "tile"},
        (64,),
        {Severity.FORWARD, Severity.PAST},
    ),
    "a mask of -1e9": ({"mask_value": -1e9}, (64,), {Severity.FORWARD, Severity.BACKWARD}),
    "a mask of -6e4": ({"mask_value": -6e4}, (64,), {Severity.FORWARD, Severity.BACKWARD}),
    "the next document in the padding": (
        {"uses": {"o.v": "col"}, "padding": "neighbours"},
        DOCUMENTS,
        {Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD},
    ),
    "the document before in the padding": (
        {"uses": {"s.k": "tile"}, "padding": "workspace"},
        DOCUMENTS,
        {Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD},
    ),
    "the scale of the call before": ({"delayed": True}, (64,), {Severity.CROSS_DOCUMENT}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_leaks_are_found(name: str) -> None:
    plant, lengths, severities = OTHERS[name]
    report = first_leak(lengths=lengths, backward="decision" not in plant, **plant)
    assert report.leaks
    assert {one.severity for one in report.witnesses} <= severities


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_leaks_are_found_with_all_their_severities(name: str) -> None:
    plant, lengths, severities = OTHERS[name]
    backward = "decision" not in plant
    report = hunt(planted(**plant), lengths=lengths, head_dim=HEAD_DIM, backward=backward)
    assert report.leaks
    found = {one.severity for one in report.witnesses}
    assert found == severities | (found & {Severity.BACKWARD, Severity.FORWARD})
    assert not report.reasons


def test_the_safe_uses_together_show_nothing() -> None:
    uses = dict.fromkeys(USES, "tok") | {"dv.p": "col", "dk.ds": "col"}
    report = hunt(planted(uses), lengths=DOCUMENTS, head_dim=HEAD_DIM, calls=250)
    assert report.verdict == "none_found", report
    assert not report.witnesses
    assert all(one.found for one in report.controls)
    assert (
        len(report.controls) == 16
    )  # of each operand: blocks, last blocks, gradients, across documents


@pytest.mark.nightly
@pytest.mark.parametrize(("use", "blocking"), SAFE)
def test_every_safe_use_shows_nothing(use: str, blocking: str) -> None:
    report = hunt(planted({use: blocking}), lengths=(64,), head_dim=HEAD_DIM)
    assert report.verdict == "none_found", report


@pytest.mark.parametrize(
    "plant",
    [
        {"decision": "row"},
        {"uses": {"o.v": "previous"}},
        {"uses": {"o.v": "tok"}, "grid": "packed"},
        {"uses": {"s.k": "tok"}},
    ],
    ids=str,
)
def test_what_resembles_a_leak_and_is_none(plant: dict[str, Any]) -> None:
    report = hunt(planted(**plant), lengths=DOCUMENTS, head_dim=HEAD_DIM, backward=False, calls=200)
    assert report.verdict == "none_found", report


def test_a_byte_that_shows_in_no_value_is_found() -> None:
    report = first_leak(scales=True)
    (witness,) = report.witnesses
    assert (witness.kind, witness.stage, witness.severity) == (
        "scale",
        "v.o.scales",
        Severity.FORWARD,
    )
    assert "scale byte v.o.scales[0, 0, 0] of tokens 0 to 31" in witness.sentence
    assert witness.reproduce(planted(scales=True))
    assert not witness.reproduce(planted())


@pytest.mark.parametrize(
    "lengths",
    [(17, 20, 7), pytest.param((100, 3, 61), marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_grouped_heads_and_straddling_documents(
    lengths: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    report = hunt(
        planted({"o.v": "col"}, grid="packed"),
        lengths=lengths,
        head_dim=8,
        heads=heads,
        kv_heads=kv_heads,
        backward=False,
        calls=200,
    )
    found = {one.severity for one in report.witnesses}
    assert {Severity.FORWARD, Severity.CROSS_DOCUMENT} <= found
    assert all(one.repeated for one in report.witnesses)


def test_windows_and_full_attention() -> None:
    settings: dict[str, Any] = {"head_dim": 16, "lengths": (64,), "calls": 200, "enough": 1}
    windowed = hunt(planted({"o.v": "col"}), window=(4, 0), backward=False, **settings)
    assert windowed.witnesses[0].operand == "v"
    full = hunt(planted({"o.v": "col"}), causal=False, backward=False, **settings)
    assert not full.witnesses
    rows = hunt(planted({"s.q": "tile"}), causal=False, backward=False, **settings)
    assert rows.witnesses[0].severity is Severity.PAST
    assert rows.verdict == "none_found"  # of what counts, after the whole budget and every control
    assert all(one.found for one in rows.controls)
    assert "found, but of no severity that counts: past" in rows.notes
    counted = hunt(
        planted({"s.q": "tile"}), causal=False, backward=False, severities=("past",), **settings
    )
    assert counted.leaks


CUT: dict[str, dict[str, Any]] = {
    "P in dV": {"uses": {"dv.p": "tile"}},
    "rescaling": {"decision": "tile"},
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 6))]
)
@pytest.mark.parametrize("name", CUT)
def test_leaks_of_a_few_rows_of_a_cut_block_are_found(name: str, seed: int) -> None:
    report = hunt(
        planted(**CUT[name]),
        lengths=DOCUMENTS,
        head_dim=HEAD_DIM,
        seed=seed,
        backward=name == "P in dV",
        enough=1,
    )
    assert report.leaks


def coupled(operand: str, first: int) -> Any:
    """Attention in which two tokens of an operand share one power of two a channel, in int8."""
    plain = planted()

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        given = {"q": q, "k": k, "v": v}
        x = given[operand].astype(np.float64)
        pair = slice(first, first + 2)
        amax = np.abs(x[pair]).max(axis=0, keepdims=True)
        unit = 2.0 ** np.ceil(np.log2(np.where(amax > 0, amax, 1) / 127))
        x[pair] = np.round(x[pair] / unit) * unit
        return plain(**(given | {operand: x}), **keywords)

    return kernel


@pytest.mark.parametrize(
    ("operand", "first"),
    [("q", 3), ("k", 12), ("v", 39)]
    + [
        pytest.param(*one, marks=pytest.mark.nightly)
        for one in (("q", 6), ("q", 44), ("k", 0), ("k", 15), ("k", 52), ("v", 20))
    ],
)
def test_two_tokens_that_share_a_scale_are_found(operand: str, first: int) -> None:
    report = hunt(
        coupled(operand, first), lengths=DOCUMENTS, head_dim=HEAD_DIM, backward=False, enough=1
    )
    assert report.leaks
