"""What only the backend knows: refusals, and that the two libraries are told apart."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from flamia_ref import _backend


@pytest.mark.parametrize("flag", ["=true", "", "=1"])
def test_fast_math_is_refused(flag: str) -> None:
    program = (
        "import jax.numpy as jnp\n"
        "from flamia_ref.arithmetic import float32\n"
        "x = jnp.ones(3, jnp.uint32)\n"
        "float32.add(x, x)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": f"--xla_cpu_enable_fast_math{flag}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "RuntimeError: XLA_FLAGS has --xla_cpu_enable_fast_math" in result.stderr


def test_plain_arrays() -> None:
    array = np.arange(3)
    assert _backend.plain("x", array) is array
    assert type(_backend.plain("x", array.view(np.memmap))) is np.ndarray
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        matrix = np.asmatrix(array)
    for wrong in (np.ma.masked_array(array), matrix):
        with pytest.raises(TypeError, match=r"x is a .*; pass a plain array"):
            _backend.plain("x", wrong)


def test_a_checked_gather() -> None:
    array = np.arange(4)
    assert _backend.gather(array, np.array([3, 0])).tolist() == [3, 0]
    for index in ([4], [-1]):
        with pytest.raises(IndexError, match=r"outside 0\.\.3"):
            _backend.gather(array, np.array(index))
