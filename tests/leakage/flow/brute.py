"""What an analysis says of a function, and what changing one input element at a time shows of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.interpreter import RULES, Interpreter
from flamia_ref.leakage.flow.sets import Sets
from flamia_ref.leakage.flow.value import Flow, made

Array = np.ndarray[Any, Any]


class WrongValue(AssertionError):
    """An element that is said to be known has another value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The outputs of an analysis, and for each the sources of each of its elements [..., sources]."""

    context: Context
    outputs: list[Flow]
    members: list[Array]


def analysed(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    free: Sequence[Array],
    *,
    strict: bool = False,
    fine: bool = False,
    rules: Any = RULES,
) -> Found:
    """The analysis of `function`; elements of `arrays` are known but where `free`, each of which is a source."""
    total = sum(
        int(np.broadcast_to(flags, x.shape).sum()) for x, flags in zip(arrays, free, strict=True)
    )
    context = Context(Sets(max(total, 1)), strict=strict, fine=fine)
    operands, start = [], 0
    for x, flags in zip(arrays, free, strict=True):
        ids = np.full(x.shape, -1, dtype=np.int32)
        count = int(flags.sum())
        ids[flags] = context.sets.singles(np.arange(start, start + count))
        start += count
        operands.append(made(x.shape, x.dtype, ids, np.where(flags, np.zeros((), x.dtype), x)))
    program = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    outputs = Interpreter(context, rules).run(program, operands)
    for flow, aval in zip(outputs, program.out_avals, strict=True):
        _check_form(flow, aval)
    members = [context.sets.members(flow.full_ids()) for flow in outputs]
    return Found(context=context, outputs=outputs, members=members)


def _check_form(flow: Flow, aval: Any) -> None:
    assert flow.shape == tuple(aval.shape)
    assert flow.dtype == aval.dtype
    np.broadcast_to(flow.ids, flow.shape)
    if flow.values is None:
        assert (flow.ids >= 0).all()
    else:
        assert flow.values.dtype == aval.dtype
        np.broadcast_to(flow.values, flow.shape)


def influences(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    free: Sequence[Array],
    pools: Sequence[Array],
    *,
    trials: int,
    found: Found,
) -> list[Array]:
    """Which sources are seen to change each output element, bit by bit [..., sources], in at most `trials`.

    Free elements take values of their array's pool. What `found` says is known must be so. The search ends when all
    that it has is seen. `function` is compiled, and gives a list.
    """
    rng = np.random.default_rng(0)
    places = [(which, at) for which, flags in enumerate(free) for at in np.argwhere(flags)]
    seen: list[Array] | None = None
    for _ in range(trials):
        base = [x.copy() for x in arrays]
        for x, flags, pool in zip(base, free, pools, strict=True):
            x[flags] = rng.choice(pool, size=int(flags.sum()))
        before = [np.asarray(y) for y in function(*base)]
        if seen is None:
            seen = [np.zeros((*y.shape, len(places)), dtype=np.bool_) for y in before]
        for y, flow in zip(before, found.outputs, strict=True):
            _check_known(y, flow)
        for source, (which, at) in enumerate(places):
            changed = list(base)
            changed[which] = base[which].copy()
            others = pools[which][pools[which] != base[which][tuple(at)]]
            changed[which][tuple(at)] = rng.choice(others)
            after = function(*changed)
            for flags, y, z in zip(seen, before, after, strict=True):
                flags[..., source] |= different(y, np.asarray(z))
        if not any((m & ~s).any() for s, m in zip(seen, found.members, strict=True)):
            break
    assert seen is not None
    return seen


def different(a: Array, b: Array) -> Array:
    """Where arrays differ in a bit; zeros of both signs are one value, and so are all NaN."""
    if a.dtype.kind in "biu" or "int" in a.dtype.name:
        return np.asarray(a != b)
    return np.asarray((a != b) & ~((a != a) & (b != b)))


def _check_known(y: Array, flow: Flow) -> None:
    wrong = different(y, flow.full_values().astype(y.dtype)) & (flow.full_ids() < 0)
    if wrong.any():
        raise WrongValue(f"{y[wrong]}, not {flow.full_values()[wrong]}")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled, its results as a list."""
    return jax.jit(lambda *xs: jax.tree.leaves(function(*xs)))


def compared(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    free: Sequence[Array],
    pools: Sequence[Array],
    *,
    trials: int,
    fine: bool = False,
    rules: Any = RULES,
) -> tuple[int, int]:
    """How many dependencies are seen that the analysis does not have, and how many it has that are not seen."""
    found = analysed(function, arrays, free, fine=fine, rules=rules)
    seen = influences(function, arrays, free, pools, trials=trials, found=found)
    missed = sum(int((s & ~m).sum()) for s, m in zip(seen, found.members, strict=True))
    more = sum(int((m & ~s).sum()) for s, m in zip(seen, found.members, strict=True))
    return missed, more
