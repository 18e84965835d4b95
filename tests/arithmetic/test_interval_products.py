"""Intervals of matrix products: no permitted order, split or tree leaves them, and few steps need no more."""

from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot, interval
from flamia_ref.arithmetic.interval import Interval
from flamia_ref.formats import FORMATS, decode, encode
from tests.arithmetic.product_rows import SOME, Case, adversarial, arguments

Words = Any  # an array of unsigned integers

FEW = [
    "sm90.wgmma.fp8",
    "sm90.wgmma.fp8.f16out",
    "sm90.wgmma.tf32",
    "sm80.mma.bf16",
    "sm100.tcgen05.f16",
    "sm100.tcgen05.mxf8f6f4",
    "sm100.tcgen05.mxf4nvf4",
    "float32",
]
# One of each set of rules; the others are nightly.
DISTINCT = [case for case in SOME if case.like is case]
ONES = list({(case.rules, case.scale_format): case for case in DISTINCT}.values())
JOINED = [(1, None), (2, None), (None, None), (1, 3)]


def name(case: Case) -> str:
    return case.name


def operands(instruction: str, rows: int, steps: int, spread: int, seed: int) -> dict[str, Any]:
    """Operands of an instruction; elements spread over 2^(2 spread) and, in a third of the rows, cancelling."""
    rules, random = INSTRUCTIONS[instruction], np.random.default_rng([seed, *instruction.encode()])
    element = FORMATS[rules.operand_formats[0 if instruction != "float32" else -1]]
    k = steps * (rules.terms or 1)
    a, b = (
        random.standard_normal((rows, k))
        * np.exp2(random.integers(-spread, spread + 1, (rows, k)).astype(np.float64))
        for _ in range(2)
    )
    half = k // 2
    a[::3, half : 2 * half], b[::3, half : 2 * half] = -a[::3, :half], b[::3, :half]
    given: dict[str, Any] = {
        "a": encode(a, element),
        "b": encode(b, element),
        "a_format": element.name,
        "b_format": element.name,
    }
    c = random.standard_normal(rows) * np.exp2(random.integers(-8, 9, rows).astype(np.float64))
    c[1::3] = 0.0
    kind = np.float16 if instruction.endswith(".f16out") else np.float32
    given["c"] = c.astype(kind).view(np.uint16 if kind is np.float16 else np.uint32)
    if rules.scalings and rules.terms:
        scaling = rules.scalings[-1]
        low, high = (124, 131) if scaling.format == "e8m0" else (0, 0x7F)
        for side in ("a_scales", "b_scales"):
            given[side] = random.integers(low, high, (rows, k // scaling.block)).astype(np.uint8)
        given["scale_format"] = scaling.format
    return given


def join(x: Words, y: Words) -> Words:
    with np.errstate(over="ignore", invalid="ignore"):
        return (x.view(np.float32) + y.view(np.float32)).view(np.uint32)


class Variant:
    """One way to compute rows: the units of K in an order of their own for each row."""

    def __init__(self, instruction: str, given: dict[str, Any], order: str) -> None:
        self.given, self.instruction = given, instruction
        self.rows, self.k = given["a"].shape
        self.length = INSTRUCTIONS[instruction].terms or 1
        self.block = self.k // given["a_scales"].shape[1] if "a_scales" in given else 1
        whole = self.length if order == "steps" else self.block
        self.unit = max(whole, self.block)
        self.units = self.k // self.unit
        self.steps = self.k // self.length
        products = values(given, "a") * values(given, "b")
        self.sizes = products.reshape(self.rows, self.units, -1).sum(axis=2)

    def ordered(self, order: Words) -> dict[str, Any]:
        """The operands with their units in an order [rows, units]."""
        moved = dict(self.given)
        places = (order[:, :, None] * self.unit + np.arange(self.unit)).reshape(self.rows, -1)
        for side in ("a", "b"):
            moved[side] = np.take_along_axis(self.given[side], places, axis=1)
            if f"{side}_scales" in moved:
                blocks = places[:, :: self.block] // self.block
                scales = self.given[f"{side}_scales"]
                moved[f"{side}_scales"] = np.take_along_axis(scales, blocks, axis=1)
        return moved

    def chain(self, moved: dict[str, Any], first: int, last: int, c: Words) -> Words:
        """Steps first to last - 1 from c."""
        part = {key: x for key, x in moved.items() if key != "c"}
        for key, size in (("a", 1), ("b", 1), ("a_scales", self.block), ("b_scales", self.block)):
            if key in part:
                cut = slice(first * self.length // size, last * self.length // size)
                part[key] = part[key][:, cut]
        return np.asarray(fused_dot(c_bits=c, instruction=self.instruction, **part))

    def result(
        self,
        random: np.random.Generator,
        splits: int | None = 1,
        promotion: int | None = None,
        order: Words | None = None,
    ) -> Words:
        """One permitted result a row."""
        if order is None:
            keys = random.random((self.rows, self.units))
            if random.integers(2):  # by size, up or down, where partial sums are largest
                sizes = self.sizes * random.choice([-1, 1])
                keys = sizes + keys * random.choice([0.0, 0.1]) * np.abs(sizes)
            order = np.argsort(keys, axis=1)
        moved, c = self.ordered(order), self.given["c"]
        zero = np.zeros_like(c)
        if promotion is not None:
            for first in range(0, self.steps, promotion):
                chain = self.chain(moved, first, min(first + promotion, self.steps), zero)
                c = join(c, chain)
            return c
        if splits == 1:
            return self.chain(moved, 0, self.steps, c)
        chains = int(random.integers(1, min(self.steps, splits or self.steps) + 1))
        inner = random.choice(np.arange(1, self.steps), chains - 1, replace=False)
        bounds = [0, *sorted(inner.tolist()), self.steps]
        starts_at_c = bool(random.integers(2))
        nodes = [] if starts_at_c else [c]
        for index, (first, last) in enumerate(pairwise(bounds)):
            start = c if starts_at_c and index == 0 else zero
            nodes.append(self.chain(moved, first, last, start))
        while len(nodes) > 1:
            x = nodes.pop(int(random.integers(len(nodes))))
            y = nodes.pop(int(random.integers(len(nodes))))
            nodes.append(join(x, y))
        return nodes[0]


def values(given: dict[str, Any], side: str) -> npt.NDArray[np.float64]:
    """Operands as numbers."""
    numbers = decode(given[side], given[f"{side}_format"], dtype=np.float64)
    if f"{side}_scales" in given:
        scales = decode(given[f"{side}_scales"], given["scale_format"], dtype=np.float64)
        numbers = numbers * np.repeat(scales, numbers.shape[1] // scales.shape[1], axis=1)
    return np.asarray(numbers)


def intervals(instruction: str, given: dict[str, Any], **freedom: Any) -> Interval:
    return interval.dot(instructions=instruction, **given, **freedom)


def floats(bits: Words) -> npt.NDArray[np.float64]:
    kind = np.float16 if bits.dtype == np.uint16 else np.float32
    return np.asarray(bits.view(kind), dtype=np.float64)


@pytest.mark.parametrize("case", ONES, ids=name)
def test_at_the_edges_of_every_rule(case: Case) -> None:
    _ascending(case, every=4)
    _other_orders(case, every=4)


@pytest.mark.nightly
@pytest.mark.parametrize("case", DISTINCT, ids=name)
def test_all_rows_at_the_edges_of_every_rule(case: Case) -> None:
    _ascending(case, every=1)
    _other_orders(case, every=1)


def _edges(case: Case, every: int) -> tuple[dict[str, Any], Words]:
    """Rows at the edges of the rules, and what the slow machine of tests/independent returns."""
    rows, wanted = adversarial(case)
    given = arguments(rows[::every], case)
    given["c"], given["instructions"] = given.pop("c_bits"), given.pop("instruction")
    return given, wanted[::every]


def _ascending(case: Case, every: int) -> None:
    given, wanted = _edges(case, every)
    found = interval.dot(**given, orders="ascending")
    expected = floats(wanted)
    assert found.certain.all()
    np.testing.assert_array_equal(found.lower, expected)
    np.testing.assert_array_equal(found.upper, expected)


def _other_orders(case: Case, every: int) -> None:
    given, wanted = _edges(case, every)
    for order in ("steps", "elements"):
        for splits in (None, 1) if wanted.dtype == np.uint32 else (1,):
            assert interval.dot(**given, orders=order, splits=splits).contains(wanted).all()


def _never_left(instruction: str, rows: int, times: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    for steps in (5, 11):
        for spread in (0, 4):
            given = operands(instruction, rows, steps, spread, seed)
            for order in ("steps", "elements"):
                variant = Variant(instruction, given, order)
                for splits, promotion in JOINED:
                    if instruction.endswith(".f16out") and (splits, promotion) != (1, None):
                        continue
                    found = intervals(
                        instruction, given, orders=order, splits=splits, promotion=promotion
                    )
                    for _ in range(times):
                        result = variant.result(random, splits, promotion)
                        assert found.contains(result).all(), (steps, spread, order, splits)


@pytest.mark.parametrize("instruction", FEW)
def test_no_order_or_tree_leaves_it(instruction: str) -> None:
    _never_left(instruction, rows=12, times=3, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("instruction", [x for x in INSTRUCTIONS if x != "exact"])
def test_no_order_or_tree_leaves_it_thousands(instruction: str) -> None:
    _never_left(instruction, rows=60, times=40, seed=2)


@pytest.mark.parametrize("instruction", FEW[:-1])
def test_few_steps_are_nearly_as_tight_as_all_permutations(instruction: str) -> None:
    given = operands(instruction, 60, 4, 1, seed=3)
    variant = Variant(instruction, given, "steps")
    random = np.random.default_rng(0)
    results = np.stack(
        [
            floats(variant.result(random, order=np.tile(order, (60, 1))))
            for order in permutations(range(4))
        ]
    )
    found = intervals(instruction, given, orders="steps")
    low, high = results.min(axis=0), results.max(axis=0)
    assert ((found.lower <= low) & (high <= found.upper)).all()
    spread = (high - low).mean()
    assert found.width.mean() <= 1.35 * spread
    assert np.mean((found.lower == low) & (found.upper == high)) > 0.6


@pytest.mark.parametrize("instruction", FEW)
@pytest.mark.parametrize("order", ["ascending", "steps", "elements"])
def test_exact_sums_are_certain(instruction: str, order: str) -> None:
    """Small integers: every partial sum is exact in every order."""
    random = np.random.default_rng(4)
    rules = INSTRUCTIONS[instruction]
    half = instruction.endswith(".f16out")
    for steps in (4, 12):
        k = steps * (rules.terms or 1)
        given = operands(instruction, 8, steps, 0, seed=0)
        a, b = (random.integers(-1, 2, (8, k)).astype(np.float64) for _ in range(2))
        for side, x in (("a", a), ("b", b)):
            given[side] = encode(x, given[f"{side}_format"])
        if "scale_format" in given:
            one = 127 if given["scale_format"] == "e8m0" else 0x38
            for side in ("a_scales", "b_scales"):
                given[side] = np.full_like(given[side], one)
        c = random.integers(-9, 10, 8).astype(np.float16 if half else np.float32)
        given["c"] = c.view(np.uint16 if half else np.uint32)
        total = (a * b).sum(axis=1) + c
        for splits in (1,) if half or order == "ascending" else (1, 3, None):
            found = intervals(instruction, given, orders=order, splits=splits)
            assert found.certain.all()
            np.testing.assert_array_equal(found.lower, total)


def test_several_instructions() -> None:
    names = ["sm90.wgmma.f16", "sm80.mma.f16", "sm90.mma.f16.k8"]
    given = operands(names[0], 30, 6, 3, seed=5)
    found = intervals(names, given)  # type: ignore[arg-type]
    alone = [intervals(one, given) for one in names]
    np.testing.assert_array_equal(found.lower, np.min([x.lower for x in alone], axis=0))
    np.testing.assert_array_equal(found.upper, np.max([x.upper for x in alone], axis=0))


def test_another_machine_is_outside() -> None:
    given = operands("sm90.wgmma.fp8", 100, 4, 2, seed=6)
    found = intervals("sm100.tcgen05.f8f6f4", given, splits=None)
    other = fused_dot(
        c_bits=given["c"],
        instruction="sm90.wgmma.fp8",
        **{key: x for key, x in given.items() if key != "c"},
    )
    assert found.contains(other).mean() < 0.2


@pytest.mark.parametrize("instruction", ["sm90.wgmma.fp8", "sm100.tcgen05.mxf4nvf4", "float32"])
def test_an_uncertain_accumulator(instruction: str) -> None:
    given = operands(instruction, 20, 5, 2, seed=7)
    middle = floats(given["c"])
    ends = [(middle + step).astype(np.float32) for step in (-0.75, 0.5)]
    random = np.random.default_rng(8)
    for order in ("ascending", "steps", "elements"):
        for splits in (1,) if order == "ascending" else (1, None):
            wide = given | {"c": interval.between(*ends)}
            found = intervals(instruction, wide, orders=order, splits=splits)
            for _ in range(10):
                inside = (ends[0] + random.random(20) * (ends[1] - ends[0])).astype(np.float32)
                narrow = given | {"c": np.clip(inside, *ends).view(np.uint32)}
                if order == "ascending":
                    keys = {key: x for key, x in narrow.items() if key != "c"}
                    result = fused_dot(c_bits=narrow["c"], instruction=instruction, **keys)
                else:
                    result = Variant(instruction, narrow, order).result(random, splits)
                assert found.contains(result).all()


def test_a_matrix_product_is_its_dot_products() -> None:
    for instruction in ("sm90.wgmma.fp8", "sm100.tcgen05.mxf4nvf4"):
        given = operands(instruction, 5, 10, 2, seed=9)
        other = operands(instruction, 7, 10, 2, seed=10)
        sides = {
            "b": other["b"].T,
            "b_scales": other["b_scales"].T if "b_scales" in other else None,
        }
        c = np.random.default_rng(11).standard_normal((5, 7)).astype(np.float32).view(np.uint32)
        keys = {key: x for key, x in given.items() if key != "c"}
        for order in ("ascending", "elements"):
            whole = interval.matmul(instructions=instruction, c=c, orders=order, **(keys | sides))
            for i, j in ((0, 0), (4, 6), (2, 3)):
                row = {key: x[i : i + 1] for key, x in keys.items() if isinstance(x, np.ndarray)}
                for key in ("b", "b_scales"):
                    if key in other:
                        row[key] = other[key][j : j + 1]
                one = intervals(instruction, keys | row | {"c": c[i, j : j + 1]}, orders=order)
                assert (whole.lower[i, j], whole.upper[i, j]) == (one.lower[0], one.upper[0])


def _e5m2(rows: Sequence[Sequence[int]]) -> Words:
    return np.pad(np.array(rows, dtype=np.uint8), ((0, 0), (0, 64 - len(rows[0]))))


def test_special_values() -> None:
    infinity, one, nan, zero = 0x7C, 0x3C, 0x7F, 0
    a = _e5m2([[nan, one], [infinity, one], [infinity, one], [infinity, infinity], [one, one]])
    b = _e5m2([[one, one], [one, one], [zero, one], [one, one | 0x80], [one, one]])
    c = np.zeros(5, dtype=np.uint32)
    c[4] = 0x7F800001
    for splits in (1, None):
        found = interval.dot(
            a, b, c, "sm100.tcgen05.f8f6f4", splits=splits, a_format="e5m2", b_format="e5m2"
        )
        assert found.certain.all()
        np.testing.assert_array_equal(found.lower, [np.nan, np.inf, np.nan, np.nan, np.nan])
        np.testing.assert_array_equal(found.nan, [True, False, True, True, True])


def test_sums_that_may_overflow() -> None:
    """2^127 + 2^127 - 2^127 - 2^127: 0, an infinity or, from two accumulators, NaN."""
    big = np.float32(2.0**64).view(np.uint32) >> np.uint32(16)
    small = np.float32(2.0**63).view(np.uint32) >> np.uint32(16)
    a = np.zeros((1, 64), dtype=np.uint16)
    a[0, [0, 16, 32, 48]] = big, big, big | 0x8000, big | 0x8000
    b = np.full((1, 64), small, dtype=np.uint16)
    c = np.zeros(1, dtype=np.uint32)
    forms = {"a_format": "bf16", "b_format": "bf16"}
    chain = interval.dot(a, b, c, "sm100.tcgen05.f16", **forms)  # type: ignore[arg-type]
    assert (chain.lower[0], chain.upper[0], chain.nan[0]) == (-np.inf, np.inf, False)
    tree = interval.dot(a, b, c, "sm100.tcgen05.f16", splits=2, **forms)  # type: ignore[arg-type]
    assert (tree.lower[0], tree.upper[0], tree.nan[0]) == (-np.inf, np.inf, True)


def test_no_products() -> None:
    c = np.array([0x3F800000, 0x7FC00000], dtype=np.uint32)
    empty = np.zeros((2, 0), dtype=np.uint8)
    found = interval.dot(empty, empty, c, "sm90.wgmma.fp8", a_format="e4m3", b_format="e4m3")
    np.testing.assert_array_equal(found.lower, [1.0, np.nan])
    assert interval.matmul(
        empty, empty.T, "sm90.wgmma.fp8", a_format="e4m3", b_format="e4m3"
    ).shape == (2, 2)
    none = np.zeros((0, 32), dtype=np.uint8)
    assert interval.dot(
        none, none, c[:0], "sm90.wgmma.fp8", a_format="e4m3", b_format="e4m3"
    ).shape == (0,)


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_nothing_to_compute(instruction: str) -> None:
    rules = INSTRUCTIONS[instruction]
    element = FORMATS[rules.operand_formats[0]]
    half, forms = (
        instruction.endswith(".f16out"),
        {"a_format": element.name, "b_format": element.name},
    )
    alone: list[dict[str, Any]] = [{}, {"orders": "ascending"}, {"orders": "elements"}]
    joins: list[dict[str, Any]] = [{"orders": "elements", "splits": None}, {"promotion": 4}]
    for steps in (2, 20):
        k = steps * (rules.terms or 64)
        for m, n in ((0, 4), (4, 0), (0, 0)):
            given: dict[str, Any] = dict(forms)
            if rules.scalings:
                scaling = rules.scalings[-1]
                given["scale_format"] = scaling.format
                given["a_scales"] = np.zeros((m, k // scaling.block), np.uint8)
                given["b_scales"] = np.zeros((k // scaling.block, n), np.uint8)
            a, b = np.zeros((m, k), element.code_dtype), np.zeros((k, n), element.code_dtype)
            for freedom in alone + (joins if not half and instruction != "exact" else []):
                found = interval.matmul(a, b, instruction, **given, **freedom)
                assert found.shape == found.upper.shape == found.nan.shape == (m, n)
        if rules.scalings:
            given["b_scales"] = given["a_scales"]
        c = np.zeros(0, np.uint16 if half else np.uint32)
        assert interval.dot(a, a, c, instruction, **given).shape == (0,)


def test_counts_of_any_integer_type() -> None:
    given = operands("sm90.wgmma.fp8", 4, 5, 2, seed=12)
    for name in ("splits", "promotion"):
        one, other = (intervals("sm90.wgmma.fp8", given, **{name: x}) for x in (2, np.int64(2)))
        np.testing.assert_array_equal(one.lower, other.lower)
        np.testing.assert_array_equal(one.upper, other.upper)


@pytest.mark.filterwarnings("error")
def test_accumulators_that_float16_does_not_have() -> None:
    codes = encode(np.zeros((2, 64)), "e4m3")
    forms: dict[str, Any] = {"a_format": "e4m3", "b_format": "e4m3"}
    name = "sm90.wgmma.fp8.f16out"
    for value in (1e6, 1 + 2.0**-20):
        c = interval.exactly(np.array([0.5, value], np.float32))
        with pytest.raises(
            ValueError, match=r"c holds .*, which float16 does not have; convert it"
        ):
            interval.dot(codes, codes, c, name, **forms)
    wide = interval.between(np.array([1 + 2.0**-20, 7e4]), np.array([1.5 + 2.0**-20, 1e6]))
    for orders in ("ascending", "steps", "elements"):
        found = interval.dot(codes, codes, wide, name, orders=orders, **forms)
        assert (found.lower <= [1.0, 65504.0]).all()
        assert found.lower[0] == 1.0
        np.testing.assert_array_equal(found.upper, [1.5 + 2.0**-10, np.inf])
    huge = interval.between(np.full(2, -1e60), np.full(2, 1e60))
    found = interval.dot(codes, codes, huge, "sm90.wgmma.fp8", **forms)
    np.testing.assert_array_equal(found.lower, [-np.inf] * 2)
    np.testing.assert_array_equal(found.upper, [np.inf] * 2)


@pytest.mark.parametrize(
    ("instruction", "changed", "error", "message"),
    [
        ("sm90.wgmma.fp8", {"orders": "random"}, ValueError, "order"),
        ("sm90.wgmma.fp8", {"splits": 0}, ValueError, "splits is 0"),
        ("sm90.wgmma.fp8", {"promotion": True}, ValueError, "promotion is True"),
        ("sm90.wgmma.fp8", {"splits": 2, "promotion": 2}, ValueError, "both given"),
        ("sm90.wgmma.fp8", {"splits": 2, "orders": "ascending"}, ValueError, "ascending"),
        ("sm90.wgmma.fp8", {"splits": 2.0}, ValueError, "splits is 2.0"),
        ("sm90.wgmma.fp8", {"instructions": None}, TypeError, "instructions is None; give a name"),
        ("sm90.wgmma.fp8", {"c": None}, TypeError, "c is a NoneType"),
        ("sm90.wgmma.fp8", {"instructions": []}, ValueError, "empty"),
        ("sm90.wgmma.fp8", {"c": np.zeros(3, dtype=np.uint32)}, ValueError, "c has shape"),
        ("sm90.wgmma.fp8", {"c": np.zeros(2, dtype=np.float32)}, TypeError, "c holds"),
        ("sm90.wgmma.fp8.f16out", {"splits": None}, ValueError, "float16"),
        ("exact", {"splits": 2}, ValueError, "one sum"),
    ],
)
def test_refusals(
    instruction: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    codes = np.zeros((2, 32), dtype=np.uint8)
    given: dict[str, Any] = {
        "a": codes,
        "b": codes,
        "c": np.zeros(2, dtype=np.uint16 if instruction.endswith(".f16out") else np.uint32),
        "instructions": instruction,
        "a_format": "e4m3",
        "b_format": "e4m3",
    }
    with pytest.raises(error, match=message):
        interval.dot(**(given | changed))


def test_infinity_under_a_zero_scale() -> None:
    """NaN, whichever operand the zero scale is of; the product agrees."""
    a = np.array([[0x7C00, 0x3C00]], dtype=np.uint16)
    b = np.array([[0x3C00, 0x3C00]], dtype=np.uint16)
    c = np.zeros(1, dtype=np.uint32)
    formats = {"a_format": "fp16", "b_format": "fp16", "scale_format": "ue4m3"}
    for pair in ((0, 56), (56, 0)):
        scales = [np.array([[code]], dtype=np.uint8) for code in pair]
        given = {"a_scales": scales[0], "b_scales": scales[1], **formats}
        assert fused_dot(a, b, c, "exact", **given)[0] == 0x7FFFFFFF
        assert bool(interval.dot(a, b, c, "exact", **given).nan[0])
