"""Primitives that move elements, and words put together of several."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.leakage.flow.cases.case import Case, dtype_of


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


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _structural()
    yield from _nibbles()
