"""The fused sums of tensor cores, on Python integers.

One step adds L products (or groups of products) and the accumulator c. Every term is cut toward zero
to F fraction bits below the largest exponent among the terms that are not zero and a floor; the cut
terms are added exactly; the sum is brought to the output format. What differs between instructions
is in ``Rules``; ``tests.independent.tensor_cores`` has them all. Sources: MMA-Sim 2.1.1 (a
simulator), Khattak and Mikaitis, arXiv:2512.07004, and the recorded data in tests/oracles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tests.independent import codes, float32

FINITE, INFINITE, NOT_A_NUMBER = range(3)
# (kind, signed significand, exponent); of an infinity the significand is its sign.
Operand = tuple[int, int, int]
# A term of a sum: (significand, not zero; exponent; fraction bits of the significand).
Term = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a sum becomes the accumulator, and the format in which that is stored."""

    precision: int  # significant bits that are kept
    nearest: bool  # to nearest even; else cut toward zero
    stored: codes.Element

    @property
    def infinity(self) -> int:
        """Bits of +infinity."""
        assert self.stored.infinity is not None
        return self.stored.infinity


FLOAT32 = Output(precision=24, nearest=False, stored=codes.FP32)
FLOAT32_OF_14_BITS = Output(precision=14, nearest=False, stored=codes.FP32)
FLOAT16 = Output(precision=11, nearest=True, stored=codes.FP16)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What an instruction does in one step."""

    terms: int  # products in a step
    fraction_bits: int = 25
    floor: int = -133
    output: Output = FLOAT32
    scaled: bool = False  # one E8M0 scale of each operand for all products of a step
    group: int = 0  # where not 0: products that are added exactly before their scales come in


SCALED_TERMS = 32
BFLOAT16_TERMS = 16
SCALED = Rules(terms=SCALED_TERMS, scaled=True)
BFLOAT16 = Rules(terms=BFLOAT16_TERMS)


# Operands.


@cache
def element_operands(element: codes.Element) -> tuple[Operand, ...]:
    """Every code of an element format of 16 bits at most, decoded; index = code."""
    return tuple(element_operand(code, element) for code in range(2 * element.sign_bit))


def element_operand(code: int, element: codes.Element) -> Operand:
    """A code decoded. The low 13 bits of a tf32 word do not count, not even for NaN."""
    if element.name == "tf32":
        code >>= codes.TF32_PADDING
    magnitude = code & (element.sign_bit - 1)
    if magnitude <= element.largest:
        return (FINITE, *codes.split(code, element))
    if magnitude == element.infinity:
        return INFINITE, -1 if code & element.sign_bit else 1, 0
    return NOT_A_NUMBER, 0, 0


def decoded(row: Sequence[int], element: codes.Element) -> list[Operand]:
    """Every code of a row, decoded."""
    if element.sign_bit > 1 << 15:
        return [element_operand(code, element) for code in row]
    table = element_operands(element)
    return [table[code] for code in row]


def scale_operand(code: int, scale_format: str) -> Operand:
    """A scale: E8M0 is a power of two, UE4M3 an E4M3 without sign whose bit 7 does not count."""
    if scale_format == "e8m0":
        return (NOT_A_NUMBER, 0, 0) if code == codes.E8M0_NAN else (FINITE, 1, code - 127)
    return element_operands(codes.E4M3)[code & 0x7F]


# Sums.


def fused_sum(
    pairs: Iterable[tuple[Operand, Operand]],
    c_bits: int,
    *,
    scale_exponent: int,
    product_bits: int,
    rules: Rules = SCALED,
) -> int:
    """One instruction step: bits of c plus the products.

    ``scale_exponent`` is added to the exponent of every product, whose significands have
    ``product_bits`` fraction bits.
    """
    terms: list[Term] = []
    infinite_signs = set()
    for (a_kind, a, a_exponent), (b_kind, b, b_exponent) in pairs:
        if a_kind or b_kind:  # one at least is not finite
            if a_kind == NOT_A_NUMBER or b_kind == NOT_A_NUMBER or not a or not b:
                return rules.output.stored.nan  # the last case is infinity times zero
            infinite_signs.add(1 if (a > 0) == (b > 0) else -1)
        elif takes_part(a, b):
            terms.append(product((a, a_exponent), (b, b_exponent), scale_exponent, product_bits))
    return sum_of_terms(terms, c_bits, rules, infinite_signs)


def takes_part(*factors: int) -> bool:
    """Whether a term with these significands is one of those that decide the alignment."""
    return all(factors)


def product(a: tuple[int, int], b: tuple[int, int], scale_exponent: int, bits: int) -> Term:
    """The term of two operands: the significand is not brought to [1, 2)."""
    return a[0] * b[0], a[1] + b[1] + scale_exponent, bits


def sum_of_terms(
    terms: list[Term], c_bits: int, rules: Rules, infinite_signs: Iterable[int] = ()
) -> int:
    """Terms, not zero, and the accumulator: aligned, cut, added, brought to the output format."""
    output = rules.output
    kind, significand, exponent = element_operand(c_bits, output.stored)
    signs = {*infinite_signs, *([significand] if kind == INFINITE else [])}
    if kind == NOT_A_NUMBER or len(signs) == 2:
        return output.stored.nan
    if signs:
        return output.infinity | (output.stored.sign_bit if -1 in signs else 0)
    if significand:
        terms = [*terms, (significand, exponent, output.stored.fraction_bits)]
    largest = alignment(terms, rules.floor)
    places = rules.fraction_bits - largest
    total = 0
    for significand, exponent, bits in terms:
        total += cut(significand, places + exponent - bits)
    return finished(total, largest - rules.fraction_bits, output)


def alignment(terms: Sequence[Term], floor: int) -> int:
    """The exponent to which all terms are aligned."""
    return max(floor, max((exponent for _, exponent, _ in terms), default=floor))


def cut(significand: int, places: int) -> int:
    """significand * 2**places, cut toward zero."""
    if places >= 0:
        return significand << places
    return significand >> -places if significand > 0 else -(-significand >> -places)


def finished(total: int, exponent: int, output: Output) -> int:
    """total * 2**exponent in the output format; zero is +0, what is too large infinity."""
    stored, magnitude = output.stored, abs(total)
    # The last place of the result: `precision` significant bits, but never below a subnormal's.
    least = 1 - stored.bias - (output.precision - 1)
    unit = max(exponent + magnitude.bit_length() - output.precision, least)
    if output.nearest:
        significand = float32.nearest_even_multiple(magnitude, exponent, unit)
    else:
        significand = cut(magnitude, exponent - unit)
    if not significand:
        return 0
    # The exponent field counts from the least unit, and the hidden bit adds one to it.
    low_bits = stored.fraction_bits - (output.precision - 1)
    pattern = (unit - least << stored.fraction_bits) + (significand << low_bits)
    return min(pattern, output.infinity) | (stored.sign_bit if total < 0 else 0)


# Steps: codes and scales in, the next accumulator out.

HALVES = [int(2 * codes.decode(code, codes.E2M1)) for code in range(16)]
"""Twice the value of each e2m1 code."""


def plain_step(
    a: Sequence[int],
    b: Sequence[int],
    c_bits: int,
    rules: Rules,
    elements: tuple[codes.Element, codes.Element],
    *,
    scale_exponent: int = 0,
) -> int:
    """Each product is a term."""
    pairs = zip(decoded(a, elements[0]), decoded(b, elements[1]), strict=True)
    bits = elements[0].fraction_bits + elements[1].fraction_bits
    return fused_sum(pairs, c_bits, scale_exponent=scale_exponent, product_bits=bits, rules=rules)


def grouped_step(
    a: Sequence[int],
    b: Sequence[int],
    scales: Sequence[tuple[Operand, Operand]],
    c_bits: int,
    rules: Rules,
    scale_bits: int,
) -> int:
    """Groups of e2m1 products, exact, are the terms, with the exponents of their scales alone.

    ``scales`` holds a pair a group, whose significands have ``scale_bits`` fraction bits each.
    """
    terms: list[Term] = []
    for index, ((a_kind, x, x_exponent), (b_kind, y, y_exponent)) in enumerate(scales):
        if NOT_A_NUMBER in (a_kind, b_kind):
            return rules.output.stored.nan
        part = slice(rules.group * index, rules.group * (index + 1))
        products = [HALVES[p] * HALVES[q] for p, q in zip(a[part], b[part], strict=True)]
        if takes_part(x, y, any(products)):  # products that cancel do
            terms.append((sum(products) * x * y, x_exponent + y_exponent, 2 + 2 * scale_bits))
    return sum_of_terms(terms, c_bits, rules)


def chain(
    a: Sequence[int],
    b: Sequence[int],
    c_bits: int,
    rules: Rules,
    *,
    elements: tuple[codes.Element, codes.Element],
    a_scales: Sequence[int] = (),
    b_scales: Sequence[int] = (),
    scale_format: str = "e8m0",
    block: int = 32,
) -> list[int]:
    """An instruction along K in ascending steps; the accumulator after every step.

    ``a`` and ``b`` hold K codes, the scales one code per ``block`` of them. The last step may be
    shorter: the missing codes are zeros.
    """
    accumulators = []
    for start in range(0, len(a), rules.terms):
        end = min(start + rules.terms, len(a))
        part = a[start:end], b[start:end]
        if rules.group:
            scales = [
                (
                    scale_operand(a_scales[k // block], scale_format),
                    scale_operand(b_scales[k // block], scale_format),
                )
                for k in range(start, end, rules.group)
            ]
            c_bits = grouped_step(*part, scales, c_bits, rules, 3 if scale_format == "ue4m3" else 0)
        elif rules.scaled:
            pair = [scale_operand(x[start // block], scale_format) for x in (a_scales, b_scales)]
            if any(kind == NOT_A_NUMBER for kind, _, _ in pair):
                c_bits = rules.output.stored.nan
            else:
                exponent = sum(exponent for _, _, exponent in pair)
                c_bits = plain_step(*part, c_bits, rules, elements, scale_exponent=exponent)
        else:
            c_bits = plain_step(*part, c_bits, rules, elements)
        accumulators.append(c_bits)
    return accumulators


def scaled_chain(
    a: Sequence[int],
    b: Sequence[int],
    a_scales: Sequence[int],
    b_scales: Sequence[int],
    *,
    c_bits: int = 0,
    a_element: codes.Element = codes.E4M3,
    b_element: codes.Element = codes.E4M3,
) -> list[int]:
    """kind::mxf8f6f4, scales one E8M0 byte per 32 codes; the accumulator after every step."""
    elements = (a_element, b_element)
    return chain(a, b, c_bits, SCALED, elements=elements, a_scales=a_scales, b_scales=b_scales)


def bfloat16_chain(a: Sequence[int], b: Sequence[int], *, c_bits: int = 0) -> list[int]:
    """kind::f16 with bfloat16 bits; the accumulator after every step."""
    return chain(a, b, c_bits, BFLOAT16, elements=(codes.BF16, codes.BF16))
