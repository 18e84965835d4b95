"""The forward against an implementation that shares no code with it: Python integers from the written steps."""

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import forward_stages
from tests.attention.samples import BF16, any_bits, assert_same, bell, wide, with_specials
from tests.independent import attention as independent

CASES = {
    "one token": (bell, {"lengths": [1], "heads": 1, "kv_heads": 1, "head_dim": 64}),
    "straddling": (bell, {"lengths": [5, 0, 33, 2], "heads": 2, "kv_heads": 1, "head_dim": 64}),
    "three over one": (bell, {"lengths": [17, 14], "heads": 3, "kv_heads": 1, "head_dim": 32}),
    "head_dim 128": (bell, {"lengths": [20], "heads": 1, "kv_heads": 1, "head_dim": 128}),
    "head_dim 40": (bell, {"lengths": [11], "heads": 2, "kv_heads": 2, "head_dim": 40}),
    "sharp": (bell, {"lengths": [40], "heads": 2, "kv_heads": 1, "head_dim": 64, "spread": 6.0}),
    "flat": (bell, {"lengths": [33], "heads": 1, "kv_heads": 1, "head_dim": 64, "spread": 0.01}),
    "wide": (wide, {"lengths": [32, 8], "heads": 2, "kv_heads": 2, "head_dim": 64}),
    "any bits": (any_bits, {"lengths": [31, 9], "heads": 2, "kv_heads": 1, "head_dim": 64}),
    "specials": (with_specials, {"lengths": [13, 20], "heads": 2, "kv_heads": 2, "head_dim": 64}),
    "two key tiles": (
        bell,
        {"lengths": [150], "heads": 1, "kv_heads": 1, "head_dim": 32, "spread": 2.0},
    ),
    "two key tiles, wide": (wide, {"lengths": [140], "heads": 1, "kv_heads": 1, "head_dim": 32}),
    "two key tiles, specials": (
        with_specials,
        {"lengths": [140], "heads": 1, "kv_heads": 1, "head_dim": 32},
    ),
}


def check(q, k, v, cu_seqlens, *, library: str, causal: bool, softmax_scale=None) -> None:
    expected = independent.forward(
        *(x.view(np.uint16) for x in (q, k, v)),
        cu_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    if library == "jax":
        import jax.numpy as jnp

        q, k, v = (jnp.asarray(x) for x in (q, k, v))
    result = attention.forward(
        q,
        k,
        v,
        "flamia-mxfp8-folded",
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        trace=forward_stages,
    )
    for stage in forward_stages:
        want = expected[stage]
        as_float32 = stage in ("s", "p", "row_max", "row_sum", "o")
        if as_float32:
            want = (
                [x.view(np.float32) for x in want]
                if isinstance(want, list)
                else want.view(np.float32)
            )
        assert_same(result.trace[stage], want, stage)
    assert_same(np.asarray(result.out).astype(BF16), _canonical_bf16(expected["out"]), "out")
    assert_same(result.lse, expected["lse"].view(np.float32), "lse")


def _canonical_bf16(pattern: np.ndarray) -> np.ndarray:
    """bfloat16 values whose NaN is what a float32 NaN converts to."""
    values = pattern.view(BF16)
    return values.astype(np.float32).astype(BF16)


@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES)
def test_every_stage(case: str, causal: bool, library: str) -> None:
    make, shape = CASES[case]
    seed = sorted(CASES).index(case)
    check(*make(seed, **shape), library=library, causal=causal)


@pytest.mark.parametrize("scale", [0.125, 1.0, 3.7e-5, 40.0, 1e30])
def test_softmax_scale(scale: float) -> None:
    make = any_bits if scale > 1 else bell
    check(
        *make(3, lengths=[24], heads=1, kv_heads=1, head_dim=32),
        library="numpy",
        causal=True,
        softmax_scale=scale,
    )


@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("score", [-1.5 * 2.0**31, 1.5 * 2.0**31])
def test_scores_beyond_the_split(score: float, library: str) -> None:
    """t is rounded to whole powers of two there: the only exponential is 0 or infinity, and the row is not dead."""
    q, v = np.zeros((1, 1, 32), BF16), np.ones((1, 1, 32), BF16)
    q[0, 0, 0] = score
    check(q, v, v, [0, 1], library=library, causal=True, softmax_scale=1.0)
    result = attention.forward(q, v, v, "flamia-mxfp8-folded", softmax_scale=1.0)
    assert np.isnan(result.out).all()


def test_score_factor() -> None:
    from flamia_ref.attention.inputs import score_factor

    rng = np.random.default_rng(0)
    scales = [1 / np.sqrt(d) for d in range(1, 257)]
    scales += [float(x) for x in np.exp2(rng.uniform(-120, 120, 200))]
    for scale in scales:
        assert int(score_factor(float(scale))) == independent.score_factor(float(scale)), scale
