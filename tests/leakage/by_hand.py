"""What the witnesses give, by hand: exact rationals and nothing of the package.

q = k = 1, so every score is 128 and t = 128 / sqrt(128) * log2(e) = 16.32... for each visible key. All keys weigh
alike: 2^(t - base) each. Recipes differ in that weight, in the rounding it takes on its way into O, and in what a
shared scale leaves of v[0].
"""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

TOKENS, CHANNELS, BLOCK = 128, 128, 32
E4M3_MAX, E4M3_SMALLEST = 448, Fraction(1, 2**9)


def rounded(x: Fraction, bits: int) -> Fraction:
    """`x` > 0 to nearest even with so many significant bits, no exponent range."""
    exponent = math.frexp(float(x))[1]
    unit = Fraction(2) ** (exponent - bits)
    while not 2 ** (bits - 1) <= x / unit < 2**bits:
        unit *= 2 if x / unit >= 2**bits else Fraction(1, 2)
    return round(x / unit) * unit


def scale(amax: Fraction) -> Fraction:
    """The power of two at or above amax / 448."""
    exponent = math.frexp(float(amax / E4M3_MAX))[1] - 1
    while Fraction(2) ** exponent < amax / E4M3_MAX:
        exponent += 1
    return Fraction(2) ** exponent


def quantized(x: Fraction, block_scale: Fraction) -> Fraction:
    """What is left of `x`, zero or a power of two, in e4m3 with a scale: up to half the smallest code rounds to 0."""
    code = x / block_scale
    assert code == 0 or code >= E4M3_SMALLEST or code <= E4M3_SMALLEST / 2, code
    return x if code >= E4M3_SMALLEST else Fraction(0)


def values(first: Fraction, token: int | None, value: Fraction) -> list[Fraction]:
    """v by token."""
    v = [Fraction(0)] * TOKENS
    v[0] = first
    if token is not None:
        v[token] = value
    return v


def blocked(v: list[Fraction], block: int) -> list[Fraction]:
    """v by token, quantized with one scale for `block` tokens of a channel."""
    found = []
    for start in range(0, TOKENS, block):
        part = v[start : start + block]
        found += [quantized(x, scale(max(part))) if max(part) else x for x in part]
    return found


def weight() -> Fraction:
    """2^(t - 17), a token's weight relative to the integer base of the flamia recipes, to 30 digits; 0.6251..."""
    with localcontext(prec=40):
        t = Decimal(TOKENS) / Decimal(CHANNELS).sqrt() / Decimal(2).ln()
        return Fraction(((t - 17) * Decimal(2).ln()).exp())


def cudnn_rows(v: list[Fraction]) -> list[Fraction]:
    """out by token where each weight is a power of two: fl(O fl(1 / l)) to bfloat16, O and the row sum exact.

    16 in cuDNN's MXFP8, 1 in its BF16 PV: the same bits. All sums must fit in 24 bits.
    """
    rows = []
    total = Fraction(0)
    for token in range(TOKENS):
        total += v[token]
        assert total == 0 or rounded(total, 24) == total
        quotient = total * rounded(Fraction(1, token + 1), 24)
        rows.append(rounded(rounded(quotient, 24), 8) if total else total)
    return rows


def flamia_rows(v: list[Fraction]) -> list[Fraction]:
    """out by token where weights round to 160/256 on their way into O, and do not in the row sum.

    0.625 is the nearest to 0.6251... of 8 significant bits (bfloat16) and of 4 (e4m3). The rest, the roundings of the
    row sum and of its reciprocal, the cut sums of products, and v[0] where it vanishes beside a value 2^20 times as
    large, moves the result by less than 2^-16 of it: both ends of that must round to one bfloat16.
    """
    assert rounded(weight(), 8) == rounded(weight(), 4) == Fraction(160, 256)
    share = Fraction(160, 256) / weight()
    total = Fraction(0)
    rows = []
    for token in range(TOKENS):
        total += v[token]
        exact, slack = total * share / (token + 1), Fraction(1, 2**16)
        low, high = rounded(exact * (1 - slack), 8), rounded(exact * (1 + slack), 8)
        assert low == high
        rows.append(low)
    return rows
