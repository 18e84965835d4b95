"""Cases for the layout of scales: tiles of 128x4 that no permutation leaves as they are."""

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import TENSORS, Distribution
from flamia_ref.golden.suites.synthetic import ONE, box, synthetic

LAYOUTS: tuple[CaseSpec, ...] = (
    synthetic(
        "ladder-d128",
        "scales that differ between nearly all neighbours along tokens, heads and channels; 140 tokens are two "
        "tiles of rows, and five blocks are two tiles of columns where tokens are blocked",
        lengths=(140, 33),
        seed=31,
        heads=(2, 1),
        head_dim=128,
        distribution=Distribution.LADDER,
        exponent=-20,
        flags=("scale-ladder",),
    ),
    synthetic(
        "ladder-d192",
        "six blocks of channels, two tiles of columns the second of which is half padding, and two "
        "tiles of channels where tokens are blocked",
        lengths=(33, 70),
        seed=32,
        head_dim=192,
        distribution=Distribution.LADDER,
        exponent=-20,
        flags=("scale-ladder",),
    ),
    synthetic(
        "ladder-padding",
        "the padding of tiled scales is the byte of NaN: what a kernel computes with it is lost",
        lengths=(33, 5),
        seed=33,
        heads=(4, 2),
        distribution=Distribution.LADDER,
        exponent=-20,
        scale_padding=0xFF,
        flags=("scale-ladder",),
    ),
    synthetic(
        "tails",
        "a document of ones before one of 1024, 48 tokens each: a block that runs over the end of a "
        "document has one scale for both",
        lengths=(48, 48),
        seed=34,
        fills=tuple(
            box(tensor, bits, tokens=(first, first + 48))
            for tensor in TENSORS
            for first, bits in ((0, ONE), (48, 0x4480))
        ),
        softmax_scale=2.0**-24,
    ),
)
