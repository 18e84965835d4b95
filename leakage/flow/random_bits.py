"""Random numbers: what comes of a key sees the key; keys are never known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import Flow, unknown, with_axes


def from_each(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`random_bits`, `random_split`, `random_unwrap`, `random_seed`: more axes for each key."""
    out = equation.outvars[0].aval
    ids = operands[0].sources
    return unknown(
        tuple(out.shape), out.dtype, ids.reshape((*ids.shape, *(1,) * (len(out.shape) - ids.ndim)))
    )


def wrapped(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`random_wrap`: a key of all its words."""
    out = equation.outvars[0].aval
    x = operands[0]
    axes = list(range(len(out.shape), x.ndim))
    ids = context.sets.union_over(x.sources, axes)
    return unknown(
        tuple(out.shape), out.dtype, np.maximum(ids, EMPTY).reshape(ids.shape[: len(out.shape)])
    )


def together(context: Context, equation: Any, operands: Sequence[Flow]) -> Any:
    """`random_fold_in`, `threefry2x32`: element by element, all operands in all results."""
    axes = len(equation.outvars[0].aval.shape)
    ids: Ids = np.zeros((1,) * axes, dtype=np.int32)
    for x in operands:
        ids = context.sets.union(ids, with_axes(x, axes).sources)
    ids = np.maximum(ids, EMPTY)
    results = [unknown(tuple(v.aval.shape), v.aval.dtype, ids) for v in equation.outvars]
    return results if len(results) > 1 else results[0]


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    **dict.fromkeys(["random_bits", "random_split", "random_unwrap", "random_seed"], from_each),
    "random_wrap": wrapped,
    "random_fold_in": together,
    "threefry2x32": together,
}
