"""The kernels in a continuous integration: ``pytest examples/triton/test_golden.py --flamia-pack pack``."""

import pytest

pytest.importorskip("triton.language", reason="needs PyTorch and Triton")


def test_golden(golden_case):
    from examples.triton.protocol import attention, instruction

    golden_case.check(attention, instruction=instruction())
