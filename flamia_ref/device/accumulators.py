"""Accumulators that are hard for a wrong model, given the products that they are added to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flamia_ref.device.elements import codes_of, exponents_of, is_zero, special_codes
from flamia_ref.device.families import Setting
from flamia_ref.device.probes import ProductProbe
from flamia_ref.device.tiles import Tiles
from flamia_ref.formats import FORMATS, FP16, FP32, decode, encode

_NOTHING = -400  # an exponent below every other
_AT_ONCE = 1 << 22


def chosen(
    probe: ProductProbe, tiles: Tiles, setting: Setting, *, zeros: float, specials: bool
) -> npt.NDArray[np.uint32]:
    """Accumulators [tiles, m, n] for the first step: words. A share of `zeros` is zero, whatever the products are.

    Some are zeros, some lie at a chosen distance from the largest product, the last kept place above all; some cancel
    the products up to a little, some are tiny, and with `specials` a few are NaN or infinite.
    """
    rng, shape = setting.rng, tiles.c.shape
    held = FP16 if probe.half else FP32
    largest, total = _products(probe, tiles)
    present = largest > _NOTHING
    largest = np.where(present, largest, rng.integers(-20, 20, shape))
    kind = rng.integers(0, 100, shape)
    depth = setting.unit
    away = np.where(
        kind < 45,
        depth + rng.integers(-3, 4, shape),
        rng.integers(-depth - 4, depth + 5, shape),
    )
    plain = rng.random(shape) < 0.5
    fractions = np.where(plain, 0, rng.integers(0, 1 << held.mantissa_bits, shape))
    exponents = np.clip(largest + away, held.emin - held.mantissa_bits, held.emax)
    c = codes_of(held, exponents, fractions, rng.random(shape) < 0.5).astype(np.uint32)
    # Cancels the sum, or all but a few of its last places.
    near = (-total).astype(np.float64)
    cancelling = np.asarray(encode(near, held, overflow="saturate")).astype(np.uint32)
    wobble = np.where(rng.random(shape) < 0.5, rng.integers(0, 4, shape), 0).astype(np.uint32)
    wobbled = cancelling ^ wobble
    usable = np.isfinite(near) & (np.abs(near) < held.max)
    c = np.where((kind >= 60) & (kind < 75) & usable, wobbled, c)
    tiny = rng.integers(0, 1 << (held.mantissa_bits + 1), shape)
    c = np.where((kind >= 75) & (kind < 80), tiny | held.sign_code * rng.integers(0, 2, shape), c)
    top = held.max_code - rng.integers(0, 3, shape)
    c = np.where((kind >= 80) & (kind < 83), top | held.sign_code * rng.integers(0, 2, shape), c)
    zero = (kind >= 97) | (rng.random(shape) < zeros)
    c = np.where(zero, held.sign_code * (kind >= 97), c)
    if specials:
        wanted = special_codes(held)
        drawn = wanted[rng.integers(0, len(wanted), shape)]
        c = np.where(rng.random(shape) < 0.08, drawn, c)
    return c.astype(np.uint32)


def _products(
    probe: ProductProbe, tiles: Tiles
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Of the first step: the largest exponent of a term that is not zero, and the sum, each [tiles, m, n]."""
    a_format, b_format = FORMATS[probe.a_format], FORMATS[probe.b_format]
    shape = tiles.c.shape
    largest = np.empty(shape, dtype=np.int64)
    total = np.empty(shape, dtype=np.float64)
    at_once = max(1, _AT_ONCE // (probe.m * probe.n * probe.k))
    for start in range(0, shape[0], at_once):
        part = slice(start, start + at_once)
        a, b = tiles.a[part, 0], tiles.b[part, 0]
        # A zero has no exponent: so low that no product with one counts.
        first, second = (
            np.where(is_zero(e, x), 2 * _NOTHING, exponents_of(e, x)).astype(np.int16)
            for x, e in ((a, a_format), (b, b_format))
        )
        values = [decode(x, e, np.float64) for x, e in ((a, a_format), (b, b_format))]
        if probe.scaling is not None:
            scale = FORMATS[probe.scaling.format]
            sides = (tiles.a_scales[part, 0], tiles.b_scales[part, 0])
            exponents = [np.repeat(exponents_of(scale, x), probe.scaling.block, -1) for x in sides]
            factors = [
                np.repeat(decode(x, scale, np.float64), probe.scaling.block, -1) for x in sides
            ]
            values = [x * y for x, y in zip(values, factors, strict=True)]
            grouped = probe.kind.startswith("mxf4")
            first, second = (
                np.where(x <= _NOTHING, 2 * _NOTHING, (0 if grouped else x) + e).astype(np.int16)
                for x, e in zip((first, second), exponents, strict=True)
            )
        with np.errstate(all="ignore"):
            total[part] = np.matmul(values[0], np.swapaxes(values[1], 1, 2))
        sums = first[:, :, None, :] + second[:, None, :, :]
        largest[part] = np.maximum(sums.max(axis=-1), _NOTHING)
    return largest, total
