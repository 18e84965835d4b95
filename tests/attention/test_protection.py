"""Safeguards and what they cost: blocks counted one by one, bytes against what `prepare` gives."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from flamia_ref.attention import (
    RECIPES,
    Safeguard,
    bytes_kept,
    operands_from,
    prepare,
    prepare_dout,
    safeguards,
)
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.protection import block_counts
from flamia_ref.packing import Documents, Mask
from tests.attention.samples import BF16

MASKS = [
    {"causal": causal, "window": window, "alignment": alignment}
    for causal in (True, False)
    for window in (None, (0, 0), (5, None), (31, 0), (40, 70), (None, 33), (100, 0))
    for alignment in ("bottom_right", "top_left")
    if not (causal and window and window[1])
]
LENGTHS = [
    ((1,), (1,)),
    ((32,), (32,)),
    ((33, 0, 64), (33, 0, 64)),
    ((100,), (40,)),
    ((40,), (100,)),
    ((7, 0, 70), (0, 9, 129)),
    ((200, 161), (200, 161)),
]


def documents(lengths) -> Documents:
    return Documents((0, *(int(end) for end in np.cumsum(lengths))))


def counted(lengths, key_lengths, causal, window, alignment) -> tuple[int, int]:
    """Blocks with a visible pair, and those with a masked one too, pair by pair from the definition of the mask."""
    visible = guarded = 0
    left, right = window or (None, None)
    for rows, keys in zip(lengths, key_lengths, strict=True):
        shift = 0 if alignment == "top_left" else keys - rows
        i, j = np.arange(rows)[:, None], np.arange(-(-keys // 32) * 32)
        seen = np.broadcast_to(j < keys, (rows, len(j))).copy()
        if causal:
            seen &= j <= i + shift
        if left is not None:
            seen &= j >= i + shift - left
        if right is not None:
            seen &= j <= i + shift + right
        for top in range(0, rows, 32):
            for first in range(0, len(j), 32):
                block = seen[top : top + 32, first : first + 32]
                visible += block.any()
                guarded += block.any() and not block.all()
    return visible, guarded


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_blocks_are_counted_one_by_one(lengths) -> None:
    for mask in MASKS:
        found = block_counts(Mask.of(documents(lengths[0]), documents(lengths[1]), **mask))
        assert found == counted(*lengths, **mask), mask


def test_the_share_of_a_long_document() -> None:
    """256 blocks a side: one of each row is guarded."""
    found = {entry.use: entry for entry in safeguards("flamia-mxfp8", lengths=[8192])}
    assert found[Use.S_K].high_precision == Fraction(256, 256 * 257 // 2)
    assert found[Use.S_K].extra_operands == ("q", "k")
    assert found[Use.DP_V].extra_operands == ("v", "do")
    assert found[Use.DK_Q].high_precision == 0
    # A window guards its far end too.
    window = safeguards("flamia-mxfp8", lengths=[8192], window=(64, 0))
    assert next(x for x in window if x.use is Use.O_V).high_precision > Fraction(1, 2)
    full = safeguards("flamia-mxfp8", lengths=[8192], causal=False)
    assert next(x for x in full if x.use is Use.O_V).high_precision == 0


def kinds(recipe) -> dict[str, Safeguard]:
    return {str(x.use): x.safeguard for x in safeguards(recipe, lengths=[70])}


def test_the_safeguard_of_each_use() -> None:
    folded = kinds("flamia-mxfp8-folded")
    for use in ("s.q", "s.k", "dp.do", "dp.v"):
        assert folded[use] == "per token"
    for use in ("o.v", "dv.do", "dq.k", "dk.q"):
        assert folded[use] == "folded token scale"
    for use in ("o.p", "dv.p", "dq.ds", "dk.ds"):
        assert folded[use] == "zero-fill by select"
    assert kinds("flamia-nvfp4-fp8") == folded
    guarded = kinds("flamia-mxfp8")
    assert [use for use, kind in guarded.items() if kind == "guarded blocks"] == [
        "s.k",
        "o.v",
        "dp.v",
        "dq.k",
    ]
    assert guarded["o.p"] == "static"
    leaking = kinds("flamia-mxfp8-unguarded")
    assert [use for use, kind in leaking.items() if kind != "none"] == ["o.p"]
    cudnn = kinds("cudnn-mxfp8")
    assert [use for use, kind in cudnn.items() if kind == "none"] == [
        "o.v",
        "dv.do",
        "dq.k",
        "dk.q",
    ]
    descaled = {"s.q": "none", "s.k": "none", "o.p": "static", "o.v": "none"}
    assert kinds("fp8-fa4") == kinds("fp8-fa3") == descaled
    assert set(kinds("cutlass-fp8").values()) == {Safeguard.STATIC}
    assert set(kinds("bf16-fa4").values()) == {Safeguard.HIGH_PRECISION}
    assert all(x.high_precision == 1 for x in safeguards("bf16-fa4", lengths=[5]))


def test_previous_blocks_and_constants() -> None:
    base = RECIPES["flamia-mxfp8-unguarded"]
    previous = Operand(
        format="te-mx-e4m3", block=(32, 32), scope=Scope.PREVIOUS_BLOCK, static_scale=120
    )
    static = Operand(format="e4m3", scope=Scope.STATIC, static_scale=118)
    changed = replace(
        base,
        s=replace(base.s, left=static, right=previous),
        dk=replace(base.dk, right=replace(static, same_codes_as=Use.S_Q)),
        dq=replace(base.dq, right=replace(previous, same_codes_as=Use.S_K)),
        gradient=replace(base.gradient, masked_ds="product"),
        softmax=replace(base.softmax, mask_value=-1e30),
    )
    found = kinds(changed)
    assert found["s.k"] == found["dq.k"] == "previous block"
    assert found["s.q"] == found["dk.q"] == "static"


def test_without_a_select_nothing_is_filled() -> None:
    folded = RECIPES["flamia-mxfp8-folded"]
    changed = replace(
        folded,
        gradient=replace(folded.gradient, masked_ds="product"),
        tiles=replace(folded.tiles, masked="skipped"),
        softmax=replace(folded.softmax, mask_value=-1e30),
    )
    found = kinds(changed)
    assert found["o.p"] == found["dq.ds"] == found["dk.ds"] == "none"
    assert found["dv.p"] == "zero-fill by select"


# Bytes.

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 40, "value_dim": 160}
QUERIES, KEYS = (0, 5, 130, 33), (3, 0, 161, 128)


def nbytes(*arrays) -> int:
    return sum(x.nbytes for x in arrays if x is not None)


WHOLE = [name for name, recipe in RECIPES.items() if recipe.has_backward]


@pytest.mark.parametrize("name", WHOLE)
def test_bytes_are_those_of_the_arrays(name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal(shape).astype(BF16)
        for shape in ((168, 4, 40), (292, 2, 40), (292, 2, 160), (168, 4, 160))
    )
    offsets, key_offsets = (
        np.cumsum([0, *lengths]).astype(np.int32) for lengths in (QUERIES, KEYS)
    )
    made = {
        **prepare(q, k, v, name, cu_seqlens=offsets, cu_seqlens_k=key_offsets).operands,
        **prepare_dout(dout, name, cu_seqlens=offsets).operands,
    }
    found = bytes_kept(name, lengths=QUERIES, key_lengths=KEYS, **SIZES)
    for copy in found.copies:
        actual = made[copy.name]
        packed = 2 if "fp4" in RECIPES[name].s.left.format and copy.name.endswith(".s") else 1
        names = copy_names(RECIPES[name])
        operand = RECIPES[name].operand(next(use for use in names if names[use] == copy.name))
        if operand.dequantized:  # kept as its values, in bfloat16
            assert (copy.payload, copy.scales) == (2 * actual.codes.size, 0)
        else:
            assert copy.payload == actual.codes.nbytes // packed
            assert copy.scales == nbytes(actual.scales, actual.token_scales)
        layouts = [actual.row_wise, actual.column_wise]
        if copy.name == "v":  # its columns are of the forward
            layouts = [actual.row_wise]
        layouts = [layout for layout in layouts if layout is not None]
        assert copy.padded_payload == nbytes(*(x.payload for x in layouts))
        scales = [array for x in layouts for array in (x.scales, x.token_scales)]
        assert copy.padded_scales == nbytes(*scales)
    assert {copy.name for copy in found.copies} == set(made) - {"v.o"}
    assert found.saved["out"] == 168 * 4 * 160 * 2
    assert found.saved["lse"] == 168 * 4 * 4


def test_one_copy_beside_two() -> None:
    """head_dim 128: 129 bytes with a scale a token, 128 + 1/8 with 32x32 blocks, 264 with both of cuDNN's copies."""
    sizes = {"lengths": [1024], "head_dim": 128}
    per = {
        name: [bytes_kept(name, **sizes).per_token_and_head(x) for x in ("q", "k", "v", "do")]
        for name in WHOLE
    }
    assert per["flamia-mxfp8-folded"] == [129, 129, 129, 129]
    assert per["flamia-mxfp8"] == [129, 128.125, 128.125, 129]
    assert per["cudnn-mxfp8"] == [264, 264, 132, 264]
    assert per["bf16-fa4"] == [256, 256, 256, 256]
    assert per["flamia-nvfp4-fp8"] == [72, 72, 129, 129]  # e4m3 follows from FP4
    assert per["flamia-nvfp4-fp8-ue4m3"] == [73, 73, 129, 129]
    folded = bytes_kept("flamia-mxfp8-folded", **sizes)
    assert folded.kept == 3 * 129 * 1024
    assert folded.guards == {}
    guarded = bytes_kept("flamia-mxfp8", **sizes)
    assert guarded.guards == dict.fromkeys(("q", "k", "v", "do"), 256 * 1024)


def test_what_else_is_saved() -> None:
    folded = RECIPES["flamia-mxfp8-folded"]
    changed = replace(
        folded,
        gradient=replace(folded.gradient, delta_source="unrounded_out", p_for_dv="forward"),
    )
    found = bytes_kept(changed, lengths=[200, 0, 5], head_dim=64, heads=2, kv_heads=1)
    assert dict(found.saved) == {
        "out": 205 * 2 * 64 * 2,
        "lse": 205 * 2 * 4,
        "o": 205 * 2 * 64 * 4,
        "row_base": (200 * 2 + 5 * 1) * 2 * 4,  # 200 keys are two tiles of 128
    }


def test_sizes_are_exact_and_bounded() -> None:
    for lengths in ([2**62] * 3, np.array([2**63, 2**63], np.uint64), [2**31]):
        with pytest.raises(
            ValueError, match=r"lengths have .* tokens together; allowed: up to 214748"
        ):
            bytes_kept("flamia-mxfp8", lengths=lengths, head_dim=64)
    most = bytes_kept("flamia-mxfp8", lengths=[2**31 - 1], head_dim=np.int64(64))
    assert most.saved["lse"] == 4 * (2**31 - 1)


def test_sizes_that_no_forward_has() -> None:
    for heads, kv_heads in ((3, 2), (1, 2)):
        with pytest.raises(
            ValueError, match=f"heads is {heads} and kv_heads {kv_heads}; the first"
        ):
            bytes_kept("flamia-mxfp8", lengths=[3], head_dim=64, heads=heads, kv_heads=kv_heads)
    with pytest.raises(ValueError, match="unknown input 'zz'"):
        bytes_kept("flamia-mxfp8", lengths=[3], head_dim=64).per_token_and_head("zz")
    with pytest.raises(ValueError, match="lengths has 1 documents and key_lengths 2"):
        safeguards("flamia-mxfp8", lengths=[3], key_lengths=[1, 2])


def test_a_recipe_that_is_not_computed_is_refused() -> None:
    recipe = replace(RECIPES["flamia-mxfp8-folded"], input="fp32")
    x = np.zeros((4, 1, 32), np.float32)
    for call in (
        lambda: prepare(x, x, x, recipe),
        lambda: prepare_dout(x, recipe),
        lambda: operands_from({}, recipe),
        lambda: bytes_kept(recipe, lengths=[4], head_dim=32),
        lambda: safeguards(recipe, lengths=[4]),
    ):
        with pytest.raises(ValueError, match="has input = 'fp32'; computed is 'bf16': inputs and"):
            call()


def test_bad_arguments() -> None:
    for lengths in ((), (-1,), (1.5,), ((1, 2), (3,)), "12"):
        with pytest.raises(ValueError, match="lengths must be whole numbers from 0 on"):
            safeguards("flamia-mxfp8", lengths=lengths)
    with pytest.raises(ValueError, match="key_lengths 2; give equally many"):
        bytes_kept("flamia-mxfp8", lengths=[3], key_lengths=[1, 2], head_dim=64)
    with pytest.raises(ValueError, match="head_dim is 0; it must be a whole number from 1 on"):
        bytes_kept("flamia-mxfp8", lengths=[3], head_dim=0)
