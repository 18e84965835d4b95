"""What a matrix product is given, checked against its instruction before any work starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown, type_of, unknown_name
from flamia_ref.arithmetic.instructions import INSTRUCTIONS, Instruction, Summation
from flamia_ref.formats import FORMATS, BlockTensor, ScalarFormat


class Operand(NamedTuple):
    """One operand of a product, in the form that its instruction takes."""

    codes: Array
    element: ScalarFormat
    scales: Array | None


def registered(instruction: str | Instruction) -> Instruction:
    """The instruction that an `instruction` argument means.

    Raises ValueError for an unknown name, or for an instruction that was changed: its rules would
    be looked up by name, so the change would be lost without a word.
    """
    if isinstance(instruction, Instruction):
        if INSTRUCTIONS[instruction.name] != instruction:
            raise ValueError(
                f"instruction {instruction.name} differs from the one in INSTRUCTIONS; only those can be run"
            )
        return instruction
    if not isinstance(instruction, str):
        raise TypeError(
            f"instruction is a name in INSTRUCTIONS or one of its values, not {shown(instruction)}"
        )
    return INSTRUCTIONS[instruction]


def operand(
    name: str,
    given: Any,
    element: str | ScalarFormat | None,
    scales: Any,
    rules: Instruction,
    *,
    k_axis: int,
    axes: str,
) -> Operand:
    """Codes, format and scales of the operand called `name`, whose two axes are `axes`.

    Raises ValueError or TypeError, naming the argument, for what the instruction does not take.
    """
    codes = given
    if isinstance(given, BlockTensor):
        if element is not None or scales is not None:
            raise ValueError(
                f"{name} is a BlockTensor and brings its format and scales; leave out {name}_format and {name}_scales"
            )
        codes, element = given.codes, given.format.element
    chosen = _element(name, element, rules)
    codes = _checked_codes(name, codes, chosen, axes)
    if isinstance(given, BlockTensor):
        scales = _block_scales(name, given, rules, k_axis)
    elif scales is not None:
        scales = _checked_scales(name, scales, codes, rules, k_axis)
    return Operand(codes, chosen, scales)


def check_pair(left: Operand, right: Operand, rules: Instruction, scale_format: Any) -> None:
    """Raise ValueError or TypeError where `a` (left) and `b` (right) do not go together."""
    if rules.same_formats and left.element != right.element:
        raise ValueError(
            f"a is {left.element.name} and b {right.element.name}; {rules.name} takes two operands of one format"
        )
    if scale_format is not None:
        allowed_names = FORMATS if rules.scale_format is None else (rules.scale_format,)
        given = _registered_format("scale_format", scale_format, allowed_names).name
        if given != rules.scale_format:
            allowed = rules.scale_format or "no scales: leave it out"
            raise ValueError(f"scale_format is {given}; {rules.name} takes {allowed}")
    missing = [f"{name}_scales" for name, x in (("a", left), ("b", right)) if x.scales is None]
    required = rules.scale_format is not None and rules.summation is Summation.FUSED
    if missing and (required or len(missing) == 1):
        choice = "" if required else ", or none"
        raise ValueError(
            f"{' and '.join(missing)} missing; {rules.name} takes scales of both operands{choice} (code 127 is 1)"
        )


def checked_dtype(name: str, x: Any, dtype: Any, note: str = "") -> Array:
    """`x` as a plain array. Raises TypeError if it is none of `dtype`; `note` ends the message."""
    if not (isinstance(x, np.ndarray) or _backend.is_jax(x)):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a numpy or JAX array")
    if x.dtype != np.dtype(dtype):
        raise TypeError(f"{name} holds {type_of(x)}; it must hold {np.dtype(dtype).name}{note}")
    return _backend.plain(name, x)


def checked_array(name: str, x: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """`x` as a plain array. Raises TypeError or ValueError if it is none of `shape` and `dtype`."""
    x = checked_dtype(name, x, dtype)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
    return x


def check_devices(arrays: dict[str, Any]) -> None:
    """Raise ValueError if JAX arrays among `arrays` are on different devices."""
    devices = {name: _backend.device(x) for name, x in arrays.items()}
    devices = {name: device for name, device in devices.items() if device is not None}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"operands are on different devices ({where}); move them to one")


def _element(name: str, element: str | ScalarFormat | None, rules: Instruction) -> ScalarFormat:
    allowed = ", ".join(rules.operand_formats)
    if element is None and len(rules.operand_formats) > 1:
        raise ValueError(f"{name}_format is missing; {rules.name} takes {allowed}")
    given = rules.operand_formats[0] if element is None else element
    chosen = _registered_format(f"{name}_format", given, rules.operand_formats)
    if chosen.name not in rules.operand_formats:
        raise ValueError(f"{name} is {chosen.name}; {rules.name} takes {allowed}")
    return chosen


def _registered_format(name: str, given: Any, allowed: Iterable[str]) -> ScalarFormat:
    """The format that the argument called `name` means; `allowed` is for the error."""
    if isinstance(given, str):
        if given not in FORMATS:
            raise unknown_name(name, given, allowed)
        return FORMATS[given]
    if not isinstance(given, ScalarFormat):
        raise TypeError(f"{name} is a name in FORMATS or one of its values, not {shown(given)}")
    if FORMATS.get(given.name) != given:
        raise ValueError(f"{name} {given.name} is not in FORMATS; instructions take only those")
    return given


def _checked_codes(name: str, codes: Any, element: ScalarFormat, axes: str) -> Array:
    note = f", codes of {element.name}; encode values first"
    codes = checked_dtype(name, codes, element.code_dtype, note)
    if codes.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(codes.shape)}; it must be {axes}")
    if element.bits < 8 and codes.size and not _backend.is_traced(codes):
        largest = int(codes.max())
        if largest >> element.bits:
            raise ValueError(
                f"{name} holds code {largest}; codes of {element.name} are below {1 << element.bits}, one an element"
            )
    return codes


def _checked_scales(
    name: str, scales: Any, codes: Array, rules: Instruction, k_axis: int
) -> Array | None:
    """`scales`, or None for those of an instruction that needs none and no blocks."""
    scales = checked_dtype(f"{name}_scales", scales, np.uint8, ", one code a block")
    optional = rules.scale_format is None or rules.summation is not Summation.FUSED
    if optional and scales.ndim == 2 and scales.shape[k_axis] == 0:
        return None
    _check_takes_scales(name, rules)
    blocks = -(-codes.shape[k_axis] // rules.scale_block)
    shape = (codes.shape[0], blocks) if k_axis == 1 else (blocks, codes.shape[1])
    return checked_array(f"{name}_scales", scales, shape, np.uint8)


def _check_takes_scales(name: str, rules: Instruction) -> None:
    if rules.scale_format is None:
        raise ValueError(
            f"{name} has scales and {rules.name} takes none; use an instruction with scales, or encode the values"
        )


def _block_scales(name: str, tensor: BlockTensor, rules: Instruction, k_axis: int) -> Array:
    """The scales of a BlockTensor, one for each row and each of the instruction's blocks along K."""
    _check_takes_scales(name, rules)
    if tensor.tensor_scale is not None:
        raise ValueError(
            f"{name} has a tensor scale, which no instruction takes; multiply the result by it instead"
        )
    if tensor.format.scale != FORMATS[str(rules.scale_format)]:
        raise ValueError(
            f"{name} has {tensor.format.scale.name} scales; {rules.name} takes {rules.scale_format}"
        )
    extents, block = tensor.codes.shape, tensor.block
    if min(block) < 1:
        raise ValueError(f"{name} has blocks of {block}; a block has 1 row and 1 column at least")
    held = tuple(-(-extent // size) for extent, size in zip(extents, block, strict=True))
    scales = checked_array(f"{name}.scales", tensor.scales, held, np.uint8)
    along, extent = block[k_axis], extents[k_axis]
    if along % rules.scale_block and along < extent:
        raise ValueError(
            f"{name} has blocks of {along} along K; {rules.name} takes multiples of {rules.scale_block}"
        )
    copies = [min(size, whole) for size, whole in zip(block, extents, strict=True)]
    copies[k_axis] = -(-copies[k_axis] // rules.scale_block)
    shape = list(extents)
    shape[k_axis] = -(-extent // rules.scale_block)
    if copies == [1, 1]:
        return scales
    return _repeated(scales, copies=tuple(copies), shape=tuple(shape))


@_backend.jit(static=("copies", "shape"))
def _repeated(scales: Array, *, copies: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Each scale `copies` times down and across, cut to `shape`."""
    xp = _backend.namespace(scales)
    down, across = copies
    repeated = xp.repeat(xp.repeat(scales, down, axis=0), across, axis=1)
    return repeated[: shape[0], : shape[1]]
