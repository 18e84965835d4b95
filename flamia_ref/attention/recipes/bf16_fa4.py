"""`bf16-fa4`: the bfloat16 path of FlashAttention-4 on SM100, its causal kernels for head_dim up to 128.

With a full mask some of its kernels emulate other columns (4 of each 10 or 32 instead of 16, at head_dim 128 and for
grouped heads), and other sizes have kernels of their own: for those this is assumed.

Read in Dao-AILab/flash-attention 0251105a, flash_attn/cute: flash_fwd_sm100.py, softmax.py, utils.py,
flash_bwd_preprocess.py, flash_bwd_sm100.py, flash_bwd_postprocess.py, interface.py.

The steps. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff. f16 is the
instruction sm100.tcgen05.f16 on bfloat16, ex2, lg2 and rcp are mufu.sm90, poly is polynomial3. maxnum ignores a NaN
beside a number. Tiles of 128 start at the document; places past its end hold +0.

1. S = f16 over ascending channels of q and k, from +0. c = fl(fl(softmax_scale) 0x3fb8aa3b).
2. Key tiles descend, from the last that holds a visible key. A masked S is -inf.
3. mx = maxnum(m_old, largest S of the tile); the first tile has no m_old. ms = mx, or 0 where mx = -inf.
4. From the second tile on: d = fl(fl(m_old - ms) c), a = ex2(d). If d >= -8: m = ms = m_old and a = 1. Else m = mx.
5. x = fma(S, c, -fl(ms c)). P = ex2(x), but poly(x) in columns 32 <= k < 96 with k modulo 16 >= 12 of the tile,
   the pattern of the causal kernels. P = 0 where masked.
6. l by eight lanes, of the float32 P: lane r adds columns r, r + 8, ... ascending; lane 0 starts at fl(l a), or at 0
   in the first tile; then ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)).
7. O = fl(O a) from the second tile on; then f16 over the tile's keys, ascending, of bfloat16(P) and v, onto it.
8. o = fl(O rcp(l)), with rcp(1) where l is 0 or NaN; out = bfloat16(o). lse = fl(fma(m, c, lg2(l)) 0x3f317218), -inf
   where l is 0 or NaN.
9. delta: float32 products of the returned out and dO. With the channels filled up with zeros to a multiple of 32 and
   W the largest of 128, 64, 32 that divides it, thread t of W / 8 adds channels 8t to 8t + 7 of each W of them,
   ascending, from +0; then a butterfly at distance 1, 2, 4, ...
10. L = fl(lse 0x3fb8aa3b). P = ex2(fma(S, c, -L)), 0 where masked. dP = f16 over ascending
    channels of dO and v. dS = fl(P fl(dP - delta)).
11. dV = f16 over ascending queries of bfloat16(P) and dO, one chain a query head; dK the same of bfloat16(dS) and q.
    The group's heads are added in float32, ascending. dK is multiplied by fl(softmax_scale). Both become bfloat16.
12. dQ: for each key tile, or from head_dim 128 on for each pair of key tiles 2p and 2p + 1, f16 over its keys of
    bfloat16(dS) and k, from +0; steps 10 and 11 work on such a pair as one. These are added in float32 from +0: with
    a causal mask or a window from the last to the first, without ascending (the deterministic mode). dq =
    bfloat16(fl(acc fl(softmax_scale))).
Tiles without a visible pair are skipped in all of this, 128 queries by 128 keys. The forward kernel takes two query
tiles together; that shows where a key tile that only the second sees holds a NaN or an infinity, and nowhere else. A
row with lse = -inf beside an out of zeros has no gradient, by select: P = dS = 0. The kernel computes with L = 0 there,
as is done here for other rows with that lse, those whose sum is NaN.

Left to the compiler, and assumed here: that m c + lg2(l) is one fused multiply-add, and the order inside a thread of
step 9.

Windows, alignments, a soft cap, a sink and splits of the keys are as `docs/attention.md` says for a base of S; the sink
is that of correction_loop, the splits those of flash_fwd_combine.py, fused multiply-adds assumed in both. The kernels
make a soft cap of a score_mod, whose roundings are the caller's: the one here is assumed. A gradient of the sink is
not theirs, nor is the select of dS where a pair is masked, whose P is 0 there.
"""

from flamia_ref.attention.knobs import (
    DeltaSum,
    EmulatedColumns,
    Gradient,
    Schedule,
    Softmax,
    Tiles,
)
from flamia_ref.attention.product import Accumulation, Operand, Product, Scope, TileOrder
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    F16,
    MUFU,
    PRODUCTS,
    SPECIAL_FUNCTIONS,
    assumed,
    instruction,
    read,
)

_BF16 = Operand(format="bf16", scope=Scope.UNIT)
_FA4 = "flash-attention 0251105a, for causal masks and head_dim up to 128, assumed elsewhere; flash_attn/cute/"
_COMPILER = "the compiler may contract, or reorder inside a thread; "

BF16_FA4 = Recipe(
    name="bf16-fa4",
    s=Product(left=_BF16, right=_BF16, instruction=F16),
    o=Product(left=_BF16, right=_BF16, instruction=F16, tile_order=TileOrder.DESCENDING),
    dp=Product(left=_BF16, right=_BF16, instruction=F16),
    dv=Product(left=_BF16, right=_BF16, instruction=F16),
    dq=Product(
        left=_BF16,
        right=_BF16,
        instruction=F16,
        tile_order=TileOrder.DESCENDING_WHERE_CAUSAL,
        accumulation=Accumulation.FLOAT32_PARTIALS,
    ),
    dk=Product(left=_BF16, right=_BF16, instruction=F16),
    softmax=Softmax(
        exp2=MUFU,
        log2=MUFU,
        reciprocal=MUFU,
        emulated=EmulatedColumns(exp2="polynomial3", period=16, count=4, first=32, stop=96),
        score_factor="float32_product",
        base="raw_max",
        exp2_argument="fused",
        rescale_threshold=8,
        normalisation="zero_safe_reciprocal",
        lse="log2_fma",
        combine="scales_first",
    ),
    gradient=Gradient(
        score_factor="float32_product", normalisation="lse", delta=DeltaSum.THREAD_VECTORS
    ),
    tiles=Tiles(masked="skipped"),
    # Its default adds to dQ in any order; deterministic it takes one of these. Splits are the caller's.
    schedules=(
        Schedule(name="dq ascending", dq_order=TileOrder.ASCENDING),
        Schedule(name="dq descending", dq_order=TileOrder.DESCENDING),
        Schedule(name="two splits", splits=2),
    ),
    steps={
        **dict.fromkeys(("s", "o"), read(_FA4 + "flash_fwd_sm100.py")),
        **dict.fromkeys(("dp", "dv", "dq", "dk"), read(_FA4 + "flash_bwd_sm100.py")),
        **{f"{product}.instruction": instruction(F16) for product in PRODUCTS},
        "softmax": read(_FA4 + "softmax.py"),
        **SPECIAL_FUNCTIONS,
        "softmax.emulated": read(_FA4 + "softmax.py and flash_fwd_sm100.py, _TUNING_CONFIG"),
        "softmax.lse": assumed(_COMPILER + _FA4 + "flash_fwd_sm100.py, correction_loop"),
        "softmax.combine": assumed(_COMPILER + _FA4 + "flash_fwd_combine.py"),
        "gradient": read(_FA4 + "flash_bwd_sm100.py"),
        "gradient.masked_ds": assumed("the kernel has no select there, and P = 0"),
        "gradient.heads_order": assumed("its deterministic order of heads was not read"),
        "gradient.delta": assumed(_COMPILER + _FA4 + "flash_bwd_preprocess.py"),
        "tiles": read(_FA4 + "block_info.py"),
        "guard_operands": read("no block is guarded"),
        "input": read(_FA4 + "interface.py"),
        "output": read(_FA4 + "interface.py"),
    },
)
