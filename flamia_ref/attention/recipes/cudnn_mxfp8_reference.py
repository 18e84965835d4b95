"""`cudnn-mxfp8-reference`, the PyTorch reference that NVIDIA tests its MXFP8 attention kernels against.

test/python/sdpa/mxfp8_ref.py of NVIDIA/cudnn-frontend, `compute_ref` and `compute_ref_backward`, as of commit 3929da2
of 2026-05-08, with V's two payloads as mxfp8.py beside it gives them. It is not what the kernels of `cudnn-mxfp8`
compute: natural exponentials, a rescale threshold in natural units, P of the backward from a softmax of its own, the
softmax scale in dS before that is quantized, delta of float32 products, float32 products of everything. Commit
97f6cb3b, before, has no P scale and no threshold. Commit 0e15cb11, after, compares with 4 ln 2 (here
softmax.threshold_unit "log2") and makes P of the backward from the forward's Stats in units of log2.

The steps. All float32 operations round to nearest even and keep subnormals; every NaN is 0x7fffffff. `rule` is
te-mx-e4m3; exp and ln are correctly rounded, scale = fl(softmax_scale). Blocks of 32 and tiles of 128 start at the
document; codes past its end are 0 with byte 127. A float32 product of an operand takes fl(code 2^(byte - 127)).

1. q and k become codes by `rule` over 32 channels of a token, v over 32 tokens of a channel. S' = fl(S scale), S by
   float32 fused multiply-adds over ascending channels, from +0.
2. Key tiles of 128 ascend. cur = the maximum of S' over the tile, masked as -inf; a NaN wins. m = cur if m = -inf or
   fl(cur - m) > 4, else m stays. a = 1 where m stays or fl(m_old - m) is NaN, else exp(fl(m_old - m)).
3. P = exp(fl(S' - m)), 0 where masked and where that is NaN. So P is at most e^4 = 54.6 before it is encoded.
4. l = fl(fl(l a) + the sum of the tile's columns of P, ascending from +0).
5. O = fl(fl(O a) + the tile's product), that by fused multiply-adds over ascending keys, from +0, of P and v. P is
   e4m3(16 P) with byte 123. From 16 P > 464 on it is 0: torch's conversion to float8_e4m3fn does not saturate, but
   gives NaN where rounding passes 448, and nan_to_num makes 0 of that. A key whose score is more than ln 29 = 3.37
   above m, and not more than 4, so counts in l and not in O.
6. o = fl(O / max(l, 1)), out = bfloat16(o); lse = fl(m + ln(l)).
7. delta: fused multiply-adds of the returned out and dO over ascending channels, from +0. The source rounds products
   first; those of bfloat16 are exact from 2^-149 on.
8. S' again; m = its maximum over the row, l = the sum of exp(fl(S' - m)) over the row, each tile's columns ascending
   from +0 and the tiles ascending. P = fl(exp(fl(S' - m)) / l), 0 where masked and where that is NaN. Of lse
   nothing is used but which rows are dead: -inf beside an out of zeros.
9. dO and v become codes by `rule` over 32 channels of a token. dP as S in step 1. dS = fl(fl(P fl(dP - delta))
   scale), 0 where masked.
10. dV: e4m3(256 P) with byte 119; dO by `rule` over 32 tokens of a channel. dK: dS by `rule` over 32 queries of a
    key; q by `rule` over 32 tokens of a channel. dQ: dS by `rule` over 32 keys of a row; k by `rule` over 32 tokens
    of a channel.
11. Each is one chain of fused multiply-adds a query head, from +0: dQ over ascending keys, dK and dV over ascending
    queries, whose heads of a group are then added in float32, ascending. All become bfloat16.

A sink is m and 1 is l before the first key tile; in step 8 it counts in m and, first, in l. A row that sees no key
has out = +0, lse = -inf or the sink, and no gradient.

Assumed: the order of every float32 sum, which torch leaves open (einsum, sum, softmax); that exp and ln are correctly
rounded; what becomes of NaN and of P above 448, which is read in 97f6cb3b and 0e15cb11 and not in between. The source
has no documents, no soft cap and no splits of the keys. It computes every pair, so that a NaN or an infinity of v, k,
q or dO reaches all rows (in 0e15cb11 none does: all operands go through nan_to_num); here tiles of 128 by 128 without
a visible pair are skipped, and a masked dS is 0 by select.
"""

from flamia_ref.attention.knobs import DeltaSum, Gradient, Softmax, Tiles
from flamia_ref.attention.product import Accumulation, Operand, Product, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import PRODUCTS, assumed, read

_FLOAT32 = "float32"
_CHANNELS = Operand(
    format="te-mx-e4m3", block=(1, 32)
)  # one scale for 32 channels of a token, or 32 keys of a row
_TOKENS = Operand(
    format="te-mx-e4m3", block=(32, 1)
)  # one scale for 32 tokens of a channel, or 32 queries of a key


def _static(code: int) -> Operand:
    """P in e4m3 with a constant scale."""
    return Operand(format="e4m3", scope=Scope.STATIC, static_scale=code)


_FILE = "NVIDIA/cudnn-frontend 3929da2, test/python/sdpa/mxfp8_ref.py"
_FORWARD = _FILE + ", compute_ref"
_BACKWARD = _FILE + ", compute_ref_backward"
_OPEN = "torch leaves the order of float32 sums open; "
_ABSENT = "not in the source; as other recipes have it"
_ROUNDED = "torch's is within an ulp or two, by device and version; correctly rounded here"

_STEPS = {
    **dict.fromkeys(("s", "o"), read(_FORWARD)),
    **dict.fromkeys(("dp", "dv", "dq", "dk"), read(_BACKWARD)),
    **{
        f"{product}.{part}": assumed(_OPEN + "fused multiply-adds, ascending")
        for product in PRODUCTS
        for part in ("instruction", "k_order")
    },
    "softmax": read(_FORWARD),
    "softmax.exp2": assumed("torch.exp: " + _ROUNDED),
    "softmax.log2": assumed("torch.log: " + _ROUNDED),
    **{f"softmax.{name}": assumed(_ABSENT) for name in ("tanh", "reciprocal", "combine")},
    "softmax.row_sum": assumed(_OPEN + "ascending in a tile"),
    "softmax.p_overflow": assumed(
        "torch's conversion gives NaN above 464 (pytorch c10/util/Float8_e4m3fn.h); that it then becomes 0 is read in"
        " 0e15cb11"
    ),
    "softmax.nan_p": assumed("read in 97f6cb3b and in 0e15cb11, before and after"),
    "gradient": read(_BACKWARD),
    "gradient.delta": assumed(_OPEN + "ascending"),
    "gradient.masked_ds": assumed("the source multiplies by 0, which a NaN survives"),
    "tiles.masked": assumed("the source computes all pairs, which a NaN or an infinity shows"),
    "gradient.heads_order": assumed(_OPEN + "ascending"),
    "tiles": read(_FORWARD + ", block_size; queries are in no tiles"),
    "tiles.splits": assumed(_ABSENT),
    "guard_operands": read("no block is guarded"),
    "input": read(_FILE + " and mxfp8.py"),
    "output": read(_FILE),
}

CUDNN_MXFP8_REFERENCE = Recipe(
    name="cudnn-mxfp8-reference",
    s=Product(left=_CHANNELS, right=_CHANNELS, instruction=_FLOAT32),
    o=Product(
        left=_static(123),
        right=_TOKENS,
        instruction=_FLOAT32,
        accumulation=Accumulation.FLOAT32_PARTIALS,
    ),
    dp=Product(left=_CHANNELS, right=_CHANNELS, instruction=_FLOAT32),
    dv=Product(left=_static(119), right=_TOKENS, instruction=_FLOAT32),
    dq=Product(left=_CHANNELS, right=_TOKENS, instruction=_FLOAT32),
    dk=Product(left=_TOKENS, right=_TOKENS, instruction=_FLOAT32),
    softmax=Softmax(
        exp2="correct",
        log2="correct",
        reciprocal="correct",
        tanh="correct",
        score="scaled",
        base="natural_max",
        exp2_argument="unfused",
        rescale_threshold=4,
        threshold_unit="natural",
        p_scaling="static_scale",
        p_overflow="zero",
        nan_p="zero",
        row_sum="by_tiles",
        normalisation="clamped_quotient",
        lse="natural_sum",
    ),
    gradient=Gradient(
        softmax_scale="times_ds",
        normalisation="row_softmax",
        delta=DeltaSum.FMA_ASCENDING,
        p_offset=8,
    ),
    tiles=Tiles(masked="skipped"),
    steps=_STEPS,
)
