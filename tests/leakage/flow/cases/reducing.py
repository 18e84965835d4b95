"""Reductions, sorts, windows and sums of products."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.leakage.flow.cases.case import Case


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
        name="sort-two-keys-of-zeros",
        function=lambda a, b: lax.sort((a, b), dimension=0, num_keys=2),
        operands=(((3,), "float32"), ((3,), "float32")),
        pools={0: [0.0, -0.0, 1.0], 1: [0.0, 1.0, 2.0]},
        exact=False,
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


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _reductions()
    yield from _contractions()
