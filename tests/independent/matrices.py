"""The fused sums of ``machine`` for a whole matrix of results at once, on 64-bit integers.

The steps are those of ``machine``, term by term; only the loop over results is numpy's. No integer
here needs more than 53 bits.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent import codes, machine
from tests.independent.codes import Element
from tests.independent.machine import FINITE, INFINITE, NOT_A_NUMBER, Rules

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
UNIT = {"e8m0": 127, "ue4m3": 0x38}  # the scale code of 1
NONE = -(1 << 20)  # the exponent of a term that does not take part


@dataclass(frozen=True, kw_only=True)
class Side:
    """The lines of one operand along K: codes [line, K], and scale codes [line, K / block]."""

    codes: Integers
    element: Element
    scales: Integers | None = None
    scale_format: str = "e8m0"
    block: int = 32

    def padded(self, multiple: int) -> "Side":
        """With zeros, under scales of 1, up to a multiple of some K."""
        size = self.codes.shape[1] + -self.codes.shape[1] % multiple
        scales = self.scales
        if scales is not None:
            scales = _filled(scales, size // self.block, UNIT[self.scale_format])
        return replace(self, codes=_filled(self.codes, size, 0), scales=scales)


def _filled(array: Integers, width: int, value: int) -> Integers:
    more = np.full((len(array), max(width - array.shape[1], 0)), value, np.int64)
    return np.concatenate([array, more], axis=1)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms [a line, b line, term] with fraction bits, and which results are not finite."""

    significands: Integers
    exponents: Integers  # NONE where a term does not take part
    bits: int
    nan: Flags
    positive: Flags
    negative: Flags


def contract(a: Side, b: Side, c: Integers, rules: Rules, *, descending: bool = False) -> Integers:
    """c [a line, b line] plus the products along K in the steps of an instruction; float32 bits.

    ``descending``: the steps start at the end of K.
    """
    a, b = a.padded(rules.terms), b.padded(rules.terms)
    starts = range(0, a.codes.shape[1], rules.terms)
    for start in reversed(starts) if descending else starts:
        terms = (_groups if rules.group else _products)(a, b, start, rules)
        c = _sums(terms, c, rules)
    return c


@cache
def _table(element: codes.Element) -> tuple[Integers, Integers, Integers]:
    kinds, significands, exponents = np.array(machine.element_operands(element), np.int64).T
    return kinds, significands, exponents


def _decoded(side: Side, span: slice) -> tuple[Integers, Integers, Integers]:
    kinds, significands, exponents = _table(side.element)
    part = side.codes[:, span]
    return kinds[part], significands[part], exponents[part]


@cache
def _scale_table(scale_format: str) -> Integers:
    table: Integers = np.array([machine.scale_operand(x, scale_format) for x in range(256)])
    return table


def _products(a: Side, b: Side, start: int, rules: Rules) -> Terms:
    """Each product is a term; one scale a line where the instruction has them."""
    span = slice(start, start + rules.terms)
    a_kinds, a_significands, a_exponents = _decoded(a, span)
    b_kinds, b_significands, b_exponents = _decoded(b, span)
    a_kinds, a_significands, a_exponents = (
        x[:, None] for x in (a_kinds, a_significands, a_exponents)
    )
    significands = a_significands * b_significands
    exponents = a_exponents + b_exponents
    nan = (a_kinds == NOT_A_NUMBER) | (b_kinds == NOT_A_NUMBER)
    infinite = (a_kinds == INFINITE) | (b_kinds == INFINITE)
    nan = (nan | (infinite & (significands == 0))).any(axis=2)
    if rules.scaled:
        place = start // rules.terms
        for side, axis in ((a, 1), (b, 0)):
            if side.scales is None:
                raise ValueError("a scaled instruction without scales: give both sides scales")
            kinds, _, powers = _scale_table(side.scale_format)[side.scales[:, place]].T
            exponents = exponents + np.expand_dims(powers, (axis, 2))
            nan = nan | np.expand_dims(kinds == NOT_A_NUMBER, axis)
    takes_part = (significands != 0) & ~infinite
    return Terms(
        significands=np.where(takes_part, significands, 0),
        exponents=np.where(takes_part, exponents, NONE),
        bits=a.element.fraction_bits + b.element.fraction_bits,
        nan=nan,
        positive=(infinite & (significands > 0)).any(axis=2),
        negative=(infinite & (significands < 0)).any(axis=2),
    )


def _groups(a: Side, b: Side, start: int, rules: Rules) -> Terms:
    """Groups of e2m1 products, exact, are the terms."""
    halves = np.array(machine.HALVES, np.int64)
    first, count = start // rules.group, rules.terms // rules.group
    span = slice(start, start + rules.terms)
    left = halves[a.codes[:, span]].reshape(-1, 1, count, rules.group)
    right = halves[b.codes[:, span]].reshape(1, -1, count, rules.group)
    products = left * right
    takes_part = (products != 0).any(axis=3)
    significands = products.sum(axis=3)
    exponents = np.zeros_like(significands)
    nan = np.zeros(significands.shape[:2], np.bool_)
    for side, axis in ((a, 1), (b, 0)):
        if side.scales is None:
            raise ValueError("a scaled instruction without scales: give both sides scales")
        places = (first + np.arange(count)) * rules.group // side.block
        scale = _scale_table(side.scale_format)[side.scales[:, places]]
        kinds, factors, powers = (np.expand_dims(scale[..., x], axis) for x in range(3))
        nan = nan | (kinds == NOT_A_NUMBER).any(axis=2)
        takes_part = takes_part & (factors != 0)
        significands, exponents = significands * factors, exponents + powers
    return Terms(
        significands=np.where(takes_part, significands, 0),
        exponents=np.where(takes_part, exponents, NONE),
        bits=2 + (6 if a.scale_format == "ue4m3" else 0),
        nan=nan,
        positive=np.zeros_like(nan),
        negative=np.zeros_like(nan),
    )


def _sums(terms: Terms, c: Integers, rules: Rules) -> Integers:
    """One step: terms and accumulator aligned, cut, added, brought to the output format."""
    output = rules.output
    if output.nearest or output.stored is not codes.FP32:
        raise ValueError("accumulators that are not float32 are not computed here: use machine")
    c_magnitude = c & 0x7FFFFFFF
    c_kind = np.where(
        c_magnitude > output.infinity,
        NOT_A_NUMBER,
        np.where(c_magnitude == output.infinity, INFINITE, FINITE),
    )
    field = np.maximum(c_magnitude >> 23, 1)
    c_significand = (c_magnitude & 0x7FFFFF) | ((c_magnitude >> 23 > 0).astype(np.int64) << 23)
    c_significand = np.where(c_kind == FINITE, c_significand, 0)
    c_exponent = field - 127
    negative = (c >> 31) == 1

    largest = np.maximum(rules.floor, terms.exponents.max(axis=2))
    largest = np.where(c_significand != 0, np.maximum(largest, c_exponent), largest)
    places = rules.fraction_bits - largest
    total = _cut(terms.significands, (places[..., None] + terms.exponents) - terms.bits).sum(axis=2)
    signed = np.where(negative, -c_significand, c_significand)
    total = total + _cut(signed, places + c_exponent - 23)

    result = _finished(total, largest - rules.fraction_bits, output)
    positive = terms.positive | ((c_kind == INFINITE) & ~negative)
    minus = terms.negative | ((c_kind == INFINITE) & negative)
    result = np.where(positive, output.infinity, result)
    result = np.where(minus, output.infinity | 1 << 31, result)
    nan = terms.nan | (c_kind == NOT_A_NUMBER) | (positive & minus)
    return np.where(nan, output.stored.nan, result)


def _cut(significands: Integers, places: Integers) -> Integers:
    """significand * 2**places, cut toward zero."""
    magnitudes = abs(significands)
    moved = magnitudes << np.clip(places, 0, 40)
    moved = np.where(places < 0, magnitudes >> np.clip(-places, 0, 62), moved)
    moved = np.where(magnitudes == 0, 0, moved)
    return np.where(significands < 0, -moved, moved)


def _finished(total: Integers, exponent: Integers, output: machine.Output) -> Integers:
    """total * 2**exponent cut to the output's precision; zero is +0, what is too large infinity."""
    magnitude = abs(total)
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)  # exact below 2**53
    least = 1 - output.stored.bias - (output.precision - 1)
    unit = np.maximum(exponent + length - output.precision, least)
    significand = _cut(magnitude, exponent - unit)
    low_bits = output.stored.fraction_bits - (output.precision - 1)
    pattern = (unit - least << output.stored.fraction_bits) + (significand << low_bits)
    pattern = np.minimum(pattern, output.infinity) | ((total < 0).astype(np.int64) << 31)
    return np.where(significand == 0, 0, pattern)


def zeros(rows: int, columns: int) -> Integers:
    """Accumulators at +0."""
    return np.zeros((rows, columns), np.int64)


def integers(matrix: Any, width: int) -> Integers:
    """A list of rows as an array with ``width`` columns."""
    return np.array(matrix, np.int64).reshape(len(matrix), width)
