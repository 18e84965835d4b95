"""Intervals: what a computation may return when order, split, tree or model are not known.

`Interval` holds a lower and an upper value, elementwise, and where NaN is permitted. `dot` and `matmul` are
matrix products by any of some instructions, in any order of steps or elements, over split or promoted
accumulators. The other functions are float32 operations, special functions by any of some models,
conversions, and sums in any tree. No value that a permitted computation returns is outside; how wide
intervals are is measured in `docs/accumulation.md`.

Everything here is numpy, on the host.
"""

from flamia_ref.arithmetic.interval_float32 import (
    add,
    convert,
    divide,
    encode,
    exp2,
    fma,
    log2,
    maximum,
    maximum_number,
    multiply,
    negate,
    reciprocal,
    subtract,
    tanh,
)
from flamia_ref.arithmetic.interval_products import TRIED_STEPS, Orders, dot, matmul
from flamia_ref.arithmetic.interval_sums import total
from flamia_ref.arithmetic.interval_value import Interval, between, exactly, hull

__all__ = [
    "TRIED_STEPS",
    "Interval",
    "Orders",
    "add",
    "between",
    "convert",
    "divide",
    "dot",
    "encode",
    "exactly",
    "exp2",
    "fma",
    "hull",
    "log2",
    "matmul",
    "maximum",
    "maximum_number",
    "multiply",
    "negate",
    "reciprocal",
    "subtract",
    "tanh",
    "total",
]
