"""What a format does with one block, operation by operation."""

import dataclasses
import re
from dataclasses import dataclass

import numpy as np

from flamia_ref import _float32
from flamia_ref.formats.bits import decode_bits
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.diagnosis.runs import Bits, Result, number, own_amax, run
from flamia_ref.formats.elements import scale_bits
from flamia_ref.formats.formula import Formula, Step
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.scalar import FP32, ScalarFormat
from flamia_ref.formats.scales import scale_codes, tensor_scale_bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation and its result, as float32 bits."""

    text: str
    bits: int

    def __str__(self) -> str:
        return f"{self.text} = {self.bits:08x} ({number(self.bits)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """How a format comes to the scale of a block, and to the code of one of its elements.

    Attributes:
        preset: the name of the format.
        amax: float32 bits of the amax as it goes into the scale.
        tensor: the operations of the tensor scale; none without one.
        quotient: those of what is rounded to a scale; for rules that give powers of two by their
            exponents, the rule with the value of its scale.
        rounded: the scale code before ranges and odd blocks.
        scale: the scale code.
        value: float32 bits of its value.
        scaled: the operations of what is rounded to a code.
        code: the element code.
    """

    preset: str
    amax: int
    tensor: tuple[Operation, ...] = ()
    quotient: tuple[Operation, ...]
    rounded: int
    scale: int
    value: int
    scaled: tuple[Operation, ...] = ()
    code: int | None = None

    @property
    def scale_in_words(self) -> str:
        """The scale code and its value; the value alone where that is the code."""
        value = number(self.value)
        return value if self.scale == self.value else f"{self.scale} ({value})"


def trace(
    block: Bits,
    element: tuple[int, int] | None,
    block_format: BlockFormat,
    tensor_amax: Bits | None,
    source: ScalarFormat = FP32,
    result: Result | None = None,
) -> Trace:
    """The operations on one block.

    Args:
        block: float32 bits [r, c].
        element: the place of the element to follow, if any.
        block_format: the format, as it is for that input (`of_input`).
        tensor_amax: float32 bits of the amax of the tensor, shape (1,); None for the block's own.
        source: the type that x had.
        result: what it gives there, where that depends on more than the block.
    """
    result = result or run(block[None], block_format, tensor_amax, source)
    machine = block_format.machine(source)
    x = block if block_format.signs is None else transformed(block, block_format.signs, source)
    tensor_steps: list[Step] = []
    tensor_scale = None
    if block_format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = own_amax(block[None], block_format, source)
        formula = Formula.parse(block_format.tensor_scale or "")
        kept = dataclasses.replace(machine, ftz=False)  # as `tensor_scale_bits` keeps subnormals
        formula.evaluate({"tensor_amax": tensor_amax}, kept, tensor_steps)
        tensor_scale = tensor_scale_bits(tensor_amax, block_format, source)
    given = {} if tensor_scale is None else {"tensor_scale": tensor_scale}
    if block_format.prepared is not None:
        x = Formula.parse(block_format.prepared).evaluate({"x": x, **given}, machine)
    amax = _amax(x, block_format)
    scaled_steps: list[Step] = []
    if element is not None:
        one = x[element].reshape(1)
        if block_format.flushes_subnormals:
            one = _float32.flush(one)
        divisor = scale_bits(result.scales, block_format)
        if block_format.scaled is None:
            scaled_steps.append(("x / scale", _over(one, divisor)))
        else:
            values = {"x": one, "scale": divisor, "amax": amax, **given}
            Formula.parse(block_format.scaled).evaluate(values, machine, scaled_steps)
    return Trace(
        preset=block_format.name,
        amax=int(amax[0]),
        tensor=_operations(tensor_steps),
        quotient=_quotient(amax, block_format, tensor_scale, source),
        rounded=int(scale_codes(amax, _bare(block_format), tensor_scale, source)[0]),
        scale=int(result.scales[0]),
        value=int(result.values[0]),
        scaled=_operations(scaled_steps),
        code=None if element is None else int(result.codes[(0, *element)]),
    )


def _amax(x: Bits, block_format: BlockFormat) -> Bits:
    magnitude = x & _float32.MAGNITUDE
    nan = magnitude > _float32.INFINITY
    if block_format.nan is not NanPolicy.PROPAGATE:
        alone = nan.all() and block_format.nan is NanPolicy.MAXIMUM_NUMBER
        magnitude = magnitude if alone else np.where(nan, np.uint32(0), magnitude)
    found: Bits = magnitude.max(initial=0).astype(np.uint32).reshape(1)
    return found


def _bare(block_format: BlockFormat) -> BlockFormat:
    """The format without what becomes of odd scales."""
    return dataclasses.replace(
        block_format,
        scale_range=None,
        underflow_scale=None,
        infinity_scale=None,
        zero_scale=None,
        row_span=None,
    )


def _quotient(
    amax: Bits, block_format: BlockFormat, tensor_scale: Bits | None, source: ScalarFormat
) -> tuple[Operation, ...]:
    rule, steps = block_format.rule, list[Step]()
    if block_format.smallest_amax:
        amax = np.maximum(amax, np.float32(block_format.smallest_amax).view(np.uint32))
    text = block_format.quotient
    if rule is ScaleRule.RCEIL:
        text = f"amax * (1 / {block_format.element.max:g})"
    if text is not None:
        values = {"amax": amax}
        if tensor_scale is not None:
            values["tensor_scale"] = tensor_scale
        machine = block_format.machine(source)
        Formula.parse(text).evaluate(values, machine, steps)
    else:
        codes = scale_codes(amax, _bare(block_format), tensor_scale, source)
        steps.append((rule_in_words(block_format), decode_bits(codes, block_format.scale)))
    return _operations(steps)


def rule_in_words(block_format: BlockFormat) -> str:
    """The scale rule with its numbers, and how it rounds."""
    if block_format.rule is ScaleRule.QUOTIENT:
        rounding = block_format.scale_rounding.value.replace("_", " ")
        return f"{block_format.quotient} to {block_format.scale.name}, {rounding}"
    element = block_format.element
    exponent = element.emax if block_format.exponent is None else block_format.exponent
    bits = element.mantissa_bits if block_format.even_bits is None else block_format.even_bits
    numbers = {"emax": str(exponent), "max": f"{element.max:g}", "even_bits": f"{bits} bits"}
    words = re.compile(rf"\b({'|'.join(numbers)})\b")
    return words.sub(lambda found: numbers[found[0]], block_format.rule.in_words)


def _over(x: Bits, divisor: Bits) -> Bits:
    """x over a power of two, for show: the float32 nearest to it."""
    with np.errstate(all="ignore"):
        wide = x.view(np.float32).astype(np.float64) / divisor.view(np.float32).astype(np.float64)
        found: Bits = np.asarray(wide.astype(np.float32)).view(np.uint32)
    return found


def _operations(steps: list[Step]) -> tuple[Operation, ...]:
    return tuple(
        Operation(text=text, bits=int(np.asarray(bits).reshape(-1)[0])) for text, bits in steps
    )
