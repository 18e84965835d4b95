"""Tests of the tests: the rows of product_rows catch every change of a rule.

A rule is changed in the slow machine, and its results on the rows that the tests run every time are
compared with the right ones. An engine that had the changed rule would fail in as many rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.arithmetic.product_rows import CASES, SOME, Case, adversarial, result
from tests.independent import codes, float32, machine
from tests.independent.machine import FINITE, INFINITE, NOT_A_NUMBER, Operand, Output, Rules, Term

ENOUGH = 3  # rows that must differ

Patch = pytest.MonkeyPatch
Change = Callable[[Patch, Rules], Rules]


def case(name: str, scale_format: str | None = None, block: int = 32) -> Case:
    """The case of an instruction and a pair of formats, from "instruction a b"."""
    instruction, a, b = name.split()
    found = Case(instruction=instruction, a=a, b=b, scale_format=scale_format, block=block)
    assert found in SOME
    return found


PLAIN = case("sm100.tcgen05.f16 bf16 bf16")
TF32 = case("sm100.tcgen05.tf32 tf32 tf32")
OLD = case("sm80.mma.bf16 bf16 bf16")
HOPPER = case("sm90.wgmma.fp8 e4m3 e5m2")
UNSCALED = case("sm100.tcgen05.f8f6f4 e4m3 e4m3")
HALF = case("sm90.wgmma.f16.f16out fp16 fp16")
HALF_FP8 = case("sm100.tcgen05.f8f6f4.f16out e5m2 e5m2")
MX = case("sm100.tcgen05.mxf8f6f4 e5m2 e5m2", "e8m0")
MX_FP4 = case("sm100.tcgen05.mxf8f6f4 e2m1 e4m3", "e8m0")
FP4_32 = case("sm100.tcgen05.mxf4 e2m1 e2m1", "e8m0")
FP4_16 = case("sm100.tcgen05.mxf4nvf4 e2m1 e2m1", "e8m0", 16)
NVFP4 = case("sm100.tcgen05.mxf4nvf4 e2m1 e2m1", "ue4m3", 16)

SINGLE = (PLAIN, TF32, OLD, HOPPER, UNSCALED, HALF, HALF_FP8, MX, MX_FP4)
GROUPED = (FP4_32, FP4_16, NVFP4)
ALL = (*SINGLE, *GROUPED)
TO_FLOAT32 = (PLAIN, TF32, OLD, MX, *GROUPED)
# Where products are small enough to show the floor, with c = 0.
WITH_FLOOR = (PLAIN, TF32, OLD, HALF, MX, FP4_16)
SCALED = (MX, MX_FP4, *GROUPED)


class Mutation(NamedTuple):
    """A change of a rule and the cases in which it makes a difference."""

    name: str
    cases: tuple[Case, ...]
    change: Change


# Changes of the data of an instruction.


def data(**changes: Any) -> Change:
    return lambda patch, rules: dataclasses.replace(rules, **changes)


def moved(field: str, by: int) -> Change:
    def change(patch: Patch, rules: Rules) -> Rules:
        return dataclasses.replace(rules, **{field: getattr(rules, field) + by})

    return change


def multiplied(field: str, numerator: int, denominator: int = 1) -> Change:
    def change(patch: Patch, rules: Rules) -> Rules:
        value = getattr(rules, field) * numerator // denominator
        return dataclasses.replace(rules, **{field: value})

    return change


def output(**changes: Any) -> Change:
    def change(patch: Patch, rules: Rules) -> Rules:
        return dataclasses.replace(rules, output=dataclasses.replace(rules.output, **changes))

    return change


def rounding_flipped(patch: Patch, rules: Rules) -> Rules:
    return output(nearest=not rules.output.nearest)(patch, rules)


# Changes of how terms are cut, and of what sums become.


def replaced(name: str, function: Callable[..., Any]) -> Change:
    """`machine.NAME` is `function`, which gets the right one first."""
    right = getattr(machine, name)

    def change(patch: Patch, rules: Rules) -> Rules:
        patch.setattr(machine, name, lambda *given, **named: function(right, *given, **named))
        return rules

    return change


def cut_nearest(right: Any, significand: int, places: int) -> int:
    if places >= 0:
        return int(right(significand, places))
    magnitude = abs(significand)
    whole, rest = magnitude >> -places, magnitude & ((1 << -places) - 1)
    half = 1 << (-places - 1)
    whole += rest > half or (rest == half and whole & 1)
    return -whole if significand < 0 else whole


def cut_down(right: Any, significand: int, places: int) -> int:
    return significand << places if places >= 0 else significand >> -places


def cut_away(right: Any, significand: int, places: int) -> int:
    return -cut_down(right, -abs(significand), places) * (-1 if significand < 0 else 1)


def not_cut(right: Any, significand: int, places: int) -> Any:
    return significand << 400 + places


def saturated(right: Any, total: int, exponent: int, output: Output) -> int:
    found = right(total, exponent, output)
    return found - (found & (output.stored.sign_bit - 1) == output.infinity)


def signed_zero(right: Any, total: int, exponent: int, output: Output) -> int:
    return int(right(total, exponent, output)) or (output.stored.sign_bit if total < 0 else 0)


def flushed(right: Any, total: int, exponent: int, output: Output) -> int:
    found: int = right(total, exponent, output)
    return found if found & output.infinity else 0


def rounded_up(right: Any, total: int, exponent: int, output: Output) -> int:
    """Ties of a rounding to nearest go away from zero."""
    return int(right(2 * total + (1 if total > 0 else -1), exponent - 1, output))


# Changes of the alignment.


def no_accumulator(right: Any, terms: Sequence[Term], floor: int) -> int:
    """c is always the last term, and the only one with so many bits."""
    if terms and terms[-1][2] in (23, 10) and all(bits != terms[-1][2] for *_, bits in terms[:-1]):
        terms = terms[:-1]
    return int(right(terms, floor))


def no_floor(right: Any, terms: Sequence[Term], floor: int) -> int:
    return max((exponent for _, exponent, _ in terms), default=floor)


def floor_for_zeros_only_in_float32(right: Any, terms: Sequence[Term], floor: int) -> int:
    return int(right(terms, -126 if floor < -100 else -14))


def by_size(right: Any, terms: Sequence[Term], floor: int) -> int:
    """The exponent of a term is that of its leading bit."""
    exponents = [e + abs(m).bit_length() - 1 - bits for m, e, bits in terms if m]
    return max(floor, *exponents) if exponents else floor


def cancelled_terms_are_left_out(right: Any, terms: Sequence[Term], floor: int) -> int:
    return int(right([term for term in terms if term[0]], floor))


def accumulator_afterwards(
    right: Any, terms: list[Term], c_bits: int, rules: Rules, infinite_signs: Any = ()
) -> int:
    """The products alone, and then the accumulator."""
    if infinite_signs:
        return int(right(terms, c_bits, rules, infinite_signs))
    alone = right(terms, 0, rules)
    kind, significand, exponent = machine.element_operand(alone, rules.output.stored)
    one = [(significand, exponent, rules.output.stored.fraction_bits)] if significand else []
    return int(right([] if kind else one, c_bits, rules, [significand] if kind else []))


# Changes of what a product is.


def zeros_count(right: Any, *factors: int) -> bool:
    return True


def normalised_product(right: Any, *given: Any) -> Term:
    significand, exponent, bits = right(*given)
    carry = abs(significand) >> (bits + 1)
    return significand, exponent + bool(carry), bits + bool(carry)


def beyond_is_infinite(
    right: Any, terms: list[Term], c_bits: int, rules: Rules, infinite_signs: Any = ()
) -> int:
    """Products of 2^128 and more are infinities."""
    top = rules.output.stored.bias + 1
    large = [m for m, e, bits in terms if abs(m).bit_length() - 1 - bits + e >= top]
    signs = {*infinite_signs, *(1 if m > 0 else -1 for m in large)}
    return int(right(terms, c_bits, rules, signs))


def changed_operands(function: Callable[[Operand, codes.Element], Operand]) -> Change:
    """Operands of products, decoded, go through `function`."""

    def decoded(right: Any, row: Sequence[int], element: codes.Element) -> list[Operand]:
        return [function(operand, element) for operand in right(row, element)]

    return replaced("decoded", decoded)


def normal(operand: Operand, element: codes.Element) -> Operand:
    """Subnormals brought to [1, 2)."""
    kind, m, e = operand
    shift = element.fraction_bits + 1 - abs(m).bit_length()
    return (kind, m << shift, e - shift) if kind == FINITE and m else operand


def without_subnormals(operand: Operand, element: codes.Element) -> Operand:
    kind, m, e = operand
    return (kind, 0, e) if kind == FINITE and not abs(m) >> element.fraction_bits else operand


def zero_as_in_january(operand: Operand, element: codes.Element) -> Operand:
    """The rule of MMA-Sim's version of January 2026: a zero has the exponent of float32's."""
    kind, m, _ = operand
    return (FINITE, 0, -126) if kind == FINITE and not m else operand


def with_zeros_counted(change: Change) -> Change:
    def both(patch: Patch, rules: Rules) -> Rules:
        return replaced("takes_part", zeros_count)(patch, change(patch, rules))

    return both


def quiet(operand: Operand, element: codes.Element) -> Operand:
    """A NaN is an infinity."""
    return (INFINITE, 1, 0) if operand[0] == NOT_A_NUMBER else operand


def infinity_times_zero(right: Any, pairs: Any, *given: Any, **named: Any) -> int:
    """Is infinity."""
    kept = [
        ((x[0], x[1] or 1, x[2]), (y[0], y[1] or 1, y[2])) if INFINITE in (x[0], y[0]) else (x, y)
        for x, y in pairs
    ]
    return int(right(kept, *given, **named))


def tf32_nearest(right: Any, row: Sequence[int], element: codes.Element) -> list[Operand]:
    words = [code + 0x1000 if code & float32.INFINITY != float32.INFINITY else code for code in row]
    return list(right(words, element))


# Changes of scales.


def bit_7_is_a_sign(right: Any, code: int, scale_format: str) -> Operand:
    kind, m, e = right(code, scale_format)
    return kind, -m if code & 0x80 else m, e


def bit_7_is_an_exponent_bit(right: Any, code: int, scale_format: str) -> Operand:
    kind, m, e = right(code, scale_format)
    return kind, m, e + 16 * (code >> 7)


def no_nan_scale(right: Any, code: int, scale_format: str) -> Operand:
    kind, m, e = right(code, scale_format)
    if kind != NOT_A_NUMBER:
        return kind, m, e
    return (FINITE, 1, 128) if scale_format == "e8m0" else (FINITE, 15, 8)


def nan_in_both_signs_only(right: Any, code: int, scale_format: str) -> Operand:
    """0x7f is NaN, 0xff is not."""
    return (FINITE, 15, 8) if code == 0xFF else right(code, scale_format)


def scale_zero_is_zero(right: Any, code: int, scale_format: str) -> Operand:
    return right(code, scale_format) if code else (FINITE, 0, -1000)


def normal_scales(right: Any, code: int, scale_format: str) -> Operand:
    """A subnormal ue4m3 is brought to [1, 2)."""
    kind, m, e = right(code, scale_format)
    shift = 4 - m.bit_length()
    return (kind, m << shift, e - shift) if kind == FINITE and m else (kind, m, e)


def scale_bias(right: Any, code: int, scale_format: str) -> Operand:
    kind, m, e = right(code, scale_format)
    return kind, m, e + 1


def significand_of_scales_cut(right: Any, code: int, scale_format: str) -> Operand:
    kind, m, e = right(code, scale_format)
    return kind, m & ~1, e


def one_scale_alone(right: Any, *given: Any, **named: Any) -> int:
    return int(right(*given, **named | {"scale_exponent": named["scale_exponent"] // 2}))


def chained(**changes: Any) -> Change:
    """`machine.chain` with other arguments."""

    def chain(right: Any, *given: Any, **named: Any) -> Any:
        return right(*given, **named | changes)

    return replaced("chain", chain)


def scales_swapped_in_k(right: Any, *given: Any, **named: Any) -> Any:
    """Neighbouring blocks have each other's scales."""
    for side in ("a_scales", "b_scales"):
        scales = list(named[side])
        scales[0::2], scales[1::2] = scales[1::2], scales[0::2]
        named[side] = scales
    return right(*given, **named)


def descending(right: Any, a: Any, b: Any, c: int, rules: Rules, **named: Any) -> list[int]:
    """The steps from the last to the first."""
    starts = range(0, len(a), rules.terms)[::-1]
    order = [k for start in starts for k in range(start, start + rules.terms)]
    for side in ("a_scales", "b_scales"):
        per_step = len(named[side]) // len(starts)
        scales = [named[side][i * per_step : (i + 1) * per_step] for i in range(len(starts))]
        named[side] = [scale for step in scales[::-1] for scale in step]
    found: list[int] = right([a[k] for k in order], [b[k] for k in order], c, rules, **named)
    return found


MUTATIONS = (
    Mutation("one fraction bit fewer", ALL, moved("fraction_bits", -1)),
    Mutation("one fraction bit more", ALL, moved("fraction_bits", 1)),
    Mutation("25 fraction bits", (HOPPER, *GROUPED, OLD), data(fraction_bits=25)),
    Mutation("13 fraction bits", (PLAIN, TF32, UNSCALED, HALF, MX), data(fraction_bits=13)),
    Mutation("floor one lower", WITH_FLOOR, moved("floor", -1)),
    Mutation("floor one higher", WITH_FLOOR, moved("floor", 1)),
    Mutation("no floor", WITH_FLOOR, replaced("alignment", no_floor)),
    Mutation(
        "floor of normal numbers",
        WITH_FLOOR,
        replaced("alignment", floor_for_zeros_only_in_float32),
    ),
    Mutation("terms to nearest", ALL, replaced("cut", cut_nearest)),
    Mutation("terms rounded down", ALL, replaced("cut", cut_down)),
    Mutation("terms away from zero", ALL, replaced("cut", cut_away)),
    Mutation("the other rounding of the result", ALL, rounding_flipped),
    Mutation("ties away from zero", (HALF, HALF_FP8), replaced("finished", rounded_up)),
    Mutation("result of 24 bits", (HOPPER,), output(precision=24)),
    Mutation("result of 14 bits", TO_FLOAT32, output(precision=14)),
    Mutation("result of 13 bits", (HOPPER,), output(precision=13)),
    Mutation("result of 15 bits", (HOPPER,), output(precision=15)),
    Mutation("saturation", (*TO_FLOAT32[:-1], HALF, HALF_FP8), replaced("finished", saturated)),
    Mutation(
        "zero with a sign", (PLAIN, TF32, MX, HALF, FP4_16), replaced("finished", signed_zero)
    ),
    Mutation("results without subnormals", ALL, replaced("finished", flushed)),
    Mutation("steps of half the length", SINGLE, multiplied("terms", 1, 2)),
    Mutation("steps of double length", SINGLE, multiplied("terms", 2)),
    Mutation("steps of 32 of 64", GROUPED, data(terms=32)),
    Mutation("groups of 8", GROUPED, data(group=8)),
    Mutation("groups of 32", (FP4_32,), data(group=32)),
    Mutation("c does not decide the alignment", ALL, replaced("alignment", no_accumulator)),
    Mutation("c is added afterwards", ALL, replaced("sum_of_terms", accumulator_afterwards)),
    Mutation("alignment by leading bits", ALL, replaced("alignment", by_size)),
    Mutation("zeros decide the alignment", SINGLE, replaced("takes_part", zeros_count)),
    Mutation(
        "zeros as in January",
        (PLAIN, TF32, OLD, MX, MX_FP4),
        with_zeros_counted(changed_operands(zero_as_in_january)),
    ),
    Mutation("groups of zeros decide the alignment", GROUPED, replaced("takes_part", zeros_count)),
    Mutation(
        "groups that cancel do not", GROUPED, replaced("alignment", cancelled_terms_are_left_out)
    ),
    Mutation("products in [1, 2)", SINGLE, replaced("product", normalised_product)),
    Mutation("subnormals in [1, 2)", SINGLE[:-1], changed_operands(normal)),
    Mutation("no subnormal operands", SINGLE, changed_operands(without_subnormals)),
    Mutation(
        "large products are infinite",
        (PLAIN, TF32, OLD, MX, MX_FP4, HALF, HALF_FP8),
        replaced("sum_of_terms", beyond_is_infinite),
    ),
    Mutation("NaN is infinity", (*SINGLE[:-1],), changed_operands(quiet)),
    Mutation(
        "infinity times zero is infinity",
        (PLAIN, TF32, OLD, HOPPER, HALF, HALF_FP8, MX),
        replaced("fused_sum", infinity_times_zero),
    ),
    Mutation("all bits of tf32", (TF32,), chained(elements=(codes.FP32, codes.FP32))),
    Mutation("tf32 to nearest", (TF32,), replaced("decoded", tf32_nearest)),
    Mutation("bit 7 of ue4m3 is a sign", (NVFP4,), replaced("scale_operand", bit_7_is_a_sign)),
    Mutation(
        "bit 7 of ue4m3 is an exponent bit",
        (NVFP4,),
        replaced("scale_operand", bit_7_is_an_exponent_bit),
    ),
    Mutation("no NaN among scales", SCALED, replaced("scale_operand", no_nan_scale)),
    Mutation("0xff is no NaN", SCALED, replaced("scale_operand", nan_in_both_signs_only)),
    Mutation("scale 0 of e8m0 is 0", SCALED[:-1], replaced("scale_operand", scale_zero_is_zero)),
    Mutation("subnormal scales in [1, 2)", (NVFP4,), replaced("scale_operand", normal_scales)),
    Mutation("scales of two bits", (NVFP4,), replaced("scale_operand", significand_of_scales_cut)),
    Mutation("another bias of scales", SCALED, replaced("scale_operand", scale_bias)),
    Mutation("scales of the neighbours", SCALED, replaced("chain", scales_swapped_in_k)),
    Mutation("scales of 32", (NVFP4, FP4_16), chained(block=32)),
    Mutation("e4m3 scales as e8m0", (NVFP4,), chained(scale_format="e8m0")),
    Mutation("half of a scale", (MX, MX_FP4), replaced("plain_step", one_scale_alone)),
    Mutation("steps from the last to the first", ALL, replaced("chain", descending)),
)


@pytest.mark.parametrize(
    ("mutation", "case"),
    [(mutation, case) for mutation in MUTATIONS for case in mutation.cases],
    ids=lambda x: x.name.replace(" ", "-"),
)
def test_the_rows_show(mutation: Mutation, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, right = adversarial(case)
    rules = mutation.change(monkeypatch, case.rules)
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    differ = (index for index in order if result(rows[index], case, rules) != right[index])
    found = list(itertools.islice(differ, ENOUGH))
    assert len(found) == ENOUGH, f"{len(found)} of {len(rows)} rows differ"


def test_every_kind_of_case_is_mutated() -> None:
    """The cases above stand for all: each set of rules of the newest devices is among them."""
    assert {case.rules for case in ALL} <= {case.rules for case in CASES}
    assert {case.rules.output for case in ALL} == {case.rules.output for case in CASES}
