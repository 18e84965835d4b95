"""Bit fields: integers put together from several places, as packed codes are, and taken apart again.

An "or", "xor" or sum of integers that share no bit keeps both as fields of a word. A mask or a shift then selects among
them, so that a code that is unpacked does not depend on its neighbours in the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.evaluation import evaluate
from flamia_ref.leakage.flow.sets import EMPTY
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Bounds,
    Field,
    Flow,
    integer_info,
    is_integer,
    is_narrow,
    known_ids,
    made,
)

_MOST = 64  # fields of a word

Fields = tuple[Field, ...]


def refined(context: Context, equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
    """`result` of an elementwise equation, an integer, with its fields and no more sources than they have."""
    rule = _RULES.get(equation.primitive.name)
    if rule is None or not any(x.fields or x.bounds or x.values is not None for x in operands):
        return result  # nothing is told of any bit
    if 0 in result.shape or result.all_known:
        return result
    if any(not is_integer(x.dtype) or is_narrow(x.dtype) for x in (*operands, result)):
        return result
    return rule(context, equation, operands, result)


def mask_of(x: Flow) -> int:
    """The bits that may be other than 0 in any element."""
    if x.fields is not None:
        return sum(field.mask for field in x.fields)
    info = integer_info(x.dtype)
    whole = int((1 << info.bits) - 1)
    if x.ids.size and x.all_known:
        return int(np.bitwise_or.reduce(x.compact_values(), axis=None)) & whole
    if x.bounds is None or (x.bounds[0] < 0).any() or (x.bounds[1] > 2.0**52).any():
        return whole
    most = int(x.bounds[1].max())
    if x.values is not None:
        own = np.where(x.known, x.values, 0)
        if (own < 0).any():
            return whole
        most = max(most, int(own.max()))
    return (1 << most.bit_length()) - 1


def _fields_of(x: Flow) -> Fields:
    return x.fields if x.fields is not None else (Field(mask_of(x), x),)


def _word(x: Flow) -> Flow:
    """`x` without fields."""
    return Flow(x.shape, x.dtype, x.ids, x.values, x.bounds)


def _combined(context: Context, result: Flow, parts: Sequence[Field]) -> Flow:
    """The word of these fields."""
    parts = [x for x in parts if x.mask and not (x.word.all_known and not _any(x.word))]
    shape, dtype = result.shape, result.dtype
    if not parts:
        return Flow(shape, dtype, known_ids(len(shape)), np.zeros((1,) * len(shape), dtype))
    if len(parts) == 1:
        word = parts[0].word
        ends = result.bounds if word.bounds is None else word.bounds
        return Flow(shape, dtype, word.ids, word.values, ends, tuple(parts))
    ids, sure = parts[0].word.sources, parts[0].word.known
    for part in parts[1:]:
        ids = context.sets.union(ids, part.word.sources)
        sure = sure & part.word.known
    values = None
    if sure.any():
        values = np.zeros((1,) * len(shape), dtype)
        for part in parts:
            values = values | np.where(sure, part.word.compact_values(), np.zeros((), dtype))
    plain = made(shape, dtype, np.where(sure, np.int32(KNOWN), np.maximum(ids, EMPTY)), values)
    kept = tuple(parts) if len(parts) <= _MOST else None
    return Flow(shape, dtype, plain.ids, plain.values, result.bounds, kept)


def _any(x: Flow) -> bool:
    return x.values is not None and bool((x.values != 0).any())


def _spread(x: Field, shape: tuple[int, ...]) -> Field:
    """A field of an array of a shape that its array broadcasts to."""
    word = x.word
    return Field(x.mask, Flow(shape, word.dtype, word.ids, word.values, word.bounds))


def _together(context: Context, equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
    """Integers that share no bit."""
    a, b = operands
    if mask_of(a) & mask_of(b):
        return result
    parts = [_spread(x, result.shape) for side in (a, b) for x in _fields_of(_settled(side))]
    found = _combined(context, result, parts)
    return found if found.fields is not None else result


def _settled(x: Flow) -> Flow:
    return x if x.fields is not None else _word(x)


def _masked(context: Context, equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
    """`and`: field by field."""
    a, b = operands
    if a.fields is None and b.fields is None:
        mask = mask_of(a) & mask_of(b)
        if not mask:
            return _combined(context, result, [])
        whole = (1 << integer_info(result.dtype).bits) - 1
        return result if mask == whole else _combined_alone(result, mask)
    parts = []
    for x in _fields_of(_settled(a)):
        for y in _fields_of(_settled(b)):
            if x.mask & y.mask:
                parts.append(
                    Field(x.mask & y.mask, _both(context, equation, x.word, y.word, result))
                )
    return _combined(context, result, parts)


def _both(context: Context, equation: Any, a: Flow, b: Flow, result: Flow) -> Flow:
    """The "and" of two words."""
    ids = np.maximum(context.sets.union(a.ids, b.ids), EMPTY)
    sure = a.known & b.known
    values, _ = evaluate(equation, [a.compact_values(), b.compact_values()], result.dtype)
    for x in (a, b):
        zero = x.where_known(0)
        sure, values = sure | zero, np.where(zero, np.zeros((), result.dtype), values)
    return made(result.shape, result.dtype, np.where(sure, np.int32(KNOWN), ids), values)


def _shifted(move: Callable[[int, int, int], int]) -> Callable[..., Flow]:
    def rule(context: Context, equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
        x, places = operands
        if (
            not places.all_known
            or places.values is None
            or (places.values != places.values.flat[0]).any()
        ):
            return result
        bits = integer_info(result.dtype).bits
        by = int(places.values.flat[0])
        if not 0 <= by < bits:
            return result
        if x.fields is None:
            mask = move(mask_of(x), by, bits)
            whole = (1 << bits) - 1
            return result if mask in (0, whole) else _combined_alone(result, mask)
        amount = Flow(places.shape, places.dtype, places.ids, places.values)
        parts = [
            Field(move(part.mask, by, bits), _moved(equation, part.word, amount, result))
            for part in x.fields
        ]
        return _combined(context, result, parts)

    return rule


def _combined_alone(result: Flow, mask: int) -> Flow:
    """A word whose other bits are 0."""
    word = _word(result)
    return Flow(word.shape, word.dtype, word.ids, word.values, word.bounds, (Field(mask, word),))


def _moved(equation: Any, word: Flow, amount: Flow, result: Flow) -> Flow:
    from flamia_ref.leakage.flow import bounds

    values = None
    if word.values is not None:
        values, _ = evaluate(equation, [word.values, amount.compact_values()], result.dtype)
    moved = made(result.shape, result.dtype, word.ids, values)
    return bounds.refined(equation, [word, amount], moved)


def _left(mask: int, by: int, bits: int) -> int:
    return (mask << by) & ((1 << bits) - 1)


def _right(mask: int, by: int, bits: int) -> int:
    return mask >> by


def _right_with_sign(mask: int, by: int, bits: int) -> int:
    top = (((1 << by) - 1) << (bits - by)) if mask >> (bits - 1) else 0
    return (mask >> by) | top


def _converted(context: Context, equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
    """Another type of integer: the bits that both have; a negative number has others above them."""
    x = operands[0]
    before, after = integer_info(x.dtype), integer_info(result.dtype)
    grows = after.bits > before.bits
    if x.fields is None:
        return result
    if before.min < 0 and grows and mask_of(x) >> (before.bits - 1):
        return result
    whole = (1 << after.bits) - 1
    parts = []
    for part in x.fields:
        values = None
        if part.word.values is not None:
            values = part.word.values.astype(result.dtype)
        word = made(result.shape, result.dtype, part.word.ids, values)
        if part.mask & whole == part.mask and (before.min == 0 or mask_of(x) <= before.max):
            word = Flow(word.shape, word.dtype, word.ids, word.values, _fitting(part.word, after))
        parts.append(Field(part.mask & whole, word))
    return _combined(context, result, parts)


def _fitting(word: Flow, info: Any) -> Bounds | None:
    if word.bounds is None or (word.bounds[1] > info.max).any() or (word.bounds[0] < 0).any():
        return None
    return word.bounds


_RULES: Mapping[str, Callable[..., Flow]] = {
    "or": _together,
    "xor": _together,
    "add": _together,
    "and": _masked,
    "shift_left": _shifted(_left),
    "shift_right_logical": _shifted(_right),
    "shift_right_arithmetic": _shifted(_right_with_sign),
    "convert_element_type": _converted,
    "bitcast_convert_type": _converted,
}
