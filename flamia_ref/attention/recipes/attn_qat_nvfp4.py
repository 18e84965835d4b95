"""`attn-qat-nvfp4`: Attn-QAT, training with attention that is fake-quantized to NVFP4 (arXiv:2603.00040).

Every product is one of bfloat16. q, k, v and P are quantized to NVFP4, and the products take the values of the codes.
The forward is FastVideo's (hao-ai-lab/FastVideo 20e4f7d, fastvideo-kernel/python/fastvideo_kernel/triton_kernels/
attn_qat_train.py: _attn_fwd, _attn_fwd_inner, _attention; with the arguments of fastvideo/attention/backends/
attn_qat_train.py: no second level and no tensor scale of P, none of q, k and v, no smoothing, delta from O of high
precision). The backward is cuDNN's port of it (nvidia-cudnn-frontend 1.32.0, cudnn/sdpa/bwd/qat/_kernels.py and
_nvfp4.py), which quantizes q, k and v again. Both are for head_dim 128, bfloat16, and as many heads of k and v as of q.

The steps. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff. `rule` is
cudnn-qat-nvfp4: blocks of 16, scale = e4m3 of max(fl(amax / 6), 2^-9), to nearest even, beyond 448 to 448; code = e2m1
of fl(x / scale), to nearest even, beyond 6 to 6 with its sign; a NaN does not count in amax and becomes code 7. A value
is code times scale, which bfloat16 holds. f16 is the instruction sm100.tcgen05.f16 on bfloat16, ex2 and lg2 are
mufu.sm90, N is -3.4028235e38. Tiles of 32 queries by 32 keys start at the document; places past its end hold +0.

1. q, k and v become codes by `rule` over 16 channels of a token, counted from channel 0, once. Below, q, k and v are
   their values.
2. S = f16 over ascending channels of q and k, from +0. c = fl(fl(softmax_scale) 0x3fb8aa3b). A masked S is -1e6, past
   the document's end too.
3. Key tiles ascend. m = max(m_old, fl(c largest S of the tile)), m_old = N at first. a = ex2(fl(m_old - m)), and
   ex2(N) in the first tile.
4. x = fma(S, c, -m). P = ex2(x).
5. P becomes codes by `rule` over 16 keys of a row; the products take their values, which are P^. P~ = bfloat16(P).
6. l = fma(l, a, r), from +0. r is the sum of the 32 P~ of the tile in bfloat16: column j plus column j xor 1, then the
   sums at distance 4, 2, 16 and 8, each rounded to bfloat16.
7. O = fl(O a), then f16 over the tile's keys, ascending, of P^ and v, onto it. O~ likewise of P~ and v.
8. out = bfloat16(fl(O / l)). The forward keeps bfloat16(fl(O~ / l)) as `high_precision_out`. lse = fl(fl(m + lg2(l))
   0x3f317218).
9. delta: float32 products of high_precision_out and dO, added as in `bf16-fa4`.
10. L = fl(lse 0x3fb8aa3b). S again, P = ex2(fma(S, c, -L)), 0 where masked. dP = f16 over ascending channels of dO and
    v. dS = fl(P fl(dP - delta)), with the P that is 0 where masked.
11. dV: P becomes codes by `rule` over 16 keys of a row again, relative to L now, so that they are not those of step 5;
    f16 over ascending queries of the values and dO. dK: f16 over ascending queries of bfloat16(dS) and q. dQ: f16 over
    ascending keys of bfloat16(dS) and k. One chain each, a query head; the group's heads are added in float32,
    ascending. dK and dQ are multiplied by fl(softmax_scale). All become bfloat16.

Tiles without a visible pair are skipped in all of this. A row with lse = -inf beside an out of zeros has no gradient,
by select: P = 0. A row that sees no key, or has l <= 0, is dead: out = +0, lse = -inf. The kernel divides by that l.

A masked score is finite, so that a row whose own scores are all below -1e6 takes in what it must not see, v above all.
In all other rows a masked P is exactly 0. Nothing leaks through scales: no block of q, k and v holds more than one
token, none of P more than one query.

What is assumed:

- The forward's quantizer. FastVideo multiplies by a reciprocal, has no least scale, and takes 1 for a scale of 0. Here
  both passes have the one quantizer of the backward, so that both take the same q, k and v.
- `/` of Triton is an approximate division in float32; here quotients are correct. Of x / scale the source says so.
- That products and sums of steps 3, 4, 6 and 10 are fused as written.
- The order of step 6 is that of FastVideo's own reference (fastvideo-kernel/tests/qat_forward_reference.py,
  bf16_sum32), found on SM121 for tiles of 32; Triton's sum of bfloat16 is in bfloat16 on every device.
- Tiles of 32 by 32 are those of every causal kernel. Without a mask SM100 has tiles of up to 128 in the forward, whose
  maxima and sums differ, and of 64 in the backward, which shows nowhere.
- The masks. The causal kernel adds -1e6 to the scaled score, in log2 units; without a causal mask keys past the end
  have a score of -1e6, which is here. The causal kernel also rounds the product of step 4 first, in the tile on the
  diagonal alone.
- m begins at -inf there, which gives the same. Its lg2 is the library's log2, not the approximate instruction. The
  forward keeps m + log2(l), the backward takes a natural lse.
- Tiles of 32 rows have no tcgen05 products; f16 stands for the older instruction. The order of step 9 is the
  compiler's.
- Grouped heads, windows, alignments, a soft cap, a sink and splits of the keys, which the kernels do not have.
"""

from flamia_ref.attention.knobs import DeltaSum, Gradient, Softmax, Tiles
from flamia_ref.attention.product import Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import (
    F16,
    MUFU,
    PRODUCTS,
    SPECIAL_FUNCTIONS,
    assumed,
    read,
)

_FORWARD = "FastVideo 20e4f7d, fastvideo-kernel attn_qat_train.py, _attn_fwd_inner"
_BACKWARD = "nvidia-cudnn-frontend 1.32.0, cudnn/sdpa/bwd/qat/_kernels.py"
_QUANTIZER = "nvidia-cudnn-frontend 1.32.0, cudnn/sdpa/bwd/qat/_nvfp4.py"
_COMPILER = "Triton may contract or divide approximately; "
_OLDER = assumed(
    "tiles of 32 rows take the tensor cores' older instruction, of which nothing is measured"
)


def _fake(same_codes_as: Use | None = None) -> Operand:
    """The values of NVFP4 codes, one scale for 16 elements of a row."""
    return Operand(format="cudnn-qat-nvfp4", dequantized=True, same_codes_as=same_codes_as)


_BF16 = Operand(format="bf16", scope=Scope.UNIT)
_PAIRS_OF_KEYS = _fake()  # of P, 16 keys of a row

ATTN_QAT_NVFP4 = Recipe(
    name="attn-qat-nvfp4",
    s=Product(left=_fake(), right=_fake(), instruction=F16),
    o=Product(left=_PAIRS_OF_KEYS, right=_fake(), instruction=F16),
    dp=Product(left=_BF16, right=_fake(Use.O_V), instruction=F16),
    dv=Product(left=_PAIRS_OF_KEYS, right=_BF16, instruction=F16),
    dq=Product(left=_BF16, right=_fake(Use.S_K), instruction=F16),
    dk=Product(left=_BF16, right=_fake(Use.S_Q), instruction=F16),
    softmax=Softmax(
        exp2=MUFU,
        log2=MUFU,
        reciprocal=MUFU,
        score_factor="float32_product",
        base="scaled_max",
        exp2_argument="fused",
        mask_value=-1e6,
        row_sum="bfloat16_butterfly",
        normalisation="quotient",
        lse="log2_sum",
    ),
    gradient=Gradient(
        score_factor="float32_product",
        normalisation="lse",
        delta=DeltaSum.THREAD_VECTORS,
        delta_source="high_precision_out",
        masked_ds="product",
    ),
    tiles=Tiles(query=32, key=32, masked="skipped"),
    steps={
        **dict.fromkeys(("s", "o"), read(_FORWARD)),
        **dict.fromkeys(("dp", "dv", "dq", "dk"), read(_BACKWARD)),
        **{f"{product}.instruction": _OLDER for product in PRODUCTS},
        **dict.fromkeys(
            ("s.left.format", "s.right.format", "o.left.format", "o.right.format"),
            assumed(f"the quantizer of the backward, {_QUANTIZER}; FastVideo's differs"),
        ),
        **dict.fromkeys(
            ("dp.right.format", "dv.left.format", "dq.right.format", "dk.right.format"),
            assumed(f"{_COMPILER}{_QUANTIZER}, fake_quantize_nvfp4"),
        ),
        "softmax": read(_FORWARD),
        **SPECIAL_FUNCTIONS,
        "softmax.exp2_argument": assumed(_COMPILER + _FORWARD),
        "softmax.mask_value": assumed(
            f"{_FORWARD} without a causal mask; with one -1e6 is added to the scaled score"
        ),
        "softmax.row_sum": assumed(
            "FastVideo 20e4f7d, fastvideo-kernel/tests/qat_forward_reference.py, bf16_sum32, found on SM121"
        ),
        "softmax.normalisation": assumed(_COMPILER + _FORWARD),
        "softmax.lse": assumed(f"natural as {_BACKWARD} takes it; {_FORWARD} keeps one in base 2"),
        "softmax.combine": assumed("no kernel splits the keys"),
        "gradient": read(_BACKWARD),
        "gradient.delta": assumed(f"the order of Triton's sum was not read; {_BACKWARD}"),
        **dict.fromkeys(
            ("gradient.heads", "gradient.heads_order"), assumed("the kernels have no grouped heads")
        ),
        "tiles": assumed(f"{_FORWARD} and {_BACKWARD}, causal; larger on SM100 without a mask"),
        "tiles.splits": assumed("no kernel splits the keys"),
        "guard_operands": read("no block is guarded"),
        "input": read(_BACKWARD),
        "output": read(_BACKWARD),
    },
)
