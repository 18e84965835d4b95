"""Cases in which every sum is exact, so that any order of additions gives the same bits.

Q, K, V and dO are small integers times powers of two, and with ln 2 as the scale the exponent of a
weight is a score. tests/golden/test_exact_cases.py proves it of each sum, by integers.
"""

import math

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.suites.synthetic import ONE, box, synthetic

EXACT: tuple[CaseSpec, ...] = (
    synthetic(
        "exact-uniform",
        "Q is zero and no mask: 64 equal weights, integers of -3 to 3 in K, V and dO",
        lengths=(64,),
        seed=91,
        causal=False,
        softmax_scale=math.log(2),
        distribution=Distribution.INTEGERS,
        exponent=0,
        fills=(box("q", 0, tokens=(0, 64)),),
        flags=("exact",),
    ),
    synthetic(
        "exact-scores",
        "16 keys with the score 1 and 32 with 0: weights of 1 and 1/2, whose sum is 32; V and the "
        "gradient are integers of -3 to 3",
        lengths=(48,),
        seed=92,
        causal=False,
        softmax_scale=math.log(2),
        distribution=Distribution.INTEGERS,
        exponent=0,
        fills=(
            box("q", 0, tokens=(0, 48)),
            box("q", ONE, tokens=(0, 48), channels=(0, 1)),
            box("k", 0, tokens=(0, 48)),
            box("k", ONE, tokens=(0, 16), channels=(0, 1)),
            box("dout", 0, tokens=(0, 48), channels=(2, 64)),
        ),
        flags=("exact",),
    ),
    synthetic(
        "exact-tiles",
        "Q is zero, V and dO are one: the sums over 256 keys and two tiles are counts",
        lengths=(256,),
        seed=93,
        softmax_scale=math.log(2),
        distribution=Distribution.INTEGERS,
        exponent=0,
        fills=(
            box("q", 0, tokens=(0, 256)),
            box("v", ONE, tokens=(0, 256)),
            box("dout", ONE, tokens=(0, 256)),
        ),
        flags=("exact", "ones"),
    ),
)
