"""`sage3-nvfp4`, SageAttention3's forward: Q and K smoothed, all of it in NVFP4, P by two levels. There is no backward.

Read in https://github.com/thu-ml/SageAttention, sageattention3_blackwell/sageattn3 at d1a57a5: api.py,
quantization/fp4_quantization_4d.cu and blackwell/{softmax_fused,mainloop_tma_ws,kernel_ws,cute_extension,api.cu}. It
is for compute capability 12.0, head_dim 64 and 128, dense batches and equally many heads of Q and K; for other sizes,
packed documents and grouped heads it is assumed, document by document.

What the compiler makes of the source was looked up in its output, for sm_120 with setup.py's flags (-O3
--use_fast_math): of the softmax and of the quantizers by CUDA 13.5 in SASS, of the mean of Q by Triton 3.8.0 in PTX.
That is where fused operations, reciprocals in place of quotients and the bfloat16 sums of Q's means are from.

The steps. All float32 operations round to nearest even; every NaN is 0x7fffffff. ex2, lg2 and rcp are mufu.sm90.
maxnum ignores a NaN beside a number. Tiles of 128 and blocks of 16 start at the document; codes past its end are 0.

1. k' = bfloat16(fl(k - mean)), mean over the document's tokens: float32 sums of 128 tokens, ascending from +0; these
   ascending from +0; times fl(1 / tokens); rounded to bfloat16.
2. q' = bfloat16(fl(q - mean)), mean over the 128 tokens of a query tile, those past the document's end being zeros:
   sums in bfloat16, token by token with the one 8 further on (of the same 16), these sums with those 16 further on,
   then 32, 64, 1, 4 and 2; up to 64 channels 16, 32, 64, 2, 1, 8 and 4. Times 2^-7.
3. q' and k' become e2m1 codes by `sage3-nvfp4` over 16 channels of a token, v over 16 tokens of a channel.
4. S = mxf4nvf4 with UE4M3 scales for 16 elements, over ascending channels, from delta: the products of the mean of 2.
   and k', mma bf16 over ascending channels from +0, rounded to bfloat16. Channels are filled up to a multiple of 64.
   c = float32(softmax_scale log2 e), a float64 product of the float32 scale.
5. Key tiles descend. m = maxnum(m_old, maxnum over the tile's 128 columns of S, -inf where masked). a =
   ex2(fl(fl(m_old - m) c)). b = fma(m, c, -L) with L = 11.392318 = float32(log2 2688). P = ex2(fma(S, c, -b)), 0
   where masked: 2688 = 448 * 6 times the probability relative to m.
6. Of the visible S of 16 keys the largest, by maxnum from -inf, is M. d = ex2(fl(fma(M, c, -b) - 2.5849626)), the
   last the float32 log2 6. P's scale is UE4M3 of d, its codes e2m1 of fl(P rcp(d)): both to nearest even, beyond the
   largest to the largest, and the code of NaN is the largest, 7. So 16 masked keys of a visible tile have codes 7 and
   scale 0.
7. Four lanes, lane r of the columns 8 r to 8 r + 7 of each 32, ascending: the first of a tile by fma(L_old, a, P),
   the others added. l = (L0 + L1) + (L2 + L3), at the end.
8. T = mxf4nvf4 of P's codes and v over the tile's keys, ascending, from +0. O = T for the first tile, then O = fma(O,
   a, T).
9. o = fl(O rcp(l)), and fl(O 0) where l is 0 or NaN. out = bfloat16(o). lse = fl(fma(m, c, fl(lg2(l) - L)) ln 2), ln
   2 = 0x3f317218; -inf where l is 0 or NaN.

Tiles without a visible pair are skipped. lse is that of the smoothed scores: that of q and k, less softmax_scale
times q . mean of k.

Nothing public settles, and assumed is: the order of the sums of the mean of K (torch.mean), the product behind delta
(a library's), what the first tile's accumulators begin at (the source leaves them without a value), and lse, which
the kernel does not return. Subnormals are kept here, and flushed by that build, which shows nowhere but in P and row
sums 2^126 below their row's.

What is computed here is what the source is meant to do. Two places of it do otherwise with a causal mask, and the
first also where a document's length is no multiple of 32; an issue reports large errors of the causal mode
(https://github.com/thu-ml/SageAttention/issues/340). mainloop_tma_ws.h masks columns by their place in the tile,
where scaled_fp4_quant_permute has put another key of the same 32; and it adds the product of the second key tile only
`if (masking_step > 0)`, which it never is. Neither is in this recipe: its mask is the exact one.
"""

from flamia_ref.attention.knobs import Softmax, Tiles
from flamia_ref.attention.product import Accumulation, Operand, Product, Scope, TileOrder
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    MUFU,
    SPECIAL_FUNCTIONS,
    assumed,
    instruction,
    read,
)

_NVFP4 = "sm120.mma.mxf4nvf4"
_BF16 = "sm120.mma.bf16"
_SAGE = "SageAttention d1a57a5, sageattention3_blackwell/sageattn3/"
_SOFTMAX = _SAGE + "blackwell/softmax_fused.h, online_softmax_with_quant"
_MAIN_LOOP = _SAGE + "blackwell/mainloop_tma_ws.h, mma"
_QUANTIZER = _SAGE + "quantization/fp4_quantization_4d.cu"
_COMPILED = ", compiled by CUDA 13.5 for sm_120 with --use_fast_math"

SAGE3_NVFP4 = Recipe(
    name="sage3-nvfp4",
    s=Product(
        left=Operand(format="sage3-nvfp4", block=(1, 16), smoothing="tile_mean"),
        right=Operand(format="sage3-nvfp4", block=(1, 16), smoothing="document_mean"),
        instruction=_NVFP4,
        correction_instruction=_BF16,
    ),
    o=Product(
        left=Operand(format="sage3-nvfp4", block=(1, 16), scope=Scope.LARGEST_SCORE),
        right=Operand(format="sage3-nvfp4", block=(16, 1)),
        instruction=_NVFP4,
        tile_order=TileOrder.DESCENDING,
        accumulation=Accumulation.FUSED_PARTIALS,
    ),
    softmax=Softmax(
        exp2=MUFU,
        log2=MUFU,
        reciprocal=MUFU,
        score_factor="float32_scale",
        base="raw_max",
        exp2_argument="fused",
        p_scale=2688,
        row_sum="octets",
        normalisation="zeroing_reciprocal",
        lse="log2_fma",
    ),
    tiles=Tiles(masked="skipped"),
    steps={
        "s": read(_MAIN_LOOP),
        "s.left": read(_QUANTIZER + ", scaled_fp4_quant_kernel"),
        "s.left.smoothing": read(
            _SAGE
            + "api.py, triton_group_mean, compiled by Triton 3.8.0 for sm_120: other versions may add otherwise"
        ),
        "s.right": read(_QUANTIZER + ", scaled_fp4_quant_kernel"),
        "s.right.smoothing": assumed(
            _SAGE + "api.py, preprocess_qkv; the order of torch.mean's sums is open"
        ),
        "s.instruction": instruction(_NVFP4),
        "s.correction_instruction": assumed(
            _SAGE + "api.py, preprocess_qkv; the library behind torch.matmul is open"
        ),
        "o": read(_MAIN_LOOP),
        "o.left": read(_SOFTMAX + _COMPILED),
        "o.right": read(_QUANTIZER + ", scaled_fp4_quant_trans_kernel"),
        "o.instruction": instruction(_NVFP4),
        "o.accumulation": read(_SAGE + "blackwell/softmax_fused.h, rescale_o" + _COMPILED),
        "softmax": read(_SOFTMAX + _COMPILED),
        **SPECIAL_FUNCTIONS,
        "softmax.score_factor": read(_SAGE + "blackwell/api.cu, set_params_fprop"),
        "softmax.normalisation": read(_SAGE + "blackwell/softmax_fused.h, finalize" + _COMPILED),
        "softmax.lse": assumed("the kernel returns none"),
        "softmax.combine": assumed("the kernel does not split keys"),
        "tiles": read(_SAGE + "blackwell/launch.h, run_mha_fwd_"),
        "guard_operands": read("no block is guarded"),
        "input": read(_SAGE + "api.py, sageattn3_blackwell"),
        "output": read(_SAGE + "api.py, sageattn3_blackwell"),
    },
)
