"""The rows of product_rows against MMA-Sim itself, where it is installed (mmasim 2.1.1, with torch).

It is not among our dependencies. To run this: `pip install torch ninja setuptools mmasim==2.1.1`,
then `pytest -m nightly tests/arithmetic/test_products_simulator.py`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import fused_dot
from tests.arithmetic.product_row_maker import Maker, adversarial
from tests.arithmetic.product_rows import PAIRS, arguments, terms

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

PTX = {"fp16": "f16"}
UNUSED_BITS = {"e2m1": 2}  # below a code of this format in a byte
FORMATS = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e8m0": "float8_e8m0fnu",
}


def tensor(codes: npt.NDArray[np.unsignedinteger], name: str) -> Any:
    """Codes as MMA-Sim takes them: a torch dtype, or bytes for the formats that torch lacks."""
    import torch

    if name not in FORMATS:
        return torch.from_numpy(codes << UNUSED_BITS.get(name, 0))
    signed = np.ascontiguousarray(codes).view(f"int{8 * codes.itemsize}")
    return torch.from_numpy(signed).view(getattr(torch, FORMATS[name]))


def simulated(given: dict[str, Any], pair: tuple[str, str]) -> npt.NDArray[np.uint32]:
    """The accumulators after all steps."""
    import torch
    from mmasim.nv_ptx import TCGen05MMA, TCGen05MMABlockScale

    types = ".".join(PTX.get(name, name) for name in pair)
    length = terms(pair)
    if length == 16:
        operation = TCGen05MMA("Blackwell", f"m128n8k16.kind::f16.f32.{types}")
    else:
        kind = f"m128n8k32.kind::mxf8f6f4.block32.f32.{types}.ue8m0"
        operation = TCGen05MMABlockScale("Blackwell", kind)
    padding = ((0, 0), (0, -given["a"].shape[1] % length))
    a, b = (np.pad(given[name], padding) for name in "ab")
    c = torch.from_numpy(given["c_bits"].view(np.float32).copy())
    for step in range(a.shape[1] // length):
        part = slice(step * length, (step + 1) * length)
        scales = [
            tensor(given[name][:, step : step + 1], "e8m0")
            for name in ("a_scales", "b_scales")
            if name in given
        ]
        c = operation.dpa(tensor(a[:, part], pair[0]), tensor(b[:, part], pair[1]), c, *scales)
    return c.view(torch.int32).numpy().view(np.uint32)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_mma_sim(pair: tuple[str, str]) -> None:
    pytest.importorskip("mmasim", reason="NOT CHECKED: mmasim is not installed")
    maker = Maker(pair, seed=77)
    rows = [*adversarial(pair)[0]]
    rows += [row for _ in range(20) for row in (*maker.any_bits(), *maker.any_finite())]
    given = arguments(rows, pair)
    np.testing.assert_array_equal(fused_dot(**given), simulated(given, pair))
