"""Simpler inputs: what shrinking tries on an operand to make a witness readable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import Registry
from flamia_ref.leakage.search.bases import BFLOAT16, Inputs

Array = NDArray[Any]
Change = tuple[str | int | float, ...]


def changed(inputs: Inputs, change: Change) -> dict[str, Array]:
    """The inputs after a change: its name in `CHANGES`, the operand, and numbers."""
    name, operand, *numbers = change
    found = CHANGES[str(name)](inputs[str(operand)], *(int(x) for x in numbers))
    return {**inputs, str(operand): found}


def _fill(x: Array, bits: int) -> Array:
    """The bfloat16 of `bits` everywhere."""
    return np.full(x.shape, np.uint16(bits)).view(BFLOAT16)


def _powers(x: Array) -> Array:
    """The power of two at or below each magnitude, with its sign."""
    bits = x.view(np.uint16)
    subnormal = (bits & np.uint16(0x7F80)) == 0
    return np.where(subnormal, np.uint16(0), bits & np.uint16(0xFF80)).view(BFLOAT16)


def _positive(x: Array) -> Array:
    """The magnitudes."""
    return (x.view(np.uint16) & np.uint16(0x7FFF)).view(BFLOAT16)


def _tokens(x: Array, *kept: int) -> Array:
    """0 in all other tokens."""
    found = np.zeros_like(x)
    found[list(kept)] = x[list(kept)]
    return found


def _channels(x: Array, *kept: int) -> Array:
    """0 in all other channels."""
    found = np.zeros_like(x)
    found[:, :, list(kept)] = x[:, :, list(kept)]
    return found


def _put(x: Array, token: int, head: int, channel: int, bits: int) -> Array:
    """The bfloat16 of `bits` in one element."""
    found = x.copy()
    found.view(np.uint16)[token, head, channel] = bits
    return found


CHANGES: Mapping[str, Callable[..., Array]] = Registry(
    "change",
    (
        ("fill", _fill),
        ("powers", _powers),
        ("positive", _positive),
        ("tokens", _tokens),
        ("channels", _channels),
        ("put", _put),
    ),
)
"""Changes by name: functions of an operand and whole numbers."""
