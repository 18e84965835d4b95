"""PyTorch's attention for real, on the CPU, against float64: documents, masks, alignments, windows, grouped heads."""

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.adapters import torch_sdpa
from flamia_ref.adapters.refusal import Refused
from tests.adapters import cases

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other kernels run")


@pytest.mark.parametrize("name", cases.MASKS)
def test_forward_and_backward_are_those_of_float64(name):
    inputs, dout, keywords = cases.made(name)
    results = torch_sdpa.bf16(*inputs, dout=dout, **keywords)
    assert results["out"].dtype == ml_dtypes.bfloat16
    assert results["lse"].dtype == np.float32
    expected = cases.exact(name, inputs, dout)
    dead = ~np.isfinite(expected["lse"]) & np.isfinite(results["lse"])
    # PyTorch gives rows that its mask kills an LSE of 0.
    assert not dead.any() or name in ("bottom-right", "band")
    assert np.all(results["lse"][dead] == 0)
    results["lse"] = np.where(dead, -np.inf, results["lse"])
    cases.assert_near(results, expected)


def test_without_dout_there_are_no_gradients():
    inputs, _, keywords = cases.made("causal")
    assert set(torch_sdpa.bf16(*inputs, **keywords)) == {"out", "lse"}


@pytest.mark.parametrize("kernel", [torch_sdpa.bf16_efficient, torch_sdpa.bf16_cudnn])
def test_kernels_for_cuda_are_refused_without_a_device(kernel):
    inputs, _, keywords = cases.made("causal")
    with pytest.raises(Refused) as refused:
        kernel(*inputs, **keywords)
    assert refused.value.note == "needs a CUDA device, and torch sees none"
