"""A function of one primitive, with its operands."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FLOATS = np.array([0.0, 1.0, -1.0, 2.5, -3.75, 1000.0, -0.0078125])
INTEGERS = np.array([0, 1, 2, 3, -1, -2, 5, 100])
CODES = np.array([0, 1, 2, 3, 7, 15, 16, 128, 200, 255])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function, the shapes and dtypes of its operands, and which of them stay known."""

    name: str
    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], str], ...]
    exact: bool = True
    """Whether the rule claims the exact set, with all operands free."""
    fixed: dict[int, Any] = field(default_factory=dict)
    """Operands that are always known, by place."""
    pools: dict[int, Any] = field(default_factory=dict)
    fine: bool = False


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def pool_of(case: Case, place: int) -> Array:
    dtype = dtype_of(case.operands[place][1])
    if place in case.pools:
        return np.asarray(case.pools[place]).astype(dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind == "u" or dtype.name.startswith("uint"):
        top = int(ml_dtypes.iinfo(dtype).max)
        return np.unique(CODES[top >= CODES]).astype(dtype)
    if dtype.kind == "i" or dtype.name.startswith("int"):
        top = int(ml_dtypes.iinfo(dtype).max)
        return np.unique(INTEGERS[top >= INTEGERS]).astype(dtype)
    return np.unique(FLOATS.astype(dtype))
