"""Comparing one tensor bit for bit, and saying where and by how much it differs."""

from dataclasses import dataclass
from itertools import permutations
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from flamia_ref.formats import FORMATS, ScalarFormat, decode
from flamia_ref.golden.files import Stored, Tensor
from flamia_ref.golden.stage import Place, View
from flamia_ref.report.model import Status

_MASKED = -1e4
"""Masked scores are this or less where kernels have no -infinity for them: -1e4, -1e6, -1e30, -3.4e38."""

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

# What a tensor may be given as. float32 for bfloat16 must hold bfloat16 values, or it differs.
ACCEPTED = {
    View.F4_E2M1: ("U8", "F4_E2M1"),
    View.F8_E4M3: ("U8", "F8_E4M3"),
    View.F8_E8M0: ("U8", "F8_E8M0"),
    View.F8_UE4M3: ("U8", "F8_E4M3"),
    View.BF16: ("U16", "BF16", "F32"),
    View.F32: ("F32", "U32"),
    View.I32: ("I32", "I64"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Aligned:
    """Expected and actual bits of one tensor in one type, with what the bits mean."""

    view: View
    expected: Tensor
    actual: Tensor

    def differs(self) -> Bools:
        """Return which elements differ. A NaN of a float tensor equals any other; -0 is not +0."""
        unequal = self.expected != self.actual
        if self.view in (View.F32, View.BF16):
            expected, actual = values(self.expected, self.view), values(self.actual, self.view)
            unequal &= ~(np.isnan(expected) & np.isnan(actual))
        return cast(Bools, unequal)

    def skipped(self) -> Bools:
        """Return where the actual value says that it was not computed: 0, NaN, -infinity or what stands for it."""
        given = values(self.actual, self.view)
        return cast(Bools, (given == 0) | (given <= _MASKED) | np.isnan(given))

    def values(self, bits: Tensor) -> Doubles:
        """Return the numbers that bits of this tensor stand for, in float64."""
        return values(bits, self.view)

    def largest(self, where: Bools) -> tuple[int | None, float | None]:
        """Return the largest distance in representable numbers, and in value, of some elements.

        None where every pair has a NaN.
        """
        expected, actual = self.expected[where], self.actual[where]
        left, right = values(expected, self.view), values(actual, self.view)
        numbers = ~(np.isnan(left) | np.isnan(right))
        if not numbers.any():
            return None, None
        steps = np.abs(ordinals(expected, self.view) - ordinals(actual, self.view))[numbers]
        with np.errstate(over="ignore", invalid="ignore"):
            distances = np.abs(left - right)[numbers]
        # Equal infinities are no distance.
        return int(steps.max()), float(np.nan_to_num(distances, nan=0.0, posinf=np.inf).max())


def align(place: Place, expected: Tensor, given: Stored) -> Aligned | tuple[Status, str]:
    """Bring a given tensor to the bits of the expected one, or say why it cannot be compared."""
    view = place.stage.view
    if given.dtype not in ACCEPTED[view]:
        return Status.DTYPE, f"given as {given.dtype}, accepted: {', '.join(ACCEPTED[view])}"
    if given.array.shape != place.shape:
        axes = ", ".join(place.stage.axes)
        moved = _axes_moved(expected, given.array)
        if moved is not None:
            named = ", ".join(place.stage.axes[axis] for axis in moved)
            return (
                Status.LAYOUT,
                f"given as {list(given.array.shape)} [{named}] with the right elements, expected "
                f"{list(place.shape)} [{axes}]; move the axes",
            )
        if given.array.size == expected.size and _same_bytes(expected, given.array):
            return (
                Status.LAYOUT,
                f"given as {list(given.array.shape)} with the right bytes in order, expected "
                f"{list(place.shape)} [{axes}]; reshape it",
            )
        return (
            Status.SHAPE,
            f"given as {list(given.array.shape)}, expected {list(place.shape)} [{axes}]",
        )
    if view is View.I32:
        return Aligned(
            view=view,
            expected=expected.astype(np.int64),
            actual=given.array.astype(np.int64),
        )
    if view is View.BF16 and given.dtype == "F32":
        wide = expected.astype(np.uint32) << np.uint32(16)
        return Aligned(view=View.F32, expected=wide, actual=given.array.view(np.uint32))
    if view is View.F32:
        return Aligned(
            view=view, expected=expected.view(np.uint32), actual=given.array.view(np.uint32)
        )
    return Aligned(view=view, expected=expected, actual=given.array)


def _axes_moved(expected: Tensor, given: Tensor) -> tuple[int, ...] | None:
    """The order of axes in which the expected tensor is the given one, None if there is none."""
    if expected.ndim != given.ndim or expected.dtype.itemsize != given.dtype.itemsize:
        return None
    for axes in permutations(range(expected.ndim)):
        moved = expected.transpose(axes)
        if moved.shape == given.shape and moved.size and moved.tobytes() == given.tobytes():
            return axes
    return None


def _same_bytes(expected: Tensor, given: Tensor) -> bool:
    return expected.size > 0 and expected.tobytes() == given.tobytes()


def values(bits: Tensor, view: View) -> Doubles:
    """Return the numbers that bits stand for, in float64."""
    if view is View.I32:
        return bits.astype(np.float64)
    if view is View.BF16:
        bits = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif view is View.F32:
        bits = bits.view(np.float32)
    else:
        return _decoded(bits, FORMATS[_NARROW[view]])
    return bits.astype(np.float64)


_NARROW = {
    View.F4_E2M1: "e2m1",
    View.F8_E4M3: "e4m3",
    View.F8_E8M0: "e8m0",
    View.F8_UE4M3: "ue4m3",
}


def _decoded(codes: Tensor, of_format: ScalarFormat) -> Doubles:
    """Return the numbers of codes, one a byte. What has more bits than the format is no number."""
    unused = codes >> of_format.bits if of_format.bits < 8 else np.zeros_like(codes)
    numbers = decode(np.where(unused != 0, np.uint8(0), codes), of_format, np.float64)
    return np.where(unused != 0, np.nan, numbers)


def ordinals(bits: Tensor, view: View) -> Integers:
    """Number representable values in their order, so that neighbours differ by 1. Both zeros are 0."""
    numbers = bits.astype(np.int64)
    signs = {View.F4_E2M1: 0x8, View.F8_E4M3: 0x80, View.BF16: 0x8000, View.F32: 0x80000000}
    sign = signs.get(view)
    if sign is None:
        return numbers
    return np.where(numbers & sign, -(numbers & (sign - 1)), numbers)


def as_text(bits: Any, view: View) -> tuple[str, str]:
    """Return one element as hexadecimal bits and as a value."""
    number = int(bits)
    if view is View.I32:
        return str(number), str(number)
    digits = {View.BF16: 4, View.F32: 8}.get(view, 2)
    if view is View.F8_E8M0:
        return f"0x{number:02x}", "NaN" if number == 255 else f"2^{number - 127}"
    kind = {2: np.uint8, 4: np.uint16, 8: np.uint32}[digits]
    return f"0x{number:0{digits}x}", str(np.float32(values(np.array([number], kind), view)[0]))
