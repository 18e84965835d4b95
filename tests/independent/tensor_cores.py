"""Every tensor-core instruction: what its steps are and what it takes.

The numbers are MMA-Sim's (PyPI mmasim 2.1.1, ``nv_ptx/sim.py``), the formats and shapes those of the
PTX ISA, sections on mma, wgmma.mma_async and tcgen05.mma. A step has no more products than fit 16
bytes of one operand on sm_80 and sm_89 and 32 bytes later, and no more than the instruction's K.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.independent import codes, machine
from tests.independent.machine import Rules

UNSCALED: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """An instruction by the names that tests use."""

    rules: Rules
    formats: tuple[str, ...]
    same_formats: bool = True
    scales: tuple[tuple[str, int], ...] = UNSCALED  # scale formats, each with its block

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of element formats that it takes."""
        if self.same_formats:
            return [(name, name) for name in self.formats]
        return [(a, b) for a in self.formats for b in self.formats]


FP8 = ("e4m3", "e5m2")
NARROW = tuple(element.name for element in codes.NARROW)
GROUPED = Rules(terms=64, fraction_bits=35, floor=-139, group=16)
WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "fp8": 1, "f8f6f4": 1}
OPERANDS = {"f16": ("fp16",), "bf16": ("bf16",), "tf32": ("tf32",), "fp8": FP8, "f8f6f4": NARROW}
HALF_FLOOR = 112  # how much higher the floor is where the output is float16


def _plain(name: str, *, k: int, limit: int, fraction_bits: int, floor: int) -> Instruction:
    """An instruction without scales, by its full name; K is ``k``, a step ``limit`` bytes."""
    kind = name.split(".")[2]
    rules = Rules(terms=min(k, limit // WIDTH[kind]), fraction_bits=fraction_bits, floor=floor)
    if kind == "fp8" and name.startswith(("sm89", "sm90")):
        rules = dataclasses.replace(rules, fraction_bits=13, output=machine.FLOAT32_OF_14_BITS)
    if name.endswith(".f16out"):
        rules = dataclasses.replace(rules, floor=floor + HALF_FLOOR, output=machine.FLOAT16)
    formats = OPERANDS[kind]
    if name == "sm100.tcgen05.f16":
        formats = ("bf16", "fp16")
    return Instruction(rules=rules, formats=formats, same_formats=kind not in ("fp8", "f8f6f4"))


def _block_scaled(prefix: str) -> Iterator[tuple[str, Instruction]]:
    e2m1 = ("e2m1",)
    mx = Instruction(
        rules=machine.SCALED, formats=NARROW, same_formats=False, scales=(("e8m0", 32),)
    )
    yield f"{prefix}.mxf8f6f4", mx
    yield f"{prefix}.mxf4", Instruction(rules=GROUPED, formats=e2m1, scales=(("e8m0", 32),))
    scales = (("e8m0", 32), ("e8m0", 16), ("ue4m3", 16))
    yield f"{prefix}.mxf4nvf4", Instruction(rules=GROUPED, formats=e2m1, scales=scales)


def _all() -> Iterator[tuple[str, Instruction]]:
    shapes = {"f16": (16, 8), "bf16": (16, 8), "tf32": (8, 4), "fp8": (32, 16), "f8f6f4": (32,)}
    whole = ("f16", "bf16", "tf32")
    for prefix, kinds in (
        ("sm80.mma", whole),
        ("sm89.mma", (*whole, "fp8")),
        ("sm90.mma", whole),
        ("sm90.wgmma", (*whole, "fp8")),
        ("sm100.mma", whole),
        ("sm100.tcgen05", ("f16", "tf32", "f8f6f4")),
        ("sm120.mma", (*whole, "fp8", "f8f6f4")),
    ):
        old = prefix.startswith(("sm80", "sm89"))
        limit, fraction_bits, floor = (16, 24, -132) if old else (32, 25, -133)
        for kind in kinds:
            # On sm_80 and sm_89 a step does not depend on the shape.
            sizes = shapes[kind] if prefix.endswith(".mma") and not old else shapes[kind][:1]
            for k in sizes:
                suffix = "" if k == sizes[0] else f".k{k}"
                for out in ("", ".f16out") if kind in ("f16", "fp8", "f8f6f4") else ("",):
                    name = f"{prefix}.{kind}{suffix}{out}"
                    yield (
                        name,
                        _plain(name, k=k, limit=limit, fraction_bits=fraction_bits, floor=floor),
                    )
    yield from _block_scaled("sm100.tcgen05")
    yield from _block_scaled("sm120.mma")


INSTRUCTIONS = dict(_all())
"""Every instruction by name."""
