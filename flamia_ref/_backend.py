"""All the compatibility there is between numpy and JAX.

A numerical function of this package is written once, for the array library of its input. Under numpy it runs as it
reads. Under JAX it is compiled, batched and traced. What the two libraries spell differently, or get wrong, is here and
nowhere else:

- XLA on CPU changes float32 results (it contracts ``a * b - c`` and flushes subnormals), so array code handles a
  float32 value as its uint32 bits; `flamia_ref._float32` has the operations.
- 64-bit types exist in JAX only inside `jit` of this module, which enters them as a scope and leaves the caller's
  setting alone. No 64-bit JAX array leaves a public function.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, TypeVar, cast, overload

import ml_dtypes
import numpy as np

Array = Any  # a numpy or a JAX array
Function = TypeVar("Function", bound=Callable[..., Any])

_BITS = {
    np.dtype(np.float64): np.uint64,
    np.dtype(np.float32): np.uint32,
    np.dtype(np.float16): np.uint16,
    np.dtype(ml_dtypes.bfloat16): np.uint16,
}


def is_jax(x: object) -> bool:
    """Whether `x` is a JAX array or tracer. Does not import JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_traced(x: object) -> bool:
    """Whether `x` is a JAX tracer: an array whose values are not known yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def plain(name: str, x: Any) -> Array:
    """`x` itself if it is a JAX array, else `numpy.asarray(x)`.

    Raises TypeError for masked arrays, whose mask would be lost, and for matrices, which have no third axis.
    """
    if is_jax(x):
        return x
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(
            f"{name} is a {type(x).__name__}; pass a plain array, such as numpy.asarray of it after filling the mask"
        )
    return np.asarray(x)


def device(x: object) -> object | None:
    """The device that a JAX array is on, or None for numpy arrays, tracers and arrays spread over devices."""
    if not is_jax(x) or is_traced(x):
        return None
    devices = cast(Any, x).devices()
    return next(iter(devices)) if len(devices) == 1 else None


def is_committed(x: object) -> bool:
    """Whether `x` is a JAX array bound to its device, not one that JAX may move to another."""
    return device(x) is not None and bool(cast(Any, x).committed)


def _is_tracing() -> bool:
    """Whether a JAX program is being traced, which then takes in whatever is computed, of known values too."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(jax.device_put(np.int32(0)), jax.core.Tracer)


def on_host(*xs: object) -> bool:
    """Whether all `xs` have values that the CPU holds and can compute with: numpy arrays, or JAX arrays on a CPU while
    no program is being traced."""
    places = [device(x) for x in xs if is_jax(x)]
    if places and _is_tracing():
        return False
    return all(place is not None and cast(Any, place).platform == "cpu" for place in places)


def _leaves(x: object) -> Iterable[object]:
    if isinstance(x, (tuple, list)):
        for item in x:
            yield from _leaves(item)
    else:
        yield x


def uses_jax(*xs: object) -> bool:
    """Whether a JAX array is among `xs`, looking into tuples and lists."""
    return any(is_jax(leaf) for leaf in _leaves(xs))


def namespace(*xs: object) -> ModuleType:
    """The array library that `xs` belong to: `jax.numpy` if any of them is a JAX array, else `numpy`."""
    if uses_jax(*xs):
        import jax.numpy

        return jax.numpy
    return np


@overload
def jit(function: Function) -> Function: ...


@overload
def jit(*, static: Sequence[str]) -> Callable[[Function], Function]: ...


def jit(function: Any = None, *, static: Sequence[str] = ()) -> Any:
    """Decorate a numerical function: plain on numpy arrays, compiled with 64-bit types in scope on JAX arrays.

    `static` names keyword arguments that select code rather than carry numbers; they must be hashable.
    """
    if function is None:
        return lambda function: _jitted(function, static)
    return _jitted(function, static)


def _jitted(function: Function, static: Sequence[str]) -> Function:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        import jax

        _refuse_fast_math()
        return cast("Callable[..., Any]", jax.jit(function, static_argnames=tuple(static)))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not uses_jax(args, list(kwargs.values())):
            with np.errstate(all="ignore"):
                return function(*args, **kwargs)
        import jax

        with jax.enable_x64(True):
            return compiled()(*args, **kwargs)

    return cast(Function, call)


def _refuse_fast_math() -> None:
    """Raise RuntimeError where XLA was told to compute float64 otherwise than IEEE 754 says."""
    for flag in os.environ.get("XLA_FLAGS", "").split():
        name, _, value = flag.partition("=")
        if name == "--xla_cpu_enable_fast_math" and value.lower() not in ("false", "0"):
            raise RuntimeError(
                f"XLA_FLAGS has {flag}, under which float64 sums are wrong; take it out, or pass numpy arrays"
            )


def bits(x: Array) -> Array:
    """The bit patterns of a float array, as unsigned integers of the same width."""
    unsigned = _BITS[np.dtype(x.dtype)]
    if is_jax(x):
        import jax

        return jax.lax.bitcast_convert_type(x, unsigned)
    return x.view(unsigned)


def from_bits(x: Array, dtype: Any) -> Array:
    """The float array of `dtype` that has the bit patterns `x`."""
    if is_jax(x):
        import jax

        return jax.lax.bitcast_convert_type(x, dtype)
    return np.asarray(x).view(dtype)


def reinterpret(x: Array, integer: Any) -> Array:
    """The integers of `x` as another integer type of the same width, modulo 2^width; no copy in numpy."""
    return x.astype(integer) if is_jax(x) else x.view(integer)


def bit_length(x: Array) -> Array:
    """Bits needed to write each uint32 of `x`: int32, 0 for 0."""
    if is_jax(x):
        import jax

        return 32 - jax.lax.clz(x).astype(np.int32)
    return np.frexp(x.astype(np.float64))[1].astype(np.int32)


def gather(x: Array, index: Array, axis: int = 0) -> Array:
    """Entries of `x` along `axis` at `index`. A host index is checked; a computed one is in range by construction."""
    if not is_jax(index):
        index = np.asarray(index)
        size = x.shape[axis]
        if index.size and (int(index.min()) < 0 or int(index.max()) >= size):
            raise IndexError(f"index {int(index.min())}..{int(index.max())} outside 0..{size - 1}")
    if uses_jax(x, index):
        import jax.numpy as jnp

        return jnp.take(jnp.asarray(x), jnp.asarray(index), axis=axis, mode="clip")
    return np.take(x, index, axis=axis)


def exact_contraction(a: Array, b: Array) -> Array:
    """The sum over the first axis of a * b, for floats whose every partial sum is exact, so that no order matters.

    It is one matrix product where the other axes are those of one, [K, ..., m, 1] and [K, ..., 1, n].
    """
    if a.ndim < 3 or a.shape[-1] != 1 or b.shape[-2] != 1 or a.shape[1:-2] != b.shape[1:-2]:
        return _sum_of_products(a, b)
    return _matrix_product(a, b)


def _sum_of_products(a: Array, b: Array) -> Array:
    return functools.reduce(operator.add, (a[k] * b[k] for k in range(a.shape[0])))


def _matrix_product(a: Array, b: Array) -> Array:
    xp = namespace(a, b)
    left, right = xp.moveaxis(a[..., 0], 0, -1), xp.moveaxis(b[..., 0, :], 0, -2)
    if xp is np:
        return left @ right
    return xp.matmul(left, right, precision="highest")


def apart(x: Any) -> Any:
    """`x`, arrays that XLA shall compute in loops of their own, before those that use them; nothing in numpy.

    One loop over arrays of several widths runs at the pace of the widest, and one that slices by a computed index may
    not be vectorised at all.
    """
    if not uses_jax(x):
        return x
    import jax

    barrier: Callable[[Any], Any] = cast(Any, jax.lax).optimization_barrier
    return barrier(x)


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, xs: Sequence[Array], *, unroll: int = 1
) -> Any:
    """The state carried over the leading axis of all `xs`: a Python loop in numpy, `jax.lax.scan` in JAX.

    `unroll` steps are one turn of JAX's loop.
    """
    if uses_jax(state, xs):
        import jax

        return jax.lax.scan(step, state, tuple(xs), unroll=unroll)[0]
    for index in range(len(xs[0])):
        state, _ = step(state, tuple(x[index] for x in xs))
    return state


def cond(
    predicate: Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any
) -> Any:
    """`if_true(*operands)` or `if_false(*operands)` by one boolean: an `if` in numpy, `jax.lax.cond` in JAX."""
    if uses_jax(predicate, operands):
        import jax

        return jax.lax.cond(predicate, if_true, if_false, *operands)
    return if_true(*operands) if predicate else if_false(*operands)


def without_gradient(x: Array, message: str) -> Array:
    """`x`, for a function whose derivative would silently be zero: differentiating it raises TypeError(`message`)."""
    if not is_traced(x):
        return x
    import jax

    @jax.custom_jvp
    def identity(x: Array) -> Array:
        return x

    @identity.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(message)

    return identity(x)


def register_value_type(cls: type, data: Sequence[str], meta: Sequence[str]) -> None:
    """Make the dataclass `cls` a pytree with array fields `data`, once JAX is in use; before that, do nothing."""
    jax = sys.modules.get("jax")
    if jax is not None and cls not in _VALUE_TYPES:
        jax.tree_util.register_dataclass(cls, data_fields=list(data), meta_fields=list(meta))
        _VALUE_TYPES.add(cls)


_VALUE_TYPES: set[type] = set()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def put(x: Array, library: ModuleType, device: object | None = None) -> Array:
    """A host array as an array of `library`, on a JAX device, without compiling anything for its shape."""
    if library is np:
        return x
    import jax

    return jax.device_put(x, device)


def host(x: Array) -> np.ndarray[Any, Any]:
    """`x` as a numpy array. `x` must not be traced."""
    return np.asarray(x)
