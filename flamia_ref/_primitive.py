"""A numerical function as one JAX primitive, so that who reads a program sees it whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from flamia_ref._backend import Array, is_jax, namespace, uses_jax

Function = TypeVar("Function", bound=Callable[..., Any])


_LANES = 1 << 14
_TILE = 128  # rows and columns of lanes that a CPU works on at a time: they fit its cache


def _tile_by_tile(function: Callable[..., Array], *operands: Array) -> Array:
    """`function` on tiles of the last two lane axes, one after another, several small matrices at a time.

    A CPU works several times faster on lanes that fit its cache, in numpy and in XLA.
    """
    *others, lanes = operands
    shape = lanes.shape
    most = (_TILE, _TILE)
    if len(shape) == 1:  # a row of dot products, as long as a tile
        others, lanes, most = [x[:, None] for x in others], lanes[None], (1, _LANES)
    whole = (int(np.prod(lanes.shape[:-2], dtype=np.int64)), *lanes.shape[-2:])
    if 0 in shape or (lanes.ndim == 2 and whole[1] <= most[0] and whole[2] <= most[1]):
        return function(*operands)
    at_once = max(1, _LANES // (whole[1] * whole[2]))
    axes = [_tiles(size, at_most) for size, at_most in zip(whole, (at_once, *most), strict=True)]
    starts = np.array(list(itertools.product(*(starts for starts, _ in axes))), dtype=np.int32)
    sizes = tuple(size for _, size in axes)
    laid_out = [_as_matrices(x, lanes.shape) for x in (*others, lanes[None])]

    def on_parts(parts: list[Array]) -> Array:
        if sizes[0] > 1:
            return function(*parts[:-1], parts[-1][0])
        # Fewer axes make faster code.
        return function(*(x[:, 0] for x in parts[:-1]), parts[-1][0, 0])[None]

    if not uses_jax(operands):
        result = np.empty(whole, dtype=np.uint32)
        for start in starts:
            place = tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))
            parts = [
                x[
                    :,
                    *(
                        here if extent > 1 else slice(None)
                        for here, extent in zip(place, x.shape[1:], strict=True)
                    ),
                ]
                for x in laid_out
            ]
            result[place] = on_parts(parts)
        return result.reshape(shape)
    import jax

    zero = np.int32(0)

    def tile(result: Array, start: Array) -> tuple[Array, None]:
        parts = []
        for x in laid_out:
            begin = [
                at if extent > 1 else zero for at, extent in zip(start, x.shape[1:], strict=True)
            ]
            extents = [min(size, extent) for size, extent in zip(sizes, x.shape[1:], strict=True)]
            parts.append(jax.lax.dynamic_slice(x, (zero, *begin), (x.shape[0], *extents)))
        return jax.lax.dynamic_update_slice(result, on_parts(parts), tuple(start)), None

    empty = jax.numpy.zeros(whole, dtype=np.uint32)
    return jax.lax.scan(tile, empty, starts)[0].reshape(shape)


def _tiles(extent: int, most: int) -> tuple[list[int], int]:
    """Where tiles begin that cover `extent`, and their size, at most `most`. The last one may overlap another."""
    count = -(-extent // most)
    size = -(-extent // count)
    return [min(index * size, extent - size) for index in range(count)], size


def _as_matrices(x: Array, shape: tuple[int, ...]) -> Array:
    """An operand with all axes between its first and its last two made one, of extent 1 where `x` is the same along."""
    between, wanted = x.shape[1:-2], shape[:-2]
    if any(extent != 1 for extent in between) and between != wanted:
        x = namespace(x).broadcast_to(x, (x.shape[0], *wanted, *x.shape[-2:]))
    count = int(np.prod(x.shape[1:-2], dtype=np.int64))
    return x.reshape((x.shape[0], count, *x.shape[-2:]))


def lane_primitive(name: str, function: Function) -> Function:
    """`function(x, ..., **static)` as one JAX primitive named `name`; plain under numpy.

    The last operand holds the lanes and the result is like it: uint32 of its shape. The other operands have one leading
    axis of their own, and behind it axes that broadcast against the lanes. `function` keeps to this for any number of
    lane axes, so that batching adds one.
    """

    @functools.cache
    def primitive() -> Any:
        import jax
        from jax.extend.core import Primitive
        from jax.interpreters import batching, mlir

        def anywhere(*operands: Any, **static: Any) -> Any:
            with jax.enable_x64(True):
                return function(*operands, **static)

        def on_cpu(*operands: Any, **static: Any) -> Any:
            with jax.enable_x64(True):
                return _tile_by_tile(functools.partial(function, **static), *operands)

        def batched(operands: Sequence[Any], axes: Sequence[Any], **static: Any) -> tuple[Any, int]:
            size = next(
                x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None
            )
            last = len(operands) - 1
            moved = [
                jax.numpy.expand_dims(x, min(1, last - place))
                if axis is None
                else jax.numpy.moveaxis(x, axis, min(1, last - place))
                for place, (x, axis) in enumerate(zip(operands, axes, strict=True))
            ]
            moved[last] = jax.numpy.broadcast_to(moved[last], (size, *moved[last].shape[1:]))
            return made.bind(*moved, **static), 0

        made: Any = cast(Any, Primitive)(name)
        made.def_impl(anywhere)
        made.def_abstract_eval(
            lambda *operands, **_: jax.core.ShapedArray(operands[-1].shape, np.uint32)
        )
        mlir.register_lowering(made, mlir.lower_fun(anywhere, multiple_results=False))
        mlir.register_lowering(made, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")
        batching.primitive_batchers[made] = batched
        return made

    @functools.wraps(function)
    def call(*operands: Any, **static: Any) -> Any:
        if not uses_jax(operands):
            return _tile_by_tile(functools.partial(function, **static), *operands)
        jnp = namespace(*operands)
        return primitive().bind(*(jnp.asarray(x) for x in operands), **static)

    return cast(Function, call)


def _identity(name: str) -> Any:
    """A primitive that gives flags back."""
    import jax
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    made: Any = cast(Any, Primitive)(name)
    made.def_impl(lambda flags, **_: flags)
    made.def_abstract_eval(lambda flags, **_: jax.core.ShapedArray(flags.shape, flags.dtype))
    mlir.register_lowering(made, lambda _, flags, **__: [flags])
    batching.primitive_batchers[made] = lambda operands, axes, **static: (
        made.bind(*operands, **static),
        axes[0],
    )
    return made


@functools.cache
def _special() -> Any:
    return _identity("special")


@functools.cache
def _shortcut() -> Any:
    return _identity("shortcut")


def special(flags: Array) -> Array:
    """`flags`, which say where values are NaN, infinite or a negative zero: under JAX the primitive `special`, so that
    who reads a program for other values knows that they are false there."""
    return _special().bind(flags) if is_jax(flags) else flags


def shortcut(flag: Array, *, general: bool) -> Array:
    """`flag`, by which one of two ways to the same result is taken, of which that of `general` is right whatever the
    flag is: under JAX the primitive `shortcut`, so that who reads a program may look at that way alone."""
    return _shortcut().bind(flag, general=general) if is_jax(flag) else flag
