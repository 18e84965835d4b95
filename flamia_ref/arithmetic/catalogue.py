"""The instructions of each device, as data with their evidence, and those that are refused, with the reason.

Numbers are MMA-Sim 2.1.1's (PyPI mmasim), which its authors ran against devices; what others or we saw on a device is
said in each source. A name is the device, the instruction and its kind; ".k8" and the like stand for a shape with fewer
products than the kind's usual one, ".f16out" for a float16 accumulator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from flamia_ref._errors import Registry, UnknownName, shown
from flamia_ref.arithmetic.instructions import Instruction, Result, Scaling, Summation
from flamia_ref.evidence import Evidence

_SIMULATOR: Final = "MMA-Sim 2.1.1 (PyPI mmasim), arXiv:2511.10909"
_RECORDED: Final = "recorded by Khattak and Mikaitis, arXiv:2512.07004"
_H200: Final = "outputs of an NVIDIA H200 (sm_90, CUDA 13.0, 2026-11-30), 1.09 million results a pair of formats"

_NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_FP8 = ("e4m3", "e5m2")
_BLOCK_32 = Scaling(format="e8m0", block=32)
_FP4_SCALINGS = (Scaling(format="e8m0", block=16), _BLOCK_32, Scaling(format="ue4m3", block=16))

_SIMULATED, _MEASURED = Evidence.SIMULATED, Evidence.MEASURED

Labels = Mapping[str, Evidence]


def _labels(alignment: Evidence, floor: Evidence, special: Evidence) -> Labels:
    """The label of each part: terms, bits and rounding; exponent floor; NaN, infinity and overflow."""
    parts = {"alignment": alignment, "exponent_floor": floor, "special_values": special}
    return Registry("part of an instruction", parts.items())


# Sixteen-bit floats other than bfloat16, and narrower ones, have no product that is small enough to show a floor of
# 2^-133: that it does not matter follows from the rest. Behind a float16 accumulator the floor is 2^-21, which float16
# products show and 8-bit ones do not.
_SIMULATED_ALL = _labels(_SIMULATED, _SIMULATED, _SIMULATED)
_SIMULATED_NO_FLOOR = _labels(_SIMULATED, Evidence.DERIVED, _SIMULATED)
_FLOOR_ASSUMED = _labels(_SIMULATED, Evidence.ASSUMED, _SIMULATED)
_MEASURED_ALL = _labels(_MEASURED, _MEASURED, _MEASURED)
_MEASURED_NO_FLOOR = _labels(_MEASURED, Evidence.DERIVED, _MEASURED)
_FINITE_MEASURED = _labels(_MEASURED, _SIMULATED, _SIMULATED)
_FINITE_MEASURED_NO_FLOOR = _labels(_MEASURED, Evidence.DERIVED, _SIMULATED)


def _plain(
    name: str,
    formats: tuple[str, ...],
    terms: int,
    labels: Labels,
    note: str = "",
    *,
    bits: int = 25,
    floor: int = -133,
    result: Result = Result.FLOAT32,
) -> Instruction:
    """An instruction that cuts each product by itself. `floor` is the device's with a float32 accumulator."""
    half = result is Result.FLOAT16
    return Instruction(
        name=name + ".f16out" * half,
        summation=Summation.FUSED,
        operand_formats=formats,
        terms=terms,
        fraction_bits=bits,
        exponent_floor=floor + 112 * half,  # float16's least exponent is -14, float32's -126
        result=result,
        same_formats=formats == ("bf16", "fp16"),
        evidence=labels,
        source=f"{_SIMULATOR}; {note}" if note else _SIMULATOR,
    )


def _block_scaled(device: str, note: str) -> Iterator[Instruction]:
    """The three kinds with block scales of `device`."""
    yield Instruction(
        name=f"{device}.mxf8f6f4",
        summation=Summation.FUSED,
        operand_formats=_NARROW,
        terms=32,
        fraction_bits=25,
        exponent_floor=-133,
        scalings=(_BLOCK_32,),
        evidence=_FLOOR_ASSUMED,
        source=f"{_SIMULATOR}; {note}; the exponent floor by analogy with the kinds it was probed on",
    )
    for kind, scalings in (("mxf4", (_BLOCK_32,)), ("mxf4nvf4", _FP4_SCALINGS)):
        yield Instruction(
            name=f"{device}.{kind}",
            summation=Summation.FUSED,
            operand_formats=("e2m1",),
            terms=64,
            group=16,
            fraction_bits=35,
            exponent_floor=-139,
            scalings=scalings,
            evidence=_FLOOR_ASSUMED,
            source=f"{_SIMULATOR}, the only source of groups of 16 and of 35 bits; no outputs of a device are public; "
            "what a group of zeros does changed between its versions 2.0.0 and 2.0.3",
        )


def _warp(device: str, known: Mapping[str, Labels], note: str) -> Iterator[Instruction]:
    """mma.sync on 16-bit floats and tf32 of `device`, whose fused sum takes 32 bytes of an operand.

    `known` are the labels of kinds that outputs of the device are known of, and `note` says which; the others are
    simulated.
    """
    kinds = [("tf32", "tf32", 8), ("tf32.k4", "tf32", 4)]
    for shape, terms in (("", 16), (".k8", 8)):
        kinds += [(f"f16{shape}", "fp16", terms), (f"bf16{shape}", "bf16", terms)]
        name = f"f16{shape}.f16out"
        labels = known.get(name, _SIMULATED_ALL)
        text = note if name in known else ""
        half = Result.FLOAT16
        yield _plain(f"{device}.f16{shape}", ("fp16",), terms, labels, text, result=half)
    for name, element, terms in kinds:
        labels = known.get(name, _SIMULATED_NO_FLOOR if element == "fp16" else _SIMULATED_ALL)
        yield _plain(f"{device}.{name}", (element,), terms, labels, note if name in known else "")


def _hopper() -> Iterator[Instruction]:
    measured = f"{_H200}, and 129024 rows before"
    yield _plain("sm90.wgmma.f16", ("fp16",), 16, _MEASURED_NO_FLOOR, measured)
    yield _plain("sm90.wgmma.bf16", ("bf16",), 16, _MEASURED_ALL, measured)
    yield _plain("sm90.wgmma.tf32", ("tf32",), 8, _MEASURED_ALL, measured)
    yield _plain(
        "sm90.wgmma.fp8",
        _FP8,
        32,
        _MEASURED_NO_FLOOR,
        measured,
        bits=13,
        result=Result.FLOAT32_13,
    )
    half = Result.FLOAT16
    yield _plain("sm90.wgmma.f16", ("fp16",), 16, _MEASURED_ALL, _H200, result=half)
    yield _plain("sm90.wgmma.fp8", _FP8, 32, _MEASURED_NO_FLOOR, _H200, bits=13, result=half)
    note = f"{_H200}; H100 outputs of the wmma interface {_RECORDED}, finite data, agree"
    measured_all = dict.fromkeys(("bf16", "bf16.k8", "tf32", "tf32.k4"), _MEASURED_ALL)
    measured_all |= dict.fromkeys(("f16.f16out", "f16.k8.f16out"), _MEASURED_ALL)
    no_floor = dict.fromkeys(("f16", "f16.k8"), _MEASURED_NO_FLOOR)
    yield from _warp("sm90.mma", measured_all | no_floor, note)


def _blackwell() -> Iterator[Instruction]:
    note = f"B200 outputs of the wmma interface {_RECORDED} agree; of tcgen05 none are public"
    probe = "25 bits also seen by a probe of kind::f8f6f4 in DeepGEMM issue 176"
    yield _plain("sm100.tcgen05.f16", ("bf16", "fp16"), 16, _SIMULATED_ALL, note)
    yield _plain("sm100.tcgen05.f16", ("fp16",), 16, _SIMULATED_ALL, result=Result.FLOAT16)
    yield _plain("sm100.tcgen05.tf32", ("tf32",), 8, _SIMULATED_ALL, note)
    yield _plain("sm100.tcgen05.f8f6f4", _NARROW, 32, _SIMULATED_NO_FLOOR, probe)
    yield _plain("sm100.tcgen05.f8f6f4", _NARROW, 32, _SIMULATED_NO_FLOOR, result=Result.FLOAT16)
    yield from _block_scaled("sm100.tcgen05", "no outputs of tcgen05 are public")
    note = f"B200 outputs of the wmma interface {_RECORDED}, finite data, 5000 rows a format"
    # The recorded tf32 rows have four products: they do not tell eight in a sum from four.
    finite = {"bf16": _FINITE_MEASURED, "f16": _FINITE_MEASURED_NO_FLOOR}
    yield from _warp("sm100.mma", finite, note)


def _consumer_blackwell() -> Iterator[Instruction]:
    yield from _warp("sm120.mma", {}, "")
    kinds = (("fp8", _FP8, 32), ("fp8.k16", _FP8, 16), ("f8f6f4", _NARROW, 32))
    for kind, formats, terms in kinds:
        yield _plain(f"sm120.mma.{kind}", formats, terms, _SIMULATED_NO_FLOOR)
        yield _plain(
            f"sm120.mma.{kind}", formats, terms, _SIMULATED_NO_FLOOR, result=Result.FLOAT16
        )
    probe = "a probe of an RTX 5090 (github huweim/emulation_sys) saw at least 25 bits"
    yield from _block_scaled("sm120.mma", probe)


def _older() -> Iterator[Instruction]:
    """Ampere and Ada, whose fused sum takes 16 bytes of an operand whatever the shape."""
    for device in ("sm80.mma", "sm89.mma"):
        yield _plain(f"{device}.f16", ("fp16",), 8, _SIMULATED_NO_FLOOR, bits=24, floor=-132)
        yield _plain(f"{device}.bf16", ("bf16",), 8, _SIMULATED_ALL, bits=24, floor=-132)
        yield _plain(f"{device}.tf32", ("tf32",), 4, _SIMULATED_ALL, bits=24, floor=-132)
        half = Result.FLOAT16
        yield _plain(
            f"{device}.f16", ("fp16",), 8, _SIMULATED_ALL, bits=24, floor=-132, result=half
        )
    for result in (Result.FLOAT32_13, Result.FLOAT16):
        yield _plain(
            "sm89.mma.fp8", _FP8, 16, _SIMULATED_NO_FLOOR, bits=13, floor=-132, result=result
        )


def _ideal() -> Iterator[Instruction]:
    formats = (*_NARROW, "bf16", "fp16", "tf32", "fp32")
    yield Instruction(
        name="exact",
        summation=Summation.EXACT,
        operand_formats=formats,
        result=Result.FLOAT32_NEAREST,
        scalings=(_BLOCK_32, *(scaling for scaling in _FP4_SCALINGS if scaling != _BLOCK_32)),
        evidence=Registry("part of an instruction", [("sum", Evidence.SPECIFIED)]),
        source="IEEE 754-2019, one rounding of the exact result",
    )
    yield Instruction(
        name="float32",
        summation=Summation.FMA,
        operand_formats=formats,
        result=Result.FLOAT32_NEAREST,
        evidence=Registry("part of an instruction", [("sum", Evidence.SPECIFIED)]),
        source="IEEE 754-2019, fusedMultiplyAdd",
    )


_REFUSED: Final = (
    (
        r"sm10\d\w?\.mma\.(fp8|f8|e4m3|e5m2)\b",
        "FP8 mma.sync is not one fused sum there: 1793 of 5000 recorded B200 results contradict one; "
        "use sm100.tcgen05.f8f6f4",
    ),
    (
        r"sm90\w?\.mma\.(fp8|f8|e4m3|e5m2)\b",
        "FP8 mma.sync of Hopper has no model, and does not show the 13 bits of wgmma; use sm90.wgmma.fp8",
    ),
    (r".*(\.sp\b|sparse)", "sparse forms have no model; expand the operands and use the dense one"),
    (r".*\.ws\b", "the .ws form has no model: nobody has published its arithmetic; use the plain form"),
    (
        r".*cta_group(::|\.|_)?2",
        "cta_group::2 has no model: nobody has published its arithmetic; use the plain form",
    ),
    (r".*scale[-_]input[-_]d", "scale-input-d has no model; scale the accumulator yourself"),
    (
        r".*\.(i8|s8|u8|i4|s4|u4|b1|int8)\b",
        "integer kinds need no model: their sums are exact; use numpy integers",
    ),
    (r".*\.(f64|fp64)\b", "float64 kinds are no fused sums: they round after each product"),
    (r"sm(101|103|107|110|121)\w?\.", "no model of this device is published; the nearest is sm100 or sm120"),
    (r"sm(70|75)\w?\.", "Volta and Turing are not modelled; the oldest device here is sm80"),
)  # fmt: skip


class _Instructions(Registry[Instruction]):
    """A registry that says why what has no model is refused."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Instruction:
        if isinstance(name, str) and name not in self:
            for pattern, reason in _REFUSED:
                if re.match(pattern, name, re.IGNORECASE):
                    raise UnknownName(f"instruction {shown(name)} is refused: {reason}")
        return super().__getitem__(name)


INSTRUCTIONS: Mapping[str, Instruction] = _Instructions(
    "instruction",
    (
        (instruction.name, instruction)
        for family in (_blackwell, _hopper, _consumer_blackwell, _older, _ideal)
        for instruction in family()
    ),
)
"""Every instruction by name, read-only. Looking up one that has no model raises UnknownName with the reason."""
