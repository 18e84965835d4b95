"""float32 bit patterns that find faults, and the ways to run a function on them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

Words = npt.NDArray[np.uint32]

_MAGNITUDES = (
    0x00000000, 0x00000001, 0x00000002, 0x00000003,              # zero, the smallest subnormals
    0x003FFFFF, 0x00400000, 0x007FFFFE, 0x007FFFFF,              # the largest
    0x00800000, 0x00800001, 0x00FFFFFF, 0x01000000, 0x01000001,  # the smallest normal binades
    0x0C800000, 0x1F800000, 0x20000001, 0x33000000, 0x33800000,  # 2^-102, 2^-64, 2^-25, 2^-24
    0x33800001, 0x34000000, 0x3EFFFFFF, 0x3F000000, 0x3F000001,
    0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x40400000,  # 1, 1.5, 3
    0x40490FDB, 0x4B000001, 0x4B7FFFFF, 0x4B800000, 0x4E800000,  # 2^23 + 1, 2^24 - 1, 2^24, 2^30
    0x4F000000, 0x5F800000, 0x5F800001, 0x73000000, 0x73800000,  # 2^31, 2^64, half an ulp of 2^127
    0x7E800000, 0x7F000000, 0x7F000001, 0x7F7FFFFE, 0x7F7FFFFF,  # 2^126, 2^127, the largest
    0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,              # infinity, NaN
)  # fmt: skip
SPECIAL: Words = np.array([m | s for m in _MAGNITUDES for s in (0, 1 << 31)], dtype=np.uint32)


def pairs() -> tuple[Words, Words]:
    """Every pair of special operands."""
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    return a.ravel(), b.ravel()


def exponents(low: int, high: int) -> Callable[[np.random.Generator, int], Words]:
    """Operands of either sign with biased exponents in low..high - 1."""

    def draw(random: np.random.Generator, count: int) -> Words:
        magnitude = random.integers(low << 23, high << 23, count, dtype=np.uint32)
        return magnitude | (random.integers(0, 2, count, dtype=np.uint32) << np.uint32(31))

    return draw


def arbitrary(random: np.random.Generator, count: int) -> Words:
    return random.integers(0, 1 << 32, count, dtype=np.uint32)


KINDS: dict[str, Callable[[np.random.Generator, int], Words]] = {
    "normal": exponents(97, 158),
    "arbitrary": arbitrary,
    "subnormal": exponents(0, 3),        # sums at the edge of the subnormals
    "factors": exponents(52, 76),        # products there
}  # fmt: skip


def drawn(kind: str, operands: int, count: int, seed: int) -> list[Words]:
    """Operands of one kind, with some special ones and some near repeats, so that sums cancel."""
    random = np.random.default_rng([seed, len(kind)])
    drawn = [KINDS[kind](random, count) for _ in range(operands)]
    for words in drawn:
        words[: count // 50] = random.choice(SPECIAL, count // 50)
        random.shuffle(words)
    if operands > 1:
        some = slice(count // 50, count // 10)
        drawn[-1][some] = (
            drawn[0][some]
            ^ np.uint32(1 << 31)
            ^ random.integers(0, 4, drawn[0][some].shape, dtype=np.uint32)
        )
    return drawn


def scanned(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` on each eighth of its operands inside `jax.lax.scan`."""
    split = [x.reshape(8, -1) for x in operands]

    def step(carry: Any, x: Any) -> Any:
        return carry, function(*x)

    results = jax.lax.scan(step, jnp.int32(0), split)[1]
    return jax.tree.map(lambda x: x.reshape(-1), results)


def mapped(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` under `jax.vmap` over two leading axes."""
    split = [x.reshape(8, 10, -1) for x in operands]
    results = jax.vmap(jax.vmap(function))(*split)
    return jax.tree.map(lambda x: x.reshape(-1), results)


MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda function, *operands: function(*operands),
    "jit": lambda function, *operands: jax.jit(function)(*operands),
    "vmap": mapped,
    "jit of vmap": lambda function, *operands: jax.jit(lambda *x: mapped(function, *x))(*operands),
    "scan": scanned,
}
"""Ways to run an elementwise function on JAX arrays whose size is a multiple of 80."""

in_every_mode = pytest.mark.parametrize(
    ("mode", "x64"),
    [
        *((mode, False) for mode in MODES),
        ("jit", True),
        *(pytest.param(mode, True, marks=pytest.mark.nightly) for mode in MODES if mode != "jit"),
    ],
)
"""Each with 64-bit types off, and with them on; of the latter one by day."""


def run(mode: str, x64: bool, function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of JAX copies of `operands`, with the caller's 64-bit setting on or off."""
    with jax.enable_x64(x64):
        results = MODES[mode](function, *(jnp.asarray(x) for x in operands))
        leaves = jax.tree.leaves(results)
        assert all(isinstance(leaf, jax.Array) for leaf in leaves)
        assert bool(jax.config.jax_enable_x64) is x64
        return jax.tree.map(np.asarray, results)


def differing(actual: Any, expected: Any, *operands: Any) -> str:
    """Nothing if two arrays of bits are equal, else the first operands where they are not."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    places = np.flatnonzero(actual != expected)
    if not places.size:
        return ""
    first = places[0]
    given = ", ".join(hex(int(x[first])) for x in operands)
    wrong, right = int(actual[first]), int(expected[first])
    return f"{places.size} differ, first at ({given}): {wrong:#x}, expected {right:#x}"
