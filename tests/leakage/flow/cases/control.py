"""Loops, branches, calls and random numbers."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.leakage.flow.cases.case import Case


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
    yield from _control()
    yield from _random()
