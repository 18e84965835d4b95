"""Operands that are hard for a wrong model: tiles of the families, with accumulators that go with their products.

A tile belongs to one family, and every result in it is a case of that. Everything follows from the seed.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator

import numpy as np

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.device import accumulators, group_families
from flamia_ref.device.elements import Codes, codes_of, special_codes
from flamia_ref.device.families import DRAWN, Setting
from flamia_ref.device.probes import ProductProbe
from flamia_ref.device.tiles import Tiles
from flamia_ref.formats import FORMATS, ScalarFormat, encode

_CODES = ("gaussian", "subnormal", "zeros", "special values", "any finite", "any bits")
"""Families that are drawn as codes."""

_ZERO_ACCUMULATORS = {
    "alignment": 0.5,
    "guard bits": 0.4,
    "ties": 0.5,
    "exponent floor": 0.8,
    "floor sums": 0.8,
}
"""Share of accumulators that are zero in the families where another one hides what they aim at."""


def families(probe: ProductProbe) -> tuple[str, ...]:
    """Names of the families of a probe."""
    if probe.kind.startswith("mxf4"):
        return (*group_families.GROUPED, "special values", "any bits")
    return (*DRAWN, *_CODES)


def tiles(probe: ProductProbe, count: int, steps: int, seed: int) -> Iterator[tuple[str, Tiles]]:
    """About `count` tiles in all, at least one a family; each family's name and its tiles."""
    names = families(probe)
    each = max(1, count // len(names))
    for name in names:
        key = zlib.crc32(f"{probe.name} {name} {steps}".encode())
        yield name, _family(probe, name, each, steps, np.random.default_rng([seed, key]))


def _family(
    probe: ProductProbe, name: str, count: int, steps: int, rng: np.random.Generator
) -> Tiles:
    setting = Setting(
        a=FORMATS[probe.a_format],
        b=FORMATS[probe.b_format],
        rules=INSTRUCTIONS[probe.instruction],
        half=probe.half,
        scaled=probe.scaling is not None,
        tiles=count,
        steps=steps,
        m=probe.m,
        n=probe.n,
        k=probe.k,
        rng=rng,
    )
    if probe.kind.startswith("mxf4"):
        a, b, a_scales, b_scales = _grouped(probe, name, setting)
    elif name in DRAWN:
        a, b, a_scales, b_scales = _drawn(probe, name, setting)
    else:
        a, b = _as_codes(name, setting)
        a_scales, b_scales = _any_scales(probe, setting, wide=name == "any bits")
    made = Tiles(
        a=_varied(setting, a, setting.a),
        b=_varied(setting, b, setting.b),
        a_scales=a_scales,
        b_scales=b_scales,
        c=np.zeros((count, probe.m, probe.n), dtype=np.uint32),
    )
    c = accumulators.chosen(
        probe,
        made,
        setting,
        zeros=_ZERO_ACCUMULATORS.get(name, 0.15),
        specials=name in ("special values", "any bits"),
    )
    return dataclasses.replace(made, c=c)


def _drawn(probe: ProductProbe, name: str, setting: Setting) -> tuple[Codes, ...]:
    drawn = DRAWN[name](setting)
    low, high = setting.reach
    shift = np.zeros_like(drawn.base)
    if setting.scaled:
        # The base goes to the upper part of what the elements reach, so that there is room below.
        shift = np.clip(
            drawn.base - setting.integers((low + high) // 2, high, drawn.base.shape), -254, 254
        )
    exponents = np.broadcast_to(drawn.exponents - shift, setting.rows)
    # The exponents of B are those that suit the middle row; A takes the rest, subnormal where it must.
    middle = exponents[:, :, setting.m // 2 :][:, :, :1]
    least = np.maximum(setting.b.emin, middle - setting.a.emax)
    most = np.minimum(setting.b.emax, middle - setting.a.emin)
    extent = np.maximum(most - least, 0)
    chosen = least + np.floor(setting.rng.random(middle.shape) * (extent + 1)).astype(int)
    b_exponents = np.where(least <= most, chosen, np.clip(least, setting.b.emin, setting.b.emax))
    both_small = middle < low
    b_exponents = np.where(
        both_small, np.minimum(b_exponents, middle - setting.a.emin), b_exponents
    )
    b_exponents = np.maximum(b_exponents, setting.b.emin - setting.b.mantissa_bits)
    flip = setting.chance(0.5, setting.each_place)
    column = setting.chance(0.5, (setting.tiles, setting.steps, setting.n, 1))
    a = codes_of(
        setting.a,
        exponents - b_exponents,
        np.broadcast_to(drawn.a_fractions, setting.rows),
        drawn.negative ^ flip,
    )
    b = codes_of(
        setting.b, b_exponents, np.broadcast_to(drawn.b_fractions, setting.columns), flip ^ column
    )
    a = np.where(drawn.present, a, a & setting.a.sign_code).astype(setting.a.code_dtype)
    if probe.scaling is None:
        return a, b, *_no_scales(setting)
    scale = _scale_format(probe)
    exponents = np.broadcast_to(shift, (setting.tiles, setting.steps, setting.m, probe.scales))
    scales = group_families.scale_codes(scale, exponents, setting.n, setting.rng)
    return a, b, *(_jittered(setting, scale, codes) for codes in scales)


def _jittered(setting: Setting, scale: ScalarFormat, codes: Codes) -> Codes:
    """Scales of which a few are one or two codes off."""
    off = np.where(setting.chance(0.06, codes.shape), setting.integers(-2, 2, codes.shape), 0)
    return np.clip(codes.astype(np.int64) + off, 0, scale.max_code).astype(np.uint8)


def _scale_format(probe: ProductProbe) -> ScalarFormat:
    if probe.scaling is None:
        raise ValueError(f"{probe.name} has no scales")
    return FORMATS[probe.scaling.format]


def _no_scales(setting: Setting) -> list[Codes]:
    return [np.zeros((*shape[:3], 0), dtype=np.uint8) for shape in (setting.rows, setting.columns)]


def _any_scales(probe: ProductProbe, setting: Setting, *, wide: bool) -> list[Codes]:
    """Scales near 1, or any at all."""
    if probe.scaling is None:
        return _no_scales(setting)
    scale = _scale_format(probe)
    one = -scale.emin << scale.mantissa_bits if scale.mantissa_bits == 0 else scale.bias << 3
    found = []
    for count in (setting.m, setting.n):
        shape = (setting.tiles, setting.steps, count, probe.scales)
        near = np.clip(one + setting.integers(-9, 9, shape), 0, scale.max_code)
        found.append((setting.integers(0, 255, shape) if wide else near).astype(np.uint8))
    return found


def _as_codes(name: str, setting: Setting) -> list[Codes]:
    sides = ((setting.a, setting.rows), (setting.b, setting.columns))
    if name == "gaussian":
        spread = np.exp2(setting.integers(-2, 2, setting.each_step))
        return [
            np.asarray(encode(setting.rng.standard_normal(shape) * spread, element))
            for element, shape in sides
        ]
    if name == "any bits":
        return [_any_bits(setting, element, shape) for element, shape in sides]
    if name == "zeros":
        # Zeros beside the largest values, which must not count, and products of the smallest.
        largest, zero = (setting.chance(p, setting.each_place) for p in (0.8, 0.5))
        found = []
        for (element, shape), here in zip(sides, (zero, ~zero), strict=True):
            signs = element.sign_code * setting.integers(0, 1, shape)
            magnitude = np.where(here, 0, element.max_code)
            magnitude = np.where(largest, magnitude, 1 << element.padding_bits)
            found.append((signs | magnitude).astype(element.code_dtype))
        return found
    found = [_finite(setting, e, shape, subnormal=name == "subnormal") for e, shape in sides]
    if name == "special values":
        return [_with_specials(setting, x, e) for x, (e, _) in zip(found, sides, strict=True)]
    return found


def _any_bits(setting: Setting, element: ScalarFormat, shape: tuple[int, ...]) -> Codes:
    bits = element.bits + element.padding_bits
    return setting.rng.integers(0, 1 << bits, shape, dtype=np.uint64).astype(element.code_dtype)


def _finite(
    setting: Setting, element: ScalarFormat, shape: tuple[int, ...], *, subnormal: bool
) -> Codes:
    limit = element.max_code >> element.padding_bits
    if subnormal:
        limit = (1 << element.mantissa_bits) - 1
    magnitude = setting.integers(0, limit, shape) * setting.chance(0.9, shape)
    signs = element.sign_code * setting.integers(0, 1, shape)
    return (magnitude << element.padding_bits | signs).astype(element.code_dtype)


def _with_specials(setting: Setting, codes: Codes, element: ScalarFormat) -> Codes:
    """About one element in 150 made NaN, infinite or zero."""
    wanted = np.append(special_codes(element), [0, element.sign_code])
    drawn = wanted[setting.integers(0, len(wanted) - 1, codes.shape)]
    return np.where(setting.chance(1 / 150, codes.shape), drawn, codes).astype(element.code_dtype)


def _grouped(probe: ProductProbe, name: str, setting: Setting) -> tuple[Codes, ...]:
    scale = _scale_format(probe)
    if name in group_families.GROUPED:
        made = group_families.GROUPED[name](setting, scale, probe.scales)
        scales = group_families.scale_codes(scale, made.exponents, setting.n, setting.rng)
        return made.a, made.b, *(_jittered(setting, scale, codes) for codes in scales)
    a, b = _as_codes("any bits", setting)
    if name == "any bits":
        return a, b, *_any_scales(probe, setting, wide=True)
    near = _any_scales(probe, setting, wide=False)
    return (
        a,
        b,
        *(
            np.where(setting.chance(1 / 40, codes.shape), scale.nan_code, codes).astype(np.uint8)
            for codes in near
        ),
    )


def _varied(setting: Setting, codes: Codes, element: ScalarFormat) -> Codes:
    """A quarter of the rows with one element changed: made zero, its last bit or its sign turned round."""
    shape = (*codes.shape[:3], 1)
    what = setting.integers(0, 11, shape)
    here = setting.integers(0, setting.k - 1, shape) == np.arange(setting.k)
    codes = np.where((what == 0) & here, codes & element.sign_code, codes)
    codes = np.where((what == 1) & here, codes ^ 1 << element.padding_bits, codes)
    codes = np.where((what == 2) & here, codes ^ element.sign_code, codes)
    return codes.astype(element.code_dtype)
