"""`fp8-fa4`: the FP8 path of FlashAttention-4 on SM100, its causal kernels for head_dim 128. Forward alone.

With a full mask its kernels emulate other columns (4 of each 10), and other sizes have numbers of their own: for those
this is assumed.

Read in Dao-AILab/flash-attention 0251105a, flash_attn/cute: flash_fwd_sm100.py, softmax.py, interface.py.

The kernel takes e4m3 codes and, for each batch entry and key/value head, float32 descales of q, k and v. How these
come about is the caller's, and assumed here: the largest magnitude of a document and key/value head over 448. So all
tokens of a document share three descales, and later tokens reach earlier rows through them.

The steps. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff. f8 is the
instruction sm100.tcgen05.f8f6f4 on e4m3, ex2, lg2 and rcp are mufu.sm90, poly is polynomial3. maxnum ignores a NaN
beside a number. Tiles of 128 start at the document; places past its end hold +0.

1. For each document and key/value head a descale of q (of all query heads of the group), of k and of v: dq, dk, dv =
   fl(amax / 448), 1 where amax is 0. Codes are e4m3(fl(x / descale)), 448 in magnitude at most. amax is NaN where an
   element is, as torch's amax has it, and infinite where one is: assumed too. Either of them in q or k so reaches every
   row of the document and group of heads, earlier ones too: out is NaN, and lse -inf, as in a row that sees no key.
   One in v makes out NaN in all of them. With an amax that skips NaN, rows that do not see it would not move.
2. S = f8 over ascending channels of the codes of q and k, from +0. c = fl(fl(fl(softmax_scale) 0x3fb8aa3b) fl(dq dk)).
3. Key tiles descend, from the last that holds a visible key. A masked S is -inf.
4. m = maxnum(m_old, largest S of the tile); the first tile has no m_old. ms = m, or 0 where m = -inf. From the second
   tile on a = ex2(fl(fl(m_old - ms) c)): no rescale is left out.
5. x = fma(S, c, fl(8 - fl(ms c))). P = ex2(x), but poly(x) in columns 32 <= k < 96 with k modulo 8 >= 4 of the tile. P
   = 0 where masked. P is 2^8 times the probability relative to m.
6. l by eight lanes, of the float32 P: lane r adds columns r, r + 8, ... ascending; lane 0 starts at fl(l a), or at 0
   in the first tile; then ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)).
7. O = fl(O a) from the second tile on; then f8 over the tile's keys, ascending, of e4m3(P) and the codes of v, onto
   it.
8. o = fl(O fl(rcp(l) dv)), with rcp(1) where l is 0 or NaN; out = bfloat16(o). lse = fl(fma(m, c, fl(lg2(l) - 8))
   0x3f317218), -inf where l is 0 or NaN.

Tiles without a visible pair are skipped, 128 queries by 128 keys. With a soft cap the descales are in what S is
multiplied by before the cap, as with a score_mod of the kernels; the roundings of a soft cap are the caller's, and
assumed. Windows, alignments, a sink and splits of the keys are as in `bf16-fa4`.

Left to the compiler, and assumed here: that m c + (lg2(l) - 8) is one fused multiply-add.
"""

from flamia_ref.attention.knobs import EmulatedColumns, Schedule, Softmax, Tiles
from flamia_ref.attention.product import Operand, Product, Scope, TileOrder
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    DESCALE,
    MUFU,
    PER_HEAD,
    SPECIAL_FUNCTIONS,
    assumed,
    instruction,
    read,
)

_F8 = "sm100.tcgen05.f8f6f4"
_FA4 = "flash-attention 0251105a, for causal masks and head_dim 128, assumed elsewhere; flash_attn/cute/"
_COMPILER = "the compiler may contract; "

FP8_FA4 = Recipe(
    name="fp8-fa4",
    s=Product(left=PER_HEAD, right=PER_HEAD, instruction=_F8),
    o=Product(
        left=Operand(format="e4m3", scope=Scope.UNIT),
        right=PER_HEAD,
        instruction=_F8,
        tile_order=TileOrder.DESCENDING,
    ),
    softmax=Softmax(
        exp2=MUFU,
        log2=MUFU,
        reciprocal=MUFU,
        emulated=EmulatedColumns(exp2="polynomial3", period=8, count=4, first=32, stop=96),
        score_factor="float32_product",
        base="raw_max",
        exp2_argument="fused",
        p_offset=8,
        normalisation="zero_safe_reciprocal",
        lse="log2_fma",
        combine="scales_first",
    ),
    tiles=Tiles(masked="skipped"),
    schedules=(Schedule(name="two splits", splits=2),),
    steps={
        **dict.fromkeys(("s", "o"), read(_FA4 + "flash_fwd_sm100.py")),
        **{f"{product}.instruction": instruction(_F8) for product in ("s", "o")},
        **dict.fromkeys(("s.left", "s.right", "o.right"), DESCALE),
        "softmax": read(_FA4 + "softmax.py"),
        **SPECIAL_FUNCTIONS,
        "softmax.emulated": read(_FA4 + "softmax.py and flash_fwd_sm100.py, _FP8_TUNING_CONFIG"),
        "softmax.lse": assumed(_COMPILER + _FA4 + "flash_fwd_sm100.py, correction_loop"),
        "softmax.combine": assumed(_COMPILER + _FA4 + "flash_fwd_combine.py"),
        "tiles": read(_FA4 + "block_info.py"),
        "guard_operands": read("no block is guarded"),
        "input": assumed("the kernel takes e4m3; what its caller quantizes is bfloat16"),
        "output": read(_FA4 + "interface.py"),
    },
)
