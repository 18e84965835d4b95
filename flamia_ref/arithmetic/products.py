"""Matrix products by the rules of an instruction: `fused_dot` row by row, `matmul` for whole matrices.

Under JAX a whole chain along K is one primitive named `fused_sum`, so that who reads the program sees which lanes depend
on which operands without looking into integer arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import fused_sum, ideal
from flamia_ref.arithmetic.instructions import INSTRUCTIONS, Instruction, Summation
from flamia_ref.formats import FORMATS, BlockTensor, ScalarFormat
from flamia_ref.formats import decode_bits


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
) -> Array:
    rules, a_element, b_element = INSTRUCTIONS[instruction], FORMATS[a_format], FORMATS[b_format]
    if rules.summation is Summation.FMA:
        return ideal.fma_chain(decode_bits(a, a_element), decode_bits(b, b_element), c)
    xp = _backend.namespace(a, b, c)
    if rules.terms is not None:
        a, b = (_padded(x, -x.shape[0] % rules.terms) for x in (a, b))
    product_bits = a_element.mantissa_bits + b_element.mantissa_bits
    scaled = a_scales.shape[0] != 0
    left, right = fused_sum.unpack(a, a_element), fused_sum.unpack(b, b_element)
    poisoned = _float32.is_nan(c)
    for terms in (left, right):
        if terms.nan is not None:
            poisoned = poisoned | terms.nan.any(axis=0)
    if scaled:
        left, right = (
            fused_sum.scaled(terms, scales, rules.scale_block)
            for terms, scales in ((left, a_scales), (right, b_scales))
        )
        for scales in (a_scales, b_scales):
            poisoned = poisoned | (scales == np.uint8(255)).any(axis=0)
    if rules.summation is Summation.EXACT:
        exponents = (
            a_element.emin + b_element.emin,
            a_element.emax + b_element.emax,
        )
        result = ideal.exact_sum(left, right, c, product_bits, exponents, scaled)
    else:
        result = fused_sum.chain(left, right, c, rules, product_bits)
    return xp.where(poisoned, _float32.NAN, result)


chain = _backend.lane_primitive("fused_sum", _chain)
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


_STATIC = ("instruction", "a_format", "b_format")


@_backend.jit(static=_STATIC)
def _matmul(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    c: Array,
    *,
    instruction: str,
    a_format: str,
    b_format: str,
) -> Array:
    a, a_scales = (x.swapaxes(0, 1)[:, :, None] for x in (a, a_scales))
    b, b_scales = (x[:, None, :] for x in (b, b_scales))
    return chain(
        a, b, a_scales, b_scales, c, instruction=instruction, a_format=a_format, b_format=b_format
    )


@_backend.jit(static=_STATIC)
def _dot(
    a: Array,
    b: Array,
    a_scales: Array,
    b_scales: Array,
    c: Array,
    *,
    instruction: str,
    a_format: str,
    b_format: str,
) -> Array:
    a, b, a_scales, b_scales = (x.swapaxes(0, 1) for x in (a, b, a_scales, b_scales))
    return chain(
        a, b, a_scales, b_scales, c, instruction=instruction, a_format=a_format, b_format=b_format
    )


class _Operand(NamedTuple):
    codes: Array
    element: ScalarFormat
    scales: Array | None


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
) -> Array:
    """c[i] + sum over k of a[i, k] b[i, k], row by row, K chained in ascending instruction steps.

    Shapes: `a`, `b` (n, K) element codes, `c_bits` (n,) float32 bits as uint32, scales (n, ceil(K / block)) codes or
    None. K that is not a whole number of steps is padded with zero codes.
    Returns: uint32 float32 bits (n,); every NaN is 0x7fffffff.
    Raises: ValueError or TypeError for shapes, dtypes, formats and scales that the instruction does not take.
    Source: the instruction's own.
    """
    rules = _rules(instruction)
    left = _operand("a", a, a_format, a_scales, rules, k_axis=1)
    right = _operand("b", b, b_format, b_scales, rules, k_axis=1)
    if left.codes.shape != right.codes.shape:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; fused_dot needs both (n, K)"
        )
    _check_pair(left, right, rules, scale_format)
    rows = left.codes.shape[0]
    _check_array("c_bits", c_bits, (rows,), np.uint32)
    return _dot(
        left.codes,
        right.codes,
        *_scales(left, right, rows, rows, k_axis=1),
        c_bits,
        instruction=rules.name,
        a_format=left.element.name,
        b_format=right.element.name,
    )


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
) -> Array:
    """a @ b + c by an instruction's rules, `c` and the result as uint32 float32 bits.

    Shapes: `a` (m, K), `b` (K, n) element codes or BlockTensors (which bring format and scales), `a_scales`
    (m, ceil(K / block)), `b_scales` (ceil(K / block), n), `c` (m, n) or None for +0. K ascends, in instruction steps; K
    that is not a whole number of steps is padded with zero codes.
    Returns: uint32 [m, n]; every NaN is 0x7fffffff.
    Raises: ValueError or TypeError for shapes, dtypes, formats and scales that the instruction does not take.
    Source: the instruction's own.
    """
    rules = _rules(instruction)
    left = _operand("a", a, a_format, a_scales, rules, k_axis=1)
    right = _operand("b", b, b_format, b_scales, rules, k_axis=0)
    if left.codes.shape[1] != right.codes.shape[0]:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; a needs (m, K) and b (K, n)"
        )
    _check_pair(left, right, rules, scale_format)
    shape = (left.codes.shape[0], right.codes.shape[1])
    if c is None:
        c = _backend.namespace(left.codes, right.codes).zeros(shape, dtype=np.uint32)
    _check_array("c", c, shape, np.uint32)
    return _matmul(
        left.codes,
        right.codes,
        *_scales(left, right, *shape, k_axis=0),
        c,
        instruction=rules.name,
        a_format=left.element.name,
        b_format=right.element.name,
    )


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
) -> Array:
    """`matmul_bits` with `c` and the result as float32 values. Shapes, errors and source are the same."""
    if c is not None:
        if np.dtype(getattr(c, "dtype", None)) != np.float32:
            raise TypeError(
                f"c holds {getattr(c, 'dtype', type(c).__name__)}; it must be float32 (or use matmul_bits)"
            )
        c = _backend.bits(c)
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
    )
    return _backend.from_bits(result, np.float32)


def _rules(instruction: str | Instruction) -> Instruction:
    name = instruction.name if isinstance(instruction, Instruction) else instruction
    return INSTRUCTIONS[name]


def _operand(
    name: str,
    given: Any,
    element: str | ScalarFormat | None,
    scales: Array | None,
    rules: Instruction,
    *,
    k_axis: int,
) -> _Operand:
    """Codes, format and scales of one operand, checked against the instruction."""
    codes = given
    if isinstance(given, BlockTensor):
        if element is not None or scales is not None:
            raise ValueError(
                f"{name} is a BlockTensor, which brings its format and scales; leave {name}_format and {name}_scales out"
            )
        if given.tensor_scale is not None:
            raise ValueError(
                f"{name} has a tensor scale, which no instruction takes; multiply the result by it instead"
            )
        codes, element = given.codes, given.format.element
        scales = _block_scales(name, given, rules, k_axis)
    if element is None:
        if len(rules.operand_formats) > 1:
            raise ValueError(
                f"{name}_format is missing; {rules.name} takes {', '.join(rules.operand_formats)}"
            )
        element = rules.operand_formats[0]
    chosen = FORMATS[element] if isinstance(element, str) else element
    if chosen.name not in rules.operand_formats:
        raise ValueError(
            f"{name} is {chosen.name}; {rules.name} takes {', '.join(rules.operand_formats)}"
        )
    _check_array(name, codes, (None, None), chosen.code_dtype)
    if (
        chosen.bits < 8
        and not _backend.is_traced(codes)
        and codes.size
        and int(codes.max()) >> chosen.bits
    ):
        raise ValueError(
            f"{name} holds code {int(codes.max())}; {chosen.name} codes are below {1 << chosen.bits}, one an element"
        )
    if scales is not None and 0 in scales.shape and codes.size:
        scales = None
    if scales is not None:
        if rules.scale_format is None:
            raise ValueError(
                f"{name} has scales, and {rules.name} takes none; dequantize first or use a block-scaled instruction"
            )
        blocks = -(-codes.shape[k_axis] // rules.scale_block)
        shape = (codes.shape[0], blocks) if k_axis == 1 else (blocks, codes.shape[1])
        _check_array(f"{name}_scales", scales, shape, np.uint8)
    return _Operand(codes, chosen, scales)


def _block_scales(name: str, tensor: BlockTensor, rules: Instruction, k_axis: int) -> Array:
    """The scales of a BlockTensor, one for each row and each of the instruction's blocks along K."""
    xp = _backend.namespace(tensor.scales)
    other_axis = 1 - k_axis
    extents = tensor.codes.shape
    block = [
        extent if size > extent else size
        for size, extent in zip(tensor.block, extents, strict=True)
    ]
    along = tensor.block[k_axis]
    if along % rules.scale_block and along < extents[k_axis]:
        raise ValueError(
            f"{name} has blocks of {along} along K; {rules.name} scales blocks of {rules.scale_block}"
        )
    scales = xp.repeat(tensor.scales, max(block[other_axis], 1), axis=other_axis)
    steps = -(-extents[k_axis] // rules.scale_block)
    scales = xp.repeat(scales, max(-(-along // rules.scale_block), 1), axis=k_axis)
    cut = [slice(None), slice(None)]
    cut[k_axis], cut[other_axis] = slice(steps), slice(extents[other_axis])
    return scales[tuple(cut)]


def _check_pair(left: _Operand, right: _Operand, rules: Instruction, scale_format: Any) -> None:
    if rules.same_formats and left.element.name != right.element.name:
        raise ValueError(
            f"a is {left.element.name} and b {right.element.name}; {rules.name} takes two operands of one format"
        )
    if scale_format is not None:
        given = (
            scale_format.name
            if isinstance(scale_format, ScalarFormat)
            else FORMATS[scale_format].name
        )
        if given != rules.scale_format:
            raise ValueError(
                f"scale_format is {given}; {rules.name} takes {rules.scale_format or 'no scales'}"
            )
    if (left.scales is None) != (right.scales is None):
        missing = "a" if left.scales is None else "b"
        raise ValueError(
            f"{missing}_scales are missing; give both operands' scales (127 is 2^0) or none"
        )
    if (
        left.scales is None
        and rules.scale_format is not None
        and rules.summation is Summation.FUSED
    ):
        raise ValueError(f"{rules.name} needs a_scales and b_scales; code 127 is 2^0")


def _scales(
    left: _Operand, right: _Operand, a_extent: int, b_extent: int, *, k_axis: int
) -> tuple[Array, Array]:
    """Both operands' scales, of no blocks where there are none."""
    if left.scales is not None and right.scales is not None:
        return left.scales, right.scales
    empty = (0, b_extent) if k_axis == 0 else (b_extent, 0)
    return np.zeros((a_extent, 0), dtype=np.uint8), np.zeros(empty, dtype=np.uint8)


def _check_array(name: str, x: Any, shape: tuple[int | None, ...], dtype: Any) -> None:
    given = getattr(x, "dtype", None)
    if given is None:
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a numpy or JAX array")
    if np.dtype(given) != np.dtype(dtype):
        raise TypeError(f"{name} holds {np.dtype(given).name}; it must be {np.dtype(dtype).name}")
    fits = len(x.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        wanted = "(" + ", ".join("any" if want is None else str(want) for want in shape) + ")"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {wanted}")
