"""What a call of a kernel gave, as bits that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import line, shown
from flamia_ref.kernels import KernelError, guarded
from flamia_ref.leakage.search.setting import Bools, Setting

Array = NDArray[Any]

_FLOATS = {
    np.dtype(np.float64): np.uint64,
    np.dtype(np.float32): np.uint32,
    np.dtype(np.float16): np.uint16,
    np.dtype(ml_dtypes.bfloat16): np.uint16,
}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """The results of one call.

    Attributes:
        outputs: floats by name, tokens first: [tokens, heads, channels], lse with one channel.
        scales: scale bytes by stage, uint8.
        failure: why there are none, in one line, or None.
        touched: inputs whose arrays the kernel changed.
    """

    outputs: Mapping[str, Array] = field(default_factory=dict)
    scales: Mapping[str, Array] = field(default_factory=dict)
    failure: str | None = None
    touched: tuple[str, ...] = ()


def read(results: Mapping[str, Any], setting: Setting, *, wanted: Sequence[str]) -> Outcome:
    """The outcome that a kernel's dict holds. Raises KernelError of one line."""
    outputs = {}
    for name in wanted:
        if name in results and results[name] is not None:
            outputs[name] = _output(name, results[name], setting)
    if "out" not in outputs:
        raise KernelError(f'it gave no "out", only {shown(sorted(results))}; it must return "out"')
    return Outcome(outputs=outputs, scales=_scales(results))


def _output(name: str, given: Any, setting: Setting) -> Array:
    with guarded(f"{name} cannot be read as an array"):
        x = np.asarray(given)
    if x.dtype == np.uint16:
        x = x.view(_BFLOAT16)
    if x.dtype not in _FLOATS:
        allowed = "float32, bfloat16, its bits as uint16, float16 or float64"
        raise KernelError(f"{name} is {line(str(x.dtype))}; it must be {allowed}")
    wanted = setting.shape(name)
    if name == "lse":
        if x.shape != (setting.heads, setting.tokens):
            raise KernelError(
                f"lse has shape {x.shape}; it must be (heads, tokens) = {(setting.heads, setting.tokens)}"
            )
        x = x.T[..., None]
    if x.shape != wanted:
        raise KernelError(f"{name} has shape {x.shape}; it must be {wanted}")
    return np.array(x, order="C")  # a copy: the kernel may write into its own buffer again


def is_scale(name: str) -> bool:
    """Whether a stage of this name holds scale bytes."""
    return "scales" in name.split(".")


def _scales(results: Mapping[str, Any]) -> dict[str, Array]:
    found = {}
    for name, given in results.items():
        if not is_scale(name) or name.endswith("token_scales") or given is None:
            continue
        entries = given if isinstance(given, (list, tuple)) else [given]
        for index, entry in enumerate(entries):
            with guarded(f"{line(name)} cannot be read as an array"):
                x = np.array(entry)
            if x.dtype == np.uint8:
                found[f"{name}.{index}" if isinstance(given, (list, tuple)) else name] = x
    return found


def bits(x: Array) -> Array:
    """The bit patterns of floats, every NaN as one."""
    unsigned = _FLOATS[x.dtype]
    return np.where(np.isnan(x), np.array(np.nan, dtype=x.dtype), x).view(unsigned)


def moved(before: Array, after: Array) -> Bools:
    """Which elements have other bits. A NaN is as good as another; -0 is not +0."""
    found: Bools = bits(before) != bits(after)
    return found


def rows_of(elements: Bools) -> Bools:
    """Which tokens have an element that moved."""
    return np.asarray(elements.reshape(len(elements), -1).any(axis=1))


def differences(before: Outcome, after: Outcome) -> dict[str, Bools]:
    """Which elements of each output moved, of the outputs that both have."""
    return {
        name: moved(x, after.outputs[name])
        for name, x in before.outputs.items()
        if name in after.outputs and after.outputs[name].dtype == x.dtype
    }


def number(x: Array) -> str:
    """One float as its bits in hexadecimal and its value: "0x3f80 (1.0)". bfloat16 values of float32 have 4 digits."""
    pattern, digits = int(bits(x)), 2 * x.dtype.itemsize
    if x.dtype == np.float32 and pattern & 0xFFFF == 0:
        pattern, digits = pattern >> 16, 4
    return f"0x{pattern:0{digits}x} ({value(float(x))})"


def value(x: float) -> str:
    """A value as text; a power of two that is far from 1 as such."""
    if x == 0 or not np.isfinite(x):
        return repr(x)
    mantissa, exponent = np.frexp(abs(x))
    if mantissa == 0.5 and not -5 < exponent < 12:
        return f"{'-' if x < 0 else ''}2^{exponent - 1}"
    text = f"{x:.6g}"
    return text if "." in text or "e" in text else f"{text}.0"
