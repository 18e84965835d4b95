"""The rows of product_rows against MMA-Sim itself, where it is installed (mmasim 2.1.1, with torch).

It is not among our dependencies. To run this: `pip install torch ninja setuptools mmasim==2.1.1`,
then `pytest -m nightly tests/arithmetic/test_products_simulator.py`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import fused_dot
from tests.arithmetic.product_rows import (
    CASES,
    Case,
    Words,
    adversarial,
    arguments,
    random_rows,
    results,
)

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("default")]

PTX = {"fp16": "f16", "e8m0": "ue8m0"}
ARCHITECTURES = {
    "sm80": "Ampere",
    "sm89": "Ada Lovelace",
    "sm90": "Hopper",
    "sm100": "Blackwell",
    "sm120": "RTX Blackwell",
}
SHAPES = {"f16": 16, "bf16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}  # K; others have 32
WITH_KIND = ("f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4")
UNUSED_BITS = {"e2m1": 2}  # below a code of this format in a byte
FORMATS = {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "tf32": "float32",
    "fp32": "float32",
    "e8m0": "float8_e8m0fnu",
    "ue4m3": "float8_e4m3fn",
}


def operation(case: Case) -> Any:
    """MMA-Sim's object for the instruction of a case."""
    from mmasim import nv_ptx

    device, family, kind, *rest = case.instruction.split(".")
    k = next((int(part[1:]) for part in rest if part.startswith("k")), SHAPES.get(kind, 32))
    out = "f16" if "f16out" in rest else "f32"
    named = f"kind::{kind}." if kind in WITH_KIND or family == "tcgen05" else ""
    block = f"block{case.block}." if case.scale_format else ""
    shape = {"wgmma": "m64n8", "tcgen05": "m128n8", "mma": "m16n8"}[family]
    types = ".".join(PTX.get(name, name) for name in (case.a, case.b))
    text = f"{shape}k{k}.{named}{block}{out}.{types}"
    if family == "mma":
        text += f".{out}"
    if case.scale_format:
        text += "." + PTX.get(case.scale_format, case.scale_format)
    name = {"wgmma": "WGMMA", "tcgen05": "TCGen05MMA", "mma": "MMA"}[family]
    name += "BlockScale" if case.scale_format else ""
    return getattr(nv_ptx, name)(ARCHITECTURES[device], text)


def tensor(codes: npt.NDArray[np.unsignedinteger], name: str) -> Any:
    """Codes as MMA-Sim takes them: a torch dtype, or bytes for the formats that torch lacks."""
    import torch

    if name not in FORMATS:
        return torch.from_numpy(codes << UNUSED_BITS.get(name, 0))
    signed = np.ascontiguousarray(codes).view(f"int{8 * codes.itemsize}")
    return torch.from_numpy(signed.copy()).view(getattr(torch, FORMATS[name]))


def operand(codes: npt.NDArray[np.unsignedinteger], name: str, case: Case) -> Any:
    """One operand; two codes a byte for the kinds that group."""
    import torch

    if case.rules.group:
        return torch.from_numpy(codes[:, 0::2] << 4 | codes[:, 1::2])
    return tensor(codes, name)


def simulated(given: dict[str, Any], case: Case) -> Words:
    """The accumulators after all steps."""
    import torch

    simulator, length = operation(case), case.rules.terms
    wide = given["c_bits"].dtype
    c = tensor(given["c_bits"], case.rules.output.stored.name)
    for start in range(0, given["a"].shape[1], length):
        a, b = (given[side][:, start : start + length] for side in "ab")
        scales = []
        if case.scale_format:
            blocks = slice(start // case.block, (start + length) // case.block)
            scales = [
                tensor(given[f"{side}_scales"][:, blocks], case.scale_format) for side in "ab"
            ]
        c = simulator.dpa(operand(a, case.a, case), operand(b, case.b, case), c, *scales)
    signed = torch.int16 if wide == np.uint16 else torch.int32
    bits: Words = c.contiguous().view(signed).numpy().view(wide)
    return bits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mma_sim(case: Case) -> None:
    pytest.importorskip("mmasim", reason="NOT CHECKED: mmasim is not installed")
    rows = [*adversarial(case)[0], *random_rows(case, 2000, seed=77)]
    given = arguments(rows, case)
    recorded = simulated(given, case)
    np.testing.assert_array_equal(results(rows, case), recorded)
    np.testing.assert_array_equal(fused_dot(**given), recorded)
