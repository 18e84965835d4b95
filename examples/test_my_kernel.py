import pytest

from examples.kernels import simulator as my_kernel
from flamia_ref import golden


@pytest.mark.parametrize("case", golden.load("pack"), ids=str)
def test_my_kernel(case):
    report = golden.check(case, my_kernel)
    assert report.passed, str(report)
