"""Small packed cases in bfloat16, and how far a bfloat16 kernel may be from float64."""

import ml_dtypes
import numpy as np

from tests.adapters import attention64

SCALE = 0.125
# Name -> offsets of the queries, of the keys (None: the same), and the mask.
MASKS = {
    "twins": ([0, 20, 20, 40], None, {"causal": True}),  # one length, so that JAX compiles once
    "causal": ([0, 5, 5, 70], None, {"causal": True}),
    "full": ([0, 5, 5, 70], None, {"causal": False}),
    "bottom-right": ([0, 5, 5, 35], [0, 9, 20, 60], {"causal": True}),
    "top-left": ([0, 5, 5, 35], [0, 9, 20, 60], {"causal": True, "alignment": "top_left"}),
    "window": ([0, 5, 5, 70], None, {"causal": True, "window": (7, 0)}),
    "band": ([0, 5, 70], [0, 5, 80], {"causal": False, "window": (7, 3)}),
    "no-keys": ([0, 5, 20], [0, 0, 30], {"causal": False}),
}


def made(name, *, heads=4, kv_heads=2, channels=64, seed=0):
    """q, k, v, dout and the keywords of the protocol."""
    offsets, offsets_k, mask = MASKS[name]
    rng = np.random.default_rng(seed)
    keys = (offsets if offsets_k is None else offsets_k)[-1]
    shapes = ((offsets[-1], heads), (keys, kv_heads), (keys, kv_heads), (offsets[-1], heads))
    q, k, v, dout = (
        rng.standard_normal((*shape, channels)).astype(ml_dtypes.bfloat16) for shape in shapes
    )
    keywords = {"cu_seqlens": np.int32(offsets), "softmax_scale": SCALE, **mask}
    if offsets_k is not None:
        keywords["cu_seqlens_k"] = np.int32(offsets_k)
    return (q, k, v), dout, keywords


def exact(name, inputs, dout):
    """The results in float64."""
    offsets, offsets_k, mask = MASKS[name]
    return attention64.packed(*inputs, dout, offsets, offsets_k or offsets, SCALE, **mask)


def assert_near(results, expected, *, lse=2e-4):
    """Every result within what rounding P, dS and the results to bfloat16 can do here.

    Values are about 1, a gradient adds up to 65 products: the largest error seen is 0.03, and a wrong mask, head, row
    or scale is off by 0.3 and more.
    """
    for name, values in expected.items():
        found = results[name].astype(np.float64)
        assert found.shape == values.shape, name
        limit = lse if name == "lse" else 0.06
        assert np.array_equal(np.isfinite(found), np.isfinite(values)), name
        finite = np.isfinite(values)
        assert np.abs(found[finite] - values[finite]).max(initial=0) <= limit, name
        assert np.array_equal(found[~finite], values[~finite]), name
