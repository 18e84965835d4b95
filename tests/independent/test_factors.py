"""The three roundings of softmax_scale * log2(e)."""

import math

import numpy as np
import pytest

from tests.independent import factors


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def test_log2_e() -> None:
    assert math.log2(math.e) == factors.LOG2_E_FLOAT64
    assert bits(math.log2(math.e)) == factors.LOG2_E_FLOAT32


def test_powers_of_two_agree() -> None:
    for factor in (factors.exact_product, factors.float64_product, factors.float32_product):
        assert factor(1.0) == 0x3FB8AA3B
        assert factor(0.125) == 0x3FB8AA3B - (3 << 23)


def test_products_by_numpy() -> None:
    differ = 0
    for head_dim in range(1, 300):
        scale = 1 / math.sqrt(head_dim)
        assert factors.float64_product(scale) == bits(scale * math.log2(math.e))
        wanted = int((np.float32(scale) * np.float32(math.log2(math.e))).view(np.uint32))
        assert factors.float32_product(scale) == wanted
        differ += wanted != factors.exact_product(scale)
        assert abs(factors.exact_product(scale) - factors.float64_product(scale)) <= 1
    assert differ > 50


def at_a_boundary() -> list[float]:
    """Scales whose exact product with log2(e) is next to the middle of two float32."""
    middles = [1 + (2 * i + 1) * 2.0**-24 for i in range(40)]
    return [middle / math.log2(math.e) for middle in middles]


def test_float64_product_rounds_twice() -> None:
    """In float64 such a product may be the middle itself, which rounds to even."""
    both = [(factors.exact_product(x), factors.float64_product(x)) for x in at_a_boundary()]
    assert 5 < sum(x != y for x, y in both) < 35
    assert all(twice % 2 == 0 for once, twice in both if once != twice)


def test_scale_itself() -> None:
    assert factors.rounded(0.1) == bits(0.1)
    for bad in (0.0, -1.0, math.inf, math.nan):
        for factor in (factors.float64_product, factors.float32_product, factors.rounded):
            with pytest.raises(ValueError, match="softmax_scale"):
                factor(bad)
