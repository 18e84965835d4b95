"""q and k in FP4: e2m1 under a scale for 16 channels of a token, and the e4m3 copies made from them.

The rules are those of `flamia-nvfp4-fp8` and `flamia-nvfp4-fp8-ue4m3`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.independent import codes, float32, matrices
from tests.independent.operands import Matrix
from tests.independent.quantized import UNIT_SCALE, Quantized, in_blocks, scaled_value

GROUP = 16
LARGEST = 6  # of e2m1
POWERS = 14  # of the block scales of a token, below the largest
PROMOTED = 6  # the promoted token byte is so much lower
NAN_BYTE = codes.E8M0_NAN
NAN_SCALE = 0x7F
PRESETS = ("flamia-fp4-e8m0", "flamia-fp4-ue4m3")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One token and head: codes, a scale for 16 of them, the token's byte."""

    codes: list[int]
    scales: list[int]
    token: int


def smallest_byte(amax: int, largest: int) -> int:
    """The smallest s in 0..254 with amax <= largest * 2**(s - 127); float32 bits, not NaN."""
    if float32.is_zero(amax):
        return 0
    if float32.is_infinite(amax):
        return 254
    quotient = float32.value(amax) / largest
    exponent = float32.floor_log2(quotient)
    exponent += float32.power_of_two(exponent) < quotient
    return max(exponent + 127, 0)


def _amax(row: Sequence[int]) -> int:
    return max((x & 0x7FFFFFFF for x in row), default=0)


def _groups(row: Sequence[int]) -> list[Sequence[int]]:
    return [row[start : start + GROUP] for start in range(0, len(row), GROUP)]


def power_of_two_row(row: Sequence[int]) -> Row:
    """E8M0 scales, held within 14 powers below the token's."""
    groups = _groups(row)
    if any(float32.is_nan(x) for x in row):
        return Row(codes=[7] * len(row), scales=[NAN_BYTE] * len(groups), token=NAN_BYTE)
    token = smallest_byte(_amax(row), LARGEST)
    scales = [max(smallest_byte(_amax(group), LARGEST), token - POWERS, 0) for group in groups]
    found = [
        codes.encode(float32.shift(x, UNIT_SCALE - scale), codes.E2M1)
        for group, scale in zip(groups, scales, strict=True)
        for x in group
    ]
    return Row(codes=found, scales=scales, token=token)


def ue4m3_row(row: Sequence[int]) -> Row:
    """UE4M3 scales beside a power of two for the token."""
    groups = _groups(row)
    if any(float32.is_nan(x) for x in row):
        return Row(codes=[7] * len(row), scales=[NAN_SCALE] * len(groups), token=NAN_BYTE)
    token = smallest_byte(_amax(row), LARGEST * 448)
    found, scales = [], []
    for group in groups:
        moved = [float32.shift(x, UNIT_SCALE - token) for x in group]
        sixth = float32.divide(_amax(moved), float32.nearest(Fraction(LARGEST)))
        scale = codes.encode(sixth, codes.E4M3)
        scales.append(scale)
        value = float32.nearest(codes.decode(scale, codes.E4M3))
        found += [
            codes.encode(float32.divide(x, value), codes.E2M1)
            if scale
            else (codes.E2M1.sign_bit if x & float32.SIGN else 0)
            for x in moved
        ]
    return Row(codes=found, scales=scales, token=token)


def quantized(values: Matrix, width: int, preset: str) -> Quantized:
    """float32 bits [token][channel] by one of the presets."""
    by_powers = preset == "flamia-fp4-e8m0"
    rows = [(power_of_two_row if by_powers else ue4m3_row)(row) for row in values]
    return Quantized(
        codes=matrices.integers([row.codes for row in rows], width),
        element=codes.E2M1,
        scales=matrices.integers([row.scales for row in rows], -(-width // GROUP)),
        columns=GROUP,
        scale_format="e8m0" if by_powers else "ue4m3",
        tokens=matrices.integers([[row.token] for row in rows], 1),
    )


def promoted(copy: Quantized, width: int, preset: str) -> Quantized:
    """The values of an FP4 copy in e4m3 with one scale a token."""
    assert copy.tokens is not None
    tokens = copy.tokens[:, 0].tolist()
    if copy.scale_format == "ue4m3":
        values = [
            [
                float32.NAN if token == NAN_BYTE else float32.shift(x, token - UNIT_SCALE)
                for x in row
            ]
            for row, token in zip(copy.values(), tokens, strict=True)
        ]
        return in_blocks(values, width, (1, "all"), preset)
    bytes_ = [NAN_BYTE if token == NAN_BYTE else max(token - PROMOTED, 0) for token in tokens]
    found = [
        [
            codes.E4M3.nan
            if byte == NAN_BYTE
            else codes.encode(
                float32.shift(scaled_value(code, codes.E2M1, UNIT_SCALE), copy.scale(i, j) - byte),
                codes.E4M3,
            )
            for j, code in enumerate(row)
        ]
        for i, (row, byte) in enumerate(zip(copy.codes.tolist(), bytes_, strict=True))
    ]
    return Quantized(
        codes=matrices.integers(found, width),
        element=codes.E4M3,
        scales=matrices.integers([[byte] for byte in bytes_], 1),
        columns=max(width, 1),
    )


def with_token_scales(s: Matrix, queries: Quantized, keys: Quantized) -> Matrix:
    """S from the product's result, which lacks the tokens' powers of two with UE4M3 scales."""
    if queries.scale_format != "ue4m3" or queries.tokens is None or keys.tokens is None:
        return s
    own, other = queries.tokens[:, 0].tolist(), keys.tokens[:, 0].tolist()
    return [
        [
            float32.shift(x, (a - UNIT_SCALE) + (b - UNIT_SCALE))
            for x, b in zip(row, other, strict=True)
        ]
        for row, a in zip(s, own, strict=True)
    ]
