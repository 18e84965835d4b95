"""Every layout with JAX arrays, and with numpy arrays that lie in memory in unusual ways."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.formats import layout

SHAPE = (2, 130, 48)
CODES = np.random.default_rng(3).integers(0, 64, SHAPE, np.uint8)


def _forms() -> dict[str, tuple[Callable[[Any], Any], Any]]:
    forms: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "pack_fp4": (layout.pack_fp4, CODES & 15),
        "pack_fp6": (layout.pack_fp6, CODES),
        "pack_fp6_b6x16_p32": (layout.pack_fp6_b6x16_p32, CODES),
        "unpack_fp4": (layout.unpack_fp4, CODES * 3),
        "unpack_fp6": (layout.unpack_fp6, CODES * 3),
        "unpack_fp6_b6x16_p32": (layout.unpack_fp6_b6x16_p32, CODES * 3),
    }
    tiles: dict[str, tuple[Any, Any]] = {
        "128x4": (layout.tile_scales_128x4, layout.untile_scales_128x4),
        "128x4 column_wise": tuple(
            functools.partial(call, orientation="column_wise", order="planes_first")
            for call in (layout.tile_scales_128x4, layout.untile_scales_128x4)
        ),
        "128x4 planes_last": tuple(
            functools.partial(call, order="planes_last")
            for call in (layout.tile_scales_128x4, layout.untile_scales_128x4)
        ),
        "8x4": (layout.tile_scales_8x4, layout.untile_scales_8x4),
        "8x4 column_wise": tuple(
            functools.partial(call, orientation="column_wise")
            for call in (layout.tile_scales_8x4, layout.untile_scales_8x4)
        ),
        "words": (layout.pack_scales_int32, layout.unpack_scales_int32),
    }
    scales = CODES * np.uint8(5)  # above 127 too: words are negative
    for name, (forward, backward) in tiles.items():
        forms[name] = (forward, scales)
        forms[f"{name} back"] = (functools.partial(backward, shape=SHAPE), forward(scales))
    return forms


FORMS = _forms()
# Of each kind one daily, words with 64-bit types too.
DAILY = {(name, False) for name in ("pack_fp4", "unpack_fp6_b6x16_p32", "128x4 column_wise back")}
DAILY |= {("8x4", False), ("words", True), ("words back", True)}


@pytest.mark.parametrize(
    ("name", "x64"),
    [
        pytest.param(name, x64, marks=() if (name, x64) in DAILY else pytest.mark.nightly)
        for name in FORMS
        for x64 in (False, True)
    ],
)
def test_jax_gives_the_same(name: str, x64: bool) -> None:
    """Eagerly, in the user's jit, and in vmap, with 64-bit types off and on."""
    call, x = FORMS[name]
    ours = call(x)
    assert isinstance(ours, np.ndarray)
    with jax.enable_x64(x64):
        given = jnp.asarray(x)
        batched = jax.vmap(call)(jnp.stack([given, given]))[1]
        for theirs in (call(given), jax.jit(call)(given), batched):
            assert isinstance(theirs, jax.Array)
            assert theirs.dtype == ours.dtype
            np.testing.assert_array_equal(np.asarray(theirs), ours)


@pytest.mark.parametrize("name", FORMS)
def test_memory_order_of_the_input_does_not_matter(name: str) -> None:
    call, x = FORMS[name]
    expected = call(x)
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    fixed = x.copy()
    fixed.flags.writeable = False
    reverse = np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    swapped = np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)
    for given in (np.asfortranarray(x), wide[..., ::2], fixed, reverse, swapped):
        before = given.copy()
        found = call(given)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(given, before)
        # Kernels take a pointer: the bytes must lie as the axes say.
        assert found.flags.c_contiguous
        assert found.flags.writeable
        assert not np.may_share_memory(found, given)


@pytest.mark.parametrize(
    ("call", "shape"),
    [(layout.untile_scales_8x4, (8, 4)), (layout.untile_scales_8x4, (64, 4))]
    + [(layout.untile_scales_128x4, (128, 4))],
)
def test_results_are_not_views(call: Callable[..., Any], shape: tuple[int, int]) -> None:
    """One column of tiles of 8x4 lies in memory as its scales do."""
    tiled = np.arange(shape[0] * shape[1], dtype=np.uint8)
    found = call(tiled, shape)
    before = found.copy()
    tiled[:] = 0
    np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize("name", [name for name in FORMS if "back" in name])
def test_jax_refuses_the_same_shapes(name: str) -> None:
    """Shapes are known while a program is traced."""
    call, stored = FORMS[name]
    for convert in (jnp.asarray, np.asarray):
        with pytest.raises(ValueError, match="scales have shape"):
            call(convert(stored)[..., 1:])
    with pytest.raises(ValueError, match="scales have shape"):
        jax.jit(call)(jnp.asarray(stored)[..., 1:])
    for pack in (layout.pack_fp4, layout.pack_fp6, layout.unpack_fp6, layout.pack_fp6_b6x16_p32):
        with pytest.raises(ValueError, match="the last axis must be"):
            jax.jit(pack)(jnp.zeros((2, 7), jnp.uint8))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint32", ">u2", "int64", "uint64"])
def test_integers_of_any_width_are_codes(dtype: str) -> None:
    x = CODES[:, :, :16].astype(dtype)
    for call in (layout.pack_fp6, layout.tile_scales_128x4, layout.pack_scales_int32):
        np.testing.assert_array_equal(call(x), call(CODES[:, :, :16]))
