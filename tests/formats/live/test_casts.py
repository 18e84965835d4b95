"""`encode` beside the casts of ml_dtypes, JAX and PyTorch, of numbers of every exponent.

Of a library its rounding and its rule for overflow are stated. NaN is not compared: each has codes of
its own for it, and `encode` has the device's (test_recorded_casts.py). To E8M0 what a power of two
can be near to is compared: positive, and not below the smallest power and a half.
"""

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import encode
from tests.formats.live import inputs, libraries

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
Record = Callable[[str, object], None]
Cast = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def check(cast: Cast, name: str, target: str, dtype: str, overflow: str, record: Record) -> None:
    x = inputs.numbers(inputs.generator(name, target, dtype), inputs.FLOATS[dtype], 50_000)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = x.astype(np.float64)
    compared = wide >= 1.5 * 2.0**-127 if target == "e8m0" else ~np.isnan(wide)
    rounding = "nearest_even"
    if target == "e8m0":
        rounding, x = "nearest_away", np.abs(x)  # a midpoint goes to the larger power
        compared = np.abs(wide) >= 1.5 * 2.0**-127
    x = x[compared]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = cast(x)
    record("numbers", x.size)
    wrong = encode(x, target, rounding=rounding, overflow=overflow) != theirs
    assert not wrong.any(), f"{wrong.sum()} differ, such as {x[wrong][:5]!r}; {inputs.REPEAT}"


@pytest.mark.parametrize("dtype", inputs.FLOATS)
@pytest.mark.parametrize("target", TYPES)
def test_ml_dtypes(target: str, dtype: str, record_property: Record) -> None:
    check(
        lambda x: x.astype(TYPES[target]).view(np.uint8),
        *("ml_dtypes", target, dtype, "native", record_property),
    )


@pytest.mark.parametrize(
    ("target", "dtype"),
    libraries.daily(
        itertools.product(("e4m3", "e5m2", "e2m1", "e8m0"), inputs.FLOATS),
        *(("e4m3", "f32"), ("e5m2", "bf16"), ("e2m1", "f16"), ("e8m0", "f32")),
    ),
)
def test_jax(target: str, dtype: str, record_property: Record) -> None:
    jnp = pytest.importorskip("jax.numpy")
    check(
        lambda x: np.asarray(jnp.asarray(x).astype(TYPES[target])).view(np.uint8),
        *("jax", target, dtype, "native", record_property),
    )
