"""`structure`: the table of uses, tensor-wide and earlier scales, packed blocks, every recipe; values by hand."""

import itertools
import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Operand, Use
from flamia_ref.attention.product import Scope
from flamia_ref.leakage import Severity, Structure, structure
from flamia_ref.leakage.legal import LEGAL, LegalPairs
from flamia_ref.leakage.sharing.uses import Couples, Where
from tests.leakage.structure_recipes import (
    BASE,
    COL,
    COL16,
    PREVIOUS,
    SIDES,
    TENSOR,
    TILE,
    TOK,
    TOKEN,
    with_operands,
)

# Of 64 tokens in two blocks: pairs of a block of which one token is later, and both ways.
ONE, BOTH = 2 * (32 * 31 // 2), 2 * 32 * 31
EVERY, DIAGONAL = Where.EVERY_TILE, Where.DIAGONAL

# What each use leaks with blocks of 32 along tokens; for P and dS: along queries, alone and with keys.
TABLE = {
    Use.S_Q: (
        EVERY,
        {"out q": BOTH, "lse q": BOTH, "dq q": BOTH, "dk q": ONE, "dv q": ONE},
    ),
    Use.S_K: (DIAGONAL, {"out k": ONE, "lse k": ONE, "dq k": ONE}),
    Use.O_P: (
        EVERY,
        {"out q": BOTH, "out k": ONE, "dq q": BOTH, "dq k": ONE, "dk q": ONE},
    ),
    Use.O_V: (DIAGONAL, {"out v": ONE, "dq v": ONE}),
    Use.DP_DO: (EVERY, {"dq dout": BOTH, "dk dout": ONE}),
    Use.DP_V: (DIAGONAL, {"dq v": ONE}),
    Use.DV_P: (DIAGONAL, {"dv q": ONE}),
    Use.DV_DO: (DIAGONAL, {"dv dout": ONE}),
    Use.DQ_DS: (EVERY, {"dq q": BOTH, "dq k": ONE, "dq v": ONE, "dq dout": BOTH}),
    Use.DQ_K: (DIAGONAL, {"dq k": ONE}),
    Use.DK_DS: (DIAGONAL, {"dk q": ONE, "dk dout": ONE}),
    Use.DK_Q: (DIAGONAL, {"dk q": ONE}),
}
LEGAL_AS_COLUMNS = (
    Use.DV_P,
    Use.DK_DS,
)  # such a block holds queries that see the key, or known zeros
LATER = {"out k", "lse k", "out v", "dq k", "dq v"}  # the others of one side are earlier


def counts(found: Structure) -> dict[str, int]:
    """Of the outputs that a kernel returns."""
    return {
        f"{one.output} {one.input}": one.pairs for one in found.illegal if one.output != "delta"
    }


def severities(found: Structure) -> dict[str, dict[Severity, int]]:
    return {
        f"{one.output} {one.input}": dict(one.counts)
        for one in found.illegal
        if one.output != "delta"
    }


@pytest.mark.parametrize("use", list(Use))
@pytest.mark.parametrize("block", ["tok", "col", "tile"])
def test_the_table_of_uses(use: Use, block: str) -> None:
    operand = {"tok": TOK, "col": COL, "tile": TILE}[block]
    where, leaks = TABLE[use]
    if block == "tok" or (block == "col" and use in LEGAL_AS_COLUMNS):
        where, leaks = Where.NONE, {}
    found = structure(with_operands({use: operand}), lengths=[64])
    assert counts(found) == leaks
    assert found.legal == (not leaks)
    assert found.exit_code == int(bool(leaks))
    for one in found.illegal:
        if one.output == "delta":  # it takes what out does, which is in the products with dO
            assert leaks[f"out {one.input}"] == one.pairs
            assert one.counts == {Severity.BACKWARD: one.pairs}
            continue
        forward = one.output in ("out", "lse")
        side = one.pairs // 2 if one.pairs == BOTH else one.pairs
        if one.pairs == BOTH:
            assert (one.later, one.earlier) == (side, side)
        elif f"{one.output} {one.input}" in LATER:
            assert (one.later, one.earlier) == (side, 0)
        else:
            assert (one.later, one.earlier) == (0, side)
        if not forward:
            assert one.counts == {Severity.BACKWARD: one.pairs}
        elif one.pairs == BOTH:
            assert one.counts == {Severity.FORWARD: side, Severity.PAST: side}
        else:
            assert one.counts == {Severity.FORWARD: side}
    for entry in found.uses:
        if entry.use is not use:
            assert entry.couples is Couples.NONE
            assert not entry.illegal
    (entry,) = (one for one in found.uses if one.use is use)
    assert entry.where is where
    assert {f"{one.output} {one.input}" for one in entry.illegal} == set(leaks)


def test_where_dout_in_dp_is_illegal() -> None:
    (entry,) = (
        one
        for one in structure(with_operands({Use.DP_DO: TILE}), lengths=[64]).uses
        if one.use is Use.DP_DO
    )
    assert {one.output: one.where for one in entry.illegal} == {"dq": EVERY, "dk": DIAGONAL}


@pytest.mark.parametrize("use", list(Use))
def test_guarded_blocks_repair_what_is_illegal_on_the_diagonal_only(use: Use) -> None:
    product = str(use).split(".")[0]
    found = structure(with_operands({use: TILE}, guarded=[product]), lengths=[64])
    assert found.legal == (TABLE[use][0] is DIAGONAL)
    codes = structure(
        with_operands({use: TILE}, guarded=[product], guard_operands="codes"), lengths=[64]
    )
    if use in (Use.DV_P, Use.DK_DS):  # P and dS of a guarded block have no scale
        assert codes.legal
    else:
        assert not codes.legal


def test_a_shorter_block_leaks_less() -> None:
    found = structure(with_operands({Use.O_V: COL16}), lengths=[64])
    assert counts(found) == dict.fromkeys(("out v", "dq v"), 4 * (16 * 15 // 2))


def test_a_last_block_holds_what_there_is() -> None:
    found = structure(with_operands({Use.O_V: COL}), lengths=[33, 20, 1, 0])
    assert counts(found) == dict.fromkeys(("out v", "dq v"), 496 + 190)


def test_without_a_mask_blocks_of_documents_are_legal_and_blocks_of_packs_are_not() -> None:
    recipe = with_operands({Use.O_V: COL, Use.DQ_K: TILE, Use.DP_V: COL})
    assert structure(recipe, lengths=[20, 30, 14], causal=False).legal
    found = structure(recipe, lengths=[20, 30, 14], causal=False, grid="pack")
    # Blocks: 20 and 12 of two documents, then 18 and 14 of two. Out of the first sees 12 keys of the second, and so on.
    pairs = 20 * 12 + 30 * (20 + 14) + 14 * 18
    assert severities(found)["out v"] == {Severity.CROSS_DOCUMENT: pairs}
    assert {one.where for one in found.uses if one.illegal} == {Where.BOUNDARY}


def test_columns_of_v_that_straddle_documents() -> None:
    """1844 pairs, as the interpreter of the facts counts them for these documents."""
    found = structure(with_operands({Use.O_V: COL}), lengths=[20, 30, 14], grid="pack")
    assert counts(found)["out v"] == 1844
    alone = structure(with_operands({Use.O_V: COL}), lengths=[20, 30, 14])
    assert counts(alone)["out v"] == 190 + 435 + 91
    assert {*severities(alone)["out v"]} == {Severity.FORWARD}


def test_scales_of_a_whole_tensor_reach_every_document() -> None:
    legal = 64 * 65 // 2 + 20 * 21 // 2
    later, across = 64 * 63 // 2 + 20 * 19 // 2, 2 * 64 * 20
    found = structure(with_operands({Use.O_V: TENSOR}), lengths=[64, 20])
    assert found.uses[list(Use).index(Use.O_V)].couples is Couples.TENSOR
    assert later + across == 84 * 84 - legal
    assert severities(found) == {
        "out v": {Severity.FORWARD: later, Severity.CROSS_DOCUMENT: across},
        "dq v": {Severity.BACKWARD: later, Severity.CROSS_DOCUMENT: across},
        "dk v": {Severity.CROSS_DOCUMENT: across},
    }
    assert found.pairs("out", "v").all()
    assert found.uses[list(Use).index(Use.O_V)].where is EVERY
    long = structure(with_operands({Use.O_V: TENSOR}), lengths=[1000, 3000])
    assert severities(long)["dk v"] == {Severity.CROSS_DOCUMENT: 2 * 1000 * 3000}


@pytest.mark.parametrize(
    ("use", "leaks"),
    [
        (Use.O_V, {}),
        (Use.DQ_K, {}),
        (Use.DP_V, {}),
        (Use.S_K, {}),
        (Use.S_Q, {"out q": 1024, "lse q": 1024, "dq q": 1024, "dk q": 1520, "dv q": 1520}),
        (Use.DK_Q, {"dk q": 1520}),
        (Use.DV_DO, {"dv dout": 1520}),
        (Use.DP_DO, {"dq dout": 1024, "dk dout": 1520}),
    ],
)
def test_scales_of_the_block_before(use: Use, leaks: dict[str, int]) -> None:
    """Queries 32 to 63 take in the 32 before them: 1024 pairs. Keys 0 to 31 get all of these through query 32, those
    before them being illegal, 496, and keys 32 to 63 all 32."""
    found = structure(with_operands({use: PREVIOUS}), lengths=[64])
    assert counts(found) == leaks
    if use is Use.S_Q:
        assert severities(found)["out q"] == {Severity.PAST: 1024}
    (entry,) = (one for one in found.uses if one.use is use)
    assert entry.couples is Couples.PREVIOUS_BLOCK
    assert entry.scope is Scope.PREVIOUS_BLOCK


def test_only_the_past_of_the_forward_fails_no_command() -> None:
    past = with_operands({Use.S_Q: PREVIOUS}, gradient={"delta_source": "returned_out"})
    found = structure(past, lengths=[64])
    assert (found.legal, found.exit_code) == (False, 1)  # its gradients are illegal too
    codes = with_operands({Use.O_V: TOKEN}, softmax={"row_sum_of": "codes"})
    assert structure(codes, lengths=[64]).legal
    folding = with_operands({Use.O_V: _folded(Use.O_P)}, softmax={"row_sum_of": "codes"})
    found = structure(folding, lengths=[64])
    assert severities(found)["lse v"] == {Severity.PAST: 64 * 65 // 2}


def _folded(into: Use) -> Operand:
    return replace(TOKEN, scale_folded_into=into)


def test_a_chain_of_scales_over_documents() -> None:
    """808 pairs, as the interpreter of the facts counts them; none where the chain restarts."""
    recipe = with_operands({Use.O_V: PREVIOUS})
    found = structure(recipe, lengths=[20, 30, 14], grid="pack")
    assert severities(found)["out v"] == {Severity.CROSS_DOCUMENT: 808}
    assert structure(recipe, lengths=[20, 30, 14]).legal
    assert structure(recipe, lengths=[100, 64, 96]).legal


def test_a_window_does_not_let_the_block_before_in() -> None:
    found = structure(with_operands({Use.O_V: PREVIOUS}), lengths=[96], window=(0, 0))
    assert severities(found)["out v"] == {Severity.PAST: 2 * 32 * 32}


def test_later_keys_that_a_window_shows_are_not_later() -> None:
    """Query 0 sees keys 0 to 5: of its block 6 to 31 are later and hidden, none is past. Query 31 sees 21 to 36, of two
    blocks: 37 to 63 are later, 0 to 20 past."""
    mask = {"lengths": [64], "causal": False, "window": (10, 5)}
    found = structure(with_operands({Use.O_V: COL}), **mask)
    forward = past = 0
    for query in range(64):
        seen = range(max(0, query - 10), min(63, query + 5) + 1)
        first, last = seen[0] // 32 * 32, seen[-1] // 32 * 32 + 31
        forward += last - seen[-1]
        past += seen[0] - first
    assert severities(found)["out v"] == {Severity.FORWARD: forward, Severity.PAST: past}
    # lse must see no v at all; v of keys that the query sees is not of later ones.
    recipe = with_operands({Use.O_V: _folded(Use.O_P)}, softmax={"row_sum_of": "codes"})
    visible = sum(min(63, query + 5) - max(0, query - 10) + 1 for query in range(64))
    assert severities(structure(recipe, **mask))["lse v"] == {Severity.PAST: visible}


def test_a_finite_mask_lets_masked_keys_reach_out() -> None:
    """2016 pairs, the upper triangle, as the interpreter of the facts counts them."""
    knob = {"softmax": {"mask_value": -1e9}}
    found = structure(with_operands({}, **knob), lengths=[64])
    assert counts(found) == {"out v": 2016, "dq v": 2016}
    assert [one.knob for one in found.knobs] == ["softmax.mask_value"]
    assert not any(one.illegal for one in found.uses)
    # Tiles of 128 that no query sees a key of are left out: later keys are those of the own tile.
    long = structure(with_operands({}, **knob), lengths=[256])
    assert counts(long)["out v"] == 2 * (128 * 127 // 2)


def test_the_forwards_p_in_dv_brings_in_v_where_scales_are_folded() -> None:
    operands = {Use.O_V: _folded(Use.O_P), Use.O_P: TOK}
    assert structure(with_operands(operands), lengths=[64]).legal
    found = structure(with_operands(operands, gradient={"p_for_dv": "forward"}), lengths=[64])
    # Each key gets those of its block, and of those before none.
    assert severities(found) == {"dv v": {Severity.BACKWARD: 2 * 32 * 32}}


def test_what_a_nan_does_is_noted_and_is_not_illegal() -> None:
    skipped = {"tiles": replace(BASE.tiles, masked="skipped")}
    assert structure(with_operands({}, **skipped), lengths=[64]).notes == ()
    recipe = with_operands({}, gradient={"masked_ds": "product"}, **skipped)
    found = structure(recipe, lengths=[64])
    assert found.legal
    (note,) = found.notes
    assert note.startswith("gradient.masked_ds is 'product'")
    assert f"note: {note}" in str(found)
    assert json.loads(found.to_json())["notes"] == [note]
    assert structure("flamia-mxfp8-folded", lengths=[64]).notes[0].startswith("tiles.masked")


@pytest.mark.nightly
def test_a_million_tokens_in_less_than_50_ms() -> None:
    """Processor time: on a machine with nothing else to do that is what one waits."""
    draw = random.Random(1)
    packs = (
        [10**6],
        [draw.randint(1, 4000) for _ in range(500)],
        [draw.randint(0, 31) for _ in range(64000)],
    )
    for name, lengths in itertools.product(("flamia-mxfp8", "flamia-mxfp8-unguarded"), packs):
        times = []
        for _ in range(5):
            start = time.process_time()
            found = structure(name, lengths=lengths)
            assert found.legal == (name == "flamia-mxfp8")
            times.append(time.process_time() - start)
        assert min(times) < 0.05, (name, len(lengths))


def test_every_recipe_is_looked_at() -> None:
    leaky = {
        "cudnn-mxfp8",
        "cudnn-mxfp8-reference",
        "flamia-mxfp8-unguarded",
        "fp8-fa3",
        "fp8-fa4",
        "sage3-nvfp4",
    }
    elsewhere = {"cutlass-fp8", "attn-qat-nvfp4"}  # test_descales.py, test_mask_value_recipe.py
    assert {*RECIPES} == SAFE | leaky | elsewhere


SAFE = {
    "bf16-fa4",
    "cudnn-mxfp8-pv-bf16",
    "flamia-mxfp8",
    "flamia-mxfp8-folded",
    "flamia-nvfp4-fp8",
    "flamia-nvfp4-fp8-ue4m3",
}
MASKS = [
    {"lengths": [64]},
    {"lengths": [150, 1, 45, 0, 33]},
    {"lengths": [20, 30, 14]},
    {"lengths": [100, 70], "causal": False},
    {"lengths": [100, 70], "window": (40, 0)},
    {"lengths": [130, 20], "window": (3, 0)},
    {"lengths": [130, 20], "causal": False, "window": (20, 7)},
    {"lengths": [100, 20], "lengths_k": [40, 90]},
    {"lengths": [100, 20], "lengths_k": [40, 90], "alignment": "top_left"},
    {"lengths": [70, 9], "lengths_k": [120, 64], "alignment": "top_left", "window": (33, 0)},
]


@pytest.mark.parametrize("name", sorted(SAFE))
def test_safe_recipes_have_exactly_the_legal_dependencies(name: str) -> None:
    for mask in MASKS:
        found = structure(name, **mask)
        legal = LegalPairs(found.mask)
        assert found.legal, mask
        for output, given in itertools.product(LEGAL, LEGAL["out"]):
            np.testing.assert_array_equal(
                found.pairs(output, given), legal.dense(output, given), f"{mask} {output} {given}"
            )


CUDNN = {"out v": ONE, "dq k": ONE, "dq v": ONE, "dk q": ONE, "dv dout": ONE}
UNGUARDED = CUDNN | {
    "out q": BOTH, "out k": ONE, "lse q": BOTH, "lse k": ONE, "dq q": BOTH, "dq dout": BOTH,
    "dk dout": ONE, "dv q": ONE,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "leaks", "uses"),
    [
        ("cudnn-mxfp8", CUDNN, {Use.O_V, Use.DV_DO, Use.DQ_K, Use.DK_Q}),
        ("cudnn-mxfp8-reference", CUDNN, {Use.O_V, Use.DV_DO, Use.DQ_K, Use.DK_Q}),
        ("flamia-mxfp8-unguarded", UNGUARDED, {*Use} - {Use.O_P}),
    ],
)
def test_leaking_recipes_leak_by_the_uses_known(
    name: str, leaks: dict[str, int], uses: set[Use]
) -> None:
    found = structure(name, lengths=[64])
    assert counts(found) == leaks
    assert {one.use for one in found.uses if one.illegal} == uses
    every = {one.use for one in found.uses if one.where is EVERY}
    assert every == uses & {Use.S_Q, Use.DP_DO, Use.DQ_DS}


def test_any_length_at_once() -> None:
    """A million tokens: 31250 blocks, 496 pairs each; 64000 documents of 15 and of 16 tokens."""
    found = structure("cudnn-mxfp8", lengths=[10**6])
    assert counts(found) == dict.fromkeys(CUDNN, 31250 * 496)
    found = structure("cudnn-mxfp8", lengths=[15, 16] * 32000)
    assert counts(found) == dict.fromkeys(CUDNN, 32000 * (15 * 14 // 2 + 16 * 15 // 2))
    found = structure("flamia-mxfp8", lengths=[2**31 - 1])
    assert found.legal


def test_spans_and_dense_pairs_are_the_same() -> None:
    found = structure(with_operands({Use.S_Q: PREVIOUS, Use.O_V: TENSOR}), lengths=[70, 40])
    for output, given in itertools.product(LEGAL, LEGAL["out"]):
        dense = np.zeros_like(found.pairs(output, given))
        for spans in found.spans(output, given):
            for token, (begin, end) in enumerate(zip(spans.begin, spans.end, strict=True)):
                dense[token, begin:end] = True
        np.testing.assert_array_equal(found.pairs(output, given), dense)
        illegal = found.illegal_pairs(output, given)
        counted = counts(found).get(f"{output} {given}", 0)
        if output != "delta":
            assert illegal.sum() == counted
        else:
            (known,) = [
                one.pairs for one in found.illegal if (one.output, one.input) == (output, given)
            ] or [0]
            assert illegal.sum() == known
    # Query 35 takes in its own block of the document and the 32 before it, not those between.
    (row,) = (np.flatnonzero(found.pairs("lse", "q")[35]),)
    assert row.tolist() == [*range(32), 35]


def test_bad_input_is_refused_in_one_line() -> None:
    for arguments, message in (
        ({"lengths": []}, "lengths must be whole numbers"),
        ({"lengths": [3.5]}, "lengths must be whole numbers"),
        ({"lengths": [-1]}, "lengths must be whole numbers"),
        ({"lengths": [[1, 2], [3]]}, "lengths must be whole numbers"),
        ({"lengths": [2**40]}, "tokens together"),
        ({"lengths": [3], "lengths_k": [1, 2]}, "give equally many"),
        ({"lengths": [3], "lengths_k": ["x"]}, "lengths_k must be whole numbers"),
        ({"lengths": [3], "window": (1, 2)}, "window is"),
        ({"lengths": [3], "alignment": "left"}, "unknown alignment"),
        ({"lengths": [3], "grid": "tile"}, "unknown grid"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            structure("bf16-fa4", **arguments)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="unknown recipe"):
        structure("cudnn", lengths=[3])
    with pytest.raises(TypeError, match="recipe is"):
        structure(3, lengths=[3])  # type: ignore[arg-type]
    found = structure("bf16-fa4", lengths=[20000])
    with pytest.raises(ValueError, match="take spans"):
        found.pairs("out", "q")
    for output, given in (("o", "q"), ("out", "x")):
        with pytest.raises(ValueError, match="unknown"):
            found.spans(output, given)
    for operands, message in (
        ({Use.O_V: _folded(Use.S_Q)}, "folds the scale of o.v into s.q"),
        ({Use.DP_V: _same(Use.S_K)}, "give a use of the same tensor"),
        ({Use.O_V: _same(Use.DP_V), Use.DP_V: _same(Use.O_V)}, "give a use of the same tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            structure(with_operands(operands), lengths=[3])


def _same(use: Use) -> Operand:
    return replace(TOK, same_codes_as=use)


def test_no_tokens_at_all() -> None:
    for lengths in ([0], [0, 0]):
        found = structure("flamia-mxfp8-unguarded", lengths=lengths)
        assert found.legal
        assert found.pairs("dk", "q").shape == (0, 0)
        assert not found.examples
        assert json.loads(found.to_json())["legal"] is True
    found = structure("flamia-mxfp8-unguarded", lengths=[0, 40], lengths_k=[50, 0])
    assert found.legal


def test_the_base_recipe_couples_nothing() -> None:
    assert {str(use).split(".")[0] for use in Use} == set(SIDES)
    assert all(entry.couples is Couples.NONE for entry in structure(BASE, lengths=[9]).uses)
