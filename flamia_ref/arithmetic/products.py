"""Matrix products by the rules of an instruction: `fused_dot` row by row, `matmul` as a whole.

Under JAX a whole chain along K is one primitive named `fused_sum`, so that who reads the program
sees which lanes depend on which operands without looking into integer arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic import fused_sum, grouped_sum, ideal, operands
from flamia_ref.arithmetic.catalogue import INSTRUCTIONS
from flamia_ref.arithmetic.grouped_sum import Scales
from flamia_ref.arithmetic.instructions import Instruction, Scaling, Summation
from flamia_ref.arithmetic.operands import Pair
from flamia_ref.arithmetic.order import Order
from flamia_ref.formats import FORMATS, ScalarFormat, decode_bits


def _chain(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    c: Array,
    *,
    instruction: str,
    a_format: str,
    b_format: str,
    scaling: Scaling | None,
) -> Array:
    rules, elements = INSTRUCTIONS[instruction], (FORMATS[a_format], FORMATS[b_format])
    if rules.summation is Summation.FMA:
        return ideal.fma_chain(decode_bits(a, elements[0]), decode_bits(b, elements[1]), c)
    xp = _backend.namespace(a, b, c)
    if rules.terms is not None:
        a, b = (_padded(x, -x.shape[0] % rules.terms) for x in (a, b))
    left, right = (
        fused_sum.unpack(x, element) for x, element in zip((a, b), elements, strict=True)
    )
    poisoned = fused_sum.is_nan(c, rules.result)
    for terms in (left, right):
        if terms.nan is not None:
            poisoned = poisoned | terms.nan.any(axis=0)
    scales: tuple[Scales, Scales] | None = None
    if scaling is not None:
        blocks = -(-a.shape[0] // scaling.block)
        form = FORMATS[scaling.format]
        scales = (
            grouped_sum.unpack_scales(_padded(a_scales, blocks - a_scales.shape[0]), form),
            grouped_sum.unpack_scales(_padded(b_scales, blocks - b_scales.shape[0]), form),
        )
        poisoned = poisoned | scales[0].nan.any(axis=0) | scales[1].nan.any(axis=0)
    if rules.summation is Summation.EXACT:
        result = ideal.exact_sum(left, right, scales, c, elements, scaling)
    elif scaling is None or scales is None:
        result = fused_sum.chain(left, right, None, c, rules)
    elif rules.group == 1:
        exponents = (scales[0].exponent, scales[1].exponent)
        result = fused_sum.chain(left, right, exponents, c, rules)
    else:
        result = grouped_sum.chain(left, right, *scales, c, rules, scaling)
    return xp.where(poisoned, fused_sum.not_a_number(rules.result), result)


chain = _primitive.lane_primitive("fused_sum", _chain)
"""float32 bits of c + sum over K of a[k] b[k] by an instruction's rules: the core of every matrix product here.

`chain(a, b, a_scales, b_scales, c, *, instruction, a_format, b_format)` takes codes [K, ...] that broadcast against the
lanes of `c` (uint32 bits), scales [ceil(K / block), ...] or [0, ...], and names. K is padded with zero codes to a whole
number of steps. It checks nothing; call it inside `_backend.jit`.
"""


def _padded(x: Array, rows: int) -> Array:
    if rows == 0:
        return x
    xp = _backend.namespace(x)
    return xp.concatenate([x, xp.zeros((rows, *x.shape[1:]), dtype=x.dtype)], axis=0)


_NO_GRADIENT = "matmul has no derivative; apply jax.lax.stop_gradient to its c"
_STATIC = ("instruction", "a_format", "b_format", "scaling", "order")


@_backend.jit(static=_STATIC)
def _matmul(
    a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array | None, **static: Any
) -> Array:
    if c is None:
        xp = _backend.namespace(a, b)
        rules = INSTRUCTIONS[static["instruction"]]
        c = xp.zeros((a.shape[0], b.shape[1]), dtype=accumulator_dtype(rules))
    a, a_scales = (x.swapaxes(0, 1)[:, :, None] for x in (a, a_scales))
    b, b_scales = (x[:, None, :] for x in (b, b_scales))
    return _in_order(a, b, a_scales, b_scales, c.astype(np.uint32), **static).astype(c.dtype)


@_backend.jit(static=_STATIC)
def _dot(a: Array, b: Array, a_scales: Array, b_scales: Array, c: Array, **static: Any) -> Array:
    a, b, a_scales, b_scales = (x.swapaxes(0, 1) for x in (a, b, a_scales, b_scales))
    return _in_order(a, b, a_scales, b_scales, c.astype(np.uint32), **static).astype(c.dtype)


def _in_order(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    c: Array,
    *,
    order: Order | None,
    scaling: Scaling | None,
    **static: Any,
) -> Array:
    """`chain` with the instruction steps in the order given."""
    if order is None or not order.chains:
        return chain(a, b, a_scales, b_scales, c, scaling=scaling, **static)
    length = cast(int, INSTRUCTIONS[static["instruction"]].terms)
    blocks = 0 if scaling is None else length // scaling.block

    def of(steps: tuple[int, ...]) -> list[Array]:
        """The parts of a, b and their scales that these steps take."""
        parts = []
        for x, each in ((a, length), (b, length), (a_scales, blocks), (b_scales, blocks)):
            places = np.add.outer(np.array(steps) * each, np.arange(each)).reshape(-1)
            parts.append(_backend.gather(x, places))
        return parts

    xp = _backend.namespace(a, b, c)
    total, rest = c, list(order.chains)
    if order.c_starts_first_chain:
        first = of(rest.pop(0))
        total = chain(first[0], first[1], first[2], first[3], c, scaling=scaling, **static)

    def add(total: Array, parts: Sequence[Array]) -> tuple[Array, None]:
        zero = xp.zeros_like(c)
        partial = chain(parts[0], parts[1], parts[2], parts[3], zero, scaling=scaling, **static)
        return _float32.add(total, partial), None

    # Chains of one length are one program.
    for _, alike in itertools.groupby(rest, key=len):
        parts = [of(steps) for steps in alike]
        total = _backend.scan(add, total, [xp.stack(x) for x in zip(*parts, strict=True)])
    return total


def accumulator_dtype(instruction: Instruction) -> Any:
    """The dtype of accumulator bits: uint32, or uint16 for float16."""
    return FORMATS[instruction.result.accumulator_format].code_dtype


def fused_dot(
    a: Any,
    b: Any,
    c_bits: Array,
    instruction: str | Instruction,
    *,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
    order: Order | None = None,
) -> Array:
    """c[i] + sum over k of a[i, k] b[i, k], row by row, K chained in instruction steps.

    K must be a whole number of steps: pad with code 0, and scales with code 0 (a group of zeros with a large scale
    counts in some versions of the rules of FP4, see docs/accumulation.md).

    Args:
        a: element codes (n, K), or a BlockTensor, which brings its format and scales.
        b: the same.
        c_bits: float32 bits (n,), uint32; float16 bits, uint16, for an instruction that ends in .f16out.
        instruction: an `Instruction` of `INSTRUCTIONS` or its name.
        a_format: format of the codes of `a`, or its name. Sub-byte codes are one a byte, low bits.
        b_format: format of the codes of `b`.
        a_scales: scale codes (n, ceil(K / block)), uint8. Instructions without scales take None or (n, 0).
        b_scales: the same for `b`.
        scale_format: "e8m0" or "ue4m3", where the instruction takes both; else checked if given.
        order: how the instruction steps along K are chained; None is one chain in ascending order.

    Returns:
        bits like `c_bits`; every NaN is 0x7fffffff, 0x7fff in float16. JAX if any array given is, else numpy.
        K of 0 gives `c_bits`, with NaN written so.

    Raises:
        TypeError: for what is no array, or codes, scales or bits of another dtype.
        ValueError: for shapes, formats, scales or codes that the instruction does not take, or
            arrays on different devices. Codes that are traced are not looked at: of one that is
            too large, the bits above its format are ignored.

    Source: the instruction's own.
    """
    rules = operands.registered(instruction)
    left = operands.operand(
        "a", a, a_format, a_scales, scale_format, rules, k_axis=1, axes="(n, K)"
    )
    right = operands.operand(
        "b", b, b_format, b_scales, scale_format, rules, k_axis=1, axes="(n, K)"
    )
    if left.codes.shape != right.codes.shape:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; both must be the same (n, K)"
        )
    both = operands.pair(left, right, rules)
    dtype = accumulator_dtype(rules)
    c_bits = operands.checked_array("c_bits", c_bits, (left.codes.shape[0],), dtype)
    return _run(_dot, both, "c_bits", c_bits, rules, order)


def matmul_bits(
    a: Any,
    b: Any,
    instruction: str | Instruction,
    c: Array | None = None,
    *,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
    order: Order | None = None,
) -> Array:
    """a @ b + c by an instruction's rules, `c` and the result as float32 bits.

    Element (i, j) is `fused_dot` of row i of `a` and column j of `b`. Transposed views (`x.T`) are taken as they are.

    Args:
        a: element codes (m, K), or a BlockTensor, which brings its format and scales.
        b: element codes (K, n), or a BlockTensor.
        instruction: an `Instruction` of `INSTRUCTIONS` or its name.
        c: float32 bits (m, n), uint32; float16 bits, uint16, for an instruction that ends in .f16out. None is +0.
        a_format: format of the codes of `a`, or its name. Sub-byte codes are one a byte, low bits.
        b_format: format of the codes of `b`.
        a_scales: scale codes (m, ceil(K / block)). Instructions without scales take None or (m, 0).
        b_scales: scale codes (ceil(K / block), n), or None or (0, n).
        scale_format: "e8m0" or "ue4m3", where the instruction takes both; else checked if given.
        order: how the instruction steps along K are chained; None is one chain in ascending order.

    Returns:
        float32 bits (m, n), uint32, or float16 bits, uint16; every NaN is 0x7fffffff or 0x7fff. JAX if any array
        given is, else numpy. K of 0 gives `c`, with NaN written so.

    Raises:
        TypeError: for what is no array, or codes, scales or bits of another dtype.
        ValueError: for shapes, formats, scales or codes that the instruction does not take, or
            arrays on different devices. Codes that are traced are not looked at: of one that is
            too large, the bits above its format are ignored.

    Source: the instruction's own.
    """
    rules = operands.registered(instruction)
    left = operands.operand(
        "a", a, a_format, a_scales, scale_format, rules, k_axis=1, axes="(m, K)"
    )
    right = operands.operand(
        "b", b, b_format, b_scales, scale_format, rules, k_axis=0, axes="(K, n)"
    )
    if left.codes.shape[1] != right.codes.shape[0]:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; they must be (m, K) and (K, n)"
        )
    both = operands.pair(left, right, rules)
    if c is not None:
        shape = (left.codes.shape[0], right.codes.shape[1])
        c = operands.checked_array("c", c, shape, accumulator_dtype(rules))
    return _run(_matmul, both, "c", c, rules, order)


def matmul(
    a: Any,
    b: Any,
    instruction: str | Instruction,
    c: Array | None = None,
    *,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
    order: Order | None = None,
) -> Array:
    """`matmul_bits` with `c` and the result as float32 values; arguments and errors are the same.

    Differentiating with respect to `c` raises TypeError.
    """
    dtype = np.dtype(f"f{np.dtype(accumulator_dtype(operands.registered(instruction))).itemsize}")
    if c is not None:
        c = operands.checked_dtype("c", c, dtype, "; matmul_bits takes bits")
        c = _backend.bits(_backend.without_gradient(c, _NO_GRADIENT))
    result = matmul_bits(
        a,
        b,
        instruction,
        c,
        a_format=a_format,
        b_format=b_format,
        a_scales=a_scales,
        b_scales=b_scales,
        scale_format=scale_format,
        order=order,
    )
    return _backend.from_bits(result, dtype)


def _run(
    product: Callable[..., Array],
    both: Pair,
    c_name: str,
    c: Array | None,
    rules: Instruction,
    order: Order | None,
) -> Array:
    """`product` of checked operands."""
    k = both.a.shape[1]
    operands.check_order(order, k, rules)
    arrays = {"a": both.a, "b": both.b, "a_scales": both.a_scales, "b_scales": both.b_scales}
    operands.check_devices(arrays | {c_name: c})
    return product(
        *arrays.values(),
        c,
        instruction=rules.name,
        a_format=both.a_format,
        b_format=both.b_format,
        scaling=both.scaling,
        order=order,
    )
