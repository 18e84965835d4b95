"""Intervals: what a computation may return when order, split, tree or model are not known.

`Interval` holds a lower and an upper value, elementwise, and where NaN is permitted. `dot` and `matmul` are
matrix products by any of some instructions, in any order of steps or elements, over split or promoted
accumulators. The other functions are float32 operations, special functions by any of some models,
conversions, and sums in any tree. No value that a permitted computation returns is outside; how wide
intervals are is measured in `docs/accumulation.md`.

Everything here is numpy, on the host.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.arithmetic.interval.operations import add as add
    from flamia_ref.arithmetic.interval.operations import convert as convert
    from flamia_ref.arithmetic.interval.operations import divide as divide
    from flamia_ref.arithmetic.interval.operations import encode as encode
    from flamia_ref.arithmetic.interval.operations import exp2 as exp2
    from flamia_ref.arithmetic.interval.operations import fma as fma
    from flamia_ref.arithmetic.interval.operations import log2 as log2
    from flamia_ref.arithmetic.interval.operations import maximum as maximum
    from flamia_ref.arithmetic.interval.operations import maximum_number as maximum_number
    from flamia_ref.arithmetic.interval.operations import multiply as multiply
    from flamia_ref.arithmetic.interval.operations import negate as negate
    from flamia_ref.arithmetic.interval.operations import reciprocal as reciprocal
    from flamia_ref.arithmetic.interval.operations import subtract as subtract
    from flamia_ref.arithmetic.interval.operations import tanh as tanh
    from flamia_ref.arithmetic.interval.products import TRIED_STEPS as TRIED_STEPS
    from flamia_ref.arithmetic.interval.products import Orders as Orders
    from flamia_ref.arithmetic.interval.products import dot as dot
    from flamia_ref.arithmetic.interval.products import matmul as matmul
    from flamia_ref.arithmetic.interval.sums import total as total
    from flamia_ref.arithmetic.interval.value import Interval as Interval
    from flamia_ref.arithmetic.interval.value import between as between
    from flamia_ref.arithmetic.interval.value import exactly as exactly
    from flamia_ref.arithmetic.interval.value import hull as hull
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "operations": [
                "add",
                "convert",
                "divide",
                "encode",
                "exp2",
                "fma",
                "log2",
                "maximum",
                "maximum_number",
                "multiply",
                "negate",
                "reciprocal",
                "subtract",
                "tanh",
            ],
            "products": ["TRIED_STEPS", "Orders", "dot", "matmul"],
            "sums": ["total"],
            "value": ["Interval", "between", "exactly", "hull"],
        },
    )
