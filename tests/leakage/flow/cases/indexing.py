"""Gathers, scatters and slices."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.leakage.flow.cases.case import Case


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
        name="scatter-apply",
        function=lambda x, i: x.at[i].apply(lambda one: 2 * one),
        operands=(table, ((2,), "int32")),
        fixed={1: np.array([2, 0])},
    )
    yield Case(
        name="scatter-apply-unknown",
        function=lambda x, i: x.at[i].apply(lambda one: 2 * one),
        operands=(((4,), "float32"), ((2,), "int32")),
        pools={1: [0, 1, 2, 3]},
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


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _indexing()
