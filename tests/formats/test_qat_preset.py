"""`cudnn-qat-nvfp4` against the steps of the kernel it is named after, with exact rationals in place of float32.

The steps are those of _quantize_nvfp4 in nvidia-cudnn-frontend 1.32.0 (sdpa/bwd/qat/_nvfp4.py).
"""

import numpy as np

from flamia_ref.formats import PRESETS, dequantize, quantize
from tests.independent import codes, nvfp4

QAT = "cudnn-qat-nvfp4"


def blocks() -> np.ndarray:
    """Blocks of 16 over all exponents, some beside the midpoints of codes and of scales, odd ones at the end."""
    rng = np.random.default_rng(5)
    bell = rng.standard_normal((300, 16)) * np.exp2(rng.integers(-130, 128, (300, 1)))
    # Every scale times half steps of e2m1, whose quotients are ties, beside an amax that gives the scale.
    scales = np.array([codes.decode(code, codes.E4M3) for code in range(1, 0x7F)], float)
    ties = scales[:, None] * np.array(
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -1.25, -5, 0, -0.0, 6, 1, 2]
    )
    halfway = np.zeros((125, 16))
    halfway[:, 0] = 3 * (scales[1:] + scales[:-1])  # amax / 6 is between two scales
    halfway[:, 1] = scales[1:]
    odd = np.zeros((6, 16))
    odd[0, 0], odd[1, :], odd[2, :2] = np.nan, np.nan, (np.inf, -5)
    odd[3, :3], odd[4, 0] = (-np.inf, np.nan, 448), -0.0
    with np.errstate(over="ignore", under="ignore"):
        return np.concatenate([bell, ties, halfway, odd]).astype(np.float32)


def test_every_block() -> None:
    x = blocks()
    found = quantize(x, QAT)
    wanted = nvfp4.rows(x.view(np.uint32).tolist())
    np.testing.assert_array_equal(found.scales, np.array(wanted.scales))
    np.testing.assert_array_equal(found.codes, np.array(wanted.codes))
    values = np.array(nvfp4.values(wanted), np.uint32) << 16
    np.testing.assert_array_equal(np.asarray(dequantize(found)).view(np.uint32), values)


def test_where_it_differs_from_others_of_one_level() -> None:
    """A block below 6 2^-10 has no scale in SageAttention3, which also multiplies by a reciprocal."""
    small = np.full((1, 16), 2.0**-10, np.float32)
    assert not np.asarray(dequantize(quantize(small, "sage3-nvfp4"))).any()
    assert (np.asarray(dequantize(quantize(small, QAT))) == small).all()
    tie = np.array([[2.8125, 0.5859375, *[0.0] * 14]], np.float32)  # 0.5859375 / 0.46875 is 1.25
    assert quantize(tie, QAT).codes[0, 1] == 2
    assert quantize(tie, "sage3-nvfp4").codes[0, 1] == 3
    assert PRESETS[QAT].tensor_scale is None
