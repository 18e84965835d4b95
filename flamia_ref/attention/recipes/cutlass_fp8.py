"""`cutlass-fp8`: the FP8 build of CUTLASS's example 77 on SM100, its kernels for head_dim up to 128. Forward alone.

Read in NVIDIA/cutlass, examples/77_blackwell_fmha: collective/sm100_fmha_fwd_mainloop_tma_warpspecialized.hpp at
0429176e, collective/fmha_fusion.hpp at 08556c9b, 77_blackwell_fmha.cu at 019c5c97 and CMakeLists.txt at 122a0b5f, which
compiles with --use_fast_math. What that makes of the softmax's expressions was looked up in its output, for sm_100a by
CUDA 13.0 and 13.5, on the softmax alone: where multiply-adds are fused, that exp2f, logf and the quotient by l are ex2,
lg2 and a product with rcp, and so no division.

The kernel takes e4m3 codes and one constant each of q, k, v and of O's inverse, from its caller. These are 1 here, as
in the example, so nothing is scaled: values beyond 448 saturate, and small ones are lost. Nothing is shared by tokens.

The steps. All float32 operations round to nearest even; every NaN is 0x7fffffff. f8 is the instruction
sm100.tcgen05.f8f6f4 on e4m3; ex2, lg2 and rcp are mufu.sm90. maxnum ignores a NaN beside a number. Tiles of 128 start
at the document; places past its end hold +0.

1. Codes of q, k and v are e4m3(x), 448 in magnitude at most.
2. S = f8 over ascending channels of the codes of q and k, from +0. c = fl(fl(softmax_scale) 0x3fb8aa3b).
3. Key tiles ascend, from the first that holds a visible key. A masked S is -inf.
4. m = maxnum(m_old, largest S of the tile); the first tile has no m_old. ms = m, or 0 where m = -inf. From the second
   tile on a = ex2(fl(fl(m_old - ms) c)).
5. P = ex2(fma(S, c, -fl(ms c))), 0 where masked: from 0 to 1.
6. l by eight lanes, of the float32 P: lane r adds columns r, r + 8, ... ascending; lanes 0 and 1 both start at fl(l
   fl(a / 2)), or at 0 in the first tile; then ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)).
7. O = fl(O a) from the second tile on; then f8 over the tile's keys, ascending, of e4m3(P) and the codes of v, onto it.
8. o = fl(O rcp(l)); out = bfloat16(o). lse = fma(m, fl(softmax_scale), fl(lg2(l) ln 2)), ln 2 = 0x3f317218.

Tiles without a visible pair are skipped, 128 queries by 128 keys. The kernel takes two query tiles together; that shows
where a key tile that only the second sees holds a NaN or an infinity, and nowhere else. A row that sees no key has no
rule there, where it would be NaN: zeros and -inf are assumed. The row maximum of a tile of NaN alone is -inf there.

Not of this kernel, and assumed as in `bf16-fa4`: windows, a soft cap, a sink, splits of the keys. The example writes
float16: bfloat16 is assumed. Subnormals are kept here, and by that build flushed in part, which shows nowhere but in P
and sums 2^126 below their row's.

The public FP8 backward (kernel/sm100_fmha_bwd_kernel_tma_warpspecialized.hpp and 77_blackwell_fmha_bwd.cu) is not here:
it takes O and dO as e4m3, rounds their products for delta to e4m3 (kernel/fmha_kernel_bwd_sum_OdO.hpp) and gives
gradients in e4m3, none of which goes with a bfloat16 out.
"""

from flamia_ref.attention.knobs import Softmax, Tiles
from flamia_ref.attention.product import Operand, Product, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    MUFU,
    SPECIAL_FUNCTIONS,
    assumed,
    instruction,
    read,
)

_F8 = "sm100.tcgen05.f8f6f4"
_E4M3 = Operand(format="e4m3", scope=Scope.UNIT)
_EXAMPLE = "cutlass, examples/77_blackwell_fmha/"
_MAIN_LOOP = _EXAMPLE + "collective/sm100_fmha_fwd_mainloop_tma_warpspecialized.hpp at 0429176e"
_COMPILED = ", compiled by CUDA 13.0 and 13.5 for sm_100a with --use_fast_math"
_CONSTANTS = assumed(
    "the kernel takes codes and a constant scale of its caller's; 1, as in the example"
)

CUTLASS_FP8 = Recipe(
    name="cutlass-fp8",
    s=Product(left=_E4M3, right=_E4M3, instruction=_F8),
    o=Product(left=_E4M3, right=_E4M3, instruction=_F8),
    softmax=Softmax(
        exp2=MUFU,
        log2=MUFU,
        reciprocal=MUFU,
        score_factor="float32_product",
        base="raw_max",
        exp2_argument="fused",
        row_sum="halved_lanes",
        normalisation="reciprocal",
        lse="scale_fma",
        combine="scales_first",
    ),
    tiles=Tiles(masked="skipped"),
    steps={
        **dict.fromkeys(("s", "o"), read(_MAIN_LOOP + ", mma")),
        **{f"{product}.instruction": instruction(_F8) for product in ("s", "o")},
        **dict.fromkeys(("s.left", "s.right", "o.right"), _CONSTANTS),
        "softmax": read(_MAIN_LOOP + ", softmax_step" + _COMPILED),
        **SPECIAL_FUNCTIONS,
        "softmax.score_factor": read(_MAIN_LOOP + ", to_underlying_arguments"),
        "softmax.softcap": assumed("the example has none"),
        "softmax.normalisation": read(_MAIN_LOOP + ", correction" + _COMPILED),
        "softmax.lse": read(_MAIN_LOOP + ", correction" + _COMPILED),
        "softmax.combine": assumed("the example does not split keys"),
        "tiles": read(_EXAMPLE + "collective/fmha_fusion.hpp at 08556c9b, CausalMask"),
        "guard_operands": read("no block is guarded"),
        "input": assumed("the kernel takes e4m3; what its caller quantizes is bfloat16"),
        "output": assumed(_EXAMPLE + "77_blackwell_fmha.cu at 019c5c97 writes float16"),
    },
)
