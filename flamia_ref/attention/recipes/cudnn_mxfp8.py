"""`cudnn-mxfp8`, cuDNN's open MXFP8 kernels for SM100, and `cudnn-mxfp8-pv-bf16`, NVIDIA's answer to their leak.

Read in nvidia-cudnn-frontend 1.32.0 (PyPI), cudnn/sdpa: fwd/kernels/sm100/prefill_d128_mxfp8.py, fwd/api_dsl.py and
bwd/kernels/sm100/{_bprop_mxfp8_common,bprop_dq_d256_mxfp8,bprop_dkdv_d256_mxfp8}.py. The forward's steps are those
of head_dim 128 on compute capability 10.0. Other sizes have kernels that differ (256 and 192 have no factor 16 in P
and other emulated columns, 64 emulates none), and so have other devices (10.3 emulates none): for them the forward is
assumed. The backward is public for head_dim 256 and dense batches alone: for other sizes and packed documents it is
assumed. That of `cudnn-mxfp8-pv-bf16` is described by a draft, NVIDIA/cudnn-frontend pull request 1123.

The steps of `cudnn-mxfp8`. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff.
`rule` is te-mx-e4m3, ex2 and lg2 are mufu.sm90, poly is polynomial3, N is -3.4028235e38. maxnum ignores a NaN beside
a number. Blocks of 32 and tiles of 128 start at the document; codes past its end are 0 with byte 127.

1. q and k become codes by `rule` over 32 channels of a token, v over 32 tokens of a channel. S = mxf8f6f4 over
   ascending channels, from +0. c = fl(softmax_scale log2 e), a float64 product of float64 factors.
2. Key tiles ascend. cur = maxnum(fl(c maxnum over the tile's 128 columns of S), N), where a masked column counts as N
   and a subnormal as zero.
   m starts at N; first = (m = N). If first or fl(cur - m_old) > 4, m = cur, else m = m_old.
   a = ex2(N) where first, else ex2(fl(m_old - m)).
3. x = fma(S, c, -fl(m - 4)). P = ex2(x), but poly(x) in columns k with k modulo 16 >= 12 of the tile; 0 where masked.
   P is 16 times the probability relative to m.
4. Two lanes, of even and of odd columns: each adds the float32 P of columns 0 to 63 ascending, and of 64 to 127; the
   halves are added; then L = fma(L, a, that). l = fl(even lane + odd lane), at the end.
5. O = fl(O a) from the second tile on; then mxf8f6f4 over the tile's keys, ascending, of e4m3(P) with byte 127 and v,
   onto it.
6. o = fl(O fl(1 / maxnum(l, 1e-30))), out = bfloat16(o); lse = fl(fma(m, ln 2, fl(lg2(l) ln 2)) - fl(4 ln 2)), ln 2 =
   0x3f317218. A row with l <= 0 is dead: out = +0, lse = -inf.
7. delta: products of the returned out and dO rounded to bfloat16. Thread t of 8 adds the sums of channel pairs t, t +
   8, ..., ascending, from +0; then a butterfly at distance 4, 2, 1.
8. P = ex2(fma(S, c, fl(lse 0xbfb8aa3b))) with c = fl(fl(softmax_scale) 0x3fb8aa3b), 0 where masked.
9. dO and v become codes by `rule` over 32 channels of a token. dP = mxf8f6f4 over ascending channels.
   dS = fl(fl(dP + (-delta)) P), 0 where masked.
10. dV: e4m3(256 P) with byte 119; dO by `rule` over 32 tokens of a channel.
11. dK: dS by cudnn-mx-e4m3 over 32 queries of a key; q by `rule` over 32 tokens of a channel. dQ: dS by cudnn-mx-e4m3
    over 32 keys of a row; k by `rule` over 32 tokens of a channel. cudnn-mx-e4m3 turns a block whose byte is 0 into
    zeros.
12. dK and dV are one chain over the group's query heads, ascending, and the queries of each, ascending; dQ is one
    chain over ascending keys. dK and dQ are multiplied by fl(softmax_scale). All become bfloat16.

Tiles without a visible pair are skipped in all of this, 128 queries by 128 keys. The kernels take two query tiles
together in the forward and in dQ; that shows where a tile that only the second sees holds a NaN or an infinity, and
nowhere else. A row with lse = -inf beside an out of zeros has no gradient, by select: P = dS = 0. The kernel computes
with 2^inf there.

`cudnn-mxfp8-pv-bf16` differs where a contraction runs over tokens: bfloat16 with the instruction f16, no scales. So
v, P, and in the backward P, dO, dS, q and k; its P is not multiplied by 16 (x = fma(S, c, -m), nothing is subtracted
from lse).

Windows, alignments, a sink and splits of the keys are as `docs/attention.md` says for a base in units of S c; the sink
is that of the forward's epilogue, and split_combine.py has the splits. The kernels have no soft cap and no gradient of
the sink: those are assumed.

Left to the compiler, and assumed here: that the products and sums of steps 3, 4 and 6 are fused as written. The
kernel has no select in step 9; its P is 0 there.
"""

from dataclasses import replace

from flamia_ref.attention.knobs import (
    DeltaSum,
    EmulatedColumns,
    Gradient,
    Schedule,
    Softmax,
    Tiles,
)
from flamia_ref.attention.product import Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    F16,
    MUFU,
    MX,
    PRODUCTS,
    SPECIAL_FUNCTIONS,
    assumed,
    instruction,
    read,
)


def _channels(same_codes_as: Use | None = None) -> Operand:
    """One scale for 32 channels of a token."""
    return Operand(format="te-mx-e4m3", block=(1, 32), same_codes_as=same_codes_as)


_TOKENS = Operand(format="te-mx-e4m3", block=(32, 1))  # one scale for 32 tokens of a channel
_BF16 = Operand(format="bf16", scope=Scope.UNIT)

_FRONT_END = "nvidia-cudnn-frontend 1.32.0, cudnn/sdpa/"
_FORWARD = (
    _FRONT_END
    + "fwd/kernels/sm100/prefill_d128_mxfp8.py, for head_dim 128 on compute capability 10.0;"
    " assumed for other sizes and devices"
)
_BACKWARD = _FRONT_END + "bwd/kernels/sm100, head_dim 256"
_COMPILER = "the compiler may contract; "

_SOFTMAX = Softmax(
    exp2=MUFU,
    log2=MUFU,
    reciprocal=MUFU,
    emulated=EmulatedColumns(exp2="polynomial3", period=16, count=4, first=0, stop=128),
    score_factor="float64_product",
    base="scaled_max",
    exp2_argument="fused",
    rescale_threshold=4,
    p_offset=4,
    row_sum="two_lanes",
    normalisation="division",
    lse="natural_fma",
    combine="divide_last",
)
_STEPS = {
    **dict.fromkeys(("s", "o"), read(_FORWARD)),
    **dict.fromkeys(("dp", "dv", "dq", "dk"), assumed(_BACKWARD + "; assumed for other sizes")),
    **{f"{product}.instruction": instruction(MX) for product in PRODUCTS},
    "softmax": read(_FORWARD + ", _softmax_kv_body"),
    **SPECIAL_FUNCTIONS,
    "softmax.exp2_argument": assumed(_COMPILER + _FORWARD),
    "softmax.row_sum": assumed(_COMPILER + _FORWARD),
    "softmax.lse": assumed(_COMPILER + _FORWARD),
    "softmax.combine": assumed(_COMPILER + _FRONT_END + "fwd/kernels/sm100/split_combine.py"),
    "gradient": assumed(_BACKWARD + "; assumed for other sizes"),
    "tiles": read(_FORWARD),
    "guard_operands": read("no block is guarded"),
    "input": read(_FRONT_END + "fwd/api_dsl.py"),
    "output": read(_FRONT_END + "fwd/api_dsl.py"),
}

CUDNN_MXFP8 = Recipe(
    name="cudnn-mxfp8",
    s=Product(left=_channels(), right=_channels(), instruction=MX),
    o=Product(
        left=Operand(format="e4m3", scope=Scope.STATIC, static_scale=127),
        right=_TOKENS,
        instruction=MX,
    ),
    dp=Product(left=_channels(), right=_channels(), instruction=MX),
    dv=Product(
        left=Operand(format="e4m3", scope=Scope.STATIC, static_scale=119),
        right=_TOKENS,
        instruction=MX,
    ),
    dq=Product(left=Operand(format="cudnn-mx-e4m3", block=(1, 32)), right=_TOKENS, instruction=MX),
    dk=Product(left=Operand(format="cudnn-mx-e4m3", block=(32, 1)), right=_TOKENS, instruction=MX),
    softmax=_SOFTMAX,
    gradient=Gradient(
        score_factor="float32_product",
        normalisation="lse",
        delta=DeltaSum.HALF_PRODUCTS,
        p_offset=8,
        heads="one_chain",
    ),
    tiles=Tiles(masked="skipped"),
    schedules=(Schedule(name="two splits", splits=2),),
    steps=_STEPS,
)

_DRAFT = assumed("NVIDIA/cudnn-frontend pull request 1123, a draft; the rest as " + _BACKWARD)

CUDNN_MXFP8_PV_BF16 = replace(
    CUDNN_MXFP8,
    name="cudnn-mxfp8-pv-bf16",
    o=Product(left=_BF16, right=_BF16, instruction=F16),
    dv=Product(left=_BF16, right=_BF16, instruction=F16),
    dq=Product(left=_BF16, right=_BF16, instruction=F16),
    dk=Product(left=_BF16, right=_BF16, instruction=F16),
    softmax=replace(_SOFTMAX, p_offset=0),
    gradient=replace(CUDNN_MXFP8.backward.gradient, p_offset=0),
    steps={
        **_STEPS,
        **dict.fromkeys(("dv", "dq", "dk", "gradient"), _DRAFT),
        **{f"{product}.instruction": instruction(F16) for product in ("o", "dv", "dq", "dk")},
        "o": read(_FORWARD + ", PV_BF16"),
    },
)
