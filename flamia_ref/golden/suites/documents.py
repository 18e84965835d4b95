"""Cases for the shapes of packed documents: around a tile's end, straddling, short, empty, real."""

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.suites.synthetic import synthetic, with_flags

_STRADDLING = (5, 28, 33, 64, 127, 2)

DOCUMENTS: tuple[CaseSpec, ...] = (
    synthetic(
        "lengths-around-128",
        "documents of 127, 128 and 129 tokens: both sides of a tile's end, and one key in a tile of its "
        "own; the second starts inside a block of the packed tensor",
        lengths=(127, 129, 128),
        seed=41,
    ),
    synthetic(
        "straddling",
        "no document but the first starts at a multiple of 32, two run over a multiple of 128",
        lengths=_STRADDLING,
        seed=42,
        heads=(2, 1),
    ),
    synthetic(
        "straddling-full",
        "the same without a causal mask: every query sees the partial block at its document's end",
        lengths=_STRADDLING,
        seed=43,
        heads=(2, 2),
        causal=False,
        exponent=-7,
    ),
    synthetic(
        "short-documents",
        "sixty documents of 0 to 3 tokens: more documents than a tile has blocks, empty ones in a row "
        "and at both ends",
        lengths=(0, 0, *(index * index % 4 + index % 3 for index in range(57)), 0),
        seed=44,
        heads=(2, 1),
    ),
    synthetic(
        "no-tokens",
        "three documents and no token: results of shape (0, heads, head_dim), and no error",
        lengths=(0, 0, 0),
        seed=45,
    ),
    synthetic(
        "one-token",
        "a single token, whose weight is one: out is V, lse its score, dV the sum of dO over heads, each "
        "to the rounding of the recipe",
        lengths=(1,),
        seed=46,
        heads=(2, 1),
    ),
    synthetic(
        "four-tiles-d128",
        "385 tokens: three tiles, and one of a single key",
        lengths=(385,),
        seed=47,
        head_dim=128,
        exponent=-7,
    ),
    with_flags(
        CaseSpec(
            name="smollm2-layer28",
            why=(
                "real activations of a late layer, with larger outliers: two documents of 64 and 12 "
                "tokens, the three query heads of the second key/value head"
            ),
            lengths=(64, 12),
            heads=3,
            kv_heads=1,
            head_dim=64,
            causal=True,
            softmax_scale=0.125,
            distribution=Distribution.RECORDED,
            seed=1,
            exponent=0,
        ),
        ("real",),
    ),
)
