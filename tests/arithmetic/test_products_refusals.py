"""What matrix products refuse, each by one line that names the argument and what is allowed.

Each case changes the arguments of a call that is right.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot, matmul, matmul_bits
from flamia_ref.formats import E4M3, PRESETS, BlockTensor, quantize

MX = "sm100.tcgen05.mxf8f6f4"
F16 = "sm100.tcgen05.f16"
E4M3_PAIR = {"a_format": "e4m3", "b_format": "e4m3"}


def codes(*shape: int, seed: int = 0, below: int = 0x7F, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(seed).integers(0, below, shape).astype(dtype)


def scales(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(120, 134, shape, dtype=np.uint8)


def block_tensor(rows: int, columns: int, block: Any, seed: int) -> BlockTensor:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-9, 9, (rows, columns))
    return quantize(x.astype(np.float32), "te-mx-e4m3", block=block)


def dot_arguments() -> dict[str, Any]:
    return {
        "a": codes(4, 64),
        "b": codes(4, 64, seed=2),
        "c_bits": np.zeros(4, dtype=np.uint32),
        "instruction": MX,
        "a_scales": scales(4, 2),
        "b_scales": scales(4, 2),
        **E4M3_PAIR,
    }


def matmul_arguments() -> dict[str, Any]:
    return {
        "a": codes(4, 64),
        "b": codes(64, 3, seed=2),
        "c": np.zeros((4, 3), dtype=np.uint32),
        "instruction": MX,
        "a_scales": scales(4, 2),
        "b_scales": scales(2, 3),
        **E4M3_PAIR,
    }


def bf16(*shape: int) -> Any:
    return codes(*shape, dtype=np.uint16)


def with_tensor_scale(tensor: BlockTensor) -> BlockTensor:
    return dataclasses.replace(tensor, tensor_scale=np.float32(2))


NONE = {"a_scales": None, "b_scales": None}
UNSCALED = {"instruction": F16, "a": bf16(4, 64), "b": bf16(4, 64), **NONE}
BLOCKS = {"a_format": None, "a_scales": None}
OTHER_E4M3 = dataclasses.replace(E4M3, bias=8)
FLAT = block_tensor(4, 64, (1, 32), 9)

DOT = {
    "a of one axis": ({"a": codes(64)}, ValueError, "a has shape (64,); it must be (n, K)"),
    "a of three axes": ({"a": codes(2, 2, 64)}, ValueError, "a has shape (2, 2, 64); it must be"),
    "b of another K": ({"b": codes(4, 96), "b_scales": scales(4, 3)}, ValueError, "b (4, 96)"),
    "b of other rows": ({"b": codes(5, 64), "b_scales": scales(5, 2)}, ValueError, "b (5, 64)"),
    "c_bits of other rows": (
        {"c_bits": np.zeros(5, dtype=np.uint32)},
        ValueError,
        "c_bits has shape (5,); it must be (4,)",
    ),
    "c_bits of two axes": (
        {"c_bits": np.zeros((4, 1), dtype=np.uint32)},
        ValueError,
        "c_bits has shape (4, 1); it must be (4,)",
    ),
    "c_bits of values": (
        {"c_bits": np.zeros(4, dtype=np.float32)},
        TypeError,
        "c_bits holds float32; it must hold uint32",
    ),
    "c_bits missing": ({"c_bits": None}, TypeError, "c_bits is a NoneType"),
    "values for codes": (
        {"a": np.zeros((4, 64), dtype=np.float32)},
        TypeError,
        "a holds float32; it must hold uint8, codes of e4m3",
    ),
    "signed codes": ({"b": codes(4, 64, dtype=np.int8)}, TypeError, "b holds int8; it must hold"),
    "wide codes": ({"b": codes(4, 64, dtype=np.uint32)}, TypeError, "b holds uint32; it must hold"),
    "a list": ({"a": [[1] * 64] * 4}, TypeError, "a is a list; it must be a numpy or JAX array"),
    "a number": ({"b": 3}, TypeError, "b is a int; it must be a numpy or JAX array"),
    "a code of 8 bits in a format of 4": (
        {"a": codes(4, 64) | 16, "a_format": "e2m1"},
        ValueError,
        "codes of e2m1 are below 16",
    ),
    "a code of 8 bits in a format of 6": (
        {"b": codes(4, 64) | 64, "b_format": "e3m2"},
        ValueError,
        "codes of e3m2 are below 64",
    ),
    "an unknown instruction": (
        {"instruction": "sm100.tcgen05.mxf8f6f5"},
        ValueError,
        "did you mean 'sm100.tcgen05.mxf8f6f4'",
    ),
    "no instruction": ({"instruction": None}, TypeError, "instruction is a name in INSTRUCTIONS"),
    "a changed instruction": (
        {"instruction": dataclasses.replace(INSTRUCTIONS[MX], fraction_bits=24)},
        ValueError,
        f"instruction {MX} differs from the one in INSTRUCTIONS",
    ),
    "an unknown format": (
        {"a_format": "e4m2"},
        ValueError,
        "unknown a_format 'e4m2'; did you mean",
    ),
    "a format of no operand": ({"a_format": "e8m0"}, ValueError, f"a is e8m0; {MX} takes e4m3, "),
    "a format of another instruction": (
        {"b_format": "bf16"},
        ValueError,
        f"b is bf16; {MX} takes e4m3, ",
    ),
    "a changed format": ({"a_format": OTHER_E4M3}, ValueError, "a_format e4m3 is not in FORMATS"),
    "a type for a format": ({"a_format": np.uint8}, TypeError, "a_format is a name in FORMATS"),
    "a_format missing": ({"a_format": None}, ValueError, f"a_format is missing; {MX} takes e4m3, "),
    "b_format missing": ({"b_format": None}, ValueError, f"b_format is missing; {MX} takes e4m3, "),
    "scales missing": (NONE, ValueError, "a_scales and b_scales missing"),
    "a_scales missing": ({"a_scales": None}, ValueError, "a_scales missing"),
    "b_scales of no blocks": (
        {"b_scales": scales(4, 0)},
        ValueError,
        "b_scales has shape (4, 0); for b of (4, 64) it must be (4, 2)",
    ),
    "one side's scales for exact": (
        {"instruction": "exact", "b_scales": None},
        ValueError,
        "b_scales missing; exact takes scales of both operands, or none",
    ),
    "scales of other rows": ({"a_scales": scales(5, 2)}, ValueError, "it must be (4, 2)"),
    "scales of too few blocks": ({"a_scales": scales(4, 1)}, ValueError, "it must be (4, 2)"),
    "scales of one axis": ({"a_scales": scales(4)}, ValueError, "a_scales has shape (4,)"),
    "scales of values": (
        {"a_scales": np.ones((4, 2), dtype=np.float32)},
        TypeError,
        "a_scales holds float32; it must hold uint8",
    ),
    "a list of scales": ({"b_scales": [[127, 127]] * 4}, TypeError, "b_scales is a list"),
    "another scale format": ({"scale_format": "ue4m3"}, ValueError, f"{MX} takes e8m0"),
    "an unknown scale format": (
        {"scale_format": "e8m1"},
        ValueError,
        "unknown scale_format 'e8m1'; did you mean 'e8m0'",
    ),
    "scales for an instruction without": (
        UNSCALED | {"a_format": "bf16", "b_format": "bf16", "a_scales": scales(4, 2)},
        ValueError,
        f"a has scales and {F16} takes none",
    ),
    "a scale format for an instruction without": (
        UNSCALED | {"a_format": "bf16", "b_format": "bf16", "scale_format": "e8m0"},
        ValueError,
        f"scale_format is e8m0; {F16} takes no scales",
    ),
    "two formats where one is allowed": (
        UNSCALED | {"a_format": "bf16", "b_format": "fp16"},
        ValueError,
        f"a is bf16 and b fp16; {F16} takes two operands of one format",
    ),
    "a BlockTensor and a format": (
        {"a": FLAT, "a_scales": None},
        ValueError,
        "a is a BlockTensor and brings its format and scales",
    ),
    "a BlockTensor and scales": (
        {"b": FLAT, "b_format": None},
        ValueError,
        "leave out b_format and b_scales",
    ),
    "a BlockTensor with a tensor scale": (
        BLOCKS | {"a": with_tensor_scale(FLAT)},
        ValueError,
        "a has a tensor scale",
    ),
    "a BlockTensor for an instruction without scales": (
        BLOCKS | {"a": FLAT, "instruction": "float32", "b_scales": None},
        ValueError,
        "a has scales and float32 takes none",
    ),
    "a BlockTensor of columns": (
        BLOCKS | {"a": block_tensor(4, 64, (32, 1), 9)},
        ValueError,
        f"a has blocks of 1 along K; {MX} takes multiples of 32",
    ),
    "a BlockTensor of three axes": (
        BLOCKS | {"a": quantize(np.ones((2, 4, 64), np.float32), "te-mx-e4m3")},
        ValueError,
        "a has shape (2, 4, 64)",
    ),
    "a BlockTensor with a scale missing": (
        BLOCKS | {"a": dataclasses.replace(FLAT, scales=FLAT.scales[:, :1])},
        ValueError,
        "a.scales has shape (4, 1); it must be (4, 2)",
    ),
    "a BlockTensor of no blocks": (
        BLOCKS | {"a": dataclasses.replace(FLAT, block=(1, -32))},
        ValueError,
        "a has blocks of (1, -32)",
    ),
    "a BlockTensor whose element is no operand": (
        BLOCKS
        | {
            "a": dataclasses.replace(
                FLAT, format=dataclasses.replace(PRESETS["te-mx-e4m3"], element=OTHER_E4M3)
            )
        },
        ValueError,
        "a_format e4m3 is not in FORMATS",
    ),
}

FP4 = "sm100.tcgen05.mxf4nvf4"
HALF = "sm90.wgmma.f16.f16out"


def fp4(instruction: str = FP4, width: int = 4, **changes: Any) -> dict[str, Any]:
    """Changes that make the arguments those of an FP4 kind with scales of `width` blocks."""
    names = {"instruction": instruction, "a_format": None, "b_format": None}
    codes_of = {"a": codes(4, 64, below=16), "b": codes(4, 64, below=16)}
    return names | codes_of | {"a_scales": scales(4, width), "b_scales": scales(4, width)} | changes


def half(**changes: Any) -> dict[str, Any]:
    operand = {"a": bf16(4, 64), "b": bf16(4, 64), "a_format": None, "b_format": None}
    return operand | {"instruction": HALF, **NONE} | changes


DOT |= {
    "a K that is no whole number of steps": (
        {"a": codes(4, 40), "b": codes(4, 40)},
        ValueError,
        f"a has K of 40; {MX} adds 32 products a step: pad both operands along K with code 0 to 64",
    ),
    "a K that is less than a step of FP4": (
        fp4(a=codes(4, 32, below=16), scale_format="ue4m3"),
        ValueError,
        f"a has K of 32; {FP4} adds 64 products a step",
    ),
    "no scale format where there are two": (
        fp4(),
        ValueError,
        f"scale_format is missing; {FP4} takes e8m0 or ue4m3",
    ),
    "a scale format that is none": (
        fp4(scale_format="e4m3"),
        ValueError,
        f"scale_format is e4m3; {FP4} takes e8m0 or ue4m3",
    ),
    "ue4m3 scales of blocks of 32": (
        fp4(width=2, scale_format="ue4m3"),
        ValueError,
        "a_scales has shape (4, 2); for a of (4, 64) it must be (4, 4)",
    ),
    "e8m0 scales of no block": (
        fp4(width=3, scale_format="e8m0"),
        ValueError,
        "a_scales has shape (4, 3); for a of (4, 64) it must be (4, 4) or (4, 2)",
    ),
    "blocks of 16 beside blocks of 32": (
        fp4(scale_format="e8m0", b_scales=scales(4, 2)),
        ValueError,
        "takes one kind for both",
    ),
    "ue4m3 scales for mxf4": (
        fp4("sm100.tcgen05.mxf4", 2, scale_format="ue4m3"),
        ValueError,
        "scale_format is ue4m3; sm100.tcgen05.mxf4 takes e8m0",
    ),
    "blocks of 16 for mxf4": (
        fp4("sm100.tcgen05.mxf4"),
        ValueError,
        "a_scales has shape (4, 4); for a of (4, 64) it must be (4, 2)",
    ),
    "FP8 for an FP4 kind": (
        fp4(scale_format="ue4m3", a_format="e4m3"),
        ValueError,
        f"a is e4m3; {FP4} takes e2m1",
    ),
    "two codes a byte": (
        fp4(scale_format="ue4m3", a=codes(4, 64) | 16),
        ValueError,
        "codes of e2m1 are below 16, one an element",
    ),
    "FP4 without scales": (
        fp4(scale_format="ue4m3", **NONE),
        ValueError,
        "a_scales and b_scales missing",
    ),
    "a float32 accumulator for a float16 one": (
        half(),
        TypeError,
        "c_bits holds uint32; it must hold uint16",
    ),
    "a float16 accumulator for a float32 one": (
        half(instruction="sm90.wgmma.f16", c_bits=np.zeros(4, np.uint16)),
        TypeError,
        "c_bits holds uint16; it must hold uint32",
    ),
    "bf16 with a float16 accumulator": (
        half(a_format="bf16", c_bits=np.zeros(4, np.uint16)),
        ValueError,
        f"a is bf16; {HALF} takes fp16",
    ),
    "tf32 in 16 bits": (
        half(instruction="sm100.tcgen05.tf32"),
        TypeError,
        "a holds uint16; it must hold uint32, codes of tf32",
    ),
    "FP6 for Hopper": (
        {"instruction": "sm90.wgmma.fp8", "a_format": "e3m2", **NONE},
        ValueError,
        "a is e3m2; sm90.wgmma.fp8 takes e4m3, e5m2",
    ),
}

MATMUL = {
    "a of one axis": ({"a": codes(64)}, ValueError, "a has shape (64,); it must be (m, K)"),
    "b of three axes": ({"b": codes(64, 3, 1)}, ValueError, "b has shape (64, 3, 1); it must be"),
    "b as rows": (
        {"b": codes(3, 64), "b_scales": scales(1, 64)},
        ValueError,
        "b has K of 3",
    ),
    "b of another K": (
        {"b": codes(32, 3), "b_scales": scales(1, 3)},
        ValueError,
        "a has shape (4, 64) and b (32, 3); they must be (m, K) and (K, n)",
    ),
    "scales of b as rows": (
        {"b_scales": scales(3, 2)},
        ValueError,
        "b_scales has shape (3, 2); for b of (64, 3) it must be (2, 3)",
    ),
    "c of another shape": (
        {"c": np.zeros((3, 4), dtype=np.uint32)},
        ValueError,
        "c has shape (3, 4); it must be (4, 3)",
    ),
    "c of a row": ({"c": np.zeros(3, dtype=np.uint32)}, ValueError, "c has shape (3,)"),
    "c of values": (
        {"c": np.zeros((4, 3), dtype=np.float32)},
        TypeError,
        "c holds float32; it must hold uint32",
    ),
    "a BlockTensor of rows as b": (
        {"b": block_tensor(64, 3, (1, 32), 9), "b_format": None, "b_scales": None},
        ValueError,
        f"b has blocks of 1 along K; {MX} takes multiples of 32",
    ),
}


def check_refused(call: Any, given: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        call(**given)
    text = str(raised.value)
    assert message in text, text
    assert "\n" not in text


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("name", DOT)
def test_fused_dot_refuses(name: str) -> None:
    change, error, message = DOT[name]
    given = dot_arguments() | change
    check_refused(fused_dot, given, error, message)
    check_refused(fused_dot, in_jax(given), error, message)


@pytest.mark.parametrize("name", MATMUL)
def test_matmul_refuses(name: str) -> None:
    change, error, message = MATMUL[name]
    given = matmul_arguments() | change
    check_refused(matmul_bits, given, error, message)
    check_refused(matmul_bits, in_jax(given), error, message)


def test_what_the_cases_change_was_right() -> None:
    assert fused_dot(**dot_arguments()).shape == (4,)
    assert matmul_bits(**matmul_arguments()).shape == (4, 3)


@pytest.mark.parametrize("c", [np.zeros((4, 3), np.uint32), np.zeros((4, 3)), [[0.0] * 3] * 4])
def test_matmul_takes_c_as_float32(c: Any) -> None:
    given = matmul_arguments() | {"c": c}
    check_refused(matmul, given, TypeError, "c ")


def test_refused_under_a_trace() -> None:
    """What is known without the values is still checked."""
    given = dot_arguments()
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays}

    def run(arrays: dict[str, Any]) -> Any:
        return jax.jit(lambda arrays: fused_dot(**arrays, **rest))(arrays)

    for change, error, message in (
        ({"a": codes(64)}, ValueError, "a has shape (64,)"),
        ({"a": np.zeros((4, 64), np.float32)}, TypeError, "a holds float32"),
        ({"a_scales": scales(4, 3)}, ValueError, "a_scales has shape (4, 3)"),
    ):
        check_refused(run, {"arrays": arrays | change}, error, message)
