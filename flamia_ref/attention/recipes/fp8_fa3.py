"""`fp8-fa3`: the FP8 path of FlashAttention-3 on SM90, its kernels for head_dim 97 to 128. Forward alone.

Other sizes have other tiles, and are assumed here: 192 queries by 160 keys up to head_dim 64, 192 by 128 up to 96, 128
by 160 up to 192, 128 by 128 above, 64 keys with a window. So have paged keys (160 keys), and a soft cap with a window
(192).

Read in Dao-AILab/flash-attention, hopper: softmax.h and setup.py at 7a802796 and 000090d0, utils.h, tile_size.h,
mainloop_fwd_sm90_tma_gmma_ws.hpp and flash_fwd_kernel_sm90.h at 0473b463. setup.py compiles with --use_fast_math. What
that makes of the expressions of softmax.h was looked up in its output, for sm_90a by CUDA 13.0 and 13.5, on the
softmax alone: where multiply-adds are fused, that exp2f, __logf and 1.f / sum are ex2, lg2 and rcp, and so no division.

The kernel takes e4m3 codes and, for each batch entry and key/value head, float32 descales of q, k and v. How these
come about is the caller's, and assumed here, as in `fp8-fa4`: later tokens reach earlier rows through them.

The steps. All float32 operations round to nearest even; every NaN is 0x7fffffff. f8 is the instruction sm90.wgmma.fp8
on e4m3, which keeps 13 bits of a fraction; ex2, lg2, rcp and tanh are mufu.sm90. maxnum ignores a NaN beside a number.
Tiles of 128 queries by 224 keys start at the document; places past its end hold +0.

1. Descales dq, dk, dv and codes of q, k and v as in `fp8-fa4`, 1, also what a NaN does.
2. S = f8 over ascending channels of the codes of q and k, from +0. c = fl(c0 fl(dq dk)), c0 the float32 of the float64
   product of the float32 softmax_scale and log2(e).
3. Key tiles descend, from the last that holds a visible key. A masked S is -inf.
4. m = maxnum(m_old, largest S of the tile); the first tile has no m_old. ms = m, or 0 where m = -inf. From the second
   tile on a = ex2(fl(fl(m_old - ms) c)): no rescale is left out.
5. P = ex2(fma(S, c, -fma(ms, c, -8))), 0 where masked: 2^8 times the probability relative to m.
6. Four lanes, one a thread: lane r adds the float32 P of columns 2 r and 2 r + 1 of each 8, ascending, onto its sum so
   far; the first of a tile by fma(L_old, a, P). At the end l = (L0 + L2) + (L1 + L3).
7. O = fl(O a) from the second tile on; then f8 over the tile's keys, ascending, of e4m3(P) and the codes of v, onto it.
   The kernel permutes the keys of each 32 of both alike, which one instruction takes together.
8. o = fl(O fl(rcp(l) dv)), and 0 O where l is 0 or NaN; out = bfloat16(o). lse = fma(m, fl(c ln 2), fl(lg2(l 2^-8) ln
   2)), ln 2 = 0x3f317218, -inf where l is 0 or NaN.

Tiles without a visible pair are skipped, 128 queries by 224 keys. With a soft cap S becomes tanh(fl(S fl(fl(s / cap)
fl(dq dk)))), s and cap in float32, and c the float32 of cap log2(e). Windows are as in `bf16-fa4`; splits of the keys
come together as there, assumed. A sink is none of this kernel's: the one here is that of `bf16-fa4`, assumed.

Subnormals are kept here, and flushed by that build, which shows nowhere but in P and sums 2^126 below their row's. In
tiles that cut no mask the kernel leaves the test for m = -inf out: that shows in rows whose scores so far are all -inf.
"""

from flamia_ref.attention.knobs import Schedule, Softmax, Tiles
from flamia_ref.attention.product import Operand, Product, Scope, TileOrder
from flamia_ref.attention.recipe import Recipe, Step
from flamia_ref.attention.recipes._sources import (
    DESCALE,
    MUFU,
    PER_HEAD,
    assumed,
    instruction,
    read,
)
from flamia_ref.evidence import Evidence

_F8 = "sm90.wgmma.fp8"
_FA3 = "flash-attention, for head_dim 97 to 128, assumed elsewhere; hopper/"
_SOFTMAX = _FA3 + "softmax.h at 7a802796"
_MAIN_LOOP = _FA3 + "mainloop_fwd_sm90_tma_gmma_ws.hpp at 0473b463"
_COMPILED = ", compiled by CUDA 13.0 and 13.5 for sm_90a with --use_fast_math"
_MEASURED = dict.fromkeys(
    ("exp2", "log2", "reciprocal", "tanh"), "measured on every float32 on an H200 (sm_90)"
)

FP8_FA3 = Recipe(
    name="fp8-fa3",
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
        score_factor="float32_scale",
        softcap="folded",
        base="raw_max",
        exp2_argument="fused_base",
        p_offset=8,
        row_sum="quads",
        normalisation="zeroing_reciprocal",
        lse="factor_fma",
        combine="scales_first",
    ),
    tiles=Tiles(key=224, masked="skipped"),
    schedules=(Schedule(name="two splits", splits=2),),
    steps={
        **dict.fromkeys(("s", "o"), read(_MAIN_LOOP + ", mma")),
        **{f"{product}.instruction": instruction(_F8) for product in ("s", "o")},
        **dict.fromkeys(("s.left", "s.right", "o.right"), DESCALE),
        "softmax": read(_SOFTMAX + _COMPILED),
        **{
            f"softmax.{function}": Step(evidence=Evidence.MEASURED, source=source)
            for function, source in _MEASURED.items()
        },
        "softmax.score_factor": read(_MAIN_LOOP + ", to_underlying_arguments"),
        "softmax.softcap": read(_MAIN_LOOP + ", to_underlying_arguments and mma"),
        "softmax.row_sum": read(_SOFTMAX + ", thread_reduce_ and quad_allreduce_" + _COMPILED),
        "softmax.normalisation": read(_SOFTMAX + ", finalize" + _COMPILED),
        "softmax.lse": read(_SOFTMAX + ", finalize" + _COMPILED),
        "softmax.combine": assumed(_FA3 + "flash_fwd_combine_kernel.h was not read; as bf16-fa4"),
        "tiles": read(_FA3 + "tile_size.h at 07602adc, tile_size_fwd_sm90"),
        "guard_operands": read("no block is guarded"),
        "input": assumed("the kernel takes e4m3; what its caller quantizes is bfloat16"),
        "output": read(_FA3 + "flash_api.cpp: bfloat16 unless the caller asks for float16"),
    },
)
