"""Cases for what changes the softmax: a soft cap, a sink, the scale, sums that lose mass."""

import math

from flamia_ref.golden.case_fields import Plant
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.suites.synthetic import ONE, box, synthetic

OPTIONS: tuple[CaseSpec, ...] = (
    synthetic(
        "softcap-15",
        "scores up to 40 through a cap of 15: none is left above it",
        lengths=(70,),
        seed=71,
        heads=(2, 1),
        exponent=-6,
        softcap=15.0,
    ),
    synthetic(
        "softcap-50",
        "a cap that leaves scores below 8 nearly as they are",
        lengths=(33, 12),
        seed=72,
        exponent=-7,
        softcap=50.0,
    ),
    synthetic(
        "sink",
        "a key of value 0 with a logit for each head, below, at and above the scores: out is smaller, lse "
        "larger, and the logit has a gradient; queries that see no key have it alone",
        lengths=(33, 5),
        key_lengths=(40, 2),
        seed=73,
        heads=(4, 2),
        sinks=(-8.0, 0.0, 1.5, 20.0),
    ),
    synthetic(
        "sink-softcap-window",
        "sink, cap and window at once",
        lengths=(140,),
        seed=74,
        heads=(2, 1),
        exponent=-7,
        window=(31, 0),
        softcap=20.0,
        sinks=(0.25, -3.0),
    ),
    synthetic(
        "small-scale",
        "a softmax scale of 2^-20 makes all weights of a row nearly equal",
        lengths=(40,),
        seed=75,
        softmax_scale=2.0**-20,
    ),
    synthetic(
        "odd-scale",
        "a softmax scale of 0.1, which is no power of two: where it is multiplied shows",
        lengths=(40,),
        seed=76,
        softmax_scale=0.1,
        exponent=-7,
    ),
    synthetic(
        "ones",
        "V is one: out is one to a rounding where the sum of a row adds what is multiplied with V",
        lengths=(200,),
        seed=77,
        fills=(box("v", ONE, tokens=(0, 200)),),
        exponent=-7,
        flags=("ones",),
    ),
    synthetic(
        "lost-mass",
        "one query, a score of 11 in units of log2 and 511 scores of 0, V is one: weights of 2^-11 are "
        "zero in e4m3 without a scale, and a sum that counts them makes out 0.8",
        lengths=(1,),
        key_lengths=(512,),
        seed=78,
        softmax_scale=math.log(2),
        fills=(
            box("q", 0, tokens=(0, 1)),
            box("k", 0, tokens=(0, 512)),
            box("v", ONE, tokens=(0, 512)),
        ),
        plants=(
            Plant(tensor="q", token=0, head=0, channel=0, bits=ONE),
            Plant(tensor="k", token=0, head=0, channel=0, bits=0x4130),
        ),
        flags=("ones",),
    ),
)
