"""The rule of the fused sum is what the interpreter finds in the primitive's own program, for every instruction."""

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from flamia_ref import _float32
from flamia_ref.arithmetic import INSTRUCTIONS, products
from flamia_ref.arithmetic.instructions import Scaling, Summation
from flamia_ref.formats import FORMATS, decode
from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.interpreter import RULES, Interpreter
from flamia_ref.leakage.flow.sets import Sets
from flamia_ref.leakage.flow.value import Flow, known, made

Array = np.ndarray[Any, Any]
LANES = (3, 4)


def kinds() -> Iterator[tuple[str, str, str, Scaling | None]]:
    """Every instruction with each of its formats on each side, and each of its scalings."""
    for name, rules in INSTRUCTIONS.items():
        formats = rules.operand_formats
        for index, a in enumerate(formats):
            b = (
                a
                if rules.same_formats or len(formats) == 1
                else formats[(index + 1) % len(formats)]
            )
            scalings: tuple[Scaling | None, ...] = rules.scalings or (None,)
            if rules.summation is Summation.EXACT:
                scalings = (None, *rules.scalings) if index == 0 else (None,)
            for scaling in scalings:
                yield name, a, b, scaling
                if a != b and rules.summation is Summation.FUSED:
                    yield name, a, a, scaling


def _codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Codes of a format that are finite, many of them zeros of either sign."""
    form = FORMATS[name]
    codes = rng.integers(0, 1 << form.bits, size=shape, dtype=np.uint64).astype(form.code_dtype)
    codes = (codes >> form.padding_bits) << form.padding_bits
    size = abs(decode(codes, form, np.float64))
    # Not so far apart that one product vanishes beside another.
    finite = (size >= 0.25) & (size <= 4)
    zeros = np.array([0, form.sign_code or 0], dtype=form.code_dtype)
    zero = rng.random(shape) < 0.5
    return np.where(zero | ~finite, rng.choice(zeros, size=shape), codes).astype(form.code_dtype)


def _bits(values: Array, form: str) -> Array:
    if form == "fp16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)


class _Operands:
    """Operands of which some elements are known, each other one a source of its own."""

    def __init__(self, context: Context) -> None:
        self.context, self.start = context, 0

    def of(self, values: Array, free: Array) -> Flow:
        ids = np.full(values.shape, -1, dtype=np.int32)
        count = int(free.sum())
        ids[free] = self.context.sets.singles(np.arange(self.start, self.start + count))
        self.start += count
        return made(
            values.shape, values.dtype, ids, np.where(free, np.zeros((), values.dtype), values)
        )


def operands(
    context: Context, kind: tuple[str, str, str, Scaling | None], k: int, seed: int
) -> list[Flow]:
    """Codes half known, whole blocks of zeros among them; scales and accumulators known and not."""
    name, a_format, b_format, scaling = kind
    rng = np.random.default_rng(seed)
    of = _Operands(context)
    result = []
    for form, lanes in ((a_format, (LANES[0], 1)), (b_format, (1, LANES[1]))):
        values = _codes(rng, form, (k, *lanes))
        free = rng.random(values.shape) < 0.4
        block = 1 if scaling is None else scaling.block
        rows = np.repeat(rng.random((-(-k // block), *lanes)) < 0.4, block, axis=0)[:k]
        values, free = np.where(rows, np.zeros((), values.dtype), values), free & ~rows
        result.append(of.of(values, free))
    for lanes in ((LANES[0], 1), (1, LANES[1])):
        shape = (0 if scaling is None else -(-k // scaling.block), *lanes)
        values = _codes(rng, "e8m0" if scaling is None else scaling.format, shape).astype(np.uint8)
        if scaling is not None and scaling.format == "e8m0":
            values = rng.integers(120, 135, size=shape, dtype=np.uint8)
        result.append(of.of(values, rng.random(shape) < 0.6))
    form = FORMATS[INSTRUCTIONS[name].result.accumulator_format]
    # Neither so large that products vanish beside it, nor so small that it does.
    c = _bits(rng.choice([0.0, -0.0, 1.0, -1.5, 3.25], size=LANES), form.name)
    # A known accumulator, an unknown one and one that is +0 in turn, all three on rows of their own.
    free = np.zeros(LANES, dtype=np.bool_)
    free[1] = True
    c[2] = 0
    result.append(of.of(c, free))
    return result


@functools.cache
def _program(kind: tuple[str, str, str, Scaling | None], k: int, strict: bool) -> Any:
    name, a_format, b_format, scaling = kind
    # The sign of a zero shows where a chain of fused multiply-adds starts at a negative zero. It is not looked at,
    # as `Assumption.ZERO_TIMES_FINITE` says.
    signs = not strict and INSTRUCTIONS[name].summation is Summation.FMA
    context = Context(Sets(1 << 14))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(context, kind, k, 0)]
    static = {"instruction": name, "a_format": a_format, "b_format": b_format, "scaling": scaling}
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        if signs:
            patch.setattr(_float32, "_with_zero_sign", lambda result, *_: result)
        inside = jax.make_jaxpr(functools.partial(products._chain, **static))(*shapes)
        outside = jax.make_jaxpr(functools.partial(products.chain, **static))(*shapes)
    return inside, outside


def both(
    kind: tuple[str, str, str, Scaling | None],
    k: int,
    *,
    strict: bool,
    seed: int,
    rules: Any = RULES,
) -> tuple[Flow, Flow, Context]:
    """What the rule says, and what the program of the primitive says."""
    inside, outside = _program(kind, k, strict)
    context = Context(Sets(1 << 14), strict=strict, fine=True)
    given = operands(context, kind, k, seed)
    (by_rule,) = Interpreter(context, rules).run(outside, given)
    (by_program,) = Interpreter(context, rules).run(inside, given)
    return by_rule, by_program, context


def differences(by_rule: Flow, by_program: Flow, context: Context) -> tuple[int, int, int]:
    """Sources that only the program sees, that only the rule sees, and elements known to one of them alone."""
    sets = context.sets
    rule, program = sets.members(by_rule.full_ids()), sets.members(by_program.full_ids())
    known = by_rule.full_ids() < 0, by_program.full_ids() < 0
    same = known[0] & known[1]
    assert (by_rule.full_values()[same] == by_program.full_values()[same]).all()
    return (
        int((program & ~rule).sum()),
        int((rule & ~program).sum()),
        int((known[0] != known[1]).sum()),
    )


def _label(kind: tuple[str, str, str, Scaling | None]) -> str:
    name, a, b, scaling = kind
    text = f"{name}-{a}-{b}"
    return text if scaling is None else f"{text}-{scaling.format}-{scaling.block}"


KINDS = {_label(kind): kind for kind in kinds()}


# One of each way to sum, of each kind of scale, and formats with and without NaN and infinity.
DAILY = (
    "sm100.tcgen05.mxf8f6f4-e4m3-e4m3-e8m0-32",
    "sm100.tcgen05.mxf4-e2m1-e2m1-e8m0-32",
    "sm100.tcgen05.mxf4nvf4-e2m1-e2m1-ue4m3-16",
    "sm100.tcgen05.f16-bf16-bf16",
    "exact-e4m3-e5m2-ue4m3-16",
    "float32-bf16-fp16",
)


@pytest.mark.parametrize("strict", [False, True], ids=["finite", "strict"])
@pytest.mark.parametrize("label", DAILY)
def test_rule_is_what_the_program_says(label: str, strict: bool) -> None:
    kind = KINDS[label]
    # A step and a part of one.
    k = (INSTRUCTIONS[kind[0]].terms or 8) + 3
    assert differences(*both(kind, k, strict=strict, seed=3)) == (0, 0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("strict", [False, True], ids=["finite", "strict"])
@pytest.mark.parametrize("label", KINDS)
def test_rule_is_what_the_program_says_for_every_kind(label: str, strict: bool) -> None:
    kind = KINDS[label]
    terms = INSTRUCTIONS[kind[0]].terms or 8
    seed = zlib.crc32(label.encode())
    for k in (terms, terms + 3, 128):
        assert differences(*both(kind, k, strict=strict, seed=seed)) == (0, 0, 0)


def test_cut_of_a_known_accumulator() -> None:
    """Products of zeros leave the accumulator with the bits that the instruction keeps: 13 here."""
    context = Context(Sets(64))
    static = {"a_format": "e4m3", "b_format": "e4m3", "scaling": None}
    zeros = np.zeros((32, 1, 1), np.uint8)
    free = _Operands(context).of(np.ones((32, 1, 1), np.uint8), np.ones((32, 1, 1), bool))
    none, c = np.zeros((0, 1, 1), np.uint8), np.array([[0x3F8FFFFF]], np.uint32)
    call = functools.partial(products.chain, instruction="sm90.wgmma.fp8", **static)
    with jax.enable_x64(True):
        program = jax.make_jaxpr(call)(zeros, zeros, none, none, c)
    given = [known(zeros), free, known(none), known(none), known(c)]
    (found,) = Interpreter(context).run(program, given)
    assert found.all_known
    assert found.full_values() == 0x3F8FFC00


def test_a_known_nan_is_the_result() -> None:
    context = Context(Sets(64))
    static = {"a_format": "e4m3", "b_format": "e4m3"}
    codes = np.full((32, 1, 1), 0x38, np.uint8)
    free = _Operands(context).of(codes, np.ones(codes.shape, bool))
    scale, c = np.full((1, 1, 1), 255, np.uint8), np.zeros((1, 1), np.uint32)
    call = functools.partial(
        products.chain,
        instruction="sm100.tcgen05.mxf8f6f4",
        scaling=Scaling(format="e8m0", block=32),
        **static,
    )
    with jax.enable_x64(True):
        program = jax.make_jaxpr(call)(codes, codes, scale, scale, c)
    given = [free, known(codes), known(scale), known(np.full((1, 1, 1), 127, np.uint8)), known(c)]
    (found,) = Interpreter(context).run(program, given)
    assert found.all_known
    assert found.full_values() == 0x7FFFFFFF
