"""Faults that are planted in front of a kernel, to see that the search would have found them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from flamia_ref.properties.data import U16, Inputs, bits_of, values
from flamia_ref.properties.drawn import BLOCK

_REACH = 2.0**-16  # about what one scale leaves of a block in e4m3


def shared_scale(operand: str, *, tokens: int | None = BLOCK) -> Callable[[Inputs], Inputs]:
    """Give an operand one scale for `tokens` tokens of a channel, counted from the document; None: for all documents.

    What is less than 2^-16 of the largest value that shares the scale becomes 0, and a value that is not finite makes
    all of them NaN.
    """

    def prepare(inputs: Inputs) -> Inputs:
        x = getattr(inputs, operand).copy()
        if tokens is None:
            runs = [(0, len(x))]
        else:
            runs = [
                (first, min(first + tokens, stop))
                for start, stop in pairwise(inputs.starts)
                for first in range(start, stop, tokens)
            ]
        for first, stop in runs:
            x[first:stop] = _scaled(x[first:stop])
        return replace(inputs, **{operand: x})

    return prepare


def _scaled(x: U16) -> U16:
    if not len(x):
        return x
    held = values(x)
    largest = np.abs(held).max(axis=0, keepdims=True)
    kept = np.where(np.abs(held) < largest * np.float32(_REACH), np.float32(0), held)
    return bits_of(np.where(np.isfinite(largest), kept, np.float32(np.nan)))
