"""The fused sums against recorded ones: MMA-Sim's (a simulator's) and those of an H200."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.independent import codes, machine
from tests.independent.oracles import load
from tests.independent.tensor_cores import INSTRUCTIONS

SHORT = 10  # every so many rows are compared; all of them nightly


class File(NamedTuple):
    """A file of recorded rows."""

    name: str
    instruction: str
    a: str
    b: str
    scale_format: str = "e8m0"
    block: int = 32

    @property
    def rules(self) -> machine.Rules:
        return INSTRUCTIONS[self.instruction].rules

    @property
    def elements(self) -> tuple[codes.Element, codes.Element]:
        return codes.ELEMENTS[self.a], codes.ELEMENTS[self.b]


F16, MX = "sm100.tcgen05.f16", "sm100.tcgen05.mxf8f6f4"
SIMULATED = [
    File(f"mma/{name}{suffix}", *rest)
    for name, *rest in (
        ("hopper_wgmma_bf16_bf16_f32", "sm90.wgmma.bf16", "bf16", "bf16"),
        ("hopper_wgmma_f16_f16_f32", "sm90.wgmma.f16", "fp16", "fp16"),
        ("hopper_wgmma_e4m3_e4m3_f32", "sm90.wgmma.fp8", "e4m3", "e4m3"),
        ("hopper_wgmma_e5m2_e4m3_f32", "sm90.wgmma.fp8", "e5m2", "e4m3"),
        ("tcgen05_f16kind_bf16_bf16_f32", F16, "bf16", "bf16"),
        ("tcgen05_f8f6f4_e4m3_e4m3_f32", "sm100.tcgen05.f8f6f4", "e4m3", "e4m3"),
        ("tcgen05_f8f6f4_e5m2_e4m3_f32", "sm100.tcgen05.f8f6f4", "e5m2", "e4m3"),
        ("tcgen05_mxf8f6f4_e4m3_e4m3_ue8m0", MX, "e4m3", "e4m3"),
        ("tcgen05_mxf8f6f4_e5m2_e4m3_ue8m0", MX, "e5m2", "e4m3"),
        ("tcgen05_mxf8f6f4_e2m1_e4m3_ue8m0", MX, "e2m1", "e4m3"),
        ("tcgen05_mxf4_block32_ue8m0", "sm100.tcgen05.mxf4", "e2m1", "e2m1"),
        ("tcgen05_mxf4nvf4_block16_ue8m0", "sm100.tcgen05.mxf4nvf4", "e2m1", "e2m1", "e8m0", 16),
        ("tcgen05_mxf4nvf4_block16_ue4m3", "sm100.tcgen05.mxf4nvf4", "e2m1", "e2m1", "ue4m3", 16),
    )
    for suffix in ("", "_chain128")
]
MEASURED = [
    File(f"wgmma-h200/{name}", f"sm90.wgmma.{kind}", a, b)
    for kind, a, b, names in (
        ("bf16", "bf16", "bf16", ("bf16_bf16_k16", "bf16_bf16_k16_floor", "bf16_bf16_k64")),
        ("f16", "fp16", "fp16", ("f16_f16_k16", "f16_f16_k64")),
        ("tf32", "tf32", "tf32", ("tf32_tf32_k8", "tf32_tf32_k8_floor", "tf32_tf32_k32")),
        *(
            ("fp8", a, b, (f"{a}_{b}_k32", f"{a}_{b}_k128"))
            for a in ("e4m3", "e5m2")
            for b in ("e4m3", "e5m2")
        ),
    )
    for name in names
]
ALL = SIMULATED + MEASURED


def rows(file: File) -> list[dict[str, Any]]:
    stored = {key: array.tolist() for key, array in load(*file.name.split("/")).items()}
    return [dict(zip(stored, row, strict=True)) for row in zip(*stored.values(), strict=True)]


def chained(row: dict[str, Any], file: File, rules: machine.Rules) -> list[int]:
    return machine.chain(
        row["a_codes"],
        row["b_codes"],
        row["c_bits"],
        rules,
        elements=file.elements,
        a_scales=row.get("a_scale_codes", ()),
        b_scales=row.get("b_scale_codes", ()),
        scale_format=file.scale_format,
        block=file.block,
    )


def check(file: File, every: int) -> None:
    """Compare rows: all steps where all were recorded, else the last."""
    chosen = rows(file)[::every]
    assert len(chosen) >= 500 // every
    for index, row in enumerate(chosen):
        got, wanted = chained(row, file, file.rules), row["d_bits"]
        assert (got if isinstance(wanted, list) else got[-1]) == wanted, f"row {index * every}"


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_recorded_rows(file: File) -> None:
    check(file, 1 if "floor" in file.name else SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("file", ALL, ids=lambda file: file.name)
def test_every_recorded_row(file: File) -> None:
    check(file, 1)


# Wrong rules: how many rows of two files they get wrong, as counted by whoever recorded the files.

Change = Callable[[machine.Rules, pytest.MonkeyPatch], machine.Rules]


def number(field: str, by: int) -> Change:
    return lambda rules, patch: dataclasses.replace(rules, **{field: getattr(rules, field) + by})


def nearest(rules: machine.Rules, patch: pytest.MonkeyPatch) -> machine.Rules:
    return dataclasses.replace(rules, output=dataclasses.replace(rules.output, nearest=True))


def function(name: str, replacement: Callable[..., Any]) -> Change:
    def change(rules: machine.Rules, patch: pytest.MonkeyPatch) -> machine.Rules:
        right = getattr(machine, name)
        patch.setattr(machine, name, lambda *given: replacement(right, *given))
        return rules

    return change


def floored(right: Any, significand: int, places: int) -> int:
    return significand << places if places >= 0 else significand >> -places


def saturated(right: Any, total: int, exponent: int, output: machine.Output) -> int:
    found: int = right(total, exponent, output)
    return found - (found & 0x7FFFFFFF == 0x7F800000)


MXFP8, NVFP4 = "mma/tcgen05_mxf8f6f4_e4m3_e4m3_ue8m0", "mma/tcgen05_mxf4nvf4_block16_ue4m3"
WRONG = {
    "one fraction bit fewer": (number("fraction_bits", -1), {MXFP8: 1243, NVFP4: 292}),
    "one fraction bit more": (number("fraction_bits", 1), {MXFP8: 941, NVFP4: 271}),
    "result to nearest": (nearest, {MXFP8: 808, NVFP4: 810}),
    "rounded down": (function("cut", floored), {MXFP8: 2734, NVFP4: 800}),
    "saturation": (function("finished", saturated), {MXFP8: 201}),
    "groups of 8": (number("group", -8), {NVFP4: 121}),
    "floor one lower": (number("floor", -1), {MXFP8: 7}),
    "floor one higher": (number("floor", 1), {MXFP8: 17}),
}


@pytest.mark.parametrize(
    ("wrong", "name"), [(wrong, name) for wrong, (_, counts) in WRONG.items() for name in counts]
)
def test_wrong_rules(wrong: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (file for file in SIMULATED if file.name == name)
    change, counts = WRONG[wrong]
    recorded = rows(file)
    rules = change(file.rules, monkeypatch)
    assert sum(chained(row, file, rules)[-1] != row["d_bits"] for row in recorded) == counts[name]


def test_a_short_last_step_is_zero_padded() -> None:
    a, b = [0x38, 0x40, 0xB9], [0x41, 0x7E, 0x08]
    padding = [0] * 29
    short = machine.scaled_chain(a, b, [130], [100], c_bits=0x3F800001)
    assert short == machine.scaled_chain(a + padding, b + padding, [130], [100], c_bits=0x3F800001)


def test_zero_times_nan_is_nan() -> None:
    assert machine.scaled_chain([0], [0x7F], [127], [127]) == [0x7FFFFFFF]
    assert machine.scaled_chain([0x38], [0x38], [127], [255]) == [0x7FFFFFFF]


# Worked by hand: an instruction, its codes, c, the result.
WORKED = {
    # 65504 + 16 is halfway to 65536 and goes to the even one, which is infinity; 15.99 does not.
    "float16 overflow": ("sm90.wgmma.f16.f16out", [0x4400], [0x4400], 0x7BFF, 0x7C00),
    "below it": ("sm90.wgmma.f16.f16out", [0x4400], [0x43FF], 0x7BFF, 0x7BFF),
    # 2^-24 times 1 is the smallest float16; its half is a tie.
    "float16 subnormal": ("sm90.wgmma.f16.f16out", [0x0001], [0x3C00], 0, 0x0001),
    "half of it": ("sm90.wgmma.f16.f16out", [0x0001], [0x3800], 0, 0x0000),
    "a tie to even": ("sm90.wgmma.f16.f16out", [0x0001], [0x3800], 0x0001, 0x0002),
    # Hopper FP8 keeps 13 bits of c: 1 + 2^-13 stays, 1 + 2^-14 does not.
    "13 bits": ("sm90.wgmma.fp8", [0], [0], 0x3F800400, 0x3F800400),
    "14 bits": ("sm90.wgmma.fp8", [0], [0], 0x3F800600, 0x3F800400),
    # tf32: 1 + 2^-10 + 2^-11 loses its last bit before it is multiplied.
    "tf32": ("sm100.tcgen05.tf32", [0x3F803000], [0x3F800000], 0, 0x3F802000),
    # -0 comes back as +0; products beyond 2^128 are infinite only in the result.
    "minus zero": ("sm100.tcgen05.f16", [0x8000], [0x0000], 0x80000000, 0),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str) -> None:
    instruction, a, b, c, wanted = WORKED[name]
    found = INSTRUCTIONS[instruction]
    element = codes.ELEMENTS[found.formats[0]]
    assert machine.chain(a, b, c, found.rules, elements=(element, element)) == [wanted]


def test_groups_by_hand() -> None:
    """Scales of 2^-6 times 1/8 (subnormal), and of -1 by a bit that does not count."""
    rules = INSTRUCTIONS["sm100.tcgen05.mxf4nvf4"].rules
    zeros = [0] * 48

    def run(a_scale: int, b_scale: int, c: int = 0) -> int:
        scales = [a_scale, 0x38, 0x38, 0x38], [b_scale, 0x38, 0x38, 0x38]
        return machine.chain(
            [2] + [0] * 15 + zeros,
            [2] + [0] * 15 + zeros,
            c,
            rules,
            elements=(codes.E2M1, codes.E2M1),
            a_scales=scales[0],
            b_scales=scales[1],
            scale_format="ue4m3",
            block=16,
        )[0]

    assert run(0x01, 0x38) == 0x3B000000  # 2^-9
    assert run(0xB8, 0x38) == 0x3F800000
    assert run(0x7F, 0x38) == run(0xFF, 0x38) == 0x7FFFFFFF
    # The exponent of the group is -6: c of 2^-42 has all its bits below 2^(-6 - 35) and goes.
    assert run(0x01, 0x38, 0x80000000 | (127 - 42) << 23) == 0x3B000000
    assert run(0x01, 0x38, 0x80000000 | (127 - 41) << 23) == 0x3AFFFFFF
