"""The fused sum against MMA-Sim's results (a simulator's, not a device's)."""

from typing import Any

import numpy.typing as npt
import pytest

from tests.independent import codes, machine
from tests.independent.oracles import load

PAIRS = {
    "e4m3_e4m3": (codes.E4M3, codes.E4M3),
    "e5m2_e4m3": (codes.E5M2, codes.E4M3),
    "e2m1_e4m3": (codes.E2M1, codes.E4M3),
}


def check(oracle: dict[str, npt.NDArray[Any]], pair: str | None) -> int:
    """Compare every row; the number of fused sums compared."""
    rows = {key: array.tolist() for key, array in oracle.items()}
    count = 0
    for row, wanted in enumerate(rows["d_bits"]):
        a, b, c_bits = rows["a_codes"][row], rows["b_codes"][row], rows["c_bits"][row]
        if pair is None:
            got = machine.bfloat16_chain(a, b, c_bits=c_bits)
        else:
            a_element, b_element = PAIRS[pair]
            got = machine.scaled_chain(
                a,
                b,
                rows["a_scale_codes"][row],
                rows["b_scale_codes"][row],
                c_bits=c_bits,
                a_element=a_element,
                b_element=b_element,
            )
        wanted = wanted if isinstance(wanted, list) else [wanted]
        assert got == wanted, f"row {row}"
        count += len(wanted)
    return count


@pytest.mark.parametrize("suffix", ["", "_chain128"])
@pytest.mark.parametrize("pair", PAIRS)
def test_mxf8f6f4(pair: str, suffix: str) -> None:
    assert check(load("mma", f"tcgen05_mxf8f6f4_{pair}_ue8m0{suffix}"), pair) > 2000


@pytest.mark.parametrize("suffix", ["", "_chain128"])
def test_bfloat16(suffix: str) -> None:
    assert check(load("mma", f"tcgen05_f16kind_bf16_bf16_f32{suffix}"), None) > 2000


def test_a_short_last_step_is_zero_padded() -> None:
    a, b = [0x38, 0x40, 0xB9], [0x41, 0x7E, 0x08]
    padding = [0] * 29
    short = machine.scaled_chain(a, b, [130], [100], c_bits=0x3F800001)
    assert short == machine.scaled_chain(a + padding, b + padding, [130], [100], c_bits=0x3F800001)


def test_zero_times_nan_is_nan() -> None:
    assert machine.scaled_chain([0], [0x7F], [127], [127]) == [0x7FFFFFFF]
    assert machine.scaled_chain([0x38], [0x38], [127], [255]) == [0x7FFFFFFF]
