"""Intervals of float32 operations, special functions, conversions and sums: nothing permitted is outside."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import SPECIAL_MODELS, float32, interval, special
from flamia_ref.arithmetic.interval import Interval
from flamia_ref.formats import FORMATS, decode, encode
from tests.arithmetic.operands import SPECIAL, arbitrary
from tests.independent import float32 as scalar

Words = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.float64]
ROWS = 3000

OPERATIONS: dict[str, tuple[int, Callable[..., Words], Callable[..., Interval]]] = {
    "add": (2, float32.add, interval.add),
    "subtract": (2, float32.subtract, interval.subtract),
    "multiply": (2, float32.multiply, interval.multiply),
    "divide": (2, float32.divide, interval.divide),
    "fma": (3, float32.fma, interval.fma),
    "maximum": (2, float32.maximum, interval.maximum),
    "maximum_number": (2, float32.maximum_number, interval.maximum_number),
    "negate": (1, float32.negate, interval.negate),
}


def as_doubles(bits: Words) -> Doubles:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return bits.view(np.float32).astype(np.float64)


def near(random: np.random.Generator, bits: Words, reach: int) -> Words:
    """float32 that are up to `reach` steps of the number line away, never a NaN."""
    order = np.where(bits >> 31 != 0, -(bits & 0x7FFFFFFF).astype(np.int64), bits.astype(np.int64))
    moved = order + random.integers(-reach, reach + 1, bits.shape)
    limit = int(float32.INFINITY)
    moved = np.clip(moved, -limit, limit)
    return np.where(moved < 0, -moved | (1 << 31), moved).astype(np.uint32)


def drawn(random: np.random.Generator, wide: bool) -> tuple[Interval, Callable[[], Words]]:
    """Intervals, and a function that draws values in them: the ends, and some between."""
    if wide:
        first = np.concatenate([random.choice(SPECIAL, ROWS // 2), arbitrary(random, ROWS // 2)])
    else:
        first = random.standard_normal(ROWS).astype(np.float32).view(np.uint32)
    first = np.where(float32.is_nan(first), float32.ONE, first)
    reach = 1 << int(random.integers(0, 27 if wide else 22))
    second = near(random, first, reach)
    second[::5] = first[::5]
    a, b = as_doubles(first), as_doubles(second)
    given = interval.between(np.minimum(a, b), np.maximum(a, b))

    def inside() -> Words:
        low, high = given.bits()
        ends = np.where(random.integers(0, 2, ROWS) != 0, low, high)
        between = near(random, ends, 3)
        kept = given.contains(between) & (random.integers(0, 3, ROWS) == 0)
        chosen = np.where(kept, between, ends)
        flip = (chosen << 1 == 0) & (random.integers(0, 2, ROWS) != 0)  # -0 is +0
        return np.where(flip, chosen ^ float32.SIGN, chosen).astype(np.uint32)

    return given, inside


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("wide", [False, True], ids=["normal", "anything"])
def test_operations(operation: str, wide: bool) -> None:
    count, function, on_intervals = OPERATIONS[operation]
    random = np.random.default_rng([len(operation), wide])
    for _ in range(6):
        given = [drawn(random, wide) for _ in range(count)]
        found = on_intervals(*(x for x, _ in given))
        assert not np.isnan(found.lower).any() or wide
        for _ in range(4):
            values = [draw() for _, draw in given]
            result = np.asarray(function(*values))
            bad = np.flatnonzero(~found.contains(result))
            assert not bad.size, [hex(int(x[bad[0]])) for x in (*values, result)]


def test_ends_are_reached() -> None:
    random = np.random.default_rng(0)
    for operation in ("add", "subtract", "multiply", "fma"):
        count, function, on_intervals = OPERATIONS[operation]
        given = [drawn(random, wide=False) for _ in range(count)]
        found = on_intervals(*(x for x, _ in given))
        corners = np.stack(
            [
                as_doubles(function(*(x.bits()[corner >> i & 1] for i, (x, _) in enumerate(given))))
                for corner in range(1 << count)
            ]
        )
        np.testing.assert_array_equal(found.lower, corners.min(axis=0))
        np.testing.assert_array_equal(found.upper, corners.max(axis=0))


@pytest.mark.parametrize("rounding", ["up", "down", "toward_zero"])
def test_directed_roundings(rounding: Any) -> None:
    random = np.random.default_rng(1)
    a, draw_a = drawn(random, wide=False)
    b, draw_b = drawn(random, wide=False)
    found = interval.add(a, b, rounding=rounding)
    assert found.contains(float32.add(draw_a(), draw_b(), rounding=rounding)).all()


def test_certain_operands_give_certain_results() -> None:
    bits = SPECIAL[~float32.is_nan(SPECIAL)]
    a, b = (x.ravel() for x in np.meshgrid(bits, bits))
    for function, on_intervals in (
        (float32.add, interval.add),
        (float32.multiply, interval.multiply),
    ):
        found, wanted = on_intervals(a, b), as_doubles(function(a, b))
        certain = found.certain
        np.testing.assert_array_equal(found.lower[certain], wanted[certain])
        assert certain.mean() > 0.9
    one = interval.add(np.array([np.nan, 1.0]), np.array([1.0, 2.0]))
    np.testing.assert_array_equal(one.lower, [np.nan, 3.0])
    np.testing.assert_array_equal(one.nan, [True, False])


def test_maximum_of_a_number_and_perhaps_a_nan() -> None:
    perhaps = Interval(np.array([1.0]), np.array([2.0]), np.array([True]))
    found = interval.maximum_number(perhaps, np.array([0.5]))
    assert (found.lower[0], found.upper[0], found.nan[0]) == (0.5, 2.0, False)
    assert interval.maximum(perhaps, np.array([0.5])).nan[0]


def test_maximum_of_a_number_and_only_a_nan() -> None:
    a, b = (
        np.array([1, np.nan, 4, np.nan], np.float32),
        np.array([2, 3, np.nan, np.nan], np.float32),
    )
    for one, other in ((a, b), (b, a)):
        found = interval.maximum_number(one, other)
        np.testing.assert_array_equal(found.lower, [2, 3, 4, np.nan])
        np.testing.assert_array_equal(found.upper, [2, 3, 4, np.nan])
        np.testing.assert_array_equal(found.nan, [False, False, False, True])
    perhaps = Interval(np.array([1.0]), np.array([2.0]), np.array([True]))
    found = interval.maximum_number(perhaps, np.float32(np.nan))
    assert (found.lower[0], found.upper[0], found.nan[0]) == (1.0, 2.0, True)


# Everything that an element can be: only NaN, a number or a range, with NaN or without.
ENDS = [
    *((x, x) for x in (-np.inf, -3.0, -1e-40, 0.0, 2.5, 127.5, 3e38, np.inf)),
    *((-np.inf, np.inf), (-2.0, 3.0), (0.0, np.inf), (-np.inf, -1.0), (1.0, 200.0)),
]
KINDS_OF_ELEMENT = [(np.nan, np.nan, True), *((*x, nan) for x in ENDS for nan in (False, True))]


def everything() -> tuple[Interval, list[list[float]]]:
    """An element of each kind, and values of each."""
    low, high, nan = (np.array(x) for x in zip(*KINDS_OF_ELEMENT, strict=True))
    given = Interval(low, high, nan)
    values = [
        [np.nan] * bool(z)
        + ([] if np.isnan(x) else [x, y, *([0.0, 2.0] if x <= 0 <= 2 <= y else [])])
        for x, y, z in zip(given.lower.tolist(), given.upper.tolist(), nan.tolist(), strict=True)
    ]
    return given, values


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kind_of_element(operation: str) -> None:
    count, function, on_intervals = OPERATIONS[operation]
    given, values = everything()
    places = np.stack(np.meshgrid(*[np.arange(len(values))] * count)).reshape(count, -1)
    if count == 3:
        places = places[:, ::7]
    found = on_intervals(*(given[place] for place in places))
    for picked in range(4):
        chosen = [
            np.array([values[i][picked % len(values[i])] for i in place], np.float32)
            for place in places.tolist()
        ]
        result = np.asarray(function(*(x.view(np.uint32) for x in chosen)))
        assert found.contains(result).all()
        for x in chosen:
            x[x == 0] = -0.0
        result = np.asarray(function(*(x.view(np.uint32) for x in chosen)))
        assert found.contains(result).all()


FUNCTIONS: dict[str, Callable[..., Interval]] = {
    "exp2": interval.exp2,
    "log2": interval.log2,
    "reciprocal": interval.reciprocal,
    "tanh": interval.tanh,
}
MODELS = [
    (name, model.name)
    for model in SPECIAL_MODELS.values()
    for name in model.functions
    if name in FUNCTIONS
]


def test_which_functions_have_no_intervals() -> None:
    """The natural ones: no envelope is computed of recipes that take them."""
    functions = {name for model in SPECIAL_MODELS.values() for name in model.functions}
    assert functions - set(FUNCTIONS) == {"exp", "log"}


@pytest.mark.parametrize(("name", "model"), MODELS)
def test_special_functions_of_every_kind_of_element(name: str, model: str) -> None:
    given, values = everything()
    found = FUNCTIONS[name](given, model)
    for picked in range(4):
        x = np.array([each[picked % len(each)] for each in values], np.float32)
        assert found.contains(np.asarray(getattr(special, name)(x, model))).all()


@pytest.mark.parametrize("form", ["bf16", "e4m3", "e2m1"])
def test_conversions_of_every_kind_of_element(form: str) -> None:
    given, values = everything()
    for overflow in ("saturate", "native"):
        found = interval.convert(given, form, overflow=overflow)
        for picked in range(4):
            x = np.array([each[picked % len(each)] for each in values])
            result = decode(encode(x, form, overflow=overflow), form, dtype=np.float64)
            assert found.contains(result).all()


@pytest.mark.parametrize(("name", "model"), MODELS)
@pytest.mark.parametrize("wide", [False, True], ids=["normal", "anything"])
def test_special_functions(name: str, model: str, wide: bool) -> None:
    random = np.random.default_rng([len(name), len(model), wide])
    function = getattr(special, name)
    for _ in range(3):
        given, draw = drawn(random, wide)
        found = FUNCTIONS[name](given, model)
        for _ in range(4):
            values = draw()
            result = np.asarray(function(values.view(np.float32), model))
            bad = np.flatnonzero(~found.contains(result))
            assert not bad.size, (hex(int(values[bad[0]])), result[bad[0]])


def test_tanh_where_it_falls_back() -> None:
    ends = np.array([0x3E9FFFF0, 0x3EA00010], dtype=np.uint32)  # the segments meet at 0x3EA00000
    x = np.arange(ends[0], ends[1] + 1, dtype=np.uint32)
    found = interval.tanh(interval.between(ends[:1], ends[1:]), "mufu.sm90")
    results = np.asarray(special.tanh(x.view(np.float32), "mufu.sm90"))
    assert (np.diff(results) < 0).any()
    assert found.contains(results).all()


def test_either_model() -> None:
    x = np.linspace(-20.0, 1.0, 999).astype(np.float32)
    names = ("mufu.sm90", "polynomial3", "correct")
    found = interval.exp2(x, names)
    results = np.stack([np.asarray(special.exp2(x, name)).astype(np.float64) for name in names])
    np.testing.assert_array_equal(found.lower, results.min(axis=0))
    np.testing.assert_array_equal(found.upper, results.max(axis=0))


# Patterns of float32, which sort as magnitudes do, that reach every place of an interpolation.
MONOTONE = {
    "exp2": ((1.0, 2.0, False, True), (2.0**-24, 4.0, True, False)),
    "log2": ((0.25, 4.0, False, True),),
    "reciprocal": ((0.5, 2.0, False, False),),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MONOTONE)
def test_the_special_function_unit_is_monotone(name: str) -> None:
    for low, high, negative, rising in MONOTONE[name]:
        first, beyond = (int(np.float32(x).view(np.uint32)) for x in (low, high))
        last = None
        for start in range(first, beyond, 1 << 22):
            x = np.arange(start, min(start + (1 << 22), beyond), dtype=np.uint32)
            x |= np.uint32(negative) << np.uint32(31)
            result = np.asarray(getattr(special, name)(x.view(np.float32), "mufu.sm90"))
            steps = np.diff(result if last is None else np.append(last, result))
            assert (steps >= 0).all() if rising else (steps <= 0).all()
            last = result[-1]


@pytest.mark.nightly
def test_how_far_tanh_falls_back() -> None:
    """From 2^-8 to 8; below, the unit returns x, and beyond, 1."""
    reached, most = 0, 0
    for start in range(0x3B800000, 0x41000000, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.uint32).view(np.float32)
        result = np.asarray(special.tanh(x, "mufu.sm90")).view(np.uint32).astype(np.int64)
        so_far = np.maximum(np.maximum.accumulate(result), reached)
        reached, most = int(so_far[-1]), max(most, int((so_far - result).max()))
    assert reached <= 0x3F800000
    assert most == 114


@pytest.mark.nightly
def test_the_polynomial_is_monotone_below_128() -> None:
    """For every float32 from -127 to 128, by its patterns, which sort as its values do."""
    size, last = 1 << 22, np.uint32(0)
    for first in range(0xC2FE0000, 0x7FFFFFFF, -size):
        x = np.arange(first, max(first - size, 0x7FFFFFFF), -1, dtype=np.int64).astype(np.uint32)
        last = _rising(x, last)
    for first in range(0, 0x43000000, size):
        x = np.arange(first, min(first + size, 0x43000000), dtype=np.int64).astype(np.uint32)
        last = _rising(x, last)


def _rising(x: Words, last: np.uint32) -> np.uint32:
    result = np.asarray(special.exp2(x.view(np.float32), "polynomial3")).view(np.uint32)
    assert last <= result[0]
    assert (np.diff(result.astype(np.int64)) >= 0).all()
    return np.uint32(result[-1])


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3", "e5m2", "e2m1", "ue4m3", "e8m0"])
@pytest.mark.parametrize("overflow", ["saturate", "native"])
def test_conversions(name: str, overflow: str) -> None:
    random = np.random.default_rng(len(name))
    unsigned = not FORMATS[name].signed
    for wide in (False, True):
        given, draw = drawn(random, wide)
        if unsigned:
            given = interval.between(np.maximum(given.lower, 0.0), np.maximum(given.upper, 0.0))
        found = interval.convert(given, name, overflow=overflow)
        low, high = interval.encode(given, name, overflow=overflow)
        assert low.dtype == high.dtype == FORMATS[name].code_dtype
        for _ in range(4):
            values = as_doubles(draw())
            values = np.maximum(values, 0.0) if unsigned else values
            codes = encode(values, name, overflow=overflow)
            result = decode(codes, name, dtype=np.float64)
            assert found.contains(result).all()
            number = ~np.isnan(result)
            ends = [decode(x, name, dtype=np.float64) for x in (low, high)]
            assert ((ends[0] <= result) | np.isnan(ends[0]) | ~number).all()
            assert ((result <= ends[1]) | np.isnan(ends[1]) | ~number).all()


def tree_sum(random: np.random.Generator, terms: list[int], chain: bool) -> int:
    nodes = list(terms)
    if chain:
        random.shuffle(nodes)
    while len(nodes) > 1:
        x = nodes.pop(0 if chain else int(random.integers(len(nodes))))
        place = 0 if chain else int(random.integers(len(nodes)))
        nodes.insert(place, scalar.add(x, nodes.pop(place)))
    return nodes[0]


@pytest.mark.parametrize("kind", ["positive", "both signs", "cancelling", "wide"])
def test_sums_in_any_tree(kind: str) -> None:
    random = np.random.default_rng(len(kind))
    for count in (2, 3, 17, 64):
        x = random.standard_normal((6, count))
        if kind == "positive":
            x = np.exp2(-3 * np.abs(x))
        elif kind == "cancelling":
            x[:, count // 2 : count // 2 * 2] = -x[:, : count // 2]
        elif kind == "wide":
            x *= np.exp2(random.integers(-30, 31, x.shape).astype(np.float64))
        terms = x.astype(np.float32)
        found = interval.total(terms)
        for row, bits in enumerate(terms.view(np.uint32).tolist()):
            by_value = [
                sorted(bits, key=lambda word: float(np.uint32(word).view(np.float32)), reverse=r)
                for r in (False, True)
            ]
            for order in (bits, *by_value):
                for chain in (False, True):
                    result = np.uint32(tree_sum(random, order, chain)).view(np.float32)
                    assert found.lower[row] <= result <= found.upper[row]
            for order in by_value:
                running = order[0]
                for word in order[1:]:
                    running = scalar.add(running, word)
                result = np.uint32(running).view(np.float32)
                assert found.lower[row] <= result <= found.upper[row]


def test_exact_sums_are_certain() -> None:
    x = np.random.default_rng(2).integers(-99, 100, (5, 1000)) * 0.25
    found = interval.total(x.astype(np.float32))
    assert found.certain.all()
    np.testing.assert_array_equal(found.lower, x.sum(axis=1))
    along = interval.total(x.astype(np.float32).T, axis=0)
    np.testing.assert_array_equal(along.lower, found.lower)


def test_sums_of_uncertain_terms() -> None:
    random = np.random.default_rng(3)
    low = random.standard_normal((4, 30)).astype(np.float32)
    high = low + np.abs(random.standard_normal((4, 30))).astype(np.float32)
    found = interval.total(interval.between(low, high))
    for _ in range(50):
        inside = np.clip(low + random.random((4, 30)) * (high - low), low, high).astype(np.float32)
        inside = np.where(random.integers(0, 2, inside.shape) != 0, inside, high)
        for row in range(4):
            result = np.uint32(tree_sum(random, inside[row].view(np.uint32).tolist(), False))
            assert found.lower[row] <= result.view(np.float32) <= found.upper[row]


def test_sums_with_special_values() -> None:
    found = interval.total(np.array([[1.0, np.nan], [1.0, np.inf], [3e38, 3e38]], dtype=np.float32))
    np.testing.assert_array_equal(found.lower, [np.nan, -np.inf, -np.inf])
    np.testing.assert_array_equal(found.nan, [True, True, True])
    empty = interval.total(np.zeros((2, 0), dtype=np.float32))
    np.testing.assert_array_equal(empty.upper, [0.0, 0.0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one shape"):
        Interval(np.zeros(2), np.zeros(3), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match="above upper"):
        interval.between(np.ones(1), np.zeros(1))
    with pytest.raises(ValueError, match="NaN"):
        interval.between(np.full(1, np.nan), np.zeros(1))
    with pytest.raises(ValueError, match="NaN alone"):
        Interval(np.full(1, np.nan), np.zeros(1), np.ones(1, dtype=bool))
    with pytest.raises(TypeError, match="int64"):
        interval.exactly(np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="no sign"):
        interval.encode(-np.ones(1), "ue4m3")
    with pytest.raises(ValueError, match="model"):
        interval.exp2(np.zeros(1, dtype=np.float32), "fast")
    with pytest.raises(ValueError, match="empty"):
        interval.exp2(np.zeros(1, dtype=np.float32), ())


def test_values_that_float32_does_not_have() -> None:
    for value in (0.1, 1e300, -1e39, 1e-60, 1 + 2.0**-30):
        for call in (interval.exactly, interval.negate, lambda x: interval.add(x, x)):
            with pytest.raises(ValueError, match="which float32 does not have") as raised:
                call(np.array([1.0, value]))
            assert "\n" not in str(raised.value)
    held = np.array([0.5, np.inf, np.nan, 2.0**-149, float(np.finfo(np.float32).max)])
    np.testing.assert_array_equal(interval.exactly(held).lower, held)
    with pytest.raises(TypeError, match=r"longdouble|float128"):
        interval.exactly(np.ones(1, np.longdouble))


def test_ends_are_rounded_outward() -> None:
    x = np.array([0.1, -0.1, 1e300, -1e300, 1e-60, 0.5, 3.4028235e38, np.inf])
    for found in (interval.between(x, x), Interval(x, x, np.zeros(8, dtype=bool))):
        assert ((found.lower <= x) & (x <= found.upper)).all()
        for end in (found.lower, found.upper):
            held = ~np.isinf(end)
            np.testing.assert_array_equal(
                end[held].astype(np.float32).astype(np.float64), end[held]
            )
        steps = np.array([1, 1, 1, 1, 1, 0, 1, 0])
        rank = [
            np.where(bits >> 31 != 0, -(bits & 0x7FFFFFFF).astype(np.int64), bits)
            for bits in found.bits()
        ]
        np.testing.assert_array_equal(rank[1] - rank[0], steps)


untyped: Any = interval  # for calls that types forbid


def _traced() -> None:
    jax.jit(lambda x: untyped.add(x, x).lower)(np.ones(2, np.float32))


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lists": (
        lambda: untyped.Interval([1.0], [2.0], [False]),
        TypeError,
        "lower is .* numpy array of floats",
    ),
    "integers": (
        lambda: untyped.Interval(np.ones(1, np.int64), np.ones(1), np.zeros(1, bool)),
        TypeError,
        "lower holds int64; it must be a numpy array of floats",
    ),
    "no booleans": (
        lambda: untyped.Interval(np.ones(1), np.ones(1), np.zeros(1)),
        TypeError,
        "nan holds float64; it must be a numpy array of bool",
    ),
    "hull of an array": (lambda: untyped.hull(np.ones(2)), TypeError, "hull is given a ndarray"),
    "hull of shapes": (
        lambda: untyped.hull(untyped.exactly(np.ones(2)), untyped.exactly(np.ones(3))),
        ValueError,
        r"shapes \(2,\) and \(3,\) do not broadcast",
    ),
    "between": (
        lambda: untyped.between(np.zeros(2), np.ones(3)),
        ValueError,
        r"shapes \(2,\) and \(3,\) do not broadcast",
    ),
    "add": (
        lambda: untyped.add(np.zeros(2), np.ones(3)),
        ValueError,
        r"shapes \(2,\) and \(3,\) do not broadcast",
    ),
    "traced": (_traced, TypeError, "values is traced; intervals are numpy"),
    "no axis": (lambda: untyped.total(np.zeros(2), 1), ValueError, "axis is 1; x has 1 axes"),
    "axis of a number": (
        lambda: untyped.total(np.float32(1)),
        ValueError,
        "axis is -1; x has 0 axes",
    ),
    "all axes": (
        lambda: untyped.total(np.zeros(2), None),
        TypeError,
        "axis is None; it must be an integer",
    ),
    "no model": (
        lambda: untyped.exp2(np.zeros(1), None),
        TypeError,
        "model is None; it is a name in SPECIAL_MODELS",
    ),
    "models that are no names": (
        lambda: untyped.exp2(np.zeros(1), ("correct", 5)),
        TypeError,
        "model is .*; it is a name in SPECIAL_MODELS",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_hull_width_and_parts() -> None:
    one, other = interval.exactly(np.array([1.0, np.nan])), interval.exactly(np.array([2.0, 5.0]))
    both = interval.hull(one, other)
    np.testing.assert_array_equal(both.lower, [1.0, 5.0])
    np.testing.assert_array_equal(both.nan, [False, True])
    np.testing.assert_array_equal(both.width, [1.0, 0.0])
    np.testing.assert_array_equal(both.certain, [False, False])
    assert both[1:].shape == (1,)
    assert both.reshape(2, 1).shape == (2, 1)
    assert both.contains(np.array([1.5, np.nan])).all()
    assert [int(x[0]) for x in both.bits()] == [0x3F800000, 0x40000000]
