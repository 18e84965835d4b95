"""One block on which two formats differ, and why."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from flamia_ref import _float32
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.diagnosis.runs import Bits, Result, claimed, number, own_amax, run
from flamia_ref.formats.diagnosis.steps import Step, responsible
from flamia_ref.formats.diagnosis.trace import Operation, Trace, rule_in_words, trace
from flamia_ref.formats.scalar import E8M0, FP32, ScalarFormat

_TINY = np.uint32((127 - 100) << 23)  # 2^-100
_OF_SCALES = (Step.TENSOR_SCALE, Step.SCALE_RULE, Step.SCALE_ROUNDING, Step.QUOTIENT)
_SHOWN = 4  # values of a block in a sentence


class Kind(StrEnum):
    """What is in a block, the most ordinary first."""

    ORDINARY = "ordinary"  # finite, amax from 2^-100, no subnormals; the element is no zero
    TINY = "tiny"  # amax below 2^-100, or a subnormal
    ZERO = "zero"  # a block of zeros, or the element is one
    INFINITY = "infinity"
    NAN = "NaN"


_OPERATIONS: dict[Step, Callable[[Trace], tuple[Operation, ...]]] = {
    Step.TENSOR_SCALE: lambda one: one.tensor,
    Step.SCALE_RULE: lambda one: one.quotient,
    Step.SCALE_ROUNDING: lambda one: one.quotient,
    Step.QUOTIENT: lambda one: one.quotient,
    Step.SCALED: lambda one: one.scaled,
    Step.SCALE_VALUE: lambda one: one.scaled,
    Step.ROUNDING: lambda one: one.scaled,
    Step.OVERFLOW: lambda one: one.scaled,
    Step.ZERO_SIGN: lambda one: one.scaled,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """A block on which two formats differ.

    Attributes:
        kind: what is in it.
        step: the step that makes the difference (`responsible`).
        others: steps that have a part in it: that it needs besides, or that make it alone.
        settings: what that step is in each.
        at: where the block is in x.
        block: its rows and columns.
        values: float32 bits of the block, row by row, without the zeros at the end.
        tensor_amax: float32 bits of the amax that the tensor scale is made from, of each format; None without one.
        element: place in the block of the first code that differs; None where only the scales do.
        scales, codes: what each gives: scale codes, and element codes there.
        traces: how each comes to it.
        not_claimed: the presets that do not claim to give what their library does on such a block.
    """

    kind: Kind
    step: Step
    others: tuple[Step, ...] = ()
    settings: tuple[str, str]
    at: tuple[int, ...]
    block: tuple[int, int]
    values: tuple[int, ...]
    tensor_amax: tuple[int | None, int | None]
    element: tuple[int, int] | None
    scales: tuple[int, int]
    codes: tuple[int, int] | None
    traces: tuple[Trace, Trace]
    not_claimed: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The difference in one sentence."""
        a, b = self.traces
        where = f"block {list(self.at)} " if any(self.at) else ""
        text = f"{where}{self._input()}: "
        if self.scales_differ:
            text += f"scale {a.scale_in_words} by {a.preset}, {b.scale_in_words} by {b.preset}"
        else:
            text += f"scale {a.scale_in_words} by both"
        if self.codes is not None:
            place = self._place()
            x = self.values[place] if place < len(self.values) else 0
            text += f"; {number(x)} becomes {self.codes[0]:02x} and {self.codes[1]:02x}"
        text += f". Step: {self.step.value}: {' | '.join(self._settings())}."
        if self.others:
            text += f" Also of account: {', '.join(self.others)}."
        if self.not_claimed:
            text += (
                f" Out of contract of {', '.join(self.not_claimed)}: its library may differ here."
            )
        return text

    def _settings(self) -> list[str]:
        """What the step is in each, with the values that it comes to."""
        found = list(self.settings)
        for index, one in enumerate(self.traces):
            operations = _OPERATIONS[self.step](one) if self.step in _OPERATIONS else ()
            if operations:
                bits = operations[-1].bits
                found[index] += f" [{number(bits)} = {bits:08x}]"
        return found

    @property
    def operation(self) -> tuple[int, Operation | None, Operation | None] | None:
        """The first operation of the step that is another one or has another result, and its number.

        None where the step is no formula.
        """
        if self.step not in _OPERATIONS:
            return None
        a, b = (_OPERATIONS[self.step](one) for one in self.traces)
        for index, (first, second) in enumerate(itertools.zip_longest(a, b)):
            if first != second:
                return index, first, second
        return None

    @property
    def scales_differ(self) -> bool:
        """Whether the values of the scales differ."""
        return self.traces[0].value != self.traces[1].value

    def _place(self) -> int:
        row, column = self.element or (0, 0)
        return row * self.block[1] + column

    def _input(self) -> str:
        shown = [number(bits) for bits in self.values[:_SHOWN]] or ["0"]
        more = ", ..." if len(self.values) > _SHOWN else ""
        bits = " ".join(f"{one:08x}" for one in self.values[:_SHOWN]) or "00000000"
        text = f"[{', '.join(shown)}{more}] ({bits})"
        if self.tensor_amax[0] is None and self.tensor_amax[1] is None:
            return text
        amaxes = sorted(
            {f"{number(one)} ({one:08x})" for one in self.tensor_amax if one is not None}
        )
        return f"{text} of a tensor with amax {' and '.join(amaxes)}"

    def lines(self) -> list[str]:
        """The sentence, and under it the operations of each."""
        found = [self.sentence]
        for one in self.traces:
            found.append(f"    {one.preset}: amax {one.amax:08x} ({number(one.amax)})")
            operations = [*one.tensor, *one.quotient]
            found += [f"        {operation}" for operation in operations]
            odd = "" if one.rounded == one.scale else f", before odd blocks {one.rounded}"
            found.append(f"        scale {one.scale_in_words}{odd}")
            if one.code is not None:
                found += [f"        {operation}" for operation in one.scaled]
                found.append(f"        code {one.code:02x}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The witness as JSON holds it; bits in hexadecimal."""
        data = dataclasses.asdict(self)
        data["values"] = [f"{bits:08x}" for bits in self.values]
        data["tensor_amax"] = [None if one is None else f"{one:08x}" for one in self.tensor_amax]
        for one in data["traces"]:
            for name in ("amax", "value"):
                one[name] = f"{one[name]:08x}"
            for name in ("tensor", "quotient", "scaled"):
                for operation in one[name]:
                    operation["bits"] = f"{operation['bits']:08x}"
        data["sentence"] = self.sentence
        return data


def kind_of(blocks: Bits, element: np.ndarray | None = None) -> list[Kind]:
    """The kind of each block [N, r, c]; `element` holds the float32 bits of one of each [N]."""
    magnitude = blocks & _float32.MAGNITUDE
    amax = magnitude.max(axis=(-2, -1))
    tiny = (amax < _TINY) | ((magnitude > 0) & (magnitude < 0x800000)).any(axis=(-2, -1))
    zero = amax == 0
    if element is not None:
        zero |= (element & _float32.MAGNITUDE) == 0
    names = np.select(
        [amax > _float32.INFINITY, amax == _float32.INFINITY, zero, tiny],
        [Kind.NAN.value, Kind.INFINITY.value, Kind.ZERO.value, Kind.TINY.value],
        Kind.ORDINARY.value,
    )
    return [Kind(name) for name in names.tolist()]


def explain(
    block: Bits,
    a: BlockFormat,
    b: BlockFormat,
    tensor_amax: tuple[Bits | None, Bits | None] = (None, None),
    source: ScalarFormat = FP32,
    at: tuple[int, ...] = (),
    results: tuple[Result, Result] | None = None,
) -> Witness:
    """Why two formats differ on a block.

    Args:
        block: float32 bits [r, c].
        a, b: the formats.
        tensor_amax: float32 bits, shape (1,), of the amax of the tensor for each; None for the
            block's own.
        source: the type that x had.
        at: where the block is.
        results: what they give there, where that depends on more than the block.

    Raises ValueError where they do not differ.
    """
    if a.element != b.element:
        raise ValueError(f"{a.name} and {b.name} have elements in other formats")
    given, owned = (a, b), (a.of_input(source), b.of_input(source))
    alone = [run(block[None], f, t, source) for f, t in zip(owned, tensor_amax, strict=True)]
    results = results or (alone[0], alone[1])
    whole = all(
        one.values[0] == other.values[0] and np.array_equal(one.codes, other.codes)
        for one, other in zip(alone, results, strict=True)
    )
    scales_differ = bool(results[0].values[0] != results[1].values[0])
    places = np.argwhere(results[0].codes[0] != results[1].codes[0])
    if not scales_differ and not len(places):
        raise ValueError(f"{a.name} and {b.name} do not differ on this block")
    element = tuple(places[0].tolist()) if len(places) else None

    found: tuple[Step, tuple[str, ...], tuple[Step, ...]] = Step.ROW, ("row_span",), ()
    if whole:
        found = _step(block, owned, tensor_amax, source, element, scales_differ)
    step, fields, others = found
    flat = block.reshape(-1)
    last = int(np.flatnonzero(flat)[-1]) + 1 if flat.any() else 0
    unsure = [
        one.name
        for one, result, amax in zip(given, results, tensor_amax, strict=True)
        if not claimed(block[None], result.scales, one, amax, source)[0]
    ]
    x = None if element is None else block[element].reshape(1)
    return Witness(
        kind=kind_of(block[None], None if scales_differ else x)[0],
        step=step,
        others=others,
        settings=(_setting(owned[0], step, fields), _setting(owned[1], step, fields)),
        at=at,
        block=(block.shape[0], block.shape[1]),
        values=tuple(flat[:last].tolist()),
        tensor_amax=(
            _amax_shown(block, owned[0], tensor_amax[0], source),
            _amax_shown(block, owned[1], tensor_amax[1], source),
        ),
        element=element,
        scales=(int(results[0].scales[0]), int(results[1].scales[0])),
        codes=None
        if element is None
        else (int(results[0].codes[(0, *element)]), int(results[1].codes[(0, *element)])),
        traces=(
            trace(block, element, owned[0], tensor_amax[0], source, results[0]),
            trace(block, element, owned[1], tensor_amax[1], source, results[1]),
        ),
        not_claimed=tuple(unsure),
    )


def _step(
    block: Bits,
    owned: tuple[BlockFormat, BlockFormat],
    tensor_amax: tuple[Bits | None, Bits | None],
    source: ScalarFormat,
    element: tuple[int, int] | None,
    scales_differ: bool,
) -> tuple[Step, tuple[str, ...], tuple[Step, ...]]:
    """The step that makes the scales differ, or else the codes of the element, as in `responsible`."""
    a, b = owned

    def outcome(one: BlockFormat) -> Hashable:
        # The amax of the tensor is that of the format whose way of taking it this one has.
        second = tensor_amax[0] is None or _way(one) == _way(b)
        amax = tensor_amax[1] if second and tensor_amax[1] is not None else tensor_amax[0]
        found = run(block[None], one, amax, source)
        if scales_differ or element is None:
            return int(found.values[0])
        return int(found.values[0]), int(found.codes[(0, *element)])

    is_number = element is not None and not _float32.is_nan(block[element])
    step, fields, others = responsible(a, b, outcome, made_nan=is_number)
    other_sense = step is not Step.TENSOR_SCALE or a.tensor_divides != b.tensor_divides
    if not scales_differ and step in _OF_SCALES and a.scaled != b.scaled and other_sense:
        # The scale is the same: the step is one of the scale only where formulas were mixed up.
        return Step.SCALED, ("scaled",), ()
    return step, fields, others


def _amax_shown(
    block: Bits, block_format: BlockFormat, given: Bits | None, source: ScalarFormat
) -> int | None:
    """float32 bits of the amax of the tensor, None without a tensor scale."""
    if not block_format.has_tensor_scale:
        return None
    amax = own_amax(block[None], block_format, source) if given is None else given
    return int(amax.reshape(-1)[0])


def _way(block_format: BlockFormat) -> Hashable:
    """All that the amax of a tensor depends on."""
    return block_format.tensor_extent, block_format.signs, block_format.nan


def _setting(block_format: BlockFormat, step: Step, fields: tuple[str, ...]) -> str:
    """What a step is in a format, in words."""
    if step in (Step.SCALE_RULE, Step.SCALE_ROUNDING, Step.QUOTIENT):
        return rule_in_words(block_format)
    if step is Step.SCALED:
        return block_format.scaled or "x / scale"
    shown = [f"{field}: {_words(field, block_format)}" for field in fields]
    return ", ".join(shown) or "the same"


def _words(field: str, block_format: BlockFormat) -> str:
    value = getattr(block_format, field)
    if value is None:
        return {
            "infinity_scale": "as the rule gives",
            "zero_scale": "as the rule gives",
            "scale_range": f"{block_format.codes_of_scales[0]} to {block_format.codes_of_scales[1]}",
            "nan_codes": f"{block_format.element.nan_code:02x}",
            "underflow_scale": "0",
        }.get(field, "none")
    if field in ("nan_codes", "nan_block_code"):
        codes = value if isinstance(value, tuple) else (value,)
        return " ".join(f"{code:02x}" for code in codes)
    if field == "scale_values":
        pairs = [f"code {code}: {number(int(np.float32(v).view(np.uint32)))}" for code, v in value]
        return ", ".join(pairs) or "its value"
    if field == "scale_range":
        return f"{value[0]} to {value[1]}"
    return str(value.value if isinstance(value, StrEnum) else value)


def same_block(a: BlockFormat, b: BlockFormat, block: Any) -> Any:
    """The block that two formats are compared with; checks that they can be.

    Raises ValueError where their elements differ, or no block is common to both.
    """
    if a.element != b.element:
        raise ValueError(
            f"{a.name} has {a.element.name} elements and {b.name} {b.element.name}: their codes"
            " are not comparable; compare values, dequantize(quantize(x, preset))"
        )
    if (a.scale in (E8M0, FP32)) != (b.scale in (E8M0, FP32)) and a.element.bits != 4:
        raise ValueError(f"{a.name} has {a.scale.name} scales and {b.name} {b.scale.name}")
    if block is not None:
        chosen = a.checked_block(block)
        b.checked_block(block)
        return chosen
    common = [one for one in (a.block, b.block, *a.blocks) if one in a.blocks and one in b.blocks]
    if not common:
        raise ValueError(
            f"{a.name} and {b.name} have no block in common: {', '.join(map(str, a.blocks))};"
            f" {', '.join(map(str, b.blocks))}"
        )
    return common[0]
