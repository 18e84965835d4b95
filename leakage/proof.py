"""`prove`: which tokens each output of attention may depend on, from its program, and whether that is legal."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flamia_ref import kernels
from flamia_ref._errors import line, shown
from flamia_ref.attention import Recipe
from flamia_ref.attention.inputs import chosen_recipe
from flamia_ref.attention.protection import documents_of
from flamia_ref.leakage import program as programs
from flamia_ref.leakage.certificate import Certificate, Count, Run, runs_of
from flamia_ref.leakage.legal import LegalPairs
from flamia_ref.leakage.program import Program, Shapes
from flamia_ref.packing.mask import Mask

Progress = Callable[[int, int, str], None]

_MOST_TOKENS = 4096
"""More are refused: every tile of a mask is met with a few hundred."""


def prove(
    recipe_or_function: Recipe | str | Callable[..., Any],
    *,
    lengths: Sequence[int],
    head_dim: int,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = True,
    window: Any = None,
    backward: bool = True,
    strict: bool = False,
    lengths_k: Sequence[int] | None = None,
    alignment: str = "bottom_right",
    value_dim: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: bool = False,
    dtype: str = "bfloat16",
    progress: Progress | None = None,
) -> Certificate:
    """Follow every dependency from the tokens of q, k, v and dout to the outputs, through the traced program.

    The result holds for these shapes and this mask, and for all values of the inputs: if no illegal dependency is
    found, there is none, under the assumptions that the certificate counts. What is found may not be there, where
    values cancel. It is of the program as traced, not of the order in which a compiler evaluates it.

    Args:
        recipe_or_function: a recipe or its name, which is the simulator as it is; or a JAX function
            `function(q, k, v)` that returns out, or a dict of out, lse, delta, dq, dk, dv by name. Of `dout` and the
            keywords of the kernel protocol (`flamia_ref.kernels`) it gets those that it names. Without `dout`, its
            gradients are those of `jax.vjp`.
        lengths: tokens of each document.
        head_dim: channels of q and k.
        heads, kv_heads: of q, of k and v.
        causal, window, alignment, softcap, softmax_scale: as in `attention.forward`.
        backward: whether gradients are analysed too, where there are any.
        strict: whether nothing is assumed of values: then what a NaN or an infinity in a token reaches is found too.
        lengths_k: tokens of each document's keys, where they are others.
        value_dim: channels of v, head_dim by default.
        sink: whether heads have a sink.
        dtype: of the inputs, "bfloat16" or "float32".
        progress: called with what is done, of how much, and the name of the step.

    Raises:
        ValueError: for arguments that contradict, a recipe that is not computed, a function that cannot be traced (it
            must be JAX throughout), returns none of the outputs or others' shapes, or calls back into Python.
        TypeError: for arguments of other types.
    """
    queries, keys = documents_of(lengths, lengths_k)
    mask = Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)
    if max(queries.tokens, keys.tokens) > _MOST_TOKENS:
        raise ValueError(
            f"lengths have {shown(queries.tokens)} tokens together; allowed: up to {_MOST_TOKENS}, as proofs are of all"
            " lengths that have the same tiles. `structure` takes any length"
        )
    shapes = programs.shapes_of(
        mask,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
        dtype=dtype,
    )
    report = progress or (lambda *_: None)
    report(0, 3, "tracing the program")
    if isinstance(recipe_or_function, Recipe | str):
        recipe = chosen_recipe(recipe_or_function)
        backward = backward and recipe.has_backward
        program = programs.of_recipe(recipe, shapes, with_backward=backward)
        subject = {"recipe": recipe.name, "data": recipe.to_json()}
    elif callable(recipe_or_function):
        program = programs.of_function(recipe_or_function, shapes, with_backward=backward)
        subject = {"function": kernels.name_of(recipe_or_function)}
    else:
        raise TypeError(
            f"prove takes a recipe, its name or a function; {shown(recipe_or_function)} is none"
        )
    return _certificate(subject, program, shapes, strict, report)


def _certificate(
    subject: dict[str, Any], program: Program, shapes: Shapes, strict: bool, report: Progress
) -> Certificate:
    from flamia_ref.leakage.flow.context import Context, Refused
    from flamia_ref.leakage.flow.interpreter import Interpreter
    from flamia_ref.leakage.flow.sets import Sets
    from flamia_ref.leakage.flow.value import unknown

    report(1, 3, "following its equations")
    tokens = [shapes.tokens(name) for name in program.inputs]
    offsets = np.cumsum([0, *tokens])
    context = Context(Sets(int(offsets[-1])), strict=strict)
    operands = []
    for name, start, variable in zip(
        program.inputs, offsets, program.program.jaxpr.invars, strict=False
    ):
        ids = context.sets.singles(start + np.arange(shapes.tokens(name)))
        operands.append(unknown(variable.aval.shape, variable.aval.dtype, ids[:, None, None]))
    for variable in program.program.jaxpr.invars[len(operands) :]:  # sinks, of no source
        nothing = np.zeros((1,) * len(variable.aval.shape), dtype=np.int32)
        operands.append(unknown(variable.aval.shape, variable.aval.dtype, nothing))
    try:
        results = Interpreter(context).run(program.program, operands)
    except Refused as error:
        raise ValueError(
            f"{next(iter(subject.values()))} cannot be analysed: {line(str(error))}"
        ) from error

    report(2, 3, "comparing with what is legal")
    legal = LegalPairs(shapes.mask)
    counts: list[Count] = []
    runs: list[Run] = []
    for name, result in zip(program.outputs, results, strict=True):
        ids = np.moveaxis(np.maximum(result.ids, 0), shapes.token_axis(name), 0)
        ids = np.broadcast_to(ids, (shapes.tokens(name), *ids.shape[1:]))
        seen = context.sets.members(context.sets.union_over(ids.reshape(len(ids), -1), [1])[:, 0])
        for place, source in enumerate(program.inputs):
            found = seen[:, offsets[place] : offsets[place + 1]]
            allowed = legal.dense(name, source)
            illegal = found & ~allowed
            counts.append(
                Count(
                    output=name,
                    input=source,
                    legal=int(allowed.sum()),
                    found=int(found.sum()),
                    illegal=int(illegal.sum()),
                    missing=int((allowed & ~found).sum()),
                )
            )
            if illegal.any():
                place_out = np.arange(illegal.shape[0])[:, None]
                place_in = np.arange(illegal.shape[1])
                runs += runs_of(
                    name, source, illegal, legal.severity(name, place_out, source, place_in)
                )
    return Certificate(
        subject=subject,
        setting=_setting(shapes, program),
        strict=strict,
        counts=tuple(counts),
        runs=tuple(runs),
        assumptions={str(name): count for name, count in sorted(context.assumed.items()) if count},
        primitives=dict(sorted(context.met.items())),
        unknown=dict(sorted(context.unknown.items())),
        program=hashlib.sha256(str(program.program).encode()).hexdigest(),
        versions=_versions(),
    )


def _setting(shapes: Shapes, program: Program) -> dict[str, Any]:
    mask = shapes.mask
    return {
        "lengths": list(mask.queries.lengths),
        "lengths_k": None if mask.same_tokens else list(mask.keys.lengths),
        "heads": shapes.heads,
        "kv_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "value_dim": shapes.value_dim,
        "causal": mask.causal,
        "window": None if mask.window == (None, None) else list(mask.window),
        "alignment": mask.alignment,
        "softmax_scale": shapes.softmax_scale,
        "softcap": shapes.softcap,
        "sink": shapes.sink,
        "dtype": shapes.dtype,
        "backward": "dout" in program.inputs,
        "gradients": program.gradients,
    }


def _versions() -> dict[str, Any]:
    import jax

    from flamia_ref import __version__

    numpy = importlib.metadata.version("numpy")
    return {"flamia_ref": __version__, "jax": jax.__version__, "numpy": numpy}
