"""What a matrix product is given, checked against its instruction before any work starts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown, type_of, unknown_name
from flamia_ref.arithmetic.catalogue import INSTRUCTIONS
from flamia_ref.arithmetic.instructions import Instruction, Result, Scaling, Summation
from flamia_ref.arithmetic.order import Order
from flamia_ref.formats import FORMATS, BlockTensor, ScalarFormat


class Operand(NamedTuple):
    """One operand of a product, in the form that its instruction takes."""

    name: str
    codes: Array
    element: ScalarFormat
    k_axis: int
    scales: Array | BlockTensor | None
    """Scale codes as given, or the tensor that has them."""
    scalings: tuple[Scaling, ...]
    """What the scales can be, of all that the instruction takes; none where there are no scales."""


class Pair(NamedTuple):
    """Both operands of a product, with scales of one kind or none."""

    a: Array
    b: Array
    a_format: str
    b_format: str
    a_scales: Array
    b_scales: Array
    scaling: Scaling | None


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
    scale_format: str | ScalarFormat | None,
    rules: Instruction,
    *,
    k_axis: int,
    axes: str,
) -> Operand:
    """Codes, format and scales of the operand called `name`, whose two axes are `axes`.

    Raises ValueError or TypeError, naming the argument, for what the instruction does not take.
    """
    codes, tensor = given, None
    if isinstance(given, BlockTensor):
        if element is not None or scales is not None:
            raise ValueError(
                f"{name} is a BlockTensor and brings its format and scales; leave out {name}_format and {name}_scales"
            )
        codes, element, tensor = given.codes, given.format.element, given
    chosen = _element(name, element, rules)
    codes = _checked_codes(name, codes, chosen, axes)
    _check_steps(name, codes.shape[k_axis], rules)
    allowed = _scalings(scale_format, rules, asked=scales is not None)
    if tensor is not None:
        return Operand(
            name,
            codes,
            chosen,
            k_axis,
            tensor,
            _tensor_scalings(name, tensor, allowed, k_axis, rules),
        )
    if scales is not None:
        scales = checked_dtype(f"{name}_scales", scales, np.uint8, ", one code a block")
        optional = rules.summation is not Summation.FUSED or not rules.scalings
        if optional and scales.ndim == 2 and scales.shape[k_axis] == 0:
            scales = None
    if scales is None:
        return Operand(name, codes, chosen, k_axis, None, ())
    _check_takes_scales(name, rules)
    shapes = {scaling: _scale_shape(codes, scaling, k_axis) for scaling in allowed}
    fitting = tuple(x for x, shape in shapes.items() if shape == tuple(scales.shape))
    formats = tuple(dict.fromkeys(scaling.format for scaling in fitting))
    if scale_format is None and len(formats) > 1:
        raise ValueError(
            f"scale_format is missing; scales of this shape can be {' or '.join(formats)} for {rules.name}"
        )
    if not fitting:
        wanted = " or ".join(str(shape) for shape in dict.fromkeys(shapes.values()))
        raise ValueError(
            f"{name}_scales has shape {tuple(scales.shape)}; for {name} of {tuple(codes.shape)} it must be {wanted}"
        )
    return Operand(name, codes, chosen, k_axis, scales, fitting)


def pair(left: Operand, right: Operand, rules: Instruction) -> Pair:
    """Both operands with scales of one kind. Raises ValueError where they do not go together."""
    if rules.same_formats and left.element != right.element:
        raise ValueError(
            f"a is {left.element.name} and b {right.element.name}; {rules.name} takes two operands of one format"
        )
    missing = [f"{x.name}_scales" for x in (left, right) if x.scales is None]
    required = bool(rules.scalings) and rules.summation is Summation.FUSED
    if missing and (required or len(missing) == 1):
        choice = "" if required else ", or none"
        raise ValueError(
            f"{' and '.join(missing)} missing; {rules.name} takes scales of both operands{choice} "
            f"({_unit_scales(rules)})"
        )
    scaling = None
    if left.scales is not None:
        common = [x for x in left.scalings if x in right.scalings]
        if not common:
            kinds = [
                " or ".join(f"{x.format} a {x.block}" for x in side.scalings)
                for side in (left, right)
            ]
            raise ValueError(
                f"a has scales of {kinds[0]} elements and b of {kinds[1]}; {rules.name} takes one kind for both"
            )
        scaling = max(common, key=lambda scaling: scaling.block)
    scales = [_scales(side, scaling) for side in (left, right)]
    return Pair(
        left.codes,
        right.codes,
        left.element.name,
        right.element.name,
        scales[0],
        scales[1],
        scaling,
    )


def check_order(order: Any, k: int, rules: Instruction) -> None:
    """Raise TypeError or ValueError for an order that does not go with K and the instruction."""
    if order is None:
        return
    if not isinstance(order, Order):
        raise TypeError(f"order is a {type(order).__name__}; it must be an Order or None")
    if rules.terms is None:
        raise ValueError(f"{rules.name} has no instruction steps; leave out order")
    steps = k // rules.terms
    if order.steps != steps:
        raise ValueError(
            f"order has {order.steps} steps; K of {k} is {steps} steps of {rules.terms} for {rules.name}"
        )
    sums = len(order.chains) > 1 or not order.c_starts_first_chain
    if sums and rules.result is Result.FLOAT16:
        raise ValueError(
            f"order adds accumulators in float32 and {rules.name} has float16 ones; use one chain that starts from c"
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


def _check_steps(name: str, k: int, rules: Instruction) -> None:
    """Raise ValueError unless K is a whole number of instruction steps."""
    if rules.terms is None or k % rules.terms == 0:
        return
    whole = -(-k // rules.terms) * rules.terms
    scales = ", and their scales with code 0" if rules.scalings else ""
    raise ValueError(
        f"{name} has K of {k}; {rules.name} adds {rules.terms} products a step: "
        f"pad both operands along K with code 0 to {whole}{scales}"
    )


def _scalings(
    scale_format: str | ScalarFormat | None, rules: Instruction, *, asked: bool
) -> tuple[Scaling, ...]:
    """The scalings of an instruction that have the format given. `asked`: a format is needed."""
    if scale_format is None:
        if asked and len(rules.scale_formats) > 1 and rules.summation is Summation.FUSED:
            raise ValueError(
                f"scale_format is missing; {rules.name} takes {' or '.join(rules.scale_formats)}"
            )
        return rules.scalings
    given = _registered_format("scale_format", scale_format, rules.scale_formats or FORMATS).name
    if given not in rules.scale_formats:
        allowed = " or ".join(rules.scale_formats) or "no scales: leave it out"
        raise ValueError(f"scale_format is {given}; {rules.name} takes {allowed}")
    return tuple(x for x in rules.scalings if x.format == given)


def _scale_shape(codes: Array, scaling: Scaling, k_axis: int) -> tuple[int, ...]:
    blocks = -(-codes.shape[k_axis] // scaling.block)
    return (codes.shape[0], blocks) if k_axis == 1 else (blocks, codes.shape[1])


def _unit_scales(rules: Instruction) -> str:
    codes = {name: f"code {unit} of {name} is 1" for name, unit in (("e8m0", 127), ("ue4m3", 56))}
    return ", ".join(codes[name] for name in rules.scale_formats)


def _check_takes_scales(name: str, rules: Instruction) -> None:
    if not rules.scalings:
        raise ValueError(
            f"{name} has scales and {rules.name} takes none; use an instruction with scales, or encode the values"
        )


def _tensor_scalings(
    name: str,
    tensor: BlockTensor,
    allowed: tuple[Scaling, ...],
    k_axis: int,
    rules: Instruction,
) -> tuple[Scaling, ...]:
    """The scalings that the blocks of a BlockTensor can be given as."""
    _check_takes_scales(name, rules)
    if tensor.tensor_scale is not None:
        raise ValueError(
            f"{name} has a tensor scale, which no instruction takes; multiply the result by it instead"
        )
    of_format = [x for x in allowed if FORMATS[x.format] == tensor.format.scale]
    if not of_format:
        takes = " or ".join(dict.fromkeys(x.format for x in allowed))
        raise ValueError(
            f"{name} has {tensor.format.scale.name} scales; {rules.name} takes {takes}"
        )
    extents, block = tensor.codes.shape, tensor.block
    if min(block) < 1:
        raise ValueError(f"{name} has blocks of {block}; a block has 1 row and 1 column at least")
    held = tuple(-(-extent // size) for extent, size in zip(extents, block, strict=True))
    checked_array(f"{name}.scales", tensor.scales, held, np.uint8)
    along, extent = block[k_axis], extents[k_axis]
    fitting = tuple(x for x in of_format if along % x.block == 0 or along >= extent)
    if not fitting:
        multiples = " or ".join(str(x.block) for x in of_format)
        raise ValueError(
            f"{name} has blocks of {along} along K; {rules.name} takes multiples of {multiples}"
        )
    return fitting


def _scales(side: Operand, scaling: Scaling | None) -> Array:
    """The scales of one operand, one for each row and each block of `scaling` along K; empty without scales."""
    if scaling is None or side.scales is None:
        rows = side.codes.shape[1 - side.k_axis]
        return np.zeros((rows, 0) if side.k_axis == 1 else (0, rows), dtype=np.uint8)
    if not isinstance(side.scales, BlockTensor):
        return side.scales
    tensor, k_axis = side.scales, side.k_axis
    extents = tensor.codes.shape
    copies = [min(size, whole) for size, whole in zip(tensor.block, extents, strict=True)]
    copies[k_axis] = -(-copies[k_axis] // scaling.block)
    shape = list(extents)
    shape[k_axis] = -(-extents[k_axis] // scaling.block)
    if copies == [1, 1]:
        return tensor.scales
    return _repeated(tensor.scales, copies=tuple(copies), shape=tuple(shape))


@_backend.jit(static=("copies", "shape"))
def _repeated(scales: Array, *, copies: tuple[int, int], shape: tuple[int, int]) -> Array:
    """Each scale `copies` times down and across, cut to `shape`."""
    xp = _backend.namespace(scales)
    down, across = copies
    repeated = xp.repeat(xp.repeat(scales, down, axis=0), across, axis=1)
    return repeated[: shape[0], : shape[1]]
