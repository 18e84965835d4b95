"""Orders of instruction steps: each step on the slow machine of tests/independent, chained by hand in the order given,
the chains' results added as exact float32."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import Order, fused_dot, matmul, matmul_bits
from flamia_ref.formats import quantize
from tests.arithmetic.product_rows import WIDE, Case, Row, Words, arguments, maker
from tests.independent import codes, float32, machine, tensor_cores

MX = Case(instruction="sm100.tcgen05.mxf8f6f4", a="e4m3", b="e5m2", scale_format="e8m0")
FP8 = Case(instruction="sm90.wgmma.fp8", a="e4m3", b="e4m3")
BF16 = Case(instruction="sm100.tcgen05.f16", a="bf16", b="bf16")
NVFP4 = Case(
    instruction="sm100.tcgen05.mxf4nvf4", a="e2m1", b="e2m1", scale_format="ue4m3", block=16
)
F16OUT = Case(instruction="sm90.wgmma.f16.f16out", a="fp16", b="fp16")
CASES = {"mxf8f6f4": MX, "fp8": FP8, "bf16": BF16, "mxf4nvf4": NVFP4, "f16out": F16OUT}
STEPS = 8

Chains = tuple[tuple[int, ...], ...]
# The chains of eight steps, and whether c starts the first of them.
ORDERS: dict[str, tuple[Chains, bool]] = {
    "ascending": (((0, 1, 2, 3, 4, 5, 6, 7),), True),
    "descending": (((7, 6, 5, 4, 3, 2, 1, 0),), True),
    "shuffled": (((3, 0, 6, 1, 7, 2, 5, 4),), True),
    "split": (((0, 1, 2, 3, 4, 5), (6, 7)), True),
    "interleaved": (((0, 2, 4, 6), (1, 3, 5, 7)), True),
    "a chain a step": (((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)), True),
    "promoted": (((0, 1, 2, 3), (4, 5, 6, 7)), False),
    "promoted unevenly": (((0, 1, 2), (3, 4, 5), (6, 7)), False),
    "added at the end": (((0, 1, 2, 3, 4, 5, 6, 7),), False),
    "any": (((5, 1), (7, 0, 6), (2,), (4, 3)), True),
    "any, added": (((4,), (6, 2, 0), (1, 5, 7), (3,)), False),
}
PAIRS = [
    (kind, order)
    for kind, order in itertools.product(CASES, ORDERS)
    if kind != "f16out" or (len(ORDERS[order][0]) == 1 and ORDERS[order][1])
]


def made(name: str) -> Order:
    chains, c_starts_first_chain = ORDERS[name]
    return Order(chains=chains, c_starts_first_chain=c_starts_first_chain)


# Rows.


def element_codes(element: codes.Element, rng: np.random.Generator, count: int) -> list[int]:
    """Codes of numbers of like size, of either sign: what any narrow format has, or a bell."""
    if element.name == "bf16":
        return (rng.normal(size=count).astype(np.float32).view(np.uint32) >> 16).tolist()
    if element.name == "fp16":
        return rng.normal(size=count).astype(np.float16).view(np.uint16).tolist()
    finite = rng.integers(0, element.largest + 1, count)
    return (finite | rng.integers(0, 2, count) * element.sign_bit).tolist()


def scale_codes(case: Case, rng: np.random.Generator, k: int) -> list[int]:
    if case.scale_format is None:
        return []
    low, high = (124, 131) if case.scale_format == "e8m0" else (0x30, 0x41)
    return rng.integers(low, high, -(-k // case.block)).tolist()


def like_sized(case: Case, count: int, k: int, seed: int) -> list[Row]:
    """Rows whose steps, and c, are of like size, so that it matters in which order they are added."""
    rng = np.random.default_rng([seed, k])
    rows = []
    for _ in range(count):
        a, b = (element_codes(element, rng, k) for element in case.elements)
        a_scales, b_scales = (scale_codes(case, rng, k) for _ in "ab")
        value = rng.normal() * 2.0 ** rng.integers(-4, 10)
        c = float32.nearest(float32.Fraction(value))
        if case.rules.output.stored.name == "fp16":
            c = int(np.float16(value / 16).view(np.uint16))
        rows.append(Row(why="like", a=a, b=b, a_scales=a_scales, b_scales=b_scales, c=c))
    return rows


@functools.cache
def rows_of(kind: str, steps: int = STEPS) -> list[Row]:
    """Rows of like size, and some of any bits."""
    case = CASES[kind]
    k = steps * case.rules.terms
    source = maker(case, seed=1, k=k)
    some = [*itertools.islice(source.any_finite(), 6), *itertools.islice(source.any_bits(), 6)]
    return like_sized(case, 20, k, 2) + some


# Expected values.


def after_step(row: Row, step: int, c_bits: int, case: Case) -> int:
    """The accumulator after one instruction."""
    part = slice(step * case.rules.terms, (step + 1) * case.rules.terms)
    scales = slice(part.start // case.block, part.stop // case.block)
    return machine.chain(
        row.a[part],
        row.b[part],
        c_bits,
        case.rules,
        elements=case.elements,
        a_scales=row.a_scales[scales],
        b_scales=row.b_scales[scales],
        scale_format=case.scale_format or "e8m0",
        block=case.block,
    )[-1]


def by_hand(row: Row, chains: Chains, c_starts_first_chain: bool, case: Case) -> int:
    total = row.c
    for index, steps in enumerate(chains):
        starts = index == 0 and c_starts_first_chain
        accumulator = row.c if starts else 0
        for step in steps:
            accumulator = after_step(row, step, accumulator, case)
        total = accumulator if starts else float32.add(total, accumulator)
    return total


@functools.cache
def expected(kind: str, order: str) -> Words:
    case = CASES[kind]
    results = [by_hand(row, *ORDERS[order], case) for row in rows_of(kind)]
    return np.array(results, dtype=WIDE[case.rules.output.stored.name])


def same(got: Any, wanted: Words) -> None:
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), wanted)


# Every order of every kind.


@pytest.mark.parametrize(("kind", "order"), PAIRS)
def test_numpy(kind: str, order: str) -> None:
    given = arguments(rows_of(kind), CASES[kind])
    same(fused_dot(**given, order=made(order)), expected(kind, order))


@pytest.mark.parametrize("kind", CASES)
def test_the_rows_tell_the_orders_apart(kind: str) -> None:
    seen: dict[bytes, str] = {}
    for _, order in [pair for pair in PAIRS if pair[0] == kind]:
        result = expected(kind, order).tobytes()
        assert result not in seen, f"{order} is {seen.get(result)}"
        seen[result] = order
    assert len(seen) > 2


def eager(function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    return function(arrays)


def jitted(function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    return jax.jit(function)(arrays)


def mapped(function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    batches = {name: x.reshape(4, len(x) // 4, *x.shape[1:]) for name, x in arrays.items()}
    return jax.vmap(function)(batches).reshape(-1)


def jit_of_vmap(function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    return jax.jit(lambda arrays: mapped(function, arrays))(arrays)


IN_JAX = [
    ("mxf8f6f4", "split", eager),
    ("mxf8f6f4", "any", jit_of_vmap),
    ("fp8", "promoted", jitted),
    ("mxf4nvf4", "any, added", mapped),
    ("f16out", "shuffled", jitted),
]


@pytest.mark.parametrize(
    ("kind", "order", "mode"),
    [
        *IN_JAX,
        *(
            pytest.param(*pair, mode, marks=pytest.mark.nightly)
            for pair, mode in itertools.product(PAIRS, (eager, jit_of_vmap))
            if (*pair, mode) not in IN_JAX
        ),
    ],
)
def test_jax(kind: str, order: str, mode: Callable[..., Any]) -> None:
    given = arguments(rows_of(kind), CASES[kind])
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays} | {"order": made(order)}
    same(mode(lambda arrays: fused_dot(**arrays, **rest), arrays), expected(kind, order))


@pytest.mark.parametrize("kind", CASES)
def test_any_partition_of_the_steps(kind: str) -> None:
    """Random chains of a random number of steps."""
    case = CASES[kind]
    rng = np.random.default_rng(len(kind))
    for steps in (1, 2, 3, 5, 9):
        rows = like_sized(case, 5, steps * case.rules.terms, steps)
        permuted = rng.permutation(steps).tolist()
        cuts = sorted({0, steps, *rng.integers(0, steps, 3).tolist()})
        starts = bool(rng.integers(0, 2))
        if kind == "f16out":
            cuts, starts = [0, steps], True
        chains = tuple(tuple(permuted[i:j]) for i, j in itertools.pairwise(cuts))
        order = Order(chains=chains, c_starts_first_chain=starts)
        got = fused_dot(**arguments(rows, case), order=order)
        assert got.tolist() == [by_hand(row, chains, starts, case) for row in rows]


@pytest.mark.parametrize("name", tensor_cores.INSTRUCTIONS)
def test_no_order_is_ascending(name: str) -> None:
    instruction = tensor_cores.INSTRUCTIONS[name]
    a, b = instruction.pairs()[-1]
    scale_format, block = (*instruction.scales, (None, 32))[0]
    case = Case(instruction=name, a=a, b=b, scale_format=scale_format, block=block)
    source = maker(case, k=5 * case.rules.terms)
    rows = [*itertools.islice(source.any_finite(), 20), *itertools.islice(source.any_bits(), 20)]
    given = arguments(rows, case)
    wanted = fused_dot(**given)
    same(fused_dot(**given, order=None), wanted)
    same(fused_dot(**given, order=Order.ascending(5)), wanted)


# What kernels do.


def test_k_split_96_and_32() -> None:
    rows = like_sized(MX, 16, 128, 3)
    wanted = []
    for row in rows:
        elements = {"a_element": codes.E4M3, "b_element": codes.E5M2}
        long = (row.a[:96], row.b[:96], row.a_scales[:3], row.b_scales[:3])
        short = (row.a[96:], row.b[96:], row.a_scales[3:], row.b_scales[3:])
        first = machine.scaled_chain(*long, c_bits=row.c, **elements)[-1]
        second = machine.scaled_chain(*short, c_bits=0, **elements)[-1]
        wanted.append(float32.add(first, second))
    given = arguments(rows, MX)
    got = fused_dot(**given, order=Order.split((3, 1)))
    assert got.tolist() == wanted
    assert fused_dot(**given).tolist() != wanted


def test_promotion_after_every_four_steps() -> None:
    """128 products of FP8 at a time, on Hopper, each added to a float32 accumulator."""
    rows = like_sized(FP8, 16, 512, 4)
    wanted = []
    for row in rows:
        total = row.c
        for k in range(0, 512, 128):
            part = slice(k, k + 128)
            rules = tensor_cores.INSTRUCTIONS[FP8.instruction].rules
            sums = machine.chain(row.a[part], row.b[part], 0, rules, elements=FP8.elements)
            total = float32.add(total, sums[-1])
        wanted.append(total)
    given = arguments(rows, FP8)
    assert fused_dot(**given, order=Order.promoted(16, 4)).tolist() == wanted
    assert fused_dot(**given).tolist() != wanted


def test_infinite_chains_of_both_signs() -> None:
    """One accumulator stays at the first infinity; the sum of two is NaN."""
    largest, scale = 0x7E, 254
    a = [largest] * 32 + [largest | 0x80] * 32
    scales = [scale, scale]
    row = Row(why="overflow", a=a, b=[0x7B] * 64, a_scales=scales, b_scales=scales, c=0)
    given = arguments([row], MX)
    assert fused_dot(**given, order=Order.ascending(2)).tolist() == [float32.INFINITY]
    assert fused_dot(**given, order=Order.issued((1, 0))).tolist() == [float32.MINUS_INFINITY]
    for order in (Order.split((1, 1)), Order.promoted(2, 1)):
        assert fused_dot(**given, order=order).tolist() == [float32.NAN]


# Matrices.


def square(rows: Sequence[Row], case: Case) -> dict[str, Any]:
    """Arguments of `matmul_bits`: rows of a times rows of b as columns, without copies."""
    given = arguments(rows, case)
    c = given.pop("c_bits")
    given |= {name: given[name].T for name in ("b", "b_scales") if name in given}
    return given | {"c": np.stack([np.roll(c, shift) for shift in range(len(rows))])}


def of_square(rows: Sequence[Row], order: str, case: Case) -> list[list[int]]:
    results = []
    for i, left in enumerate(rows):
        results.append(
            [
                by_hand(
                    Row(
                        why="pair",
                        a=left.a,
                        b=right.b,
                        a_scales=left.a_scales,
                        b_scales=right.b_scales,
                        c=rows[j - i].c,
                    ),
                    *ORDERS[order],
                    case,
                )
                for j, right in enumerate(rows)
            ]
        )
    return results


@pytest.mark.parametrize(
    ("kind", "order"),
    [("mxf8f6f4", "split"), ("fp8", "promoted"), ("mxf4nvf4", "any"), ("f16out", "descending")],
)
def test_matrices(kind: str, order: str) -> None:
    case, rows = CASES[kind], rows_of(kind)[:5]
    given, wanted = square(rows, case), of_square(rows, order, case)
    got = matmul_bits(**given, order=made(order))
    assert got.tolist() == wanted
    values = np.dtype(f"f{got.dtype.itemsize}")
    c = given.pop("c")
    result = matmul(**given, c=c.view(values), order=made(order))
    assert result.dtype == values
    assert result.view(got.dtype).tolist() == wanted
    no_c = matmul_bits(**given, order=made(order))
    same(matmul_bits(**given, c=np.zeros_like(c), order=made(order)), no_c)


@pytest.mark.parametrize(
    "order", ["promoted unevenly", pytest.param("split", marks=pytest.mark.nightly)]
)
def test_matrices_in_jax(order: str) -> None:
    rows = rows_of("mxf8f6f4")[:5]
    given = square(rows, MX)
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays} | {"order": made(order)}
    wanted = of_square(rows, order, MX)
    assert jax.jit(lambda arrays: matmul_bits(**arrays, **rest))(arrays).tolist() == wanted


# Transposed views.


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        *((kind, np) for kind in ("mxf8f6f4", "mxf4nvf4", "f16out")),
        ("mxf8f6f4", jnp),
        *(pytest.param(kind, jnp, marks=pytest.mark.nightly) for kind in ("mxf4nvf4", "f16out")),
    ],
)
def test_transposed_views(kind: str, library: Any) -> None:
    """Every array as `x.T` of a copy in the other orientation: the bits of contiguous ones."""
    order = "shuffled" if kind == "f16out" else "interleaved"
    case, rows = CASES[kind], rows_of(kind)[:5]
    given = square(rows, case)
    rest = {name: x for name, x in given.items() if not isinstance(x, np.ndarray)}
    arrays = {name: np.ascontiguousarray(given[name]) for name in given if name not in rest}
    views = {name: library.asarray(np.ascontiguousarray(x.T)).T for name, x in arrays.items()}
    if library is np:
        assert not any(x.flags.c_contiguous for x in views.values())
    got = matmul_bits(**views, **rest, order=made(order))
    assert got.tolist() == of_square(rows, order, case)
    copies = {name: library.asarray(x) for name, x in arrays.items()}
    for chosen in (None, made(order)):
        wanted = matmul_bits(**copies, **rest, order=chosen)
        np.testing.assert_array_equal(matmul_bits(**views, **rest, order=chosen), wanted)
        for name, x in views.items():
            got = matmul_bits(**copies | {name: x}, **rest, order=chosen)
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_a_transposed_block_tensor(library: Any) -> None:
    """`b.T` of rows in blocks of 32 along K is what `matmul_bits` takes."""
    rng = np.random.default_rng(8)
    a, b = (quantize(rng.normal(size=(n, 128)).astype(np.float32), "te-mx-e4m3") for n in (3, 4))
    assert (b.T.codes.shape, b.T.scales.shape, b.T.block) == ((128, 4), (4, 4), (32, 1))
    wanted = [
        [
            by_hand(
                Row(why="pair", a=left, b=right, a_scales=left_scales, b_scales=right_scales, c=0),
                ((0, 1, 2), (3,)),
                True,
                dataclasses.replace(MX, b="e4m3"),
            )
            for right, right_scales in zip(b.codes.tolist(), b.scales.tolist(), strict=True)
        ]
        for left, left_scales in zip(a.codes.tolist(), a.scales.tolist(), strict=True)
    ]
    order = Order.split((3, 1))
    left, right = (jax.tree.map(library.asarray, tensor) for tensor in (a, b))
    assert matmul_bits(left, right.T, MX.instruction, order=order).tolist() == wanted
    if library is jnp:
        product = jax.jit(lambda a, b: matmul_bits(a, b.T, MX.instruction, order=order))
        assert product(left, right).tolist() == wanted


# Nothing to add.


EMPTY = {
    "none": None,
    "ascending": Order.ascending(0),
    "issued": Order.issued(()),
    "split": Order.split(()),
    "split of nothing": Order.split((0, 0)),
    "interleaved": Order.interleaved(0, 4),
    "promoted": Order.promoted(0, 4),
    "chains": Order(chains=()),
    "chains, added": Order(chains=(), c_starts_first_chain=False),
}


@pytest.mark.parametrize("order", EMPTY)
@pytest.mark.parametrize("kind", ["mxf8f6f4", "fp8", "mxf4nvf4"])
def test_no_k_returns_c(kind: str, order: str) -> None:
    case = CASES[kind]
    c = np.array([0, 0x80000000, 1, 0x807FFFFF, 0x3F800001, 0xFF7FFFFF, 0x7F800000], np.uint32)
    rows = [Row(why="no K", a=[], b=[], a_scales=[], b_scales=[], c=x) for x in c.tolist()]
    given = arguments(rows, case)
    same(fused_dot(**given, order=EMPTY[order]), c)
    transposed = {name: given[name].T for name in ("b", "b_scales") if name in given}
    matrix = np.stack([c, c[::-1]])
    a = {name: given[name][:2] for name in ("a", "a_scales") if name in given}
    given = {name: x for name, x in given.items() if name != "c_bits"} | transposed | a
    same(matmul_bits(**given, c=matrix, order=EMPTY[order]), matrix)
    assert not matmul_bits(**given, order=EMPTY[order]).any()
    in_jax = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    if kind == "mxf8f6f4":
        same(matmul_bits(**in_jax, c=jnp.asarray(matrix), order=EMPTY[order]), matrix)


# The constructors.


@pytest.mark.parametrize(
    ("order", "chains"),
    [
        (Order.ascending(3), ((0, 1, 2),)),
        (Order.issued((2, 0, 1)), ((2, 0, 1),)),
        (Order.issued(np.array([1, 0])), ((1, 0),)),
        (Order.split((3, 1)), ((0, 1, 2), (3,))),
        (Order.split([1, 0, 2]), ((0,), (1, 2))),
        (Order.interleaved(5, 2), ((0, 2, 4), (1, 3))),
        (Order.interleaved(2, 4), ((0,), (1,))),
        (Order.interleaved(3, 1), ((0, 1, 2),)),
        (Order.promoted(6, 4), ((0, 1, 2, 3), (4, 5))),
        (Order.promoted(2, 4), ((0, 1),)),
        (Order.promoted(3, 1), ((0,), (1,), (2,))),
        *((order, ()) for order in EMPTY.values() if order is not None),
    ],
)
def test_constructors(order: Order, chains: Chains) -> None:
    assert order.chains == chains
    assert order.steps == sum(len(chain) for chain in chains)
    assert all(type(step) is int for chain in order.chains for step in chain)


def test_where_c_goes() -> None:
    assert not Order.promoted(4, 2).c_starts_first_chain
    for order in (Order.ascending(4), Order.split((2, 2)), Order.interleaved(4, 2)):
        assert order.c_starts_first_chain
    assert Order.split((2, 2)) == Order(chains=((0, 1), (2, 3)))
    assert Order.split((2, 2)) != Order.promoted(4, 2)
    # It is a key of compiled programs, whatever its chains were given as.
    assert hash(Order(chains=[[0, 1], [2]])) == hash(Order.split((2, 1)))


# Bad input.


def refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    assert message in text, text
    assert "\n" not in text


@pytest.mark.parametrize(
    "chains",
    [
        ((0, 1), (1, 2)),
        ((0, 0),),
        ((0, 2),),
        ((1, 2),),
        ((-1, 0),),
        ((0.0, 1.0),),
        ((0, True),),
        ((0, "1"),),
        ((None,),),
        ((0, (1, 2)),),
    ],
)
def test_chains_that_are_not_each_step_once(chains: Any) -> None:
    refused(
        lambda: Order(chains=chains),
        ValueError,
        f"chains are {chains}; together they must have each step from 0 on, once",
    )


@pytest.mark.parametrize("chains", [((),), ((0, 1), ()), ((), (0,))])
def test_empty_chains(chains: Any) -> None:
    refused(lambda: Order(chains=chains), ValueError, "each must have one step at least")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Order.ascending(-1), "steps is -1; it must be a whole number, 0 or more"),
        (lambda: Order.ascending(2.0), "steps is 2.0"),
        (lambda: Order.ascending(True), "steps is True"),
        (lambda: Order.issued((0, 2)), "each step from 0 on, once"),
        (lambda: Order.issued((1, 1)), "each step from 0 on, once"),
        (lambda: Order.issued((0, 1.7)), "chains are ((0, 1.7),); together they must have each"),
        (lambda: Order.issued("01"), "each step from 0 on, once"),
        (lambda: Order.split((3, -1)), "a size is -1"),
        (lambda: Order.split((1.5, 2)), "a size is 1.5"),
        (lambda: Order.interleaved(-4, 2), "steps is -4"),
        (lambda: Order.interleaved(4, 2.0), "accumulators is 2.0"),
        (lambda: Order.promoted(4, 0), "every is 0; at least one step comes before a promotion"),
        (lambda: Order.promoted(4, "4"), "every is '4'"),
        (lambda: Order.promoted(4.0, 4), "steps is 4.0"),
    ],
)
def test_numbers_that_are_no_order(call: Callable[[], Any], message: str) -> None:
    refused(call, ValueError, message)


@pytest.mark.parametrize("chains", [3, None, (0, 1), [0]])
def test_what_holds_no_chains(chains: Any) -> None:
    refused(lambda: Order(chains=chains), TypeError, "they must be a sequence of chains, each of")


@pytest.mark.parametrize("given", [1, None, "no"])
def test_c_starts_or_does_not(given: Any) -> None:
    message = f"c_starts_first_chain is {given!r}; it must be True or False"
    refused(lambda: Order(chains=((0,),), c_starts_first_chain=given), TypeError, message)


@pytest.mark.parametrize("kind", CASES)
def test_orders_of_other_lengths(kind: str) -> None:
    case = CASES[kind]
    name, terms = case.instruction, case.rules.terms
    given = arguments(like_sized(case, 2, 4 * terms, 5), case)
    for steps in (0, 3, 5, 4 * terms):
        message = f"order has {steps} steps; K of {4 * terms} is 4 steps of {terms} for {name}"
        refused(lambda n=steps: fused_dot(**given, order=Order.ascending(n)), ValueError, message)
    empty = arguments([Row(why="no K", a=[], b=[], a_scales=[], b_scales=[], c=0)], case)
    message = f"order has 1 steps; K of 0 is 0 steps of {terms}"
    refused(lambda: fused_dot(**empty, order=Order.ascending(1)), ValueError, message)


@pytest.mark.parametrize("name", ["exact", "float32"])
def test_instructions_without_steps(name: str) -> None:
    x = np.zeros((2, 4), np.uint32)
    given = {"instruction": name, "a_format": "fp32", "b_format": "fp32"}
    if name == "exact":
        x = x.astype(np.uint8)
        given |= {"a_format": "e4m3", "b_format": "e4m3"}
    for order in (Order.ascending(4), Order.ascending(1), Order.ascending(0)):
        refused(
            lambda order=order: matmul_bits(x, x.T, **given, order=order),
            ValueError,
            f"{name} has no instruction steps; leave out order",
        )


@pytest.mark.parametrize(
    "order", [Order.split((2, 2)), Order.promoted(4, 4), Order.interleaved(4, 4)]
)
def test_float16_accumulators_are_not_added(order: Order) -> None:
    given = arguments(like_sized(F16OUT, 2, 64, 6), F16OUT)
    message = "has float16 ones; use one chain that starts from c"
    refused(lambda: fused_dot(**given, order=order), ValueError, message)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        (((0, 1),), "tuple"),
        ([0, 1], "list"),
        ("ascending", "str"),
        (2, "int"),
        (Order, "type"),
        (np.arange(2), "ndarray"),
    ],
)
def test_what_is_no_order(order: Any, kind: str) -> None:
    given = arguments(like_sized(MX, 2, 64, 7), MX)
    message = f"order is a {kind}; it must be an Order or None"
    refused(lambda: fused_dot(**given, order=order), TypeError, message)
    c = given.pop("c_bits")
    given |= {"b": given["b"].T, "b_scales": given["b_scales"].T, "c": np.tile(c, (2, 1))}
    refused(lambda: matmul_bits(**given, order=order), TypeError, message)
    given["c"] = given["c"].view(np.float32)
    refused(lambda: matmul(**given, order=order), TypeError, message)
