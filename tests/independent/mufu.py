"""ex2.approx.ftz, lg2.approx.ftz, rcp.approx.ftz and tanh.approx of sm_90, one result at a time.

An entry is the value of a polynomial of degree 2 on integers, cut to 24 bits. Its coefficients are
data, read from the package; what an NVIDIA H200 returned for all 2**32 inputs holds them, by digests
of whole tables. Here the truncated square is summed pair by pair, the rest is Python integers and
fractions. The models around the tables are those measured over all inputs.
"""

import csv
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.independent import float32

DATA = Path(__file__).parents[2] / "flamia_ref" / "data" / "mufu.csv"

ENTRIES = 1 << 23
AT_126, AT_128 = 0x42FC0000, 0x43000000  # float32 126 and 128
PLACES = 1 << 17
UNIT = Fraction(1, 1 << 39)  # of the interpolated value
C0_UNIT = 1 << 13
TABLES = ("ex2", "rcp", "lg2_above", "lg2_below", "tanh")

BIAS: Mapping[str, int] = {"ex2": 2 * 0x7E2, "rcp": 0x7E7, "lg2": 2 * 0x344, "tanh": 0}
# log2 |x| rounded down -> number of segments of equal width there.
TANH_SEGMENTS = {-8: 1, -7: 1, -6: 1, -5: 2, -4: 2, -3: 4, -2: 4, -1: 4, 0: 8, 1: 16, 2: 8}


@cache
def segments() -> Mapping[str, list[tuple[int, int, int]]]:
    """Function -> its coefficients (c0, c1, c2), a triple for each segment, in order."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    with DATA.open(encoding="ascii", newline="") as stored:
        for row in csv.DictReader(stored):
            triples = found.setdefault(row["function"], [])
            if int(row["segment"]) != len(triples):
                raise ValueError(f"{DATA.name}: the segments of {row['function']} are out of order")
            triples.append((int(row["c0"]), int(row["c1"]), int(row["c2"])))
    return found


def truncated_square(x: int) -> int:
    """x * x without the partial products below 2**19, divided by 2**19."""
    ones = [bit for bit in range(x.bit_length()) if x >> bit & 1]
    total = sum(1 << 2 * i for i in ones if 2 * i >= 19)
    total += sum(2 << i + j for i in ones for j in ones if j < i and i + j + 1 >= 19)
    return total >> 19


@cache
def truncated_squares() -> npt.NDArray[np.int64]:
    """All 2**17 of them."""
    x = np.arange(PLACES)
    ones = [x >> bit & 1 for bit in range(17)]
    total = np.zeros(PLACES, dtype=np.int64)
    for i in range(17):
        for j in range(17):  # a pair of different bits comes twice
            weight = i + j if i == j else i + j + 1
            if weight >= 19:
                total += (ones[i] & ones[j]) << i + j
    return total >> 19


def bias(function: str, c1: int) -> int:
    """What is added to every value of a segment; for log2 2 more where half of c1 is odd."""
    return BIAS[function] + (2 if function == "lg2" and c1 // 2 % 2 else 0)


def interpolated(function: str, segment: int, place: int) -> int:
    """In units of 2**-39; the place has 17 bits."""
    c0, c1, c2 = segments()[function][segment]
    linear = place // 2 if function == "rcp" else place
    return C0_UNIT * c0 + bias(function, c1) + c1 * linear + c2 * truncated_square(place)


def whole_intervals(function: str) -> npt.NDArray[np.int64]:
    """`interpolated` at every place of every segment: [segments, 2**17]."""
    c0, c1, c2 = np.array(segments()[function], dtype=np.int64).T[:, :, None]
    biases = np.array([[bias(function, c1)] for _, c1, _ in segments()[function]])
    place = np.arange(PLACES)
    linear = place // 2 if function == "rcp" else place
    value: npt.NDArray[np.int64] = C0_UNIT * c0 + biases + c1 * linear + c2 * truncated_squares()
    return value


@cache
def table(name: str) -> npt.NDArray[np.int64]:
    """float32 bits: 2**23 mantissas, or for tanh the 51 * 2**17 places."""
    value = whole_intervals(name[:3] if name.startswith("lg2") else name)
    if name == "rcp":
        value = value[:, ::2]
    value = value.ravel()
    if name == "lg2_below":  # minus the one's complement, on multiples of 2**-36
        value = (1 << 39) - 8 - value // 8 * 8
    mantissa, exponent = np.frexp(value.astype(np.float64))
    # A mantissa in [1/2, 1) times 2**24, cut; the value has 39 fraction bits.
    bits = np.floor(mantissa * 2.0**24).astype(np.int64) + ((exponent.astype(np.int64) + 86) << 23)
    if name == "lg2_above":
        bits[0] = 0
    return bits + (1 << 31) if name == "lg2_below" else bits


@cache
def entry(name: str, index: int) -> int:
    """float32 bits of one entry of a table of 2**23 entries."""
    if name == "lg2_above" and index == 0:
        return 0
    function = name[:3]
    segment, place = divmod(index << 1 if function == "rcp" else index, PLACES)
    value = interpolated(function, segment, place)
    if name == "lg2_below":
        return float32.toward_zero(-UNIT * ((1 << 39) - 8 - value // 8 * 8))
    return float32.toward_zero(UNIT * value)


def _flush(bits: int) -> int:
    """A subnormal input counts as a zero of its sign."""
    return bits if bits & 0x7F800000 else bits & float32.SIGN


def exp2(bits: int) -> int:
    """2**x by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    if float32.is_infinite(bits):
        return 0 if bits & float32.SIGN else float32.INFINITY
    significand, exponent = float32.split(_flush(bits))
    if bits & float32.SIGN and bits & 0x7FFFFFFF > AT_126:
        return 0
    if not bits & float32.SIGN and bits >= AT_128:
        return float32.INFINITY
    # |x| times the entries of a binade, toward zero.
    places = exponent + ENTRIES.bit_length() - 1
    cut = abs(significand) << places if places >= 0 else abs(significand) >> -places
    position = cut
    if significand < 0:
        # One's complement, except where the cut argument is a whole number.
        position = -cut if cut % ENTRIES == 0 else -cut - 1
    whole, index = divmod(position, ENTRIES)
    return entry("ex2", index) + (whole << 23)


def reciprocal(bits: int) -> int:
    """1 / x by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    bits = _flush(bits)
    sign = bits & float32.SIGN
    if float32.is_infinite(bits):
        return sign
    if float32.is_zero(bits):
        return sign | float32.INFINITY
    exponent = (bits >> 23 & 0xFF) - 127
    result = float32.value(entry("rcp", bits & 0x7FFFFF)) / float32.power_of_two(exponent)
    # No entry times a power of two rounds: results too small to be exact are flushed.
    if result < float32.power_of_two(-126):
        return sign
    return sign | float32.nearest(result)


def log2(bits: int) -> int:
    """log2(x) by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    bits = _flush(bits)
    if float32.is_zero(bits):
        return float32.MINUS_INFINITY
    if bits & float32.SIGN:
        return float32.NAN
    if float32.is_infinite(bits):
        return bits
    exponent = (bits >> 23) - 127
    mantissa = bits & 0x7FFFFF
    if exponent >= 0:
        part = entry("lg2_above", mantissa)
    else:
        part, exponent = entry("lg2_below", mantissa), exponent + 1
    return float32.toward_zero(exponent + float32.value(part))


def tanh(bits: int) -> int:
    """tanh(x) by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    sign = bits & float32.SIGN
    if float32.is_infinite(bits):
        return sign | float32.ONE
    x = abs(float32.value(bits))
    if x < Fraction(1, 256):
        return bits
    if x >= 8:
        return sign | float32.ONE
    segment = 0
    for exponent, count in TANH_SEGMENTS.items():
        low = float32.power_of_two(exponent)
        if x < 2 * low:
            position = int((x / low - 1) * count * PLACES)
            segment, place = segment + position // PLACES, position % PLACES
            return sign | float32.toward_zero(UNIT * interpolated("tanh", segment, place))
        segment += count
    raise AssertionError(f"{bits:#x} is in no binade of the table")
