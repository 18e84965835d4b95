"""Strategies of numbers: codes of scalar formats, float bit patterns, and data of blocks with wide exponents.

They are exported by `flamia_ref.properties.strategies`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from flamia_ref._errors import shown, unknown_name
from flamia_ref.formats import FORMATS, ScalarFormat, decode
from flamia_ref.golden.inputs import Distribution, hashed
from flamia_ref.properties.data import bits_of, values

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_FIELDS = {"float32": (8, 23), "bfloat16": (8, 7)}


def codes(format: ScalarFormat | str, *, specials: bool = True) -> st.SearchStrategy[int]:
    """Any code of a scalar format, as an integer; without `specials` none that is NaN or infinite.

    Formats of more than 8 bits are drawn by their fields, so that subnormal, largest and special ones are not rare.
    Shrinks to 0, or to the smallest code there is.
    """
    of = FORMATS[format] if isinstance(format, str) else format
    if of.bits <= 8:
        every = range(1 << of.bits)
        kept = [code for code in every if specials or _is_finite(of, code)]
        return st.sampled_from(kept)
    fields = _fields(of.exponent_bits, of.mantissa_bits, specials=specials)
    return fields.map(lambda code: code << of.padding_bits)


def bfloat16_bits(*, specials: bool = False) -> st.SearchStrategy[int]:
    """The 16 bits of a bfloat16: zeros, subnormals, whole powers of two, the largest; NaN and infinity on request."""
    return _fields(*_FIELDS["bfloat16"], specials=specials)


def float32_bits(
    *, specials: bool = False, ties_of: ScalarFormat | str | None = None
) -> st.SearchStrategy[int]:
    """The 32 bits of a float32, as `bfloat16_bits`; with `ties_of` also values halfway between two of that format."""
    bits = _fields(*_FIELDS["float32"], specials=specials)
    return bits if ties_of is None else bits | ties(ties_of)


def ties(format: ScalarFormat | str) -> st.SearchStrategy[int]:
    """The float32 bits of values halfway between two neighbours of a format of at most 8 bits, or of bfloat16.

    Shrinks to the smallest. Raises ValueError for other formats.
    """
    of = FORMATS[format] if isinstance(format, str) else format
    if of.name == "bf16":
        # Halfway between two bfloat16 values: a float32 that has just the next bit.
        return _fields(8, 7, specials=False).filter(_has_larger).map(lambda b: b << 16 | 0x8000)
    if of.bits > 8:
        raise ValueError(f"format is {shown(of.name)}; ties are made for 8 bits and fewer and bf16")
    return st.sampled_from(_midpoints(of))


def code_arrays(format: ScalarFormat | str, shape: tuple[int, ...]) -> st.SearchStrategy[U8]:
    """Arrays of any codes of a format of at most 8 bits, one a byte, uint8 [*shape]. Shrinks to zeros."""
    of = FORMATS[format] if isinstance(format, str) else format
    if of.bits > 8:
        raise ValueError(f"format is {shown(of.name)}; arrays are made of 8 bits and fewer")
    size = int(np.prod(shape))
    mask = np.uint8((1 << of.bits) - 1)
    return st.binary(min_size=size, max_size=size).map(
        lambda drawn: np.frombuffer(drawn, np.uint8).reshape(shape) & mask
    )


BLOCK_DATA = ("ones", "bell", "outliers", "wide", "zeros", "one", "subnormal")
"""Of `block_data`: 1; bell-shaped; one element in 256 times 2^16; exponents wide by element and by row; 0; one element
that is not 0; elements below 2^-126."""


def block_data(
    rows: int = 32, cols: int = 32, *, kinds: tuple[str, ...] = BLOCK_DATA
) -> st.SearchStrategy[F32]:
    """Data to quantize by blocks: float32 [rows, cols], bfloat16 values, of a kind and a seed, times a power of two.

    Exponents within a block span up to 46 binades, far more than a scale covers. Shrinks to ones.

    Raises UnknownName for an unknown kind.
    """
    for kind in kinds:
        if kind not in BLOCK_DATA:
            raise unknown_name("kind of block data", kind, BLOCK_DATA)
    return st.builds(
        functools.partial(_block, rows, cols),
        kind=st.sampled_from(kinds),
        seed=st.integers(0, 255),
        exponent=st.sampled_from((0, 1, -1, 8, -8, 60, -60)),
    )


def _block(rows: int, cols: int, *, kind: str, seed: int, exponent: int) -> F32:
    shape = (rows, 1, cols)
    match kind:
        case "ones":
            x = np.ones(shape, np.float32)
        case "zeros":
            x = np.zeros(shape, np.float32)
        case "one":
            x = np.zeros(shape, np.float32)
            x[seed % rows, 0, seed // rows % cols] = 1
        case "subnormal":
            bell = hashed("v", shape, seed=seed, distribution=Distribution.BELL, exponent=0)
            return (np.abs(values(bell)).astype(np.uint32) << 10).view(np.float32)[:, 0]
        case _:
            made = hashed("v", shape, seed=seed, distribution=Distribution(kind), exponent=-8)
            x = values(made)
    return values(bits_of(np.ldexp(x, exponent)))[:, 0]


def _fields(exponent_bits: int, mantissa_bits: int, *, specials: bool) -> st.SearchStrategy[int]:
    """Sign, exponent field and mantissa of an IEEE format, each from the simple to the special."""
    top, full = (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
    bias = top >> 1
    ordinary = st.sampled_from((0, bias, 1, top - 1)) | st.integers(0, top - 1)
    field = ordinary | st.just(top) if specials else ordinary
    mantissa = st.sampled_from((0, 1, full, 1 << (mantissa_bits - 1))) | st.integers(0, full)

    def joined(sign: int, field: int, mantissa: int) -> int:
        return (sign << exponent_bits | field) << mantissa_bits | mantissa

    return st.builds(joined, sign=st.sampled_from((0, 1)), field=field, mantissa=mantissa)


def _has_larger(bits: int) -> bool:
    return bits & 0x7FFF < 0x7F7F


def _is_finite(of: ScalarFormat, code: int) -> bool:
    return bool(np.isfinite(decode(np.array([code], np.uint8), of, np.float64)[0]))


@functools.cache
def _midpoints(of: ScalarFormat) -> list[int]:
    every: Any = decode(np.arange(1 << of.bits, dtype=np.uint8), of, np.float64)
    numbers = np.unique(every[np.isfinite(every)])
    halves = (numbers[1:] + numbers[:-1]) / 2
    with np.errstate(under="ignore"):
        single = halves.astype(np.float32)
    exact = single[single.astype(np.float64) == halves]
    ordered = exact[np.lexsort((exact < 0, np.abs(exact)))]
    return [int(bits) for bits in ordered.view(np.uint32)]
