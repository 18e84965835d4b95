"""Fixed-point numbers of 64 bits: products and roundings against Python integers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref.arithmetic import correct_fixed
from tests.independent import float32 as independent

EDGES = (0, 1, 2, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def wide(source: np.random.Generator, count: int) -> npt.NDArray[np.uint64]:
    """Random numbers of every length."""
    length = source.integers(0, 64, count, dtype=np.uint64)
    return source.integers(0, 1 << 64, count, dtype=np.uint64) >> length


def on_jax(function: Any, *operands: Any) -> npt.NDArray[Any]:
    with jax.enable_x64(True):
        return np.asarray(_backend.jit(function)(*(jnp.asarray(x) for x in operands)))


def test_high() -> None:
    source = np.random.default_rng(40)
    a, b = wide(source, 4000), wide(source, 4000)
    first, second = np.meshgrid(np.array(EDGES, dtype=np.uint64), np.array(EDGES, dtype=np.uint64))
    a, b = np.concatenate([a, first.ravel()]), np.concatenate([b, second.ravel()])
    found = correct_fixed.high(a, b)
    for left, right, result in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        exact = left * right
        assert result << 64 <= exact < (result + 3) << 64
    np.testing.assert_array_equal(on_jax(correct_fixed.high, a, b), found)


def test_to_float32() -> None:
    source = np.random.default_rng(41)
    number = wide(source, 3000)
    # All ones carry into the next binade; what lies just beside a tie does not count as one.
    some = [(1 << 64) - 1, (1 << 63) - 1, 1 << 63, 1 << 32, (1 << 32) + (1 << 8) - 1]
    ties = [(1 << 63) + (k << 39) + d for k in (1, 3, 101) for d in (-2, -1, 1, 2)]
    number = np.concatenate([number, np.array(some + ties, dtype=np.uint64)])
    number = number[number >= 1 << 32]
    unit = source.integers(-150, 60, number.size, dtype=np.int32)
    found = correct_fixed.to_float32(number, unit)
    for one, exponent, result in zip(number.tolist(), unit.tolist(), found.tolist(), strict=True):
        assert result == independent.nearest(one * independent.power_of_two(exponent))
    np.testing.assert_array_equal(on_jax(correct_fixed.to_float32, number, unit), found)
