"""Every rule against what changing one element at a time shows, with all elements free and with some known."""

import zlib

import jax
import numpy as np
import pytest

from tests.leakage.flow.brute import compared, compiled
from tests.leakage.flow.cases import Case, cases, dtype_of, pool_of

CASES = {case.name: case for case in cases()}


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


@pytest.mark.parametrize("name", CASES)
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
        missed, _ = compared(function, *drawn(case, 0.5), trials=3, fine=True)
        assert missed == 0
