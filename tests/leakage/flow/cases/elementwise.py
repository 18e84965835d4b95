"""Primitives that work element by element."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.leakage.flow.cases.case import Case, dtype_of


def _unary() -> Iterator[Case]:
    floats = "neg abs sign floor ceil sqrt square is_finite exp exp2 expm1 log1p tanh sin cos atan"
    floats += " asinh logistic erf cbrt rsqrt log log2"
    for name in floats.split():
        if not hasattr(lax, name):
            continue
        pools = (
            {0: [0.25, 1.0, 2.0, 9.0]} if name in ("sqrt", "rsqrt", "log", "log2", "cbrt") else {}
        )
        if name in ("exp", "exp2", "expm1"):
            pools = {0: [0.0, 1.0, -1.0, 2.5]}
        yield Case(
            name=name,
            function=getattr(lax, name),
            operands=(((3, 2), "float32"),),
            pools=pools,
            exact=name != "is_finite",
        )
    for dtype in ("float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        yield Case(name=f"neg-{dtype}", function=lax.neg, operands=(((4,), dtype),))
        yield Case(
            name=f"to-{dtype}",
            function=lambda x, d=dtype: lax.convert_element_type(x, dtype_of(d)),
            operands=(((4,), "float32"),),
            pools={0: [0.0, 1.0, -2.0, 3.3, 100.0]},
        )
        yield Case(
            name=f"from-{dtype}",
            function=lambda x: lax.convert_element_type(x, np.float32),
            operands=(((4,), dtype),),
        )
    for name in ("population_count", "clz", "bitwise_not", "neg", "abs", "sign"):
        yield Case(name=f"{name}-int", function=getattr(lax, name), operands=(((5,), "int32"),))
    for target in ("int8", "uint8", "int32", "bool", "uint64", "int4", "uint4"):
        for source in ("float32", "int16", "uint8", "bfloat16", "int4"):
            yield Case(
                name=f"{source}-to-{target}",
                function=lambda x, t=target: lax.convert_element_type(x, dtype_of(t)),
                operands=(((4,), source),),
                pools={0: [0, 1, 2, 3, 5]}
                if source != "float32"
                else {0: [0.0, 0.75, 2.0, -3.0, 300.0, 1e20]},
            )
    yield Case(
        name="round-away",
        function=lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
        operands=(((4,), "float32"),),
        pools={0: [0.49999997, 0.5, 1.5, -2.5, 3.0]},
    )
    yield Case(
        name="round-even",
        function=lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
        operands=(((4,), "float32"),),
        pools={0: [0.49999997, 0.5, 1.5, -2.5, 3.0]},
    )
    yield Case(
        name="reduce_precision",
        function=lambda x: lax.reduce_precision(x, 5, 2),
        operands=(((4,), "float32"),),
        pools={0: [1.0, 1.1, 3.3, 100.0, -7.7]},
    )
    yield Case(
        name="integer_pow", function=lambda x: lax.integer_pow(x, 3), operands=(((4,), "float32"),)
    )
    yield Case(
        name="real-imag",
        function=lambda x: lax.real(x) + lax.imag(x),
        operands=(((4,), "complex64"),),
        pools={0: [1 + 2j, 3 - 1j, 0]},
    )
    yield Case(
        name="conj",
        function=lambda x: lax.real(lax.mul(x, lax.conj(x))),
        operands=(((4,), "complex64"),),
        pools={0: [1 + 2j, 3 - 1j, 0]},
    )
    yield Case(
        name="copy",
        function=lambda x: lax.stop_gradient(jnp.copy(x)),
        operands=(((4,), "float32"),),
    )


def _binary() -> Iterator[Case]:
    for name in ("add", "sub", "mul", "max", "min", "div", "pow", "atan2", "nextafter", "rem"):
        pools = {1: [1.0, 2.0, -4.0, 3.0]} if name in ("div", "rem") else {}
        if name == "pow":
            pools = {0: [1.5, 2.0, 3.0], 1: [0.5, 2.0, -1.0, 0.0]}
        yield Case(
            name=name,
            function=getattr(lax, name),
            operands=(((3, 2), "float32"), ((3, 2), "float32")),
            pools=pools,
        )
    for dtype in ("int32", "uint8", "int8", "int64", "uint4", "int4"):
        for name in (
            "add",
            "sub",
            "mul",
            "max",
            "min",
            "div",
            "rem",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
            "shift_left",
            "shift_right_logical",
            "shift_right_arithmetic",
        ):
            if dtype in ("uint4", "int4") and name in ("div", "rem"):
                continue
            pools = {}
            if name.startswith("shift"):
                pools = {1: [0, 1, 3]} if "4" in dtype else {1: [0, 1, 3, 40]}
            elif name in ("div", "rem"):
                pools = {1: [1, 2, 3]}
            yield Case(
                name=f"{name}-{dtype}",
                function=getattr(lax, name),
                operands=(((5,), dtype), ((5,), dtype)),
                pools=pools,
            )
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for dtype in ("float32", "uint8", "bool", "bfloat16"):
            yield Case(
                name=f"{name}-{dtype}",
                function=getattr(lax, name),
                operands=(((5,), dtype), ((5,), dtype)),
            )
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield Case(
            name=f"{name}-bool",
            function=getattr(lax, name),
            operands=(((5,), "bool"), ((5,), "bool")),
        )
    yield Case(
        name="complex",
        function=lambda a, b: lax.real(lax.complex(a, b)) * lax.imag(lax.complex(a, b)),
        operands=(((5,), "float32"), ((5,), "float32")),
    )
    yield Case(
        name="scalar-beside-array",
        function=lambda a, b: a * b + jnp.float32(2),
        operands=(((3, 2), "float32"), ((), "float32")),
    )
    yield Case(
        name="clamp",
        function=lambda lo, x, hi: lax.clamp(lo, x, hi),
        operands=(((4,), "float32"), ((4,), "float32"), ((4,), "float32")),
        pools={0: [-5.0, -1.0, 0.5], 2: [1.0, 2.0, 9.0]},
    )
    yield Case(
        name="clamp-scalars",
        function=lambda lo, x, hi: lax.clamp(lo, x, hi),
        operands=(((), "int32"), ((4,), "int32"), ((), "int32")),
        pools={0: [-5, -1, 0], 2: [1, 2, 9]},
    )


def _select() -> Iterator[Case]:
    yield Case(
        name="select-bool",
        function=lax.select,
        operands=(((3, 2), "bool"), ((3, 2), "float32"), ((3, 2), "float32")),
    )
    yield Case(
        name="select-scalar",
        function=lambda p, a, b: lax.select_n(p, a, b),
        operands=(((), "bool"), ((3, 2), "float32"), ((3, 2), "float32")),
    )
    yield Case(
        name="select-int",
        function=lax.select_n,
        operands=(((4,), "int32"), ((4,), "float32"), ((4,), "float32"), ((4,), "float32")),
        pools={0: [0, 1, 2]},
    )
    yield Case(
        name="where-same",
        function=lambda p: jnp.where(p, jnp.float32(3), jnp.float32(3)),
        operands=(((4,), "bool"),),
    )
    yield Case(
        name="where-broadcast",
        function=lambda p, a: jnp.where(p[:, None], a[None, :], jnp.float32(0)),
        operands=(((3,), "bool"), ((2,), "float32")),
    )


def _bounded() -> Iterator[Case]:
    """Integers that bounds decide."""
    yield Case(
        name="difference-of-bytes",
        function=lambda x, y: (
            jnp.minimum(x.astype(np.int32) - y.astype(np.int32), np.int32(-1)),
            jnp.maximum(x.astype(np.int32) - y.astype(np.int32), np.int32(-300)),
        ),
        operands=(((4,), "uint8"), ((4,), "uint8")),
        fine=True,
    )
    yield Case(
        name="clip-of-bytes",
        function=lambda x, y: (
            jnp.minimum(x.astype(np.int32), np.int32(-1)) + jnp.clip(y.astype(np.int32), -5, 300)
        ),
        operands=(((4,), "uint8"), ((4,), "int8")),
        fine=True,
    )
    yield Case(
        name="comparison-of-bytes",
        function=lambda x, y: jnp.where(x.astype(np.int32) < 256, y, x),
        operands=(((4,), "uint8"), ((4,), "uint8")),
        fine=True,
    )
    yield Case(
        name="maximum-of-apart",
        function=lambda x, y: jnp.maximum(x.astype(np.int32) + np.int32(256), y.astype(np.int32)),
        operands=(((4,), "uint8"), ((4,), "uint8")),
        fine=True,
    )
    yield Case(
        name="power-by-bits",
        function=lambda x: lax.bitcast_convert_type(
            (jnp.clip(x.astype(np.int32), 1, 9) + np.int32(120)).astype(np.uint32) << np.uint32(23),
            np.float32,
        ),
        operands=(((4,), "uint8"),),
        fine=True,
    )


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _unary()
    yield from _binary()
    yield from _select()
    yield from _bounded()
