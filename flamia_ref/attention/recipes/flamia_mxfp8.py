"""`flamia-mxfp8`, whose token-block scales are guarded, and its negative control `flamia-mxfp8-unguarded`.

One quantized copy of every operand. K and V have 32x32 scales, whose codes serve along channels (S, dP) and along
tokens (dQ, O). A shared scale is illegal for them only in a guarded block: 32 queries by 32 keys, counted from the
document's start, that hold a visible and a masked pair (a key past the document's end counts as masked, a query past
it does not count). There S, O, dP and dQ run in bfloat16 on the values before quantization. Q and dO cannot be
repaired that way; they have one scale a token over the head dimension, folded into dS for dK and into P for dV. dK
and dV are not guarded: their contraction blocks hold only legal queries or zeros.

The steps of `flamia-mxfp8`; its notation and what is not said here are those of `flamia-mxfp8-folded`.

1. q becomes codes and one byte a token and head: `rule`, block (1, all). k and v become codes and one byte for 32
   tokens and 32 channels: `rule`, block (32, 32).
2. S = mxf8f6f4 over ascending channels with q's and k's bytes. In a guarded block S = f16 (kind::f16) over ascending
   channels of q and k in bfloat16. Both accumulate from +0.
3. t, n, x and E as there.
4. Key tiles ascend; one without a visible pair is skipped. m = max(m_old, max n). P = shift(E, n - m + 8), in units
   of 2^-8.
5. l by eight lanes, of the float32 P.
6. O, a key tile after the other on one accumulator: first e4m3(P) with byte 127, +0 in guarded blocks, and v's codes
   and bytes; then f16 over the keys of the tile's guarded blocks, ascending, of bfloat16(P) and v in bfloat16.
7. o = fl(O reciprocal(l)), out = bfloat16(o); lse = fl(fl(fl(m - 8) + log2(l)) 0x3f317218).
8. r, b, g and dO' as there; dO' becomes codes and one byte a token and head, the same in dP and dV.
9. delta' as there.
10. dP' = mxf8f6f4 over ascending channels with the bytes of dO' and v; in a guarded block f16 of bfloat16(dO') and v in
    bfloat16. P' = shift(E, n - b), dS = fl(P' fl(dP' - delta')).
11. dQ, a key tile after the other on one accumulator: first dS, +0 in guarded blocks, by `rule` over 32 keys of a
    row, and k's codes and bytes; then f16 over the keys of the tile's guarded blocks of bfloat16(dS) and k in
    bfloat16.
12. dK and dV as there, from every visible pair; query tiles without one are skipped.

`flamia-mxfp8-unguarded` has no guarded block, and 32x32 scales everywhere but for the forward's P: q, k, v and dO'
one copy each with both its orientations, nothing folded; dS by `rule` over 32 queries and 32 keys, one copy in dQ and
dK; the P of dV likewise. Its later tokens reach earlier outputs, which is what it is for.

Windows, alignments, a soft cap, a sink and splits of the keys are as `docs/attention.md` says for an integer base.
"""

from dataclasses import replace

from flamia_ref.attention.knobs import Gradient, Softmax, Tiles
from flamia_ref.attention.product import Guard, Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    F16,
    MUFU,
    MX,
    PRODUCTS,
    SCHEDULES,
    SIDES,
    SPECIAL_FUNCTIONS,
    assumed,
    derived,
    instruction,
)

_RULE = "te-mx-e4m3"
_UNIT = 127  # e8m0 code of 2^0


def _token(same_codes_as: Use | None = None, folded_into: Use | None = None) -> Operand:
    """Q or dO: one scale a token and head."""
    return Operand(
        format=_RULE,
        block=(1, "all"),
        scope=Scope.TOKEN,
        same_codes_as=same_codes_as,
        scale_folded_into=folded_into,
    )


def _guarded(operand: Operand) -> Operand:
    return replace(operand, guard=Guard.HIGH_PRECISION_WHERE_CUT)


def _square(same_codes_as: Use | None = None) -> Operand:
    """One scale for 32 tokens and 32 channels, or 32 queries and 32 keys."""
    return Operand(format=_RULE, block=(32, 32), same_codes_as=same_codes_as)


_P = Operand(format="e4m3", scope=Scope.STATIC, static_scale=_UNIT)
_ROW_BLOCKS = Operand(format=_RULE, block=(1, 32))
_COLUMN_BLOCKS = Operand(format=_RULE, block=(32, 1))

_SOFTMAX = Softmax(exp2=MUFU, log2=MUFU, reciprocal=MUFU, p_offset=8)
_OURS = assumed("our choice within arXiv:2611.03344, an abstract")
_GUARDING = derived(
    "which shared scales reach a forbidden token: docs/decisions/033-guarded-blocks.md"
)
_STEPS = {
    **dict.fromkeys(PRODUCTS, _OURS),
    **{f"{product}.instruction": instruction(MX) for product in PRODUCTS},
    "softmax": _OURS,
    **SPECIAL_FUNCTIONS,
    "gradient": _OURS,
    "tiles": _OURS,
    "guard_operands": _OURS,
    "input": assumed("arXiv:2611.03344, abstract"),
    "output": assumed("arXiv:2611.03344, abstract"),
}

FLAMIA_MXFP8 = Recipe(
    name="flamia-mxfp8",
    s=Product(left=_token(), right=_guarded(_square()), instruction=MX, guard_instruction=F16),
    o=Product(left=_P, right=_guarded(_square()), instruction=MX, guard_instruction=F16),
    dp=Product(
        left=_token(),
        right=_guarded(_square(same_codes_as=Use.O_V)),
        instruction=MX,
        guard_instruction=F16,
    ),
    dv=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.DP_DO, folded_into=Use.DV_P),
        instruction=MX,
    ),
    dq=Product(
        left=_ROW_BLOCKS,
        right=_guarded(_square(same_codes_as=Use.S_K)),
        instruction=MX,
        guard_instruction=F16,
    ),
    dk=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.S_Q, folded_into=Use.DK_DS),
        instruction=MX,
    ),
    softmax=_SOFTMAX,
    gradient=Gradient(),
    tiles=Tiles(masked="skipped"),
    schedules=SCHEDULES,
    steps={
        **_STEPS,
        **{f"{product}.guard_instruction": instruction(F16) for product in PRODUCTS},
        **{f"{side}.scope": _GUARDING for side in SIDES},
        **{f"{side}.guard": _GUARDING for side in SIDES},
    },
)

FLAMIA_MXFP8_UNGUARDED = Recipe(
    name="flamia-mxfp8-unguarded",
    s=Product(left=_square(), right=_square(), instruction=MX),
    o=Product(left=_P, right=_square(), instruction=MX),
    dp=Product(left=_square(), right=_square(same_codes_as=Use.O_V), instruction=MX),
    dv=Product(left=_square(), right=_square(same_codes_as=Use.DP_DO), instruction=MX),
    dq=Product(left=_square(), right=_square(same_codes_as=Use.S_K), instruction=MX),
    dk=Product(
        left=_square(same_codes_as=Use.DQ_DS),
        right=_square(same_codes_as=Use.S_Q),
        instruction=MX,
    ),
    softmax=_SOFTMAX,
    gradient=Gradient(),
    tiles=Tiles(masked="skipped"),
    schedules=SCHEDULES,
    steps=_STEPS,
)
