"""`flamia-mxfp8-folded`: MXFP8 without any block that spans tokens.

One quantized copy of every operand. Q, K, V and dO have one scale per token over the head
dimension. Where the contraction runs over tokens, that scale is folded into the other operand (V's into P for O, dO's
into P for dV, K's into dS for dQ, Q's into dS for dK) before that one is quantized, so no scale is ever shared between
tokens, and no tile needs a higher precision.

The steps. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff. shift(x, k) is
x 2^k with one rounding, overflow to infinity. `rule` is the preset te-mx-e4m3. fl is one rounding to float32. Blocks of
32 and tiles of 128 start at the document; codes past its end are 0 with byte 127.

1. q, k, v in bfloat16 become codes and one byte s a token and head: `rule`, block (1, all). The bytes go into the
   instruction, repeated for each 32 channels, not onto its result.
2. S = mxf8f6f4 over ascending channels, accumulator +0, for every pair. c = fl(softmax_scale log2 e), the exact product
   rounded once; softmax_scale is a float64 above 0.
3. t = fl(S c), n = ceil(t), x = fma(S, c, -n), E = ex2(x) by mufu.sm90. A masked pair has P = 0 by select. A visible
   t = -inf gives P = 0. A visible t that is NaN or +inf makes n NaN, and with it the row's maximum, its P from that key
   tile on, its row sum, out and lse.
4. Key tiles ascend. m = max(m_old, max n), from -inf; the row sum l and the accumulator of O are shifted by m_old - m.
   P = shift(E, n - m). No threshold and no constant factor: P's block scale does that.
5. l adds the float32 P before folding and quantization, by eight lanes: lane r adds columns r, r + 8, ... of the tile
   ascending; lane 0 starts at the shifted l, the others at +0; then ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)).
6. shift(P, sV - 127) by `rule` over 32 keys of a row (a block of zeros has byte 0). O: those bytes, V's codes with byte
   127, one chain ascending over all key blocks of the document. The bytes are relative to the tile's m.
7. o = fl(O reciprocal(l)) and out = bfloat16(o); lse = fl(fl(m + log2(l)) 0x3f317218); both functions by mufu.sm90. A
   row that sees no key, or only t = -inf, so that m = -inf, is dead: out = +0, lse = -inf.

The backward needs out and lse alone.

8. S, n and E again from the same codes. r = fl(lse 0x3fb8aa3b), b = floor(r), g = ex2(fl(b - r)), mufu.sm90. dO' =
   fl(dO g) becomes codes and one byte a token and head: `rule`, block (1, all), the same in dP and dV. A dead row,
   lse = -inf beside an out of zeros, has dO' = +0 and P' = dS = 0. A row whose r is NaN or infinite otherwise has b =
   NaN, and with it P' and dS of its visible pairs, and dO' = +0: a NaN of dO' would reach, in dV's chain, keys that
   the row does not see.
9. delta' = fused multiply-adds over ascending channels, from +0, of dO' before quantization and the returned out.
10. dP' = mxf8f6f4 over ascending channels with dO' and V bytes. P' = shift(E, n - b). dS = fl(P' fl(dP' - delta')), 0
    by select where masked.
11. dQ: shift(dS, sK - 127) by `rule` over 32 keys of a row; K's codes with byte 127; one chain ascending over all key
    blocks of the document. dq = bfloat16(fl(acc fl(softmax_scale))).
12. dK: shift(dS, sQ - 127) by `rule` over 32 queries of a key; Q's codes with byte 127; one chain a query head
    ascending over all query blocks of the document; the group's heads added in float32, ascending, times
    fl(softmax_scale), to bfloat16. dV: the same with shift(P', sdO' - 127) and the codes of dO', without
    softmax_scale.

Scores beyond about 2^31 leave step 3's range: t is rounded to whole powers of two, x leaves [-1, 0], and a row may
have l = 0, so that out is NaN and lse -inf, or l = infinity, so that out is 0 or NaN and lse infinite.

A NaN code of V reaches every row whose chain holds its block, so every row of its document (0 times NaN is NaN), in its
channel and the query heads of its key/value head. A NaN of K or Q reaches the pairs that see it.

Windows, alignments, a soft cap, a sink and splits of the keys are as `docs/attention.md` says for an integer base.
"""

from flamia_ref.attention.knobs import Gradient, Softmax
from flamia_ref.attention.product import Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
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


def _token(same_codes_as: Use | None = None, folded_into: Use | None = None) -> Operand:
    """One scale a token and head, over the head dimension."""
    return Operand(
        format=_RULE,
        block=(1, "all"),
        scope=Scope.TOKEN,
        same_codes_as=same_codes_as,
        scale_folded_into=folded_into,
    )


_ROW_BLOCKS = Operand(format=_RULE, block=(1, 32))  # 32 keys of a query row
_COLUMN_BLOCKS = Operand(format=_RULE, block=(32, 1))  # 32 queries of a key column

_OURS = assumed("our choice within arXiv:2611.03344, an abstract")
_FOLDING = derived("no scale is shared between tokens: docs/decisions/030-folded-scales.md")

FLAMIA_MXFP8_FOLDED = Recipe(
    name="flamia-mxfp8-folded",
    s=Product(left=_token(), right=_token(), instruction=MX),
    o=Product(left=_ROW_BLOCKS, right=_token(folded_into=Use.O_P), instruction=MX),
    dp=Product(left=_token(), right=_token(same_codes_as=Use.O_V), instruction=MX),
    dv=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.DP_DO, folded_into=Use.DV_P),
        instruction=MX,
    ),
    dq=Product(
        left=_ROW_BLOCKS,
        right=_token(same_codes_as=Use.S_K, folded_into=Use.DQ_DS),
        instruction=MX,
    ),
    dk=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.S_Q, folded_into=Use.DK_DS),
        instruction=MX,
    ),
    softmax=Softmax(exp2=MUFU, log2=MUFU, reciprocal=MUFU),
    gradient=Gradient(),
    schedules=SCHEDULES,
    steps={
        **dict.fromkeys(PRODUCTS, _OURS),
        **{f"{product}.instruction": instruction(MX) for product in PRODUCTS},
        **{f"{side}.scope": _FOLDING for side in SIDES},
        **{f"{side}.scale_folded_into": _FOLDING for side in SIDES},
        **{f"{side}.same_codes_as": _FOLDING for side in SIDES},
        "softmax": _OURS,
        **SPECIAL_FUNCTIONS,
        "gradient": _OURS,
        "tiles": _OURS,
        "guard_operands": _OURS,
        "input": assumed("arXiv:2611.03344, abstract"),
        "output": assumed("arXiv:2611.03344, abstract"),
    },
)
