"""Presets against what libraries really do (tests/oracles/quantizers), where these agree.

Each comparison states the blocks it leaves out, and is made on every other block. Left out are
blocks with NaN or infinity, where each library does something else, and:

- amax above 0 whose scale code is 0: torchao 0.18.0 divides by 2^-126 or 1 there, triton_kernels
  gives code 1, and JAX on CPU flushes the quotient amax / 448 wherever it is subnormal;
- libraries built on log2 in float32, where that is an integer although its argument is no power of
  two: torchao 0.18.0 RCEIL (argument amax / 448, above the power), gfloat (argument amax, below it);
- zero blocks under JAX on CPU, which gives NaN elements (0 / 0).
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import PRESETS, BlockFormat, quantize
from tests.formats.stored import quantizers

TE, OCP = PRESETS["te-mx-e4m3"], PRESETS["ocp-mx-floor-e4m3"]
TORCHAO, TRITON = "mx-torchao-0.18.0-e4m3", "mx-triton_kernels-018a674f-e4m3"
Amax = npt.NDArray[np.float32]
Predicate = Callable[[Amax], npt.NDArray[np.bool_]]


def log2_misleads(x: Amax, side: str) -> npt.NDArray[np.bool_]:
    """Where x is above (or below) a power of two, and log2 in float32 is that of the power."""
    with np.errstate(divide="ignore"):
        logarithm = np.log2(x.astype(np.float64)).astype(np.float32)
    mantissa = np.frexp(x)[0]  # 0.5 at a power of two, close to 1 below the next
    is_above = (mantissa > 0.5) & (mantissa < 0.75)
    return (logarithm == np.round(logarithm)) & (is_above if side == "above" else mantissa > 0.75)


def above(smallest: float) -> Predicate:
    return lambda amax: (amax == 0) | (amax >= np.float32(smallest))


def quotient(amax: Amax) -> Amax:
    with np.errstate(under="ignore"):
        return amax / np.float32(448)


def rceil(amax: Amax) -> npt.NDArray[np.bool_]:
    return (amax == 0) | (quotient(amax) > np.float32(2.0**-127))


def rceil_by_log2(amax: Amax) -> npt.NDArray[np.bool_]:
    return rceil(amax) & ~log2_misleads(quotient(amax), "above")


def floor_by_log2(amax: Amax) -> npt.NDArray[np.bool_]:
    return ~log2_misleads(amax, "below")


CASES: dict[str, tuple[BlockFormat, Predicate]] = {
    f"{TORCHAO}-rceil": (TE, rceil_by_log2),
    f"{TRITON}-round_up": (TE, rceil),
    "mx-jax-0.10.2-e4m3-scaled_dot": (TE, lambda amax: amax >= np.float32(448 * 2.0**-126)),
    f"{TORCHAO}-floor": (OCP, above(2.0**-118)),
    "mx-gfloat-0.5.2-e4m3": (OCP, floor_by_log2),
    # The rules and policies that no preset has yet.
    f"{TORCHAO}-ceil": (dataclasses.replace(OCP, rule="ceil"), above(2.0**-119 * (1 + 2.0**-23))),
    f"{TORCHAO}-even": (dataclasses.replace(OCP, rule="even"), above(2.0**-118)),
    f"{TRITON}-round_down": (
        dataclasses.replace(OCP, underflow="flush"),
        # It divides amax by 2^8 in float32, which rounds just below 2^-118 up to 2^-126.
        lambda amax: amax != np.nextafter(np.float32(2.0**-118), np.float32(0)),
    ),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("file", CASES)
def test_against_libraries(file: str, dtype: str) -> None:
    stored = quantizers()
    block_format, contract = CASES[file]
    x = stored["f32_bits"].view(np.float32)
    if dtype == "bf16":
        with np.errstate(invalid="ignore"):
            x = x.astype(ml_dtypes.bfloat16)
    tensor = quantize(x, block_format)
    wide = x.astype(np.float32)
    compared = np.isfinite(wide).all(axis=1) & contract(np.abs(wide).max(axis=1))
    place = stored["files"].tolist().index(file)
    same = (tensor.codes == stored[f"element_codes_{dtype}"][place]).all(axis=1)
    same &= tensor.scales[:, 0] == stored[f"scale_codes_{dtype}"][place]
    assert stored["tags"][compared & ~same].tolist() == []
    assert compared.sum() >= 1700


def test_what_is_left_out_is_left_out_for_a_reason() -> None:
    """Every excluded neighbourhood holds a block where the library differs."""
    stored = quantizers()
    x = stored["f32_bits"].view(np.float32)
    finite = np.isfinite(x).all(axis=1)
    amax = np.abs(np.where(finite[:, None], x, np.float32(0))).max(axis=1)
    for file, (block_format, contract) in CASES.items():
        tensor = quantize(x, block_format)
        place = stored["files"].tolist().index(file)
        differs = (tensor.codes != stored["element_codes_f32"][place]).any(axis=1)
        differs |= tensor.scales[:, 0] != stored["scale_codes_f32"][place]
        outside = finite & ~contract(amax)
        assert differs[outside].any(), file
        if file != "mx-gfloat-0.5.2-e4m3":  # log2 happens to be right at a few of those
            assert differs[outside].mean() > 0.7, file
