"""Every rule against what changing one element at a time shows, with all elements free and with some known."""

import re
import zlib

import jax
import numpy as np
import pytest

from tests.leakage.flow.brute import compared, compiled
from tests.leakage.flow.cases import CASES
from tests.leakage.flow.cases.case import Case, dtype_of, pool_of

# A case of each kind is daily; other dtypes and other functions by the same rule are not.
_MORE = re.compile(
    r".+-(int8|uint8|int64|int4|bfloat16|float64|float16|float8\w*|bool)|\w+-to-\w+|from-.+"
    r"|(exp2|expm1|log1p|tanh|sin|cos|atan|asinh|logistic|erf|cbrt|rsqrt|log2|floor|ceil|sign)"
    r"|scatter-(multiply|min|max|subtract).*|random-(split|legacy|wrapped)|permutation|conv-(strides|groups|numbers)"
    r"|(cumprod|cummin|median|argmin|min|prod)|bitcast-(uint16|int8|float64|bfloat16|uint32).*"
)
_DAILY = re.compile(
    r"(shift_right_arithmetic|shift_left)-uint8|div-int8|mul-uint4|eq-bfloat16|float32-to-(int8|uint64|int4)"
    r"|bfloat16-to-int4|int4-to-int32|from-bfloat16|reduce_or-bool|bitwise_and-bool|bitcast-uint32-uint8"
)


def _is_daily(name: str) -> bool:
    return bool(_DAILY.fullmatch(name)) or not _MORE.fullmatch(name)


NAMES = [pytest.param(name, marks=() if _is_daily(name) else pytest.mark.nightly) for name in CASES]


def drawn(case: Case, share: float) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Operands, which of their elements are free, and what those may be."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    arrays, free, pools = [], [], []
    for place, (shape, dtype) in enumerate(case.operands):
        pool = pool_of(case, place)
        if place in case.fixed:
            arrays.append(np.asarray(case.fixed[place]).astype(dtype_of(dtype)))
            free.append(np.zeros(shape, dtype=np.bool_))
        else:
            arrays.append(rng.choice(pool, size=shape))
            free.append(np.asarray(rng.random(shape) < share))
        pools.append(pool)
    return arrays, free, pools


@pytest.mark.parametrize("name", NAMES)
def test_rule(name: str) -> None:
    case = CASES[name]
    function = compiled(case.function)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        # What is claimed to be exact is looked for longer.
        trials = 60 if case.exact else 8
        missed, more = compared(function, *drawn(case, 1.1), trials=trials, fine=case.fine)
        assert missed == 0
        if case.exact:
            assert more == 0
        for fine in (False, True):
            missed, _ = compared(function, *drawn(case, 0.5), trials=2, fine=fine)
            assert missed == 0
