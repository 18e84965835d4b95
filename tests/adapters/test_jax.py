"""JAX's attention by XLA for real, against float64."""

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.adapters import jax_cudnn
from flamia_ref.adapters.refusal import Refused
from tests.adapters import cases

jax = pytest.importorskip("jax")


@pytest.mark.parametrize(
    "name",
    # JAX compiles each operation of each length: half a minute a case.
    [
        "twins",
        *(
            pytest.param(x, marks=pytest.mark.nightly)
            for x in ("causal", "top-left", "window", "no-keys")
        ),
    ],
)
def test_forward_and_backward_are_those_of_float64(name):
    inputs, dout, keywords = cases.made(name)
    results = jax_cudnn.bf16_xla(*inputs, dout=dout, **keywords)
    assert results["out"].dtype == ml_dtypes.bfloat16
    assert results["lse"].dtype == np.float32
    # The LSE comes rounded to bfloat16: below 8, half a unit is 2^-6.
    cases.assert_near(results, cases.exact(name, inputs, dout), lse=2**-6 + 2e-4)


@pytest.mark.nightly
def test_rows_that_see_no_key_are_the_mean_of_v():
    """What `limits` says of it: JAX masks with a large number, so it cannot know that a row is dead."""
    inputs, _, keywords = cases.made("bottom-right")
    keywords["cu_seqlens"], keywords["cu_seqlens_k"] = np.int32([0, 5]), np.int32([0, 2])
    q, k, v = inputs[0][:5], inputs[1][:2], inputs[2][:2]
    out = jax_cudnn.bf16_xla(q, k, v, **keywords)["out"]
    mean = v.astype(np.float64).mean(0).repeat(2, 0)
    assert np.abs(out[0].astype(np.float64) - mean).max() < 0.02


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_cudnn_is_refused_without_a_gpu():
    inputs, _, keywords = cases.made("causal")
    with pytest.raises(Refused) as refused:
        jax_cudnn.bf16(*inputs, **keywords)
    assert refused.value.note == "needs a GPU, and JAX runs on cpu"
