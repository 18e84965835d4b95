"""The smoke suite: small, and one case for each kind of trouble.

Every `why` is held to the data by tests/golden/test_suites.py.
"""

from flamia_ref.golden.case_fields import Plant
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.suites.synthetic import synthetic

SMOKE = (
    CaseSpec(
        name="smollm2-layer14",
        why=(
            "real activations: three documents of a Llama-style model, the three query heads of "
            "one key/value head; boundaries at 11 and 11 modulo 32"
        ),
        lengths=(75, 64, 12),
        heads=3,
        kv_heads=1,
        head_dim=64,
        causal=True,
        softmax_scale=0.125,
        distribution=Distribution.RECORDED,
        seed=0,
        exponent=0,
        flags=("real", "partial-block", "grouped-heads"),
    ),
    synthetic(
        "lengths-around-32",
        "documents of 0, 1, 31, 32 and 33 tokens: an empty one, one key alone, and both sides of a "
        "block's end; the longer ones start inside a block of the packed tensor; nine query heads over "
        "three, of which a kernel that maps heads by modulo gets only 0, 4 and 8 right",
        lengths=(1, 0, 32, 33, 31),
        heads=(9, 3),
        head_dim=64,
        seed=1,
    ),
    synthetic(
        "one-head-200",
        "two key tiles and a peaked softmax: in some rows the maximum rises in the second tile, and "
        "the sums of the first are shifted",
        lengths=(200,),
        heads=(1, 1),
        head_dim=64,
        seed=2,
        exponent=-6,
    ),
    synthetic(
        "outliers-d128",
        "head dimension 128; one element in 256 is 65536 times larger: it sets the scale of its token, "
        "most of whose other codes are subnormal and some zero",
        lengths=(33, 8),
        heads=(1, 1),
        head_dim=128,
        seed=8,
        distribution=Distribution.OUTLIERS,
        exponent=-14,
    ),
    synthetic(
        "full-wide-exponents",
        "no mask; exponents over 32 binades within a token and 16 between tokens: more than 12 scale "
        "bytes a tensor, over two codes in five are zero and one in ten is subnormal",
        lengths=(40,),
        heads=(1, 1),
        head_dim=64,
        causal=False,
        seed=6,
        distribution=Distribution.WIDE,
    ),
    synthetic(
        "poison",
        "NaN in K of the first document and infinity in V of the second stay inside their documents; "
        "in the third -0, a zero token of V, and a token without gradient; the last holds one token, "
        "whose only score is -infinity: a dead row",
        lengths=(36, 5, 8, 1),
        heads=(2, 1),
        head_dim=64,
        seed=7,
        plants=(
            Plant(tensor="k", token=33, head=0, channel=5, bits=0x7FC0),
            Plant(tensor="v", token=37, head=0, channel=2, bits=0x7F80),
            Plant(tensor="q", token=41, head=1, channel=0, bits=0x8000),
            *(Plant(tensor="v", token=44, head=0, channel=c, bits=0x0000) for c in range(64)),
            *(Plant(tensor="dout", token=46, head=1, channel=c, bits=0x0000) for c in range(64)),
            # 2^100 times -2^100 is beyond float32.
            *(Plant(tensor="q", token=49, head=h, channel=9, bits=0x7180) for h in range(2)),
            Plant(tensor="k", token=49, head=0, channel=9, bits=0xF180),
        ),
        flags=("nan",),
    ),
)
