"""`encode` beside the casts of PyTorch, which saturates in E4M3 and not in E5M2."""

import pytest

from tests.formats.live import inputs, libraries
from tests.formats.live.test_casts import Record, check

libraries.need("torch")


@pytest.mark.parametrize("dtype", inputs.FLOATS)
@pytest.mark.parametrize(
    ("target", "overflow"), [("e4m3", "saturate"), ("e5m2", "native"), ("e8m0", "native")]
)
def test_casts(target: str, overflow: str, dtype: str, record_property: Record) -> None:
    import torch

    kinds = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu"}
    kind = getattr(torch, kinds[target])
    check(
        lambda x: libraries.as_torch(x).to(kind).view(torch.uint8).numpy(),
        *("torch", target, dtype, overflow, record_property),
    )
