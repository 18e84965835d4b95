"""The program that a proof reads: the simulator by a recipe, or a function of a user, as one traced JAX program."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from flamia_ref import kernels
from flamia_ref._errors import line, shown
from flamia_ref.attention import Recipe, backward, forward
from flamia_ref.leakage.legal import LEGAL, QUERY_SIDE
from flamia_ref.packing.mask import Mask

INPUTS = ("q", "k", "v", "dout")
OUTPUTS = tuple(LEGAL)
GRADIENTS = ("dq", "dk", "dv")
_MOST = 1024  # heads and channels
_ROWS_LAST = ("lse", "delta")  # [heads, tokens]; all else is [tokens, heads, channels]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """The shapes and the attention that a proof is of.

    Attributes:
        mask: which keys each query sees.
        heads, kv_heads: of q and dout, of k and v.
        head_dim, value_dim: channels of q and k, of v and dout.
        softmax_scale: 1 / sqrt(head_dim) by default.
        softcap: of the scores, None for none.
        sink: whether each head has a sink. Its logits are no tokens: nothing is said of them.
        dtype: of the inputs.
    """

    mask: Mask
    heads: int = 1
    kv_heads: int = 1
    head_dim: int
    value_dim: int
    softmax_scale: float
    softcap: float | None = None
    sink: bool = False
    dtype: str = "bfloat16"

    def tokens(self, name: str) -> int:
        """Tokens of an input or output."""
        return (self.mask.queries if name in QUERY_SIDE else self.mask.keys).tokens

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or output."""
        heads = self.heads if name in QUERY_SIDE else self.kv_heads
        if name in _ROWS_LAST:
            return (heads, self.tokens(name))
        channels = self.head_dim if name in ("q", "k", "dq", "dk") else self.value_dim
        return (self.tokens(name), heads, channels)

    def token_axis(self, name: str) -> int:
        """The axis of the tokens of an input or output."""
        return 1 if name in _ROWS_LAST else 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A traced program.

    Attributes:
        inputs: the names of its operands, in their order.
        outputs: the names of its results, in their order.
        program: the closed jaxpr.
        gradients: where its gradients come from.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    program: Any
    gradients: str


def of_recipe(recipe: Recipe, shapes: Shapes, *, with_backward: bool) -> Program:
    """The simulator as it is, traced."""
    mask = shapes.mask
    keywords: dict[str, Any] = {
        "cu_seqlens": np.array(mask.queries.offsets, dtype=np.int32),
        "causal": mask.causal,
        "alignment": mask.alignment,
        "window": None if mask.window == (None, None) else mask.window,
        "softmax_scale": shapes.softmax_scale,
        "softcap": shapes.softcap,
    }
    if not mask.same_tokens:
        keywords["cu_seqlens_k"] = np.array(mask.keys.offsets, dtype=np.int32)

    def run(q: Any, k: Any, v: Any, *rest: Any) -> dict[str, Any]:
        dout, sink = (rest[0] if with_backward else None), (rest[-1] if shapes.sink else None)
        first = forward(q, k, v, recipe, sink=sink, **keywords)
        results = {"out": first.out, "lse": first.lse}
        if with_backward:
            second = backward(q, k, v, dout, first, trace=("delta",))
            results |= {"delta": second.trace["delta"]}
            results |= {name: getattr(second, name) for name in GRADIENTS}
        return results

    return _traced(
        run,
        f"recipe {recipe.name!r}",
        shapes,
        with_backward,
        ["the backward" if with_backward else ""],
    )


def of_function(function: Callable[..., Any], shapes: Shapes, *, with_backward: bool) -> Program:
    """A function of a user, traced; its gradients by `jax.vjp` where it does not take `dout`.

    Raises ValueError where it cannot be called or traced, or where its results have other names or shapes.
    """
    taken, own_backward = _keywords(function, shapes)

    def call(q: Any, k: Any, v: Any, *rest: Any) -> dict[str, Any]:
        sink = {"sink": rest[-1]} if shapes.sink else {}
        return _named(function(q, k, v, **taken, **sink))

    how = ["" if not with_backward else "its own"]

    def run(q: Any, k: Any, v: Any, *rest: Any) -> dict[str, Any]:
        if not with_backward:
            return call(q, k, v, *rest)
        dout = rest[0]
        if own_backward is not False:
            sink = {"sink": rest[-1]} if shapes.sink else {}
            found = _named(function(q, k, v, dout=dout, **taken, **sink))
            missing = [one for one in GRADIENTS if found.get(one) is None]
            if not missing:
                return found
            if own_backward or len(missing) < len(GRADIENTS):
                raise ValueError(
                    f"it takes dout and returns no {', '.join(missing)}; return all gradients, or do not take dout"
                )
        import jax

        how[0] = "jax.vjp"

        def forward_alone(q: Any, k: Any, v: Any) -> Any:
            results = call(q, k, v, *rest)
            _require_out(results)
            return results.pop("out"), results

        out, pull, others = jax.vjp(forward_alone, q, k, v, has_aux=True)
        gradients = pull(dout.astype(out.dtype))
        return {"out": out, **others, **dict(zip(GRADIENTS, gradients, strict=True))}

    name = kernels.name_of(function)
    return _traced(run, f"function {name}", shapes, with_backward, how)


def _named(results: Any) -> dict[str, Any]:
    return dict(results) if isinstance(results, Mapping) else {"out": results}


def _require_out(results: Mapping[str, Any]) -> None:
    if results.get("out") is None:
        raise ValueError(
            f"it returns {', '.join(map(str, results)) or 'nothing'} and no out; return out alone, or a dict of"
            f" {', '.join(OUTPUTS)} by name"
        )


def _keywords(function: Callable[..., Any], shapes: Shapes) -> tuple[dict[str, Any], bool | None]:
    """The keywords of the kernel protocol that a function takes, and whether it takes `dout`: None where it takes any
    keyword, so that only its results tell."""
    mask = shapes.mask
    offered: dict[str, Any] = {
        "cu_seqlens": np.array(mask.queries.offsets, dtype=np.int32),
        "cu_seqlens_k": np.array(mask.keys.offsets, dtype=np.int32),
        "causal": mask.causal,
        "softmax_scale": shapes.softmax_scale,
        "window": None if mask.window == (None, None) else mask.window,
        "alignment": mask.alignment,
        "softcap": shapes.softcap,
    }
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return offered, None
    named = {one.name for one in parameters}
    return {key: value for key, value in offered.items() if key in named}, "dout" in named


def _traced(
    run: Callable[..., dict[str, Any]],
    name: str,
    shapes: Shapes,
    with_backward: bool,
    gradients: list[str],
) -> Program:
    """The program of `run`. What `gradients` holds is known once it was traced."""
    import jax

    struct: Any = jax.ShapeDtypeStruct
    inputs = INPUTS[: 4 if with_backward else 3]
    operands = [
        struct(shapes.shape(one if one != "dout" else "out"), shapes.dtype) for one in inputs
    ]
    if shapes.sink:
        operands.append(struct((shapes.heads,), np.float32))
    outputs: list[str] = []

    def ordered(*arrays: Any) -> list[Any]:
        results = run(*arrays)
        _require_out(results)
        outputs[:] = [one for one in OUTPUTS if results.get(one) is not None]
        return [results[one] for one in outputs]

    with kernels.guarded(f"{name} cannot be traced", ValueError):
        program = cast(Any, jax.make_jaxpr(ordered))(*operands)
    for one, found in zip(outputs, program.out_avals, strict=True):
        if tuple(found.shape) != shapes.shape(one):
            raise ValueError(
                f"{name} returns {one} of shape {tuple(found.shape)}; it must be {shapes.shape(one)}"
            )
    return Program(inputs=inputs, outputs=tuple(outputs), program=program, gradients=gradients[0])


def shapes_of(
    mask: Mask,
    *,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    value_dim: Any,
    softmax_scale: Any,
    softcap: Any,
    sink: Any,
    dtype: Any,
) -> Shapes:
    """Checked shapes. Raises ValueError of one line."""
    counts = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    counts["value_dim"] = head_dim if value_dim is None else value_dim
    for name, count in counts.items():
        whole = isinstance(count, (int, np.integer)) and not isinstance(count, bool)
        if not (whole and 1 <= count <= _MOST):
            raise ValueError(
                f"{name} is {shown(count)}; it must be a whole number from 1 to {_MOST}"
            )
    for name, number in {"softmax_scale": softmax_scale, "softcap": softcap}.items():
        real = isinstance(number, (int, float, np.floating)) and not isinstance(number, bool)
        if number is not None and not (real and 0 < number < math.inf):
            raise ValueError(
                f"{name} is {shown(number)}; it must be a finite number above 0, or None"
            )
    if heads % kv_heads:
        raise ValueError(
            f"heads is {heads} with kv_heads {kv_heads}; it must be a multiple, a group of query heads a key/value head"
        )
    if mask.queries.tokens == 0 or mask.keys.tokens == 0:
        raise ValueError("the documents have no token; give at least one that has some")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype is {line(shown(dtype))}; allowed: bfloat16, float32")
    return Shapes(
        mask=mask,
        **{name: int(count) for name, count in counts.items()},
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else float(softmax_scale),
        softcap=None if softcap is None else float(softcap),
        sink=bool(sink),
        dtype=dtype,
    )
