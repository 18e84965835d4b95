"""A numerical function as one JAX primitive, so that who reads a program sees it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from flamia_ref._backend import Array, namespace, uses_jax

Function = TypeVar("Function", bound=Callable[..., Any])


def _matrix_by_matrix(function: Callable[..., Array], *operands: Array) -> Array:
    """`function` on the last two lane axes, one after another over the axes before them.

    A CPU works several times faster on lanes that fit its cache, in numpy and in XLA.
    """
    *others, lanes = operands
    shape = lanes.shape
    if len(shape) <= 2:
        return function(*operands)
    xp = namespace(*operands)
    count = int(np.prod(shape[:-2], dtype=np.int64))
    rows = []
    for x in others:
        wide = xp.broadcast_to(x, (x.shape[0], *shape[:-2], *x.shape[-2:]))
        rows.append(xp.moveaxis(wide.reshape(x.shape[0], count, *x.shape[-2:]), 1, 0))
    rows.append(lanes.reshape(count, *shape[-2:]))
    if not uses_jax(operands):
        results = [function(*(x[at] for x in rows)) for at in range(count)]
        return np.array(results, dtype=np.uint32).reshape(shape)
    import jax

    return jax.lax.map(lambda each: function(*each), tuple(rows)).reshape(shape)


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
                return _matrix_by_matrix(functools.partial(function, **static), *operands)

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
            return _matrix_by_matrix(functools.partial(function, **static), *operands)
        jnp = namespace(*operands)
        return primitive().bind(*(jnp.asarray(x) for x in operands), **static)

    return cast(Function, call)
