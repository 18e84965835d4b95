"""exp2, log2, exp, log, reciprocal and tanh on float32 arrays, by named model.

A model says what is computed to the last bit: what a device's special function unit returned, or
the correctly rounded result. `SPECIAL_MODELS` holds what each rests on.

How "correct" is proved: exp2, log2, exp, log and tanh are computed by integers whose error is bounded step by step (in
the docstrings of `correct`, `correct_log2`, `correct_natural` and `correct_tanh`), and a test that goes through
every fraction, significand or argument finds no result within that bound of a rounding boundary.
Outside the exact cases the values are irrational, so none is a tie. reciprocal is one IEEE division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flamia_ref import _backend, _float32, _mufu
from flamia_ref._backend import Array
from flamia_ref._errors import Registry, shown, type_of, unknown_name
from flamia_ref.arithmetic import correct, correct_log2, correct_natural, correct_tanh, polynomial
from flamia_ref.evidence import Evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialModel:
    """A model of special functions.

    Attributes:
        name: the registry name.
        functions: names of the functions it has.
        evidence: what it rests on. For a device's unit, by the architecture it is used for; for an
            ideal, by part.
        source: where that is written down, with the device and the number of cases of measurements.
    """

    name: str
    functions: tuple[str, ...]
    evidence: Mapping[str, Evidence] = field(hash=False)
    source: str


SPECIAL_MODELS: Mapping[str, SpecialModel] = Registry(
    "special function model",
    (
        (model.name, model)
        for model in (
            SpecialModel(
                name="mufu.sm90",
                functions=("exp2", "log2", "reciprocal", "tanh"),
                evidence={"sm_90": Evidence.MEASURED, "sm_100": Evidence.ASSUMED},
                source="ex2, lg2 and rcp.approx.ftz.f32 and tanh.approx.f32 on an NVIDIA H200 (sm_90, CUDA 13.0, "
                "2026-11-30), all 4294967296 inputs of each; no other architecture was measured",
            ),
            SpecialModel(
                name="polynomial3",
                functions=("exp2",),
                evidence={
                    "form": Evidence.SOURCE,
                    "arithmetic": Evidence.SPECIFIED,
                    "sm_90": Evidence.MEASURED,
                },
                source="nvidia-cudnn-frontend 1.32.0 frost/tile_dsl/pointwise.py exp2_emul_pair and flash-attention "
                "0251105a flash_attn/cute/utils.py ex2_emulation_2; PTX ISA for max, add.rm, sub and fma with .ftz; "
                "the same instructions, unpacked, on an NVIDIA H200 (sm_90, CUDA 13.0), all 4294967296 inputs",
            ),
            SpecialModel(
                name="correct",
                functions=("exp2", "log2", "exp", "log", "reciprocal", "tanh"),
                evidence={"definition": Evidence.SPECIFIED, "algorithm": Evidence.DERIVED},
                source="IEEE 754-2019, section 9.2, and 5.4.1 for the division 1 / x; of the others an error "
                "bound by proof and the distance of every result from a rounding boundary by exhaustive check",
            ),
        )
    ),
)
"""Every model by name, read-only."""


_NO_GRADIENT = "{function} has no derivative here; apply jax.lax.stop_gradient to its input"


def exp2(x: Array, model: str) -> Array:
    """2^x.

    x: float32, any shape, numpy or JAX. model: "mufu.sm90" (subnormal inputs count as zeros, below
    -126 the result is 0), "polynomial3" (as attention kernels emulate it: within 8.77e-5 of 2^x,
    relative, in [-126, 128); 0 for NaN; not 2^x from 128 on) or "correct" (rounded to nearest even, subnormal
    results kept). Returns float32 of x's shape and library; every NaN is 0x7fffffff.

    Raises TypeError for another dtype or under differentiation, ValueError for an unknown model.
    """
    return _apply("exp2", x, model)


def log2(x: Array, model: str) -> Array:
    """log2 x.

    As `exp2`; model: "mufu.sm90" (subnormal inputs count as zeros and give -infinity, negative ones
    NaN) or "correct" (rounded to nearest even; subnormal inputs count, either zero gives -infinity,
    negative ones NaN).
    """
    return _apply("log2", x, model)


def exp(x: Array, model: str) -> Array:
    """e^x.

    As `exp2`; model: "correct" (rounded to nearest even, subnormal results kept).
    """
    return _apply("exp", x, model)


def log(x: Array, model: str) -> Array:
    """The natural logarithm of x.

    As `exp2`; model: "correct" (rounded to nearest even; subnormal inputs count, either zero gives -infinity, negative
    ones NaN).
    """
    return _apply("log", x, model)


def reciprocal(x: Array, model: str) -> Array:
    """1 / x.

    As `exp2`; model: "mufu.sm90" (subnormal inputs count as zeros and give an infinity, subnormal
    results are flushed to zero) or "correct" (rounded to nearest even, subnormals kept; zeros give
    infinities of their sign).
    """
    return _apply("reciprocal", x, model)


def tanh(x: Array, model: str) -> Array:
    """tanh x.

    As `exp2`; model: "mufu.sm90" (below 2^-8 x itself, subnormals included; from 8 on 1; within 2^-16
    of tanh x, relative, and not monotonic) or "correct" (rounded to nearest even, subnormals and the
    sign of zeros kept).
    """
    return _apply("tanh", x, model)


def exp2_bits(x: Array, *, model: str) -> Array:
    """2^x of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("exp2", model)(x)


def log2_bits(x: Array, *, model: str) -> Array:
    """log2 x of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("log2", model)(x)


def exp_bits(x: Array, *, model: str) -> Array:
    """e^x of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("exp", model)(x)


def log_bits(x: Array, *, model: str) -> Array:
    """The natural logarithm of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("log", model)(x)


def reciprocal_bits(x: Array, *, model: str) -> Array:
    """1 / x of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("reciprocal", model)(x)


def tanh_bits(x: Array, *, model: str) -> Array:
    """tanh x of float32 bits by a named model: uint32 in and out, for use inside compiled code."""
    return _rule("tanh", model)(x)


Rule = Callable[[Array], Array]

_RULES: dict[tuple[str, str], Rule] = {
    ("exp2", "mufu.sm90"): _mufu.exp2_bits,
    ("exp2", "polynomial3"): polynomial.exp2_bits,
    ("exp2", "correct"): correct.exp2_bits,
    ("log2", "mufu.sm90"): _mufu.log2_bits,
    ("log2", "correct"): correct_log2.log2_bits,
    ("exp", "correct"): correct_natural.exp_bits,
    ("log", "correct"): correct_natural.log_bits,
    ("reciprocal", "mufu.sm90"): _mufu.reciprocal_bits,
    ("reciprocal", "correct"): lambda x: _float32.divide(_float32.ONE, x),
    ("tanh", "mufu.sm90"): _mufu.tanh_bits,
    ("tanh", "correct"): correct_tanh.tanh_bits,
}
"""Of each function and model, the rule on bits."""


def _rule(function: str, model: str) -> Rule:
    if not isinstance(model, str) or (function, model) not in _RULES:
        allowed = [name for of, name in _RULES if of == function]
        raise unknown_name(f"{function} model", model, allowed)
    return _RULES[function, model]


def _apply(function: str, x: Array, model: str) -> Array:
    _rule(function, model)
    dtype = getattr(x, "dtype", None)
    if dtype != np.float32:
        given = shown(x) if dtype is None else f"an array of {type_of(x)}"
        raise TypeError(f"{function} takes a float32 array, not {given}; convert it first")
    x = _backend.without_gradient(_backend.plain("x", x), _NO_GRADIENT.format(function=function))
    return _on_floats(x, function=function, model=model)


@_backend.jit(static=("function", "model"))
def _on_floats(x: Array, *, function: str, model: str) -> Array:
    result = _rule(function, model)(_backend.bits(x))
    return _backend.from_bits(result, np.float32)
