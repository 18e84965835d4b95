"""FLAMIA's MXFP8 recipes.

`flamia-mxfp8-folded`: one quantized copy of every operand. Q, K, V and dO have one scale per token over the head
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

The backward's products and knobs are part of the recipe; steps 8 to 12 are written down with the code that runs them.

Scores beyond about 2^31 leave step 3's range: t is rounded to whole powers of two, x leaves [-1, 0], and a row may have
l = 0 or infinity, which step 7 makes NaN.

A NaN code of V reaches every row whose chain holds its block, so every row of its document (0 times NaN is NaN), in its
channel and the query heads of its key/value head. A NaN of K or Q reaches the pairs that see it.
"""

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention.recipe import (
    Gradient,
    Operand,
    Product,
    Recipe,
    Scope,
    Softmax,
    Step,
    Use,
)
from flamia_ref.evidence import Evidence, weakest

_RULE = "te-mx-e4m3"
_MMA = "sm100.tcgen05.mxf8f6f4"
_MUFU = "mufu.sm90"


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

_PRODUCTS = ("s", "o", "dp", "dv", "dq", "dk")
_SIDES = [f"{product}.{side}" for product in _PRODUCTS for side in ("left", "right")]


def _assumed(source: str) -> Step:
    return Step(evidence=Evidence.ASSUMED, source=source)


_OURS = _assumed("our choice within arXiv:2611.03344, an abstract")
_FOLDING = Step(
    evidence=Evidence.DERIVED,
    source="no scale is shared between tokens: docs/decisions/030-folded-scales.md",
)
_INSTRUCTION = Step(
    evidence=weakest(INSTRUCTIONS[_MMA].evidence.values()),
    source="MMA-Sim 2.1.1, kind::mxf8f6f4 block32; its exponent floor by analogy",
)
_SPECIAL = _assumed("measured on every float32 on an H200 (sm_90); on sm_100 assumed")

FLAMIA_MXFP8_FOLDED = Recipe(
    name="flamia-mxfp8-folded",
    s=Product(left=_token(), right=_token(), instruction=_MMA),
    o=Product(left=_ROW_BLOCKS, right=_token(folded_into=Use.O_P), instruction=_MMA),
    dp=Product(left=_token(), right=_token(same_codes_as=Use.O_V), instruction=_MMA),
    dv=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.DP_DO, folded_into=Use.DV_P),
        instruction=_MMA,
    ),
    dq=Product(
        left=_ROW_BLOCKS,
        right=_token(same_codes_as=Use.S_K, folded_into=Use.DQ_DS),
        instruction=_MMA,
    ),
    dk=Product(
        left=_COLUMN_BLOCKS,
        right=_token(same_codes_as=Use.S_Q, folded_into=Use.DK_DS),
        instruction=_MMA,
    ),
    softmax=Softmax(exp2=_MUFU, log2=_MUFU, reciprocal=_MUFU),
    gradient=Gradient(),
    steps={
        **dict.fromkeys(_PRODUCTS, _OURS),
        **{f"{product}.instruction": _INSTRUCTION for product in _PRODUCTS},
        **{f"{side}.scope": _FOLDING for side in _SIDES},
        **{f"{side}.scale_folded_into": _FOLDING for side in _SIDES},
        **{f"{side}.same_codes_as": _FOLDING for side in _SIDES},
        "softmax": _OURS,
        **{f"softmax.{function}": _SPECIAL for function in ("exp2", "log2", "reciprocal")},
        "gradient": _OURS,
        "tiles": _OURS,
        "input": _assumed("arXiv:2611.03344, abstract"),
        "output": _assumed("arXiv:2611.03344, abstract"),
    },
)
