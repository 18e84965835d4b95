"""Cases at the boundaries of quantizers: largest magnitudes, subnormals, zeros, overflow."""

from collections.abc import Iterator

from flamia_ref.golden.case_fields import Fill, Plant
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import TENSORS, Distribution
from flamia_ref.golden.suites.synthetic import DOUBLE, ONE, box, synthetic

# 1.75 and 1.5 times 2^-5. 448 is 1.75 * 2^8, the largest number of e4m3; 6 is 1.5 * 2^2, that of e2m1.
_EDGES = (0x3D60, 0x3D40)
_MINUS = 0x8000


def _edges_of_rows() -> Iterator[Fill]:
    for tensor in TENSORS:
        for group, bits in enumerate(edge + step for edge in _EDGES for step in (0, -1, 1)):
            for first in (0, 16, 32, 48):
                yield box(
                    tensor,
                    bits | (_MINUS if first >= 32 else 0),
                    tokens=(10 * group, 10 * group + 10),
                    channels=(first, first + 1),
                    steps=(DOUBLE, 0, 0),
                )


def _edges_of_columns() -> Iterator[Fill]:
    for tensor in TENSORS:
        for block, step in enumerate((0, -1, 1)):
            token = 32 * block + 5
            yield box(tensor, _EDGES[0] + step, tokens=(token, token + 1), steps=(0, 0, 3 * DOUBLE))


# 2^-133, 2^-130, the largest subnormal, 2^-126; then around 448 * 2^-127, where scale byte 0 ends.
TINY = (0x0001, 0x0008, 0x007F, 0x0080, 0x0400, 0x045F, 0x0460, 0x0461, 0x0480)

_EVERY = len(TINY)
_NEGATIVE_ZERO = 0x8000

QUANTIZERS: tuple[CaseSpec, ...] = (
    synthetic(
        "scale-edges-rows",
        "ten tokens each whose largest magnitude is 448 times a power of two, one bfloat16 less, one "
        "more, and likewise 6 times a power of two, in every block of 16 channels; in channels 32 to 63 "
        "it is negative",
        lengths=(60,),
        seed=21,
        exponent=-16,
        fills=tuple(_edges_of_rows()),
        flags=("scale-edges",),
    ),
    synthetic(
        "scale-edges-columns",
        "three blocks of 32 tokens whose largest magnitude, in every channel, is 448 times a power of "
        "two, one bfloat16 less, and one more",
        lengths=(96,),
        seed=22,
        exponent=-16,
        fills=tuple(_edges_of_columns()),
        flags=("scale-edges",),
    ),
    synthetic(
        "subnormal-tokens",
        "tokens of zeros but for one number from 2^-133 to 2^-118: scale byte 0, both sides of where it "
        "ends, and reciprocals beyond float32",
        lengths=(20,),
        seed=23,
        fills=tuple(box(tensor, 0, tokens=(0, _EVERY)) for tensor in TENSORS),
        plants=tuple(
            Plant(tensor=tensor, token=token, head=0, channel=3, bits=bits)
            for tensor in TENSORS
            for token, bits in enumerate(TINY)
        ),
        flags=("subnormal",),
    ),
    synthetic(
        "zero-blocks",
        "V is zero in the first 32 tokens and -0 in five later ones, K in channels 32 to 63, Q in token "
        "40, the gradient in tokens 33 to 63",
        lengths=(70,),
        seed=24,
        fills=(
            box("v", 0, tokens=(0, 32)),
            box("v", _NEGATIVE_ZERO, tokens=(40, 45)),
            box("k", 0, tokens=(0, 70), channels=(32, 64)),
            box("q", 0, tokens=(40, 41)),
            box("dout", 0, tokens=(33, 64)),
        ),
        flags=("zero-blocks",),
    ),
    synthetic(
        "outliers-heads",
        "one element in 256 is 65536 times larger, four heads over two",
        lengths=(65, 31),
        seed=25,
        heads=(4, 2),
        distribution=Distribution.OUTLIERS,
        exponent=-14,
    ),
    synthetic(
        "channel-outliers",
        "channel 7 of K is 16 and channel 9 of V is -128 in every token, as some models have it: they "
        "set the scales of their blocks",
        lengths=(48,),
        seed=26,
        fills=(
            box("k", 0x4180, tokens=(0, 48), channels=(7, 8)),
            box("v", 0xC300, tokens=(0, 48), channels=(9, 10)),
        ),
    ),
    synthetic(
        "largest-values",
        "V holds the largest bfloat16 in one token: out is finite, and what is made of dP beyond float32 "
        "is compared too",
        lengths=(8, 33),
        seed=27,
        fills=(box("v", 0x7F7F, tokens=(2, 3)),),
        flags=("nan",),
    ),
    synthetic(
        "wide-heads-d128",
        "exponents over 32 binades within a token and 16 between tokens, three heads over one",
        lengths=(64, 9),
        seed=28,
        heads=(3, 1),
        head_dim=128,
        distribution=Distribution.WIDE,
    ),
    synthetic(
        "both-orientations",
        "0.49 stands alone in its token, and beside 1 in its channel: quantized along tokens after "
        "quantization along channels it is another number than quantized once",
        lengths=(32,),
        seed=29,
        fills=tuple(box(tensor, 0, tokens=(0, 1)) for tensor in TENSORS)
        + tuple(box(tensor, ONE, tokens=(5, 6)) for tensor in TENSORS),
        plants=tuple(
            Plant(tensor=tensor, token=0, head=0, channel=channel, bits=0x3EFB)
            for tensor in TENSORS
            for channel in (0, 40)
        ),
    ),
)
