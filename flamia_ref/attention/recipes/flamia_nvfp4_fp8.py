"""`flamia-nvfp4-fp8` and `flamia-nvfp4-fp8-ue4m3`: S in FP4, everything else in MXFP8 without blocks that span tokens.

q and k enter S as e2m1 in blocks of 16 channels of one token, and dK and dQ as e4m3 with one scale a token that is
folded into dS. The e4m3 values are made from the FP4 ones, never from q and k. With power-of-two scales for the blocks
of 16 both are the same numbers; with UE4M3 scales they have up to 6 significant bits, which e4m3 does not hold, so that
q and k then have two values (C2 is broken). No scale depends on more than one token.

The steps of `flamia-nvfp4-fp8`; its notation and what is not said here are those of `flamia-mxfp8-folded`. A and B are
the largest magnitudes of a token's head vector and of a block of 16 of its channels, counted from channel 0, the last
block holding what is there. byte(x) is the smallest integer s from 0 to 254 with x <= 6 * 2^(s - 127); of 0 it is 0, of
infinity 254.

1. q and k in bfloat16 become e2m1 codes, one byte for 16 channels and, not in S, one for the token. T = byte(A). The
   block's byte is s = max(byte(B), T - 14, 0). The code is e2m1 of shift(x, 127 - s), to nearest even, beyond 6 to 6
   with its sign; a zero keeps its sign. A NaN in the token and head makes T and all its s 255 and all its codes 7.
   v becomes codes and one byte a token and head as there.
2. S = mxf4nvf4 with E8M0 scales for 16 elements, over ascending channels, accumulator +0, for every pair. Channels are
   filled up to a multiple of 64 with codes 0 and bytes 0.
3. to 10. as there.
11. dQ: k is promoted. Its token byte is t = max(T - 6, 0), 255 for T = 255. Its e4m3 code is the FP4 value times
    2^(127 - t), which is (e2m1 value) 2^(s - t): exact, since s - t is -8 to 6. T = 255 gives code 0x7f. Then as there
    with these codes and sK = t.
12. dK: q is promoted likewise, then as there with these codes and sQ = t. dV as there.

Why 14 powers: 6 * 2^6 is the largest e2m1 value times a power of two that e4m3 holds, 0.5 * 2^-8 = 2^-9 the smallest,
and the powers between them are those of one token's blocks. A block that is smaller than that beside its token loses
bits in S already, so that both products still take the same value.

The steps of `flamia-nvfp4-fp8-ue4m3` are the same but for these.

1. T is the smallest integer from 0 to 254 with A <= 2688 * 2^(T - 127), 2688 = 6 * 448; of 0 it is 0, of infinity 254.
   x' = shift(x, 127 - T), and B' the largest magnitude of x' in the block. The block's scale is fl(B' / 6) in UE4M3, to
   nearest even, beyond 448 to 448. The code is e2m1 of fl(x' / scale), both quotients by IEEE 754, to nearest even,
   beyond 6 to 6 with its sign. Where the scale is 0 it is a zero with the sign of x. A NaN in the token and head makes
   T 255, all its scales 0x7f and all its codes 7.
2. S = shift(R, (Tq - 127) + (Tk - 127)) with R = mxf4nvf4 with UE4M3 scales for 16 elements, over ascending channels,
   accumulator +0. Channels are filled up with codes 0 and scales 0.
11. k is promoted. y = shift(code value * scale value, T - 127), the product exact, NaN where T = 255. y becomes codes
    and one byte t a token and head: `rule`, block (1, all). Then as there with these codes and sK = t.
12. q likewise, sQ = t.
"""

from dataclasses import replace

from flamia_ref.attention.product import Operand, Product, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes._sources import assumed, derived, instruction
from flamia_ref.attention.recipes.flamia_mxfp8_folded import FLAMIA_MXFP8_FOLDED as _FOLDED

_FP4 = "sm100.tcgen05.mxf4nvf4"


def _blocks_of_16(preset: str) -> Operand:
    """q or k in S: one scale for 16 channels of a token, held to those of the token."""
    return Operand(format=preset, block=(1, 16), scope=Scope.TOKEN)


def _promoted(use: Use, folded_into: Use) -> Operand:
    """The same values in e4m3 with one scale a token and head."""
    return Operand(
        format="te-mx-e4m3",
        block=(1, "all"),
        scope=Scope.TOKEN,
        promoted_from=use,
        scale_folded_into=folded_into,
    )


_OURS = assumed("our choice within arXiv:2611.03344, an abstract")
_ONE_TOKEN = derived("a scale is a function of one token: docs/decisions/030-folded-scales.md")
_STEPS = {
    **_FOLDED.steps,
    "s.instruction": instruction(_FP4),
    "s.left.scope": _ONE_TOKEN,
    "s.right.scope": _ONE_TOKEN,
    "dq.right.promoted_from": _OURS,
    "dk.right.promoted_from": _OURS,
}
_EXACT = derived("e4m3 holds every e2m1 value times 2^-8 to 2^6, tests/attention/test_promotion.py")

FLAMIA_NVFP4_FP8_UE4M3 = replace(
    _FOLDED,
    name="flamia-nvfp4-fp8-ue4m3",
    s=Product(
        left=_blocks_of_16("flamia-fp4-ue4m3"),
        right=_blocks_of_16("flamia-fp4-ue4m3"),
        instruction=_FP4,
    ),
    dq=replace(_FOLDED.backward.dq, right=_promoted(Use.S_K, Use.DQ_DS)),
    dk=replace(_FOLDED.backward.dk, right=_promoted(Use.S_Q, Use.DK_DS)),
    steps=_STEPS,
)

FLAMIA_NVFP4_FP8: Recipe = replace(
    FLAMIA_NVFP4_FP8_UE4M3,
    name="flamia-nvfp4-fp8",
    s=Product(
        left=_blocks_of_16("flamia-fp4-e8m0"),
        right=_blocks_of_16("flamia-fp4-e8m0"),
        instruction=_FP4,
    ),
    steps={**_STEPS, "dq.right.promoted_from": _EXACT, "dk.right.promoted_from": _EXACT},
)
