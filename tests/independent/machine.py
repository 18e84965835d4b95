"""The fused sum of a Blackwell tensor core: kind::mxf8f6f4 and kind::f16 with bfloat16.

One instruction step adds L products and the float32 accumulator c. Every term is cut toward zero to
25 fraction bits below the largest exponent among the terms that are not zero (at least -133), the
cut terms are added exactly, and the sum is cut to float32. Scale bytes are added to the exponents
of the products. Source: MMA-Sim 2.1.1 (a simulator, not the hardware).
"""

from collections.abc import Iterable, Sequence
from functools import cache

from tests.independent import codes, float32

FRACTION_BITS = 25
EXPONENT_FLOOR = -133
SCALED_TERMS = 32
BFLOAT16_TERMS = 16

FINITE, INFINITE, NOT_A_NUMBER = range(3)
# (kind, signed significand, exponent); of an infinity the significand is its sign.
Operand = tuple[int, int, int]


@cache
def element_operands(element: codes.Element) -> tuple[Operand, ...]:
    """Every code of an element format, decoded; index = code."""
    return tuple(_element_operand(code, element) for code in range(2 * element.sign_bit))


def _element_operand(code: int, element: codes.Element) -> Operand:
    magnitude = code & (element.sign_bit - 1)
    if magnitude <= element.largest:
        return (FINITE, *codes.split(code, element))
    if magnitude == element.infinity:
        return INFINITE, -1 if code & element.sign_bit else 1, 0
    return NOT_A_NUMBER, 0, 0


def float32_operand(bits: int) -> Operand:
    """A float32 (or a bfloat16 with 16 zero bits below) with 23 fraction bits."""
    sign = -1 if bits & float32.SIGN else 1
    if float32.is_nan(bits):
        return NOT_A_NUMBER, 0, 0
    if float32.is_infinite(bits):
        return INFINITE, sign, 0
    field, significand = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if field:
        return FINITE, sign * (significand | 0x800000), field - 127
    return FINITE, sign * significand, -126


def fused_sum(
    pairs: Iterable[tuple[Operand, Operand]], c_bits: int, *, scale_exponent: int, product_bits: int
) -> int:
    """One instruction step: float32 bits of c plus the products.

    ``scale_exponent`` is added to the exponent of every product, whose significands have
    ``product_bits`` fraction bits.
    """
    c_kind, c_significand, c_exponent = float32_operand(c_bits)
    if c_kind == NOT_A_NUMBER:
        return float32.NAN
    infinite_signs = {c_significand} if c_kind == INFINITE else set()
    terms = []  # (significand, exponent, fraction bits), none of them zero
    if c_kind == FINITE and c_significand:
        terms.append((c_significand, c_exponent, 23))
    for (a_kind, a, a_exponent), (b_kind, b, b_exponent) in pairs:
        if a_kind == FINITE and b_kind == FINITE:
            if a and b:
                terms.append((a * b, a_exponent + b_exponent + scale_exponent, product_bits))
        elif a_kind == NOT_A_NUMBER or b_kind == NOT_A_NUMBER or not a or not b:
            return float32.NAN  # the last case is infinity times zero
        else:
            infinite_signs.add(1 if (a > 0) == (b > 0) else -1)
    if infinite_signs:
        if len(infinite_signs) == 2:
            return float32.NAN
        return float32.INFINITY if 1 in infinite_signs else float32.MINUS_INFINITY
    return _cut_sum(terms)


def _cut_sum(terms: Sequence[tuple[int, int, int]]) -> int:
    """Terms cut toward zero below the largest exponent, added, cut to float32.

    A term is (significand, not zero; exponent; fraction bits of the significand).
    """
    largest = max((exponent for _, exponent, _ in terms), default=EXPONENT_FLOOR)
    largest = max(largest, EXPONENT_FLOOR)
    total = 0
    for significand, exponent, fraction_bits in terms:
        places = FRACTION_BITS + exponent - largest - fraction_bits
        if places >= 0:
            total += significand << places
        elif significand > 0:
            total += significand >> -places
        else:
            total -= -significand >> -places
    return _cut_to_float32(total, largest - FRACTION_BITS)


@cache
def _finite_products(a: codes.Element, b: codes.Element) -> list[list[tuple[int, int] | None]]:
    """(significand, exponent) of the product of two codes; None where it is zero or not finite."""
    table: list[list[tuple[int, int] | None]] = []
    for a_kind, a_significand, a_exponent in element_operands(a):
        row: list[tuple[int, int] | None] = []
        for b_kind, b_significand, b_exponent in element_operands(b):
            significand = a_significand * b_significand
            finite = a_kind == FINITE and b_kind == FINITE
            row.append((significand, a_exponent + b_exponent) if finite and significand else None)
        table.append(row)
    return table


@cache
def _special_codes(element: codes.Element) -> tuple[int, ...]:
    """The codes that are infinite or NaN."""
    operands = enumerate(element_operands(element))
    return tuple(code for code, (kind, _, _) in operands if kind != FINITE)


def _scaled_step(
    a: Sequence[int],
    b: Sequence[int],
    c_bits: int,
    *,
    scale_exponent: int,
    a_element: codes.Element,
    b_element: codes.Element,
) -> int:
    """``fused_sum`` of codes: products from a table where every code and c are finite."""
    product_bits = a_element.fraction_bits + b_element.fraction_bits
    special = (
        c_bits & float32.INFINITY == float32.INFINITY
        or any(code in a for code in _special_codes(a_element))
        or any(code in b for code in _special_codes(b_element))
    )
    if special:
        a_table, b_table = element_operands(a_element), element_operands(b_element)
        pairs = [(a_table[x], b_table[y]) for x, y in zip(a, b, strict=True)]
        return fused_sum(pairs, c_bits, scale_exponent=scale_exponent, product_bits=product_bits)
    table = _finite_products(a_element, b_element)
    terms = [
        (product[0], product[1] + scale_exponent, product_bits)
        for x, y in zip(a, b, strict=True)
        if (product := table[x][y])
    ]
    _, c_significand, c_exponent = float32_operand(c_bits)
    if c_significand:
        terms.append((c_significand, c_exponent, 23))
    return _cut_sum(terms)


def _cut_to_float32(total: int, exponent: int) -> int:
    """total * 2**exponent cut to float32; zero is +0, 2**128 and more is infinity."""
    magnitude = abs(total)
    # The last place of the result: 24 significant bits, but never below 2**-149.
    unit = max(exponent + magnitude.bit_length() - 24, -149)
    places = exponent - unit
    significand = magnitude << places if places >= 0 else magnitude >> -places
    if not significand:
        return 0
    # unit = field - 150 for normal numbers; subnormals have field 0 and the same unit as field 1.
    field = unit + 150 if significand >> 23 else 0
    pattern = float32.INFINITY if field >= 255 else field << 23 | significand & 0x7FFFFF
    return pattern | (float32.SIGN if total < 0 else 0)


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
    """kind::mxf8f6f4 along K in ascending steps of 32; the accumulator after every step.

    ``a`` and ``b`` hold K codes, the scales one E8M0 byte per 32 of them. The last step may be
    shorter: the missing codes are zeros.
    """
    accumulators = []
    for step, (a_scale, b_scale) in enumerate(zip(a_scales, b_scales, strict=True)):
        part = slice(SCALED_TERMS * step, SCALED_TERMS * (step + 1))
        if codes.E8M0_NAN in (a_scale, b_scale):
            c_bits = float32.NAN
        else:
            c_bits = _scaled_step(
                a[part],
                b[part],
                c_bits,
                scale_exponent=a_scale + b_scale - 254,
                a_element=a_element,
                b_element=b_element,
            )
        accumulators.append(c_bits)
    return accumulators


@cache
def _bfloat16_operand(bits: int) -> Operand:
    return float32_operand(float32.from_bfloat16(bits))


def bfloat16_chain(a: Sequence[int], b: Sequence[int], *, c_bits: int = 0) -> list[int]:
    """kind::f16 with bfloat16 bits along K in ascending steps of 16; all accumulators."""
    accumulators = []
    for start in range(0, len(a), BFLOAT16_TERMS):
        part = slice(start, start + BFLOAT16_TERMS)
        pairs = [
            (_bfloat16_operand(x), _bfloat16_operand(y))
            for x, y in zip(a[part], b[part], strict=True)
        ]
        c_bits = fused_sum(pairs, c_bits, scale_exponent=0, product_bits=46)
        accumulators.append(c_bits)
    return accumulators
