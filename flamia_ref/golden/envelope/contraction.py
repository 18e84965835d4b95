"""The matrix products of attention on ranges: the twins of `flamia_ref.attention.sides` over tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia_ref import _float32
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.arithmetic.instructions import Instruction
from flamia_ref.arithmetic.interval.tiles import Ends, Factor, exact_factor, product
from flamia_ref.attention import sides
from flamia_ref.attention.product import Operand, Product
from flamia_ref.formats import BF16, FORMATS
from flamia_ref.golden.envelope.ranges import Range, of_ends, rising, where

Indices = Any


def over_channels(
    left: sides.Rows,
    right: sides.Rows,
    given: Product,
    guarded: Indices | None,
    machine: Instruction | None,
) -> Range:
    """What `sides.over_channels` may return over all orders of steps: [tiles, left rows, right rows]. `machine`: the
    instruction that adds the products instead of the recipe's."""
    rules, scaling = machine or INSTRUCTIONS[given.instruction], sides.scaling_of(given)
    a, b = (
        _rows_factor(rows, operand, scaling, rules)
        for rows, operand in ((left, given.left), (right, given.right))
    )
    s = of_ends(product(a, b, None, rules))
    if left.shift is not None and right.shift is not None:
        k = left.shift[:, :, None] + right.shift[:, None, :]
        s = rising(lambda x: _float32.shift(x, k), s)
    if guarded is None or left.high is None or given.guard_instruction is None:
        return s
    rules = machine or INSTRUCTIONS[given.guard_instruction]
    a, b = (
        exact_factor(np.moveaxis(codes, 2, 0), BF16, None, None, rules)
        for codes in (left.high, np.asarray(right.high))
    )
    high = of_ends(product(a, b, None, rules))
    return where(in_guarded(guarded, s.low.shape), high, s)


def right_over_rows(
    rows: sides.Rows, operand: Operand, instruction: str, machine: Instruction | None
) -> Factor:
    """The right side of a product over tokens, [tiles, channels, tokens]."""
    own = INSTRUCTIONS[instruction]
    rules, scaling = machine or own, next(iter(own.scalings), None)
    scales = rows.scales
    if scaling is not None and scales is None:
        scales = np.full((-(-len(rows.codes) // scaling.block), 1, 1), sides.UNIT, dtype=np.uint8)
    return exact_factor(rows.codes, FORMATS[sides.element(operand)], scales, scaling, rules)


def over_rows(
    left: Factor, right: Factor, accumulator: Ends, instruction: str, machine: Instruction | None
) -> Ends:
    """The accumulator [tiles, others, channels] after the tokens of one tile."""
    return product(left, right, accumulator, machine or INSTRUCTIONS[instruction])


def over_guarded_keys(
    left: Factor,
    right: sides.Rows,
    accumulator: Ends,
    given: Product,
    guarded: Indices,
    machine: Instruction | None,
) -> Ends:
    """The accumulator after the guarded blocks of one tile. `left` is 0 elsewhere."""
    given_high = np.asarray(right.high)
    rules = machine or INSTRUCTIONS[str(given.guard_instruction)]
    high = exact_factor(np.moveaxis(given_high, 1, 0), BF16, None, None, rules)
    end = product(left, high, accumulator, rules)
    tiles, rows, _ = end.low.shape
    here = (guarded >= 0).any(axis=2)
    here = np.repeat(here, sides.BLOCK, axis=1)[:, :, None]
    # A block that is not guarded takes no part, so no NaN of its keys reaches the row.
    shape = (tiles, rows, left.lower.shape[2])
    used = in_guarded(guarded, shape)
    clean = (given_high.astype(np.uint32) << np.uint32(16)).view(np.float32)
    bad = ~np.isfinite(clean)
    if bad.any():
        reached = (used.astype(np.float64) @ bad.astype(np.float64)) > 0
        keep = here & ~reached
        quiet = product(
            left,
            exact_factor(
                np.moveaxis(np.where(bad, np.uint16(0), given_high), 1, 0), BF16, None, None, rules
            ),
            accumulator,
            rules,
        )
        end = Ends(*(np.where(keep, x, y) for x, y in zip(quiet, end, strict=True)))
    return Ends(*(np.where(here, x, y) for x, y in zip(end, accumulator, strict=True)))


def in_guarded(guarded: Indices, shape: tuple[int, ...]) -> Any:
    """Whether pairs [tiles, queries, keys] are in a guarded block."""
    tiles, rows, keys = shape
    found = sides.in_guarded(guarded, keys, np)
    whole = np.broadcast_to(
        found, (tiles, rows // sides.BLOCK, sides.BLOCK, keys // sides.BLOCK, sides.BLOCK)
    )
    return whole.reshape(shape)


def _rows_factor(rows: sides.Rows, operand: Operand, scaling: Any, rules: Any) -> Factor:
    codes = np.moveaxis(rows.codes, 2, 0)
    scales = None if rows.scales is None else np.moveaxis(rows.scales, 2, 0)
    if scaling is not None and scales is None:
        scales = np.full((-(-len(codes) // scaling.block), 1, 1), sides.UNIT, dtype=np.uint8)
    return exact_factor(codes, FORMATS[sides.element(operand)], scales, scaling, rules)
