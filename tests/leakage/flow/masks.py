"""Attention as users write it, in a dozen ways, and what it may depend on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.interpreter import RULES, Interpreter
from flamia_ref.leakage.flow.sets import Sets
from flamia_ref.leakage.flow.value import unknown
from flamia_ref.leakage.legal import LegalPairs
from flamia_ref.packing.documents import Documents
from flamia_ref.packing.mask import Mask

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


def mask_of(lengths: Sequence[int], *, causal: bool = True, window: Any = None) -> Mask:
    documents = Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))
    return Mask.of(documents, documents, causal=causal, window=window, alignment="bottom_right")


def visible(mask: Mask) -> Array:
    """Which keys each query sees [tokens, tokens]."""
    tokens = mask.queries.tokens
    seen = np.zeros((tokens, tokens), dtype=np.bool_)
    for index, (rows, columns) in enumerate(mask):
        seen[rows, columns] = mask.visible(index)
    return seen


def dependencies(
    function: Function,
    shapes: Sequence[tuple[int, ...]],
    *,
    axes: Sequence[int] | None = None,
    out_axes: Sequence[int] | None = None,
    dtype: Any = np.float32,
    strict: bool = False,
    rules: Any = RULES,
) -> tuple[list[list[Array]], Context]:
    """For each result and operand which tokens depend on which [tokens, tokens]; tokens are an axis of each."""
    axes = axes or [0] * len(shapes)
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    counts = [shape[axis] for shape, axis in zip(shapes, axes, strict=True)]
    context = Context(Sets(sum(counts)), strict=strict)
    operands, start = [], 0
    for shape, axis, count in zip(shapes, axes, counts, strict=True):
        ids = context.sets.singles(start + np.arange(count))
        start += count
        operands.append(
            unknown(
                shape,
                np.dtype(dtype),
                ids.reshape([-1 if a == axis else 1 for a in range(len(shape))]),
            )
        )
    results = Interpreter(context, rules).run(program, operands)
    found = []
    for place, flow in enumerate(results):
        axis = 0 if out_axes is None else out_axes[place]
        ids = np.moveaxis(flow.full_ids(), axis, 0).reshape(flow.shape[axis], -1)
        members = context.sets.members(context.sets.union_over(ids, [1])[:, 0])
        found.append(np.split(members, np.cumsum(counts)[:-1], axis=1))
    return found, context


def expected(mask: Mask, outputs: Sequence[str]) -> dict[tuple[str, str], Array]:
    legal = LegalPairs(mask)
    return {(o, i): legal.dense(o, i) for o in outputs for i in ("q", "k", "v", "dout")}


def differences(
    found: list[list[Array]], mask: Mask, outputs: Sequence[str] = ("out",)
) -> dict[str, tuple[int, int]]:
    """Illegal and missing pairs of each output and input where there are any."""
    legal = LegalPairs(mask)
    result = {}
    for name, of_output in zip(outputs, found, strict=True):
        for operand, pairs in zip(("q", "k", "v", "dout"), of_output, strict=False):
            good = legal.dense(name, operand)
            illegal, missing = int((pairs & ~good).sum()), int((good & ~pairs).sum())
            if illegal or missing:
                result[f"{name}<-{operand}"] = illegal, missing
    return result


# Forward, [tokens, channels] each.


def plain(seen: Array, fill: float = -np.inf) -> Function:
    """The mask by a select before the softmax."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = jnp.where(seen, q @ k.T, jnp.float32(fill))
        return jax.nn.softmax(s, axis=-1) @ v

    return forward


def additive(seen: Array, fill: float = -np.inf) -> Function:
    bias = np.where(seen, 0.0, fill).astype(np.float32)

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.T * np.float32(0.125) + bias
        p = jnp.exp(s - s.max(axis=-1, keepdims=True))
        return (p / p.sum(axis=-1, keepdims=True)) @ v

    return forward


def from_segments(segments: Array) -> Function:
    """Causal within documents, by segment ids that the program compares itself."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        place = jnp.arange(q.shape[0])
        ids = jnp.asarray(segments)
        seen = (ids[:, None] == ids[None, :]) & (place[:, None] >= place[None, :])
        s = jnp.where(seen, q @ k.T, -jnp.inf)
        return jax.nn.softmax(s, axis=-1, where=seen) @ v

    return forward


def flash(seen: Array, tile: int, loop: str) -> Function:
    """Tiles of keys with a running maximum, by `lax.scan`, or by `fori_loop` and `dynamic_slice`."""
    tokens = len(seen)
    hidden = jnp.asarray(~seen)

    def update(state: Any, q: Any, keys: Any, values: Any, masked: Any) -> Any:
        m, total, out = state
        s = jnp.where(masked, -jnp.inf, q @ keys.T)
        new = jnp.maximum(m, s.max(axis=-1))
        safe = jnp.where(new == -jnp.inf, jnp.float32(0), new)
        p = jnp.where(masked, jnp.float32(0), jnp.exp(s - safe[:, None]))
        scale = jnp.where(m == -jnp.inf, jnp.float32(0), jnp.exp(m - safe))
        return new, total * scale + p.sum(axis=-1), out * scale[:, None] + p @ values

    def start(q: Any) -> Any:
        none = jnp.full(tokens, -jnp.inf, dtype=np.float32)
        return none, jnp.zeros(tokens, np.float32), jnp.zeros(q.shape, np.float32)

    def by_scan(q: Any, k: Any, v: Any) -> Any:
        parts = (
            k.reshape(-1, tile, k.shape[1]),
            v.reshape(-1, tile, v.shape[1]),
            hidden.reshape(tokens, -1, tile).transpose(1, 0, 2),
        )
        state, _ = lax.scan(lambda state, x: (update(state, q, *x), None), start(q), parts)
        return state[2] / state[1][:, None]

    def by_fori(q: Any, k: Any, v: Any) -> Any:
        def body(index: Any, state: Any) -> Any:
            at = index * tile
            keys, values = (lax.dynamic_slice_in_dim(x, at, tile) for x in (k, v))
            return update(
                state, q, keys, values, lax.dynamic_slice_in_dim(hidden, at, tile, axis=1)
            )

        _, total, out = lax.fori_loop(0, tokens // tile, body, start(q))
        return out / total[:, None]

    return by_scan if loop == "scan" else by_fori


def with_gradients(forward: Function) -> Function:
    """O, dQ, dK and dV."""

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(forward, q, k, v)
        return out, *back(dout)

    return both
