"""Functions of one primitive each, with their operands: what the rules are tested on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

Array = np.ndarray[Any, Any]

FLOATS = np.array([0.0, 1.0, -1.0, 2.5, -3.75, 1000.0, -0.0078125])
INTEGERS = np.array([0, 1, 2, 3, -1, -2, 5, 100])
CODES = np.array([0, 1, 2, 3, 7, 15, 16, 128, 200, 255])


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function, the shapes and dtypes of its operands, and which of them stay known."""

    name: str
    function: Callable[..., Any]
    operands: tuple[tuple[tuple[int, ...], str], ...]
    exact: bool = True
    """Whether the rule claims the exact set, with all operands free."""
    fixed: dict[int, Any] = field(default_factory=dict)
    """Operands that are always known, by place."""
    pools: dict[int, Any] = field(default_factory=dict)
    fine: bool = False


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def pool_of(case: Case, place: int) -> Array:
    dtype = dtype_of(case.operands[place][1])
    if place in case.pools:
        return np.asarray(case.pools[place]).astype(dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind == "u" or dtype.name.startswith("uint"):
        top = int(ml_dtypes.iinfo(dtype).max)
        return np.unique(CODES[top >= CODES]).astype(dtype)
    if dtype.kind == "i" or dtype.name.startswith("int"):
        top = int(ml_dtypes.iinfo(dtype).max)
        return np.unique(INTEGERS[top >= INTEGERS]).astype(dtype)
    return np.unique(FLOATS.astype(dtype))


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


def _structural() -> Iterator[Case]:
    shape = ((2, 3, 4), "float32")
    table: dict[str, Callable[[Any], Any]] = {
        "reshape": lambda x: x.reshape(4, 6),
        "reshape-ones": lambda x: x.reshape(1, 2, 1, 12, 1),
        "reshape-broadcast": lambda x: (
            jnp.broadcast_to(x[:, :1], (2, 3, 4)).reshape(6, 4)
            + jnp.broadcast_to(x[:1, :, :1], (2, 3, 4)).reshape(6, 4)
        ),
        "transpose": lambda x: x.transpose(2, 0, 1),
        "squeeze": lambda x: lax.squeeze(x[:, 1:2], (1,)),
        "rev": lambda x: lax.rev(x, (0, 2)),
        "slice": lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3)),
        "slice-broadcast": lambda x: lax.slice(
            jnp.broadcast_to(x[:, :, :1], (2, 3, 4)), (0, 1, 2), (1, 3, 4)
        ),
        "slice-empty": lambda x: (lax.slice(x, (0, 1, 0), (2, 1, 4)), x.sum()),
        "concatenate": lambda x: jnp.concatenate(
            [x, x[:, :1], jnp.broadcast_to(x[:, :1, :1], (2, 2, 4))], axis=1
        ),
        "concatenate-known": lambda x: jnp.concatenate([x, jnp.zeros((2, 3, 4), x.dtype)], axis=2),
        "stack": lambda x: jnp.stack([x, 2 * x], axis=1),
        "unstack": lambda x: jnp.unstack(x, axis=1),
        "split": lambda x: lax.split(x, (1, 2), axis=1),
        "tile": lambda x: jnp.tile(x, (1, 2, 2)),
        "pad": lambda x: lax.pad(x, np.float32(0), ((1, 2, 0), (0, 0, 2), (-1, 1, 0))),
        "pad-negative": lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (-1, -1, 1), (2, -3, 1))),
        "pad-alike": lambda x: lax.pad(
            jnp.broadcast_to(x[:, :1], (2, 3, 4)), np.float32(1), ((0, 0, 0), (1, 0, 1), (0, 0, 0))
        ),
        "pad-empty": lambda x: lax.pad(x[:, :0], np.float32(1), ((0, 0, 0), (1, 2, 0), (0, 0, 0))),
        "repeat": lambda x: jnp.repeat(x, 2, axis=1),
        "roll": lambda x: jnp.roll(x, 1, axis=2),
        "diagonal": lambda x: jnp.diagonal(x[:, :2]),
        "tril": lambda x: jnp.tril(x),
        "optimization_barrier": lambda x: lax.optimization_barrier((x, x + 1)),
        "iota": lambda x: lax.broadcasted_iota(np.int32, (2, 3, 4), 1) + x.astype(np.int32),
        "expand_dims": lambda x: jnp.expand_dims(x, (0, 2)),
    }
    for name, function in table.items():
        yield Case(name=name, function=function, operands=(shape,))
    yield Case(
        name="pad-with-unknown",
        function=lambda x, f: lax.pad(x, f, ((1, 1, 1),)),
        operands=(((3,), "float32"), ((), "float32")),
    )
    for source, target, size in (
        ("uint32", "uint8", 3),
        ("float32", "int32", 3),
        ("uint16", "uint8", 4),
        ("uint8", "uint4", 3),
        ("int8", "int4", 3),
        ("float64", "uint32", 2),
        ("bfloat16", "uint8", 3),
    ):
        exact = source not in ("uint32", "float64", "uint16", "bfloat16", "uint8", "int8")
        pools = {} if "float" in source else {0: [0, 1, 17, 255 if source[0] == "u" else 100]}
        yield Case(
            name=f"bitcast-{source}-{target}",
            function=lambda x, t=target: lax.bitcast_convert_type(x, dtype_of(t)),
            operands=(((size,), source),),
            exact=exact,
            pools=pools,
        )
    for source, target, shape_ in (
        ("uint8", "uint32", (3, 4)),
        ("uint8", "float16", (3, 2)),
        ("uint4", "uint8", (3, 2)),
        ("int4", "int8", (3, 2)),
        ("uint32", "float64", (2, 2)),
    ):
        yield Case(
            name=f"bitcast-{source}-{target}",
            function=lambda x, t=target: lax.bitcast_convert_type(x, dtype_of(t)),
            operands=((shape_, source),),
        )
    yield Case(
        name="bitcast-scalar",
        function=lambda x: lax.bitcast_convert_type(x, np.int32),
        operands=(((), "float32"),),
    )


def _nibbles() -> Iterator[Case]:
    def pack(x: Any) -> Any:
        return x[..., 0::2] | (x[..., 1::2] << np.uint8(4))

    def unpack(x: Any) -> Any:
        return jnp.stack([x & np.uint8(15), x >> np.uint8(4)], axis=-1)

    codes = {0: list(range(16))}
    yield Case(
        name="pack",
        function=lambda x: pack(x & np.uint8(15)),
        operands=(((2, 6), "uint8"),),
        pools=codes,
    )
    yield Case(
        name="pack-unpack",
        function=lambda x: unpack(pack(x & np.uint8(15))),
        operands=(((2, 6), "uint8"),),
        pools=codes,
    )
    yield Case(
        name="pack-by-sum",
        function=lambda x: (
            unpack((x[0] & np.uint8(15)) + (x[1] & np.uint8(15)) * np.uint8(16))
            if False
            else unpack((x[0] & np.uint8(15)) + ((x[1] & np.uint8(15)) << np.uint8(4)))
        ),
        operands=(((2, 6), "uint8"),),
        pools=codes,
    )
    yield Case(
        name="pack-transposed",
        function=lambda x: unpack(pack(x & np.uint8(15)).reshape(3, 2).T),
        operands=(((2, 6), "uint8"),),
        pools=codes,
    )

    def words(x: Any) -> Any:
        wide = x.astype(np.uint32)
        word = (
            wide[0]
            | (wide[1] << np.uint32(8))
            | (wide[2] << np.uint32(16))
            | (wide[3] << np.uint32(24))
        )
        return (
            (word >> np.uint32(8)) & np.uint32(255),
            (word >> np.uint32(24)).astype(np.uint8),
            word & np.uint32(0xFFFF),
        )

    yield Case(name="scale-words", function=words, operands=(((4, 3), "uint8"),), fine=True)

    def signed(x: Any) -> Any:
        word = (x[0].astype(np.int32) << np.int32(16)) | (x[1].astype(np.int32) & np.int32(0xFFFF))
        return word >> np.int32(16), word & np.int32(0xFF)

    yield Case(name="signed-words", function=signed, operands=(((2, 3), "int8"),))
    yield Case(
        name="and-of-words",
        function=lambda x, y: (
            ((x[0] & np.uint8(1)) | (x[1] & np.uint8(2)))
            & ((y[0] & np.uint8(1)) | (y[1] & np.uint8(2)))
        ),
        operands=(((2, 3), "uint8"), ((2, 3), "uint8")),
        pools={0: [0, 1, 2, 3], 1: [0, 1, 2, 3]},
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


def _reductions() -> Iterator[Case]:
    shape = ((3, 4), "float32")
    for name, function in {
        "sum": lambda x: x.sum(0),
        "sum-all": jnp.sum,
        "sum-alike": lambda x: jnp.broadcast_to(x[:, :1], (3, 4)).sum(1),
        "prod": lambda x: (x * x + 1).prod(1),
        "max": lambda x: x.max(1),
        "min": lambda x: x.min((0, 1)),
        "argmax": lambda x: x.argmax(1),
        "argmin": lambda x: x.argmin(0),
        "cumsum": lambda x: lax.cumsum(x, 1),
        "cumsum-reverse": lambda x: lax.cumsum(x, 0, reverse=True),
        "cumprod": lambda x: lax.cumprod(x * x + 1, 1),
        "cummax": lambda x: lax.cummax(x, 1),
        "cummin": lambda x: lax.cummin(x, 1, reverse=True),
        "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
        "cumsum-alike": lambda x: lax.cumsum(jnp.broadcast_to(x[:, :1], (3, 4)), 1),
        "top_k": lambda x: lax.top_k(x, 2),
        "sort": lambda x: lax.sort(x, dimension=1),
        "argsort": lambda x: jnp.argsort(x, axis=0),
        "logsumexp": lambda x: jax.nn.logsumexp(x, axis=1),
        "empty-sum": lambda x: x[:0].sum(0) + jnp.float32(1),
        "median": lambda x: jnp.median(x, axis=1),
    }.items():
        pools = {0: [0.0, 1.0, -1.0, 2.5]} if "exp" in name else {}
        yield Case(name=name, function=function, operands=(shape,), pools=pools)
    for name in ("reduce_and", "reduce_or", "reduce_xor"):
        for dtype in ("bool", "uint8"):
            yield Case(
                name=f"{name}-{dtype}",
                function=lambda x, n=name: getattr(lax, f"{n}_p").bind(x, axes=(1,)),
                operands=(((3, 3), dtype),),
            )
    yield Case(
        name="sort-two",
        function=lambda a, b: lax.sort((a, b), dimension=0, num_keys=1),
        operands=(((4,), "int32"), ((4,), "float32")),
    )
    yield Case(
        name="sort-two-keys",
        function=lambda a, b, c: lax.sort((a, b, c), dimension=0, num_keys=2),
        operands=(((4,), "int32"), ((4,), "int32"), ((4,), "float32")),
        pools={0: [0, 1], 1: [0, 1, 2]},
    )
    yield Case(
        name="reduce-own",
        function=lambda x, y: lax.reduce(
            (x, y),
            (np.float32(0), np.float32(1)),
            lambda a, b: (a[0] + b[0], a[1] * b[0] + b[1]),
            (1,),
        ),
        operands=(((2, 3), "float32"), ((2, 3), "float32")),
        exact=False,
    )
    yield Case(
        name="reduce-start",
        function=lambda x, s: lax.reduce(x, s, lambda a, b: a + b + a * b, (0,)),
        operands=(((3, 2), "float32"), ((), "float32")),
        pools={0: [0.5, 1.0, 2.0], 1: [0.5, 3.0]},
    )
    windows = {"window_dimensions": (2, 3), "window_strides": (1, 2), "padding": ((1, 0), (1, 1))}
    dilated = {**windows, "base_dilation": (2, 1), "window_dilation": (1, 2)}
    for name, (init, op) in {
        "sum": (0.0, lax.add),
        "max": (-np.inf, lax.max),
        "min": (np.inf, lax.min),
    }.items():
        yield Case(
            name=f"reduce_window-{name}",
            function=lambda x, i=init, o=op: lax.reduce_window(x, np.float32(i), o, **dilated),
            operands=(((3, 5), "float32"),),
        )
    yield Case(
        name="reduce_window-own",
        function=lambda x, s: lax.reduce_window(x, s, lambda a, b: a + b + a * b, **windows),
        operands=(((3, 5), "float32"), ((), "float32")),
        exact=False,
        pools={0: [0.5, 1.0], 1: [0.5, 3.0]},
    )
    yield Case(
        name="max-pool-gradient",
        function=lambda x, g: jax.vjp(
            lambda y: lax.reduce_window(y, -np.inf, lax.max, (2,), (1,), "VALID"), x
        )[1](g)[0],
        operands=(((5,), "float32"), ((4,), "float32")),
    )
    yield Case(
        name="max-pool-derivative",
        function=lambda x, t: jax.jvp(
            lambda y: lax.reduce_window(y, -np.inf, lax.max, (2,), (2,), "VALID"), (x,), (t,)
        )[1],
        operands=(((6,), "float32"), ((6,), "float32")),
    )


def _contractions() -> Iterator[Case]:
    for name, numbers, a, b in (
        ("matmul", (((1,), (0,)), ((), ())), (2, 3), (3, 2)),
        ("batched", (((2,), (1,)), ((0,), (0,))), (2, 2, 3), (2, 3, 2)),
        ("two-sums", (((0, 2), (1, 0)), ((), ())), (2, 2, 3), (3, 2, 2)),
        ("batch-last", (((0,), (1,)), ((2,), (0,))), (3, 2, 2), (2, 3, 2)),
        ("outer", (((), ()), ((), ())), (2,), (3,)),
        ("scalar", (((0,), (0,)), ((), ())), (3,), (3,)),
    ):
        yield Case(
            name=f"dot-{name}",
            function=lambda x, y, n=numbers: lax.dot_general(x, y, n),
            operands=((a, "float32"), (b, "float32")),
        )
    yield Case(
        name="dot-int8",
        function=lambda x, y: lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), preferred_element_type=np.int32
        ),
        operands=(((2, 3), "int8"), ((3, 2), "int8")),
    )
    yield Case(
        name="dot-bf16",
        function=lambda x, y: lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), preferred_element_type=np.float32
        ),
        operands=(((2, 3), "bfloat16"), ((3, 2), "bfloat16")),
    )
    yield Case(
        name="dot-alike",
        function=lambda x, y: jnp.broadcast_to(x[:, :1], (2, 3)) @ y,
        operands=(((2, 3), "float32"), ((3, 2), "float32")),
    )
    yield Case(
        name="dot-empty",
        function=lambda x, y: x[:, :0] @ y[:0] + x.sum(),
        operands=(((2, 3), "float32"), ((3, 2), "float32")),
        exact=False,
    )
    for name, given in {
        "plain": {"window_strides": (1,), "padding": "SAME"},
        "strides": {"window_strides": (2,), "padding": ((2, 1),), "rhs_dilation": (2,)},
        "dilated": {"window_strides": (1,), "padding": ((1, 2),), "lhs_dilation": (2,)},
        "groups": {"window_strides": (1,), "padding": "VALID", "feature_group_count": 2},
        "batch-groups": {"window_strides": (1,), "padding": "VALID", "batch_group_count": 2},
        "numbers": {
            "window_strides": (1,),
            "padding": "VALID",
            "dimension_numbers": ("CWN", "WIO", "NWC"),
        },
    }.items():
        x, k = (2, 4, 5), (2, 4, 2)
        if name == "groups":
            k = (2, 2, 2)
        if name == "numbers":
            x, k = (3, 5, 2), (2, 3, 2)
        yield Case(
            name=f"conv-{name}",
            function=lambda x, k, g=given: lax.conv_general_dilated(x, k, **g),
            operands=((x, "float32"), (k, "float32")),
        )


def _indexing() -> Iterator[Case]:
    table = ((4, 3), "float32")
    rows = np.array([3, 0, 3, 7, -1])
    for mode in ("clip", "fill", "promise_in_bounds"):
        index = rows if mode != "promise_in_bounds" else np.array([3, 0, 1])
        yield Case(
            name=f"take-{mode}",
            function=lambda x, i, m=mode: x.at[i].get(
                mode=m, **({"fill_value": 7.0} if m == "fill" else {})
            ),
            operands=(table, ((len(index),), "int32")),
            fixed={1: index},
        )
    yield Case(
        name="take-unknown",
        function=lambda x, i: x.at[i].get(mode="clip"),
        operands=(table, ((2,), "int32")),
        pools={1: [0, 1, 2, 3]},
    )
    yield Case(
        name="take-fill-unknown",
        function=lambda x, i: x.at[:, i].get(mode="fill"),
        operands=(table, ((2,), "int32")),
        pools={1: [0, 1, 2, 9]},
    )
    yield Case(
        name="take-along",
        function=lambda x, i: jnp.take_along_axis(x, i, axis=1, mode="clip"),
        operands=(table, ((4, 2), "int32")),
        pools={1: [0, 1, 2]},
    )
    yield Case(
        name="take-pairs",
        function=lambda x, i, j: x[i, j],
        operands=(table, ((2,), "int32"), ((2,), "int32")),
        pools={1: [0, 1, 2, 3], 2: [0, 1, 2]},
        exact=False,
    )
    yield Case(
        name="take-int",
        function=lambda x, i: x.at[i].get(mode="fill"),
        operands=(((4,), "int32"), ((3,), "int32")),
        fixed={1: np.array([9, 1, 0])},
    )
    yield Case(
        name="gather-windows",
        function=lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, k), (2, 2)))(i),
        operands=(table, ((3,), "int32")),
        fixed={1: np.array([0, 2, 9])},
    )
    yield Case(
        name="gather-batched",
        function=lambda x, i: jax.vmap(lambda r, k: r[k])(x, i),
        operands=(table, ((4,), "int32")),
        pools={1: [0, 1, 2]},
    )
    yield Case(
        name="dynamic_slice",
        function=lambda x, i: lax.dynamic_slice(x, (i, np.int32(1)), (2, 2)),
        operands=(table, ((), "int32")),
        fixed={1: np.array(5)},
    )
    yield Case(
        name="dynamic_slice-unknown",
        function=lambda x, i: lax.dynamic_slice(x, (i, np.int32(1)), (2, 2)),
        operands=(table, ((), "int32")),
        pools={1: [0, 1, 2]},
    )
    yield Case(
        name="dynamic_slice-whole",
        function=lambda x, i: lax.dynamic_slice(x, (i, np.int32(0)), (4, 2)),
        operands=(table, ((), "int32")),
    )
    yield Case(
        name="dynamic_slice-alike",
        function=lambda x, i: lax.dynamic_slice(
            jnp.broadcast_to(x[:1], (4, 3)), (np.int32(1), i), (2, 2)
        ),
        operands=(table, ((), "int32")),
        fixed={1: np.array(1)},
    )
    yield Case(
        name="dynamic_update_slice",
        function=lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(1))),
        operands=(table, ((2, 2), "float32"), ((), "int32")),
        fixed={2: np.array(1)},
    )
    yield Case(
        name="dynamic_update_slice-unknown",
        function=lambda x, u, i: lax.dynamic_update_slice(x, u, (i, np.int32(1))),
        operands=(table, ((2, 2), "float32"), ((), "int32")),
        pools={2: [0, 1, 2]},
        exact=False,
    )
    for name in ("set", "add", "multiply", "min", "max", "subtract"):
        unique = np.array([2, 0])
        yield Case(
            name=f"scatter-{name}",
            function=lambda x, u, i, n=name: getattr(x.at[i], n)(u),
            operands=(table, ((2, 3), "float32"), ((2,), "int32")),
            fixed={2: unique},
        )
        yield Case(
            name=f"scatter-{name}-twice",
            function=lambda x, u, i, n=name: getattr(x.at[i], n)(u),
            operands=(table, ((3, 3), "float32"), ((3,), "int32")),
            fixed={2: np.array([2, 0, 2])},
            exact=name in ("add", "subtract"),
        )
        yield Case(
            name=f"scatter-{name}-unknown",
            function=lambda x, u, i, n=name: getattr(x.at[i], n)(u),
            operands=(((4,), "float32"), ((2,), "float32"), ((2,), "int32")),
            pools={2: [0, 1, 2, 3]},
            exact=False,
        )
        yield Case(
            name=f"scatter-{name}-int",
            function=lambda x, u, i, n=name: getattr(x.at[i], n)(u),
            operands=(((4,), "int32"), ((3,), "int32"), ((3,), "int32")),
            fixed={2: np.array([2, 0, 2])},
            exact=False,
        )
    yield Case(
        name="scatter-drop",
        function=lambda x, u, i: x.at[i].set(u, mode="drop"),
        operands=(((4,), "float32"), ((2,), "float32"), ((2,), "int32")),
        fixed={2: np.array([9, 1])},
    )
    yield Case(
        name="scatter-clip",
        function=lambda x, u, i: x.at[i].set(u, mode="clip"),
        operands=(((4,), "float32"), ((2,), "float32"), ((2,), "int32")),
        fixed={2: np.array([9, 1])},
    )
    yield Case(
        name="scatter-windows",
        function=lambda x, u: x.at[1:3, :2].add(u),
        operands=(table, ((2, 2), "float32")),
    )
    yield Case(
        name="scatter-batched",
        function=lambda x, u, i: jax.vmap(lambda r, v, k: r.at[k].set(v))(x, u, i),
        operands=(table, ((4,), "float32"), ((4,), "int32")),
        fixed={2: np.array([0, 2, 1, 1])},
    )


def _control() -> Iterator[Case]:
    vector = ((4,), "float32")
    yield Case(
        name="scan",
        function=lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.float32(1), x),
        operands=(vector,),
    )
    yield Case(
        name="scan-reverse",
        function=lambda x: lax.scan(lambda c, y: (c + y, c - y), jnp.float32(1), x, reverse=True),
        operands=(vector,),
    )
    yield Case(
        name="scan-empty",
        function=lambda x: lax.scan(lambda c, y: (c + y, c), x[0], x[:0])[0],
        operands=(vector,),
    )
    yield Case(
        name="scan-const",
        function=lambda x, s: lax.scan(lambda c, i: (c + x[i] * s, x[i]), s, jnp.arange(3)),
        operands=(vector, ((), "float32")),
        exact=False,
    )
    yield Case(
        name="cond-known",
        function=lambda x: lax.cond(jnp.array(3) > 2, lambda y: y * 2, lambda y: y[::-1], x),
        operands=(vector,),
    )
    yield Case(
        name="cond",
        function=lambda p, x, y: lax.cond(p, lambda: x * 2, lambda: y - 1),
        operands=(((), "bool"), vector, vector),
    )
    yield Case(
        name="cond-agreed",
        function=lambda p, x: lax.cond(p, lambda: (jnp.float32(2), x), lambda: (jnp.float32(2), x)),
        operands=(((), "bool"), vector),
        exact=False,
    )
    yield Case(
        name="switch",
        function=lambda i, x: lax.switch(i, [lambda y: y, lambda y: y * 2, lambda y: y[::-1]], x),
        operands=(((), "int32"), vector),
        pools={0: [0, 1, 2, -4, 9]},
    )
    yield Case(
        name="switch-known",
        function=lambda i, x: lax.switch(i, [lambda y: y, lambda y: y * 2, lambda y: y[::-1]], x),
        operands=(((), "int32"), vector),
        fixed={0: np.array(7)},
    )
    yield Case(
        name="while-known",
        function=lambda x: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + x[s[0]]), (0, jnp.float32(0))
        ),
        operands=(vector,),
    )
    yield Case(
        name="while",
        function=lambda n, x: lax.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, s[1] * 2 + x[s[0]], s[2]),
            (0, jnp.float32(0), x[3]),
        ),
        operands=(((), "int32"), vector),
        pools={0: [0, 1, 2, 3]},
        exact=False,
    )
    yield Case(
        name="while-shift",
        function=lambda n, x: lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.roll(s[1], 1)), (0, x)
        ),
        operands=(((), "int32"), vector),
        pools={0: [0, 1, 2, 3]},
    )
    yield Case(
        name="while-bounds",
        function=lambda n, x: lax.while_loop(
            lambda s: s[0] < n,
            lambda s: (s[0] + 1, s[1] + np.int32(1), lax.max(s[1], x[0])),
            (0, x[0] & np.int32(1), x[1]),
        ),
        operands=(((), "int32"), ((2,), "int32")),
        pools={0: [0, 1, 2, 3]},
        exact=False,
        fine=True,
    )
    yield Case(
        name="fori",
        function=lambda x: lax.fori_loop(0, 3, lambda i, c: c.at[i + 1].add(c[i]), x),
        operands=(vector,),
    )
    yield Case(
        name="jit", function=jax.jit(lambda x: jax.jit(lambda y: y[::2])(x)), operands=(vector,)
    )
    yield Case(
        name="remat",
        function=lambda x, g: jax.vjp(jax.checkpoint(lambda y: jnp.sin(y) * y), x)[1](g),
        operands=(vector, vector),
        exact=True,
    )
    yield Case(
        name="custom_jvp", function=lambda x: jax.nn.relu(x) + jax.nn.silu(x), operands=(vector,)
    )
    yield Case(name="map", function=lambda x: lax.map(lambda y: y * 2, x), operands=(vector,))
    yield Case(
        name="associative_scan",
        function=lambda x: lax.associative_scan(jnp.add, x),
        operands=(vector,),
    )
    yield Case(
        name="platform_dependent",
        function=lambda x: lax.platform_dependent(x, cpu=lambda y: y * 2, default=lambda y: y * 2),
        operands=(vector,),
    )
    yield Case(
        name="vmap-cond",
        function=lambda p, x: jax.vmap(lambda q, y: lax.cond(q, lambda z: z, lambda z: -2 * z, y))(
            p, x
        ),
        operands=(((4,), "bool"), vector),
        exact=False,
    )

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return x * 2

    doubled.defvjp(lambda x: (x * 2, x), lambda x, g: (g * x,))
    yield Case(
        name="custom_vjp",
        function=lambda x, g: (doubled(x), jax.vjp(doubled, x)[1](g)),
        operands=(vector, vector),
    )


def _random() -> Iterator[Case]:
    vector = ((4,), "float32")
    yield Case(
        name="random-known-key",
        function=lambda x: x + jax.random.normal(jax.random.key(0), (4,)),
        operands=(vector,),
    )
    yield Case(
        name="random-of-input",
        function=lambda s, x: (
            x + jax.random.uniform(jax.random.fold_in(jax.random.key(1), s), (4,))
        ),
        operands=(((), "uint32"), vector),
    )
    yield Case(
        name="random-split",
        function=lambda s: jax.vmap(lambda k: jax.random.bits(k, (2,)))(
            jax.random.split(jax.random.key(s), 3)
        ),
        operands=(((), "uint32"),),
    )
    yield Case(
        name="random-legacy",
        function=lambda s: jax.random.uniform(jax.random.PRNGKey(s), (3,)),
        operands=(((), "uint32"),),
    )
    yield Case(
        name="random-wrapped",
        function=lambda d: jax.random.bits(jax.random.wrap_key_data(d), (3,)),
        operands=(((2,), "uint32"),),
    )
    yield Case(
        name="rng_bit_generator",
        function=lambda k: lax.rng_bit_generator(k, (3,))[1],
        operands=(((4,), "uint32"),),
        exact=False,
    )
    yield Case(
        name="permutation",
        function=lambda x: jax.random.permutation(jax.random.key(0), x),
        operands=(vector,),
        exact=False,
    )


def cases() -> Iterator[Case]:
    """All of them."""
    for family in (
        _unary,
        _binary,
        _select,
        _structural,
        _nibbles,
        _bounded,
        _reductions,
        _contractions,
        _indexing,
        _control,
        _random,
    ):
        yield from family()
