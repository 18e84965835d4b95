"""Bounds on tiles: no order, no tree and no choice of uncertain operands leaves them; exact sums are points."""

import numpy as np
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot
from flamia_ref.arithmetic.instructions import Scaling, Summation
from flamia_ref.arithmetic.interval.tiles import Ends, exact_factor, product, uncertain_factor
from flamia_ref.formats import FORMATS, decode, encode

LANES = 48
# Instruction, element, scales: format and block, or None.
KINDS = [
    ("sm100.tcgen05.mxf8f6f4", "e4m3", ("e8m0", 32)),
    ("sm100.tcgen05.mxf8f6f4", "e5m2", ("e8m0", 32)),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", ("ue4m3", 16)),
    ("sm100.tcgen05.f16", "bf16", None),
    ("sm90.wgmma.fp8", "e4m3", None),
    ("sm90.wgmma.bf16", "bf16", None),
    ("float32", "bf16", None),
]
SPREADS = ("bell", "wide", "cancelling", "tiny", "integers")


def numbers(
    rng: np.random.Generator, spread: str, element: str, shape: tuple[int, ...]
) -> np.ndarray:
    x = rng.normal(size=shape)
    match spread:
        case "wide":
            x = x * 2.0 ** rng.integers(-12, 6, size=shape)
        case "cancelling":
            x = np.where(rng.random(shape) < 0.5, 1.0, -1.0) * (
                1 + rng.integers(0, 3, size=shape) / 8
            )
        case "tiny":
            x = x * (
                2.0**-60
                if element == "bf16"
                else 4 * 2.0 ** (FORMATS[element].emin - FORMATS[element].mantissa_bits)
            )
        case "integers":
            x = rng.integers(-2, 3, size=shape).astype(float)
    return x


class Operands:
    def __init__(self, kind: tuple, spread: str, steps: int, seed: int) -> None:
        name, element, scaled = kind
        self.rng = np.random.default_rng([seed, steps, len(spread), sum(map(ord, name + element))])
        self.rules, self.element = INSTRUCTIONS[name], element
        self.terms = self.rules.terms or 16
        extent = steps * self.terms
        shape = (LANES, extent)
        self.a, self.b = (
            encode(numbers(self.rng, spread, element, shape), FORMATS[element]) for _ in range(2)
        )
        self.scaling, self.scales = None, (None, None)
        if scaled is not None:
            self.scaling = Scaling(format=scaled[0], block=scaled[1])
            low, high = (100, 150) if spread == "wide" else (124, 131)
            codes = (
                self.rng.integers(low, high, size=(2, LANES, extent // scaled[1]))
                if scaled[0] == "e8m0"
                else self.rng.integers(
                    1,
                    0x7E,
                    size=(2, LANES, extent // scaled[1]),
                )
            )
            self.scales = tuple(codes.astype(np.uint8))

    def step(self, at: int, c: np.ndarray) -> np.ndarray:
        """One instruction step of every lane, on float32 bits."""
        k = slice(at * self.terms, (at + 1) * self.terms)
        scales = {}
        if self.scaling is not None:
            per = self.terms // self.scaling.block
            blocks = slice(at * per, (at + 1) * per)
            scales = {
                "a_scales": self.scales[0][:, blocks],
                "b_scales": self.scales[1][:, blocks],
                "scale_format": self.scaling.format,
            }
        return np.asarray(
            fused_dot(
                self.a[:, k],
                self.b[:, k],
                c,
                self.rules,
                a_format=self.element,
                b_format=self.element,
                **scales,
            )
        )

    def ends(self, start: Ends | None = None) -> Ends:
        """Bounds of the same dot products: lanes as tiles of one row and one column."""
        a, b = (
            exact_factor(
                codes.T[:, :, None],
                FORMATS[self.element],
                None if scales is None else scales.T[:, :, None],
                self.scaling,
                self.rules,
            )
            for codes, scales in zip((self.a, self.b), self.scales, strict=True)
        )
        return product(a, b, start, self.rules)

    def one_way(self, steps: int, start: np.ndarray) -> np.ndarray:
        """Some order of steps, in chains that additions join in some tree."""
        order = self.rng.permutation(steps)
        cuts = np.sort(self.rng.integers(0, steps + 1, size=self.rng.integers(0, 3)))
        chains = [part for part in np.split(order, cuts) if len(part)]
        first = self.rng.integers(
            0, len(chains) + 1
        )  # the chain that the accumulator starts; none: it is joined
        sums = []
        for at, chain in enumerate(chains):
            c = start if at == first else np.zeros(LANES, np.uint32)
            for step in chain:
                c = self.step(int(step), c)
            sums.append(c.view(np.float32))
        if first == len(chains):
            sums.append(start.view(np.float32))
        while len(sums) > 1:
            left, right = self.rng.choice(len(sums), size=2, replace=False)
            joined = sums[left] + sums[right]
            sums = [x for at, x in enumerate(sums) if at not in (left, right)] + [joined]
        return sums[0]


def inside(x: np.ndarray, ends: Ends) -> np.ndarray:
    low, high = ends.low[:, 0, 0], ends.high[:, 0, 0]
    return ((x >= low) & (x <= high)) | (np.isnan(x) & ends.nan[:, 0, 0])


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_no_order_and_no_tree_leaves_the_ends(kind: tuple, spread: str) -> None:
    for steps, seed in ((1, 0), (2, 1), (4, 2), (9, 3)):
        given = Operands(kind, spread, steps, seed)
        start = numbers(given.rng, spread, "bf16", (LANES,)).astype(np.float32)
        start[1::3] *= 2.0 ** given.rng.integers(0, 12, size=start[1::3].shape)  # above all terms
        start[::3] = 0.0
        ends = given.ends(
            Ends(*([start.astype(np.float64)[:, None, None]] * 2), np.zeros((LANES, 1, 1), bool))
        )
        for _ in range(12):
            found = given.one_way(steps, start.view(np.uint32)).astype(np.float64)
            assert inside(found, ends).all(), (steps, np.flatnonzero(~inside(found, ends)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_exact_sums_are_points(kind: tuple) -> None:
    given = Operands(kind, "integers", 4, 7)
    if given.scaling is not None:
        unit = 127 if given.scaling.format == "e8m0" else 0x38
        given.scales = tuple(np.full_like(scales, unit) for scales in given.scales)
    a, b = (decode(codes, FORMATS[given.element], np.float64) for codes in (given.a, given.b))
    expected = (a * b).sum(axis=1)  # small integers: exact
    ends = given.ends()
    assert np.array_equal(ends.low[:, 0, 0], expected)
    assert np.array_equal(ends.high[:, 0, 0], expected)
    assert not ends.nan.any()


def test_one_rounding_is_that_of_the_exact_sum() -> None:
    rng = np.random.default_rng(3)
    a, b = (encode(rng.normal(size=(LANES, 40)), FORMATS["bf16"]) for _ in range(2))
    rules = INSTRUCTIONS["exact"]
    factors = [exact_factor(x.T[:, :, None], FORMATS["bf16"], None, None, rules) for x in (a, b)]
    ends = product(*factors, None, rules)
    expected = np.asarray(
        fused_dot(a, b, np.zeros(LANES, np.uint32), "exact", a_format="bf16", b_format="bf16")
    ).view(np.float32)
    assert inside(expected.astype(np.float64), ends).all()
    assert (ends.high - ends.low <= np.spacing(np.abs(expected))[:, None, None]).all()


def test_uncertain_operands_are_covered_whichever_they_are() -> None:
    kind = KINDS[0]
    given = Operands(kind, "bell", 4, 11)
    e4m3 = FORMATS["e4m3"]
    near = given.a.copy()
    moved = given.rng.random(near.shape) < 0.3
    near[moved & ((near & 0x7F) < 0x7D)] += 1  # the next code outward
    values = [decode(codes, e4m3, np.float64) for codes in (given.a, near)]
    exponent = np.repeat(given.scales[0].astype(np.int32) - 127, 32, axis=1)
    values = [x * np.ldexp(1.0, exponent) for x in values]
    low, high = np.minimum(*values), np.maximum(*values)
    left = uncertain_factor(low[:, None, :], high[:, None, :], exponent[:, None, :], e4m3)
    right = exact_factor(
        given.b.T[:, :, None], e4m3, given.scales[1].T[:, :, None], given.scaling, given.rules
    )
    ends = product(left, right, None, given.rules)
    codes = given.a.copy()
    for _ in range(40):
        given.a = np.where(given.rng.random(codes.shape) < 0.5, codes, near)
        found = given.one_way(4, np.zeros(LANES, np.uint32)).astype(np.float64)
        assert inside(found, ends).all()


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=lambda kind: kind[0])
def test_nan_and_infinity_are_those_of_the_machine(kind: tuple) -> None:
    given = Operands(kind, "bell", 2, 5)
    special = FORMATS[given.element]
    nan = encode(np.float64(np.nan), special)
    given.a[0, 3] = nan
    given.b[1, 5], given.a[1, 5] = nan, 0
    if given.element == "bf16":
        inf = encode(np.float64(np.inf), special, overflow="native")
        given.a[2, 0] = inf  # times a number
        given.a[3, 0], given.b[3, 0] = inf, 0  # times zero
        given.a[4, :2], given.b[4, 0], given.b[4, 1] = inf, 0x3F80, 0xBF80  # both infinities
    else:
        given.scales[0][5, 0] = 255
    ends = given.ends()
    c = np.zeros(LANES, np.uint32)
    for step in range(2):
        c = given.step(step, c)
    found = c.view(np.float32).astype(np.float64)
    only = np.isnan(ends.low[:, 0, 0])
    assert np.array_equal(only, np.isnan(found))
    infinite = np.isinf(found)
    assert np.array_equal(ends.low[infinite, 0, 0], found[infinite])
    assert inside(found, ends).all()


def test_the_width_is_of_the_order_of_the_error() -> None:
    """Against the widest spread that random orders show: bounds that say little would pass all of the above."""
    given = Operands(KINDS[0], "bell", 8, 21)
    ends = given.ends()
    found = np.stack([given.one_way(8, np.zeros(LANES, np.uint32)) for _ in range(60)]).astype(
        np.float64
    )
    rms = np.sqrt(np.mean(found**2))
    assert np.mean(ends.high - ends.low) / rms < 2e-5  # eight steps: 8 ulp of 2^-23 of partial sums
    assert INSTRUCTIONS[KINDS[0][0]].summation is Summation.FUSED


def test_terms_far_below_the_rest_are_all_counted() -> None:
    """Places more than 64 above the least were taken for at most 64: two cut terms instead of hundreds."""
    extent = 512
    a, b = np.full((1, extent), 1.9375 * 2.0**7), np.full((1, extent), 2.0**7)
    a[0, :3], b[0, :3] = (2.0**20, 2.0**-30, 1.0), (2.0**20, 1.0, 2.0**-30)
    codes = [encode(x, FORMATS["bf16"]) for x in (a, b)]
    for name in ("sm100.tcgen05.f16", "sm90.wgmma.bf16"):
        rules = INSTRUCTIONS[name]
        ends = product(
            *(exact_factor(x.T[:, :, None], FORMATS["bf16"], None, None, rules) for x in codes),
            None,
            rules,
        )
        found = fused_dot(
            *codes, np.zeros(1, np.uint32), rules, a_format="bf16", b_format="bf16"
        ).view(np.float32)
        assert ends.low[0, 0, 0] <= found[0] <= ends.high[0, 0, 0]


def test_an_upper_end_of_zero_is_a_term_all_the_same() -> None:
    """Left factors in [-x, 0], as dS between two codes: each is an addition of the float32 instruction."""
    rng = np.random.default_rng(4)
    extent = 256
    x = decode(
        encode(rng.uniform(0.5, 2, size=(1, 400, extent)), FORMATS["bf16"]),
        FORMATS["bf16"],
        np.float64,
    )
    y = encode(rng.normal(size=(1, extent)), FORMATS["bf16"])
    rules = INSTRUCTIONS["float32"]
    left = uncertain_factor(-x, np.zeros_like(x), np.zeros((1, 1, 1), np.int32), FORMATS["bf16"])
    right = exact_factor(y.T[:, None, :], FORMATS["bf16"], None, None, rules)
    ends = product(left, right, None, rules)
    codes = encode(-x[0], FORMATS["bf16"])
    found = fused_dot(
        codes,
        np.repeat(y, 400, axis=0),
        np.zeros(400, np.uint32),
        rules,
        a_format="bf16",
        b_format="bf16",
    ).view(np.float32)
    assert ((found >= ends.low[0, :, 0]) & (found <= ends.high[0, :, 0])).all()
    # Taken with the widest value of each, the same sum is nearly at an end.
    assert not ends.nan.any()


def test_infinities_meet_what_they_start_from_and_what_is_uncertain() -> None:
    bf16, rules = FORMATS["bf16"], INSTRUCTIONS["sm100.tcgen05.f16"]
    inf = encode(np.full((1, 16), -np.inf), bf16, overflow="native")
    one = encode(np.ones((1, 16)), bf16)
    factors = [exact_factor(x.T[:, :, None], bf16, None, None, rules) for x in (inf, one)]
    start = np.full((1, 1, 1), np.inf)
    met = product(*factors, Ends(start, start, start != start), rules)
    assert np.isnan(met.low).all()
    zero = np.zeros((1, 1, 16))
    unsure = uncertain_factor(zero, zero + 1, np.zeros((1, 1, 1), np.int32), bf16)
    some = product(unsure, factors[0], None, rules)
    assert (some.low == -np.inf).all()
    assert (some.high == np.inf).all()
    assert some.nan.all()
