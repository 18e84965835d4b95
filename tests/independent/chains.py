"""A recipe's matrix products: over channels for all pairs, over the tokens of a tile onto accumulators.

``k_order`` is that of the product's own instruction; the steps of guarded blocks ascend.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.independent import codes, float32, matrices
from tests.independent.machine import Rules
from tests.independent.masks import BLOCK, Mask
from tests.independent.matrices import Integers, Side
from tests.independent.operands import Matrix, narrow
from tests.independent.quantized import UNIT_SCALE, Quantized, scaled_value
from tests.independent.tensor_cores import INSTRUCTIONS


def is_guarded(product: Mapping[str, Any]) -> bool:
    """Whether guarded blocks of a product are computed otherwise."""
    return "high_precision_where_cut" in (product["left"]["guard"], product["right"]["guard"])


def folds(product: Mapping[str, Any]) -> bool:
    """Whether the left operand takes the scales of the right one before it is quantized."""
    return product["right"]["scale_folded_into"] is not None


def _rules(product: Mapping[str, Any]) -> Rules:
    return INSTRUCTIONS[product["instruction"]].rules


def _guard_rules(product: Mapping[str, Any]) -> Rules:
    return INSTRUCTIONS[product["guard_instruction"]].rules


def _half(matrix: Integers) -> Side:
    return Side(codes=matrix, element=codes.BF16)


def over_channels(
    product: Mapping[str, Any],
    left: Quantized,
    right: Quantized,
    halves: tuple[Integers, Integers],
    mask: Mask,
) -> Matrix:
    """S or dP of all pairs; ``halves`` are the bfloat16 operands [token, channel] of guarded blocks."""
    start = matrices.zeros(len(left.codes), len(right.codes))
    result = over_tokens(product, left.row_side(), right.row_side(), start)
    if is_guarded(product):
        a, b = (_half(x) for x in halves)
        guarded = matrices.contract(a, b, start, _guard_rules(product))
        for row, column in mask.guarded:
            block = np.s_[
                row * BLOCK : (row + 1) * BLOCK,
                column * BLOCK : (column + 1) * BLOCK,
            ]
            result[block] = guarded[block]
    found: Matrix = result.tolist()
    return found


def over_tokens(product: Mapping[str, Any], left: Side, right: Side, start: Integers) -> Integers:
    """Accumulators plus the products over the tokens of a tile."""
    if product["instruction"] == "float32":
        return _multiply_adds(left, right, start)
    descending = product["k_order"] == "descending"
    return matrices.contract(left, right, start, _rules(product), descending=descending)


def _multiply_adds(left: Side, right: Side, start: Integers) -> Integers:
    """Fused multiply-adds of the sides' values in float32, ascending."""
    a, b = (_values(side) for side in (left, right))
    result = [[int(x) for x in row] for row in start.tolist()]
    for i, row in enumerate(a):
        for j, line in enumerate(b):
            total = result[i][j]
            for x, y in zip(row, line, strict=True):
                total = float32.fused_multiply_add(x, y, total)
            result[i][j] = total
    return matrices.integers(result, start.shape[1])


def _values(side: Side) -> Matrix:
    """float32 bits of a side's codes times its scales, rounded once."""
    scales = None if side.scales is None else side.scales.tolist()
    return [
        [
            scaled_value(
                code, side.element, UNIT_SCALE if scales is None else scales[i][k // side.block]
            )
            for k, code in enumerate(row)
        ]
        for i, row in enumerate(side.codes.tolist())
    ]


def add_guarded(
    product: Mapping[str, Any],
    weights: Matrix,
    half: Integers,
    start: Integers,
    places: tuple[range, range],
    mask: Mask,
) -> Integers:
    """Accumulators of a query tile plus the products of a key tile's guarded blocks, ascending.

    ``weights`` [query][key] are float32 bits of the tiles at ``places``; ``half`` [key, channel] is bfloat16 of the
    whole document.
    """
    if not is_guarded(product):
        return start
    queries, keys = places
    result = start.copy()
    for first in range(queries.start, queries.stop, BLOCK):
        rows = range(first, min(first + BLOCK, queries.stop))
        for left in range(keys.start, keys.stop, BLOCK):
            if not mask.is_guarded(first, left):
                continue
            place = left - keys.start
            chosen = [weights[i - queries.start][place : place + BLOCK] for i in rows]
            # Columns past the document's end meet zeros; only a mask value gives them a weight.
            operand = matrices.zeros(len(chosen[0]), half.shape[1])
            operand[: len(half) - left] = half[left : left + len(operand)]
            part = slice(rows.start - queries.start, rows.stop - queries.start)
            result[part] = matrices.contract(
                _half(matrices.integers(narrow(chosen), len(operand))),
                _half(operand.T),
                result[part],
                _guard_rules(product),
            )
    return result


def add(a: Integers, b: Integers) -> Integers:
    """The float32 sums of two matrices."""
    rows = [
        [float32.add(x, y) for x, y in zip(*pair, strict=True)]
        for pair in zip(a.tolist(), b.tolist(), strict=True)
    ]
    return matrices.integers(rows, a.shape[1])
