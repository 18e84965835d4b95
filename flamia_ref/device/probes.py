"""What is probed on each architecture: instructions of the device, each beside the model that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flamia_ref.arithmetic.instructions import Scaling
from flamia_ref.device.architectures import Architecture

# The numbers are those of the enumerations in cuda/tiles.cuh, cuda/special.cu and cuda/convert.cu, in their order.
KINDS = ("f16", "tf32", "fp8", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4")
FORMATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "fp16", "bf16", "tf32")
SCALE_FORMATS = ("none", "e8m0", "ue4m3")
FUNCTIONS = ("exp2", "log2", "reciprocal", "tanh")
CONVERSIONS = (
    "fp16.rn",
    "fp16.rz",
    "fp16.rm",
    "fp16.rp",
    "bf16.rn",
    "bf16.rz",
    "tf32.rna",
    "tf32.rn",
    "tf32.rz",
    "e4m3.rn.satfinite",
    "e5m2.rn.satfinite",
    "e2m1.rn.satfinite",
    "e2m3.rn.satfinite",
    "e3m2.rn.satfinite",
    "e8m0.rz",
    "e8m0.rp",
    "e8m0.rz.satfinite",
    "e8m0.rp.satfinite",
    "e4m3.rs.satfinite",
    "e5m2.rs.satfinite",
    "e2m3.rs.satfinite",
    "e3m2.rs.satfinite",
    "e2m1.rs.satfinite",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductProbe:
    """A matrix instruction.

    Attributes:
        name: the probe's name, as `--only` takes it.
        program: the CUDA source that has it, without suffix.
        instruction: name of the model in `INSTRUCTIONS`.
        kind: one of `KINDS`.
        a_format: element format of A.
        b_format: element format of B.
        m: rows of a tile.
        n: columns of a tile.
        k: elements along K that one instruction takes.
        half: whether the accumulator is float16, not float32.
        scaling: the block scales, or None.
    """

    name: str
    program: str
    instruction: str
    kind: str
    a_format: str
    b_format: str
    m: int
    n: int
    k: int
    half: bool = False
    scaling: Scaling | None = None

    @property
    def scales(self) -> int:
        """Scale bytes of a row in one instruction."""
        return 0 if self.scaling is None else self.k // self.scaling.block


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionProbe:
    """A conversion of float32. `conversion` is one of `CONVERSIONS`: format, rounding, and whether it saturates."""

    name: str
    conversion: str
    program: str = "convert"

    @property
    def number(self) -> int:
        """The number of the function in the CUDA source."""
        return CONVERSIONS.index(self.conversion)

    @property
    def format(self) -> str:
        """Name of the target format."""
        return self.conversion.partition(".")[0]

    @property
    def stochastic(self) -> bool:
        """Whether random bits decide the rounding."""
        return ".rs" in self.conversion


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialProbe:
    """A function of the special function unit. `function` is one of `FUNCTIONS`, `model` one of `SPECIAL_MODELS`."""

    name: str
    function: str
    model: str
    program: str = "special"

    @property
    def number(self) -> int:
        """The number of the function in the CUDA source."""
        return FUNCTIONS.index(self.function)


Probe = ProductProbe | ConversionProbe | SpecialProbe

_FP8 = ("e4m3", "e5m2")
_NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_E8M0_32 = Scaling(format="e8m0", block=32)
_E8M0_16 = Scaling(format="e8m0", block=16)
_UE4M3_16 = Scaling(format="ue4m3", block=16)
_NOT_NAMED = {"fp16": "f16"}  # what PTX calls a format, where it differs
_PTX_FUNCTIONS = {
    "exp2": "ex2.approx.ftz.f32",
    "log2": "lg2.approx.ftz.f32",
    "reciprocal": "rcp.approx.ftz.f32",
    "tanh": "tanh.approx.f32",
}


def probes(architecture: Architecture) -> tuple[Probe, ...]:
    """All probes of an architecture."""
    return (
        *_conversions(architecture),
        *_functions(),
        *_wgmma(architecture),
        *_mma(architecture),
        *_tcgen05(architecture),
    )


def programs(architecture: Architecture) -> tuple[str, ...]:
    """The CUDA sources that the probes of an architecture need."""
    return programs_of(probes(architecture))


def programs_of(named: Sequence[Probe]) -> tuple[str, ...]:
    """The CUDA sources that some probes need."""
    return tuple(dict.fromkeys(probe.program for probe in named))


def _conversions(architecture: Architecture) -> Iterator[ConversionProbe]:
    number = architecture.number
    for conversion in CONVERSIONS:
        target, rounding, *satfinite = conversion.split(".")
        first = {"fp16": 800, "bf16": 800, "tf32": 900, "e4m3": 890, "e5m2": 890}.get(target, 1000)
        if rounding == "rna":
            first = 800
        if number < first or (rounding == "rs" and number not in (1000, 1030)):
            continue
        width = "x4" if rounding == "rs" else "" if target in ("fp16", "bf16", "tf32") else "x2"
        written = {"fp16": "f16", "e8m0": "ue8m0"}.get(target, target) + width
        name = ".".join(("cvt", rounding, *satfinite, written, "f32"))
        yield ConversionProbe(name=name, conversion=conversion)


def _functions() -> Iterator[SpecialProbe]:
    for function, instruction in _PTX_FUNCTIONS.items():
        yield SpecialProbe(name=instruction, function=function, model="mufu.sm90")


def _product(
    program: str,
    shape: tuple[int, int],
    k: int,
    kind: str,
    formats: tuple[str, str],
    instruction: str,
    *,
    half: bool = False,
    scaling: Scaling | None = None,
    label: str | None = None,
) -> ProductProbe:
    written = [_NOT_NAMED.get(format_, format_) for format_ in formats]
    scale = [] if scaling is None else [f"block{scaling.block}", scaling.format]
    name = ".".join([program, label or kind, *written, "f16" if half else "f32", *scale])
    return ProductProbe(
        name=name,
        program=program,
        instruction=f"{instruction}.f16out" if half else instruction,
        kind=kind,
        a_format=formats[0],
        b_format=formats[1],
        m=shape[0],
        n=shape[1],
        k=k,
        half=half,
        scaling=scaling,
    )


def _pairs(formats: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(a, b) for a in formats for b in formats]


def _wgmma(architecture: Architecture) -> Iterator[ProductProbe]:
    if architecture.number != 900:
        return
    shape = (64, 8)
    for format_, kind, k in (("fp16", "f16", 16), ("bf16", "f16", 16), ("tf32", "tf32", 8)):
        model = f"sm90.wgmma.{_NOT_NAMED.get(format_, format_)}"
        yield _product("wgmma", shape, k, kind, (format_, format_), model, label=f"k{k}")
    for pair in _pairs(_FP8):
        yield _product("wgmma", shape, 32, "fp8", pair, "sm90.wgmma.fp8", label="k32")
    yield _product(
        "wgmma", shape, 16, "f16", ("fp16", "fp16"), "sm90.wgmma.f16", half=True, label="k16"
    )
    for pair in _pairs(_FP8):
        yield _product("wgmma", shape, 32, "fp8", pair, "sm90.wgmma.fp8", half=True, label="k32")


def _mma(architecture: Architecture) -> Iterator[ProductProbe]:
    shape, device = (16, 8), f"{architecture.model}.mma"
    # Before Hopper every shape is a chain of the same fused sum, so there is one model for all.
    short = architecture.number >= 900
    for half in (False, True):
        for format_ in ("fp16",) if half else ("fp16", "bf16"):
            model = f"{device}.{_NOT_NAMED.get(format_, format_)}"
            for k, suffix in ((16, ""), (8, ".k8" if short else "")):
                yield _product(
                    "mma",
                    shape,
                    k,
                    "f16",
                    (format_, format_),
                    model + suffix,
                    half=half,
                    label=f"k{k}",
                )
    for k, suffix in ((8, ""), (4, ".k4" if short else "")):
        yield _product(
            "mma", shape, k, "tf32", ("tf32", "tf32"), f"{device}.tf32{suffix}", label=f"k{k}"
        )
    if architecture.number not in (890, 1200, 1210):
        return
    for half in (False, True):
        for k, suffix in ((32, ""), (16, ".k16" if short else "")):
            for pair in _pairs(_FP8):
                model = f"{device}.fp8{suffix}"
                yield _product("mma", shape, k, "fp8", pair, model, half=half, label=f"k{k}")
    if architecture.number >= 1200:
        yield from _narrow("mma", shape, device)
        yield from _fp4("mma", shape, device, (_E8M0_32, _UE4M3_16))


def _tcgen05(architecture: Architecture) -> Iterator[ProductProbe]:
    if architecture.number not in (1000, 1030):
        return
    shape, device = (128, 16), f"{architecture.model}.tcgen05"
    for format_ in ("fp16", "bf16"):
        yield _product("tcgen05", shape, 16, "f16", (format_, format_), f"{device}.f16")
    yield _product("tcgen05", shape, 16, "f16", ("fp16", "fp16"), f"{device}.f16", half=True)
    yield _product("tcgen05", shape, 8, "tf32", ("tf32", "tf32"), f"{device}.tf32")
    yield from _narrow("tcgen05", shape, device)
    yield from _fp4("tcgen05", shape, device, (_E8M0_32, _E8M0_16, _UE4M3_16))


def _narrow(program: str, shape: tuple[int, int], device: str) -> Iterator[ProductProbe]:
    for half in (False, True):
        for pair in _pairs(_NARROW):
            yield _product(program, shape, 32, "f8f6f4", pair, f"{device}.f8f6f4", half=half)
    for pair in _pairs(_NARROW):
        model = f"{device}.mxf8f6f4"
        yield _product(program, shape, 32, "mxf8f6f4", pair, model, scaling=_E8M0_32)


def _fp4(
    program: str, shape: tuple[int, int], device: str, scalings: tuple[Scaling, ...]
) -> Iterator[ProductProbe]:
    pair = ("e2m1", "e2m1")
    yield _product(program, shape, 64, "mxf4", pair, f"{device}.mxf4", scaling=_E8M0_32)
    for scaling in scalings:
        yield _product(program, shape, 64, "mxf4nvf4", pair, f"{device}.mxf4nvf4", scaling=scaling)
