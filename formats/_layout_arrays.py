"""What all layouts share: bytes of scales, shapes that users give, and arrays in memory order."""

import dataclasses
import operator
from enum import StrEnum
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown, unknown_name
from flamia_ref.formats.encoding import as_codes
from flamia_ref.formats.scalar import E8M0

# Scales are bytes here, E8M0 or E4M3, and only their range is checked. The name is for messages.
_SCALE = dataclasses.replace(E8M0, name="a scale")


class Orientation(StrEnum):
    """Which axis of an operand its scales run along, as TransformerEngine and cuDNN name it."""

    #: Scales [..., rows, column blocks]: a block lies in one row. The matrix is tiled as it is.
    ROW_WISE = "row_wise"
    #: Scales [..., row blocks, columns]: a block lies in one column. Their transpose is tiled.
    COLUMN_WISE = "column_wise"


def orientation_of(given: Orientation | str) -> Orientation:
    """The orientation of that name. Raises ValueError for an unknown one."""
    try:
        return Orientation(given)
    except ValueError:
        raise unknown_name("orientation", given, Orientation) from None


def as_scales(given: Any, name: str = "scales") -> Array:
    """Scales as uint8 [..., rows, columns].

    Raises TypeError for what are no integers, ValueError for fewer than two axes or numbers that
    are no bytes.
    """
    scales = as_bytes(given, name)
    if scales.ndim < 2:
        raise ValueError(f"{name} are [..., rows, columns], not of shape {scales.shape}")
    return scales


def as_bytes(given: Any, name: str) -> Array:
    """Bytes in tile order, as uint8. Raises as `as_scales`, for no number of axes."""
    return as_codes(given, _SCALE, name)


def scale_shape(given: Any) -> tuple[int, ...]:
    """The shape (..., rows, columns) that scales have. Raises ValueError for what is none."""
    try:
        sizes = tuple(operator.index(size) for size in given)
    except TypeError:
        sizes = ()
    if len(sizes) < 2 or min(sizes) < 0:
        raise ValueError(f"shape is (..., rows, columns) of the scales, not {shown(given)}")
    return sizes


def refuse_other_shape(found: Array, expected: tuple[int, ...], name: str, of: Any) -> None:
    """Raise ValueError unless `found` has the shape that scales of shape `of` take."""
    if found.shape != expected:
        raise ValueError(f"{name} have shape {found.shape}; scales of shape {of} take {expected}")


def in_order(x: Array) -> Array:
    """`x` with its last axis contiguous in memory, which is the order that kernels read."""
    return x if _backend.is_jax(x) else np.ascontiguousarray(x)


def padded(x: Array, rows: int, columns: int) -> Array:
    """[..., rows, columns], zeros after the rows and the columns of `x`."""
    before = [(0, 0)] * (x.ndim - 2)
    after = [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])]
    return _backend.namespace(x).pad(x, before + after)
