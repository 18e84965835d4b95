"""The stages of attention one by one, codes in and codes out, as kernels are split in practice.

    prepare -> forward_from_operands -> preprocess -> backward_from_operands

gives the bits of `forward` and `backward`. Each takes what the one before it gave, or what a kernel gave in its place:
`operands_from` makes operands from codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import backward_tile, inputs
from flamia_ref.attention.backward_pass import BackwardRun, RowsBefore
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import INPUT_USES, copy_names, needs_high
from flamia_ref.attention.forward_pass import ForwardRun
from flamia_ref.attention.prepared import Prepared, prepare_dout
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.run import Sizes
from flamia_ref.attention.stages import backward_stages, forward_stages
from flamia_ref.attention.traced import Wanted, check_tiles, check_trace
from flamia_ref.formats import PRESETS
from flamia_ref.packing import Documents, Mask
from flamia_ref.packing.tiles import BLOCK

_FORWARD = (Use.S_Q, Use.S_K, Use.O_V)
_OF_DOUT = (Use.DP_DO, Use.DV_DO)
_BACKWARD = (Use.S_Q, Use.S_K, Use.DP_V, Use.DQ_K, Use.DK_Q)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preprocessed:
    """What the backward's rows bring along. A pytree once JAX is in use.

    Attributes:
        operands: the copies of what takes the place of dO in dP and dV.
        base: [heads, tokens] float32, what P is relative to: b, or lse log2 e.
        rest: [heads, tokens] float32, the factor that dO took: 2^(b - lse log2 e), or 1.
        dead: [heads, tokens], rows without a gradient.
        delta: [heads, tokens] float32; None for a recipe whose delta is the sum of P dP, which the backward adds up.
    """

    operands: Prepared
    base: Array
    rest: Array
    dead: Array
    delta: Array | None

    def __post_init__(self) -> None:
        names = ("operands", "base", "rest", "dead", "delta")
        _backend.register_value_type(Preprocessed, data=names, meta=())


def forward_from_operands(
    operands: Prepared,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    trace: Iterable[Any] = (),
) -> Forward:
    """`attention.forward` from codes and scales of q, k and v; keywords, result and errors are those of `forward`."""
    recipe = _checked_operands(operands, _FORWARD)
    check_computed(recipe)
    wanted = check_trace(trace, forward_stages(recipe), recipe)
    q, k, v = (operands.operand(use).codes for use in _FORWARD)
    sizes = _sizes(q, k, v)
    inputs.check_one_library(
        {"q": q, "k": k, "v": v} if sink is None else {"q": q, "k": k, "v": v, "sink": sink}
    )
    if cu_seqlens_k is None and len(k) != len(q):
        raise ValueError(
            f"q has {len(q)} tokens and k {len(k)}; give cu_seqlens_k where keys are other tokens than queries"
        )
    mask = inputs.checked_mask(
        len(q),
        len(k),
        cu_seqlens,
        cu_seqlens_k,
        causal=causal,
        window=window,
        alignment=alignment,
    )
    inputs.check_sink(sink, sizes.heads)
    shape = inputs.Shape(
        mask,
        inputs.checked_scale(softmax_scale, sizes.head_dim),
        inputs.checked_softcap(softcap),
    )
    check_tiles(wanted, mask, sizes.heads, recipe)
    _check_documents(operands, mask)
    run = ForwardRun(recipe, shape, sizes, *_libraries(q, operands), wanted, inputs.sink_bits(sink))
    run.take(operands)
    return run.forward()


def preprocess(dout: Any, forward: Forward) -> Preprocessed:
    """What comes before the backward's products, from dO and the out and lse of a forward.

    Shapes: `dout` [tokens, heads, value channels], float32 or bfloat16 as in `backward`. Raises as `backward`.
    """
    _check_forward(forward)
    check_computed(forward.recipe)
    inputs.check_values("dout", dout, inputs.DTYPES)
    if tuple(dout.shape) != tuple(forward.out.shape):
        raise ValueError(
            f"dout has shape {tuple(dout.shape)} and the forward's out {tuple(forward.out.shape)}; they must be equal"
        )
    given = {"dout": dout, "forward.out": forward.out, "forward.lse": forward.lse}
    inputs.check_one_library(given | dict(forward.saved))
    bits = inputs.rounded_bits({"dout": dout})["dout"]
    out, lse, saved = forward.out, forward.lse, dict(forward.saved)
    if _backend.on_host(dout, out, lse, *saved.values()):
        out, lse = (_backend.host(x) for x in (out, lse))
        saved = {name: _backend.host(x) for name, x in saved.items()}
    saved = {name: inputs.float32_bits(inputs.no_gradient(x)) for name, x in saved.items()}
    _, heads, channels = dout.shape
    run = BackwardRun(
        forward,
        Sizes(heads, heads, channels, channels),
        _backend.namespace(bits),
        _backend.namespace(dout),
        _backend.device(dout),
        Wanted(()),
        None,
        saved,
    )
    rows = run.rows_before(
        bits,
        inputs.float32_bits(inputs.no_gradient(out)),
        inputs.float32_bits(inputs.no_gradient(lse)),
    )

    def by_head(x: Array) -> Array:
        return run.finished(x.reshape(-1, heads).T)

    prologue = rows.prologue
    return Preprocessed(
        operands=prepare_dout(
            run.finished(prologue.dout),
            forward.recipe,
            cu_seqlens=np.array(forward.mask.queries.offsets),
        ),
        base=by_head(prologue.base),
        rest=by_head(prologue.rest),
        dead=by_head(prologue.dead),
        delta=None if rows.delta is None else by_head(rows.delta),
    )


def backward_from_operands(
    operands: Prepared,
    preprocessed: Preprocessed,
    forward: Forward,
    *,
    trace: Iterable[Any] = (),
) -> Backward:
    """`attention.backward` from the codes and scales of q, k, v and dO. Result and errors are those of `backward`; that
    lse and out belong to the operands is not checked."""
    _check_forward(forward)
    recipe = forward.recipe
    for given, uses in ((operands, _BACKWARD), (preprocessed.operands, _OF_DOUT)):
        if _checked_operands(given, uses) != recipe:
            raise ValueError(
                f"the operands are of recipe {given.recipe.name!r} and the forward of {recipe.name!r}; take one"
            )
    check_computed(recipe)
    wanted = check_trace(trace, backward_stages(recipe), recipe)
    q, k, v = (operands.operand(use).codes for use in (Use.S_Q, Use.S_K, Use.DP_V))
    dout = preprocessed.operands.operand(Use.DP_DO).codes
    sizes = _sizes(q, k, v)
    mask = forward.mask
    if (len(q), len(k)) != (mask.queries.tokens, mask.keys.tokens):
        raise ValueError(
            f"q has {len(q)} tokens and k {len(k)}, but the forward ran on {mask.queries.tokens} and"
            f" {mask.keys.tokens}; pass the operands of that forward"
        )
    if tuple(dout.shape) != (len(q), sizes.heads, sizes.value_dim):
        raise ValueError(
            f"dO has shape {tuple(dout.shape)}; for these q and v it must be {(len(q), sizes.heads, sizes.value_dim)}"
        )
    arrays = {"q": q, "k": k, "v": v, "dO": dout, "base": preprocessed.base}
    inputs.check_one_library(arrays | dict(forward.saved))
    check_tiles(wanted, mask, sizes.heads, recipe)
    for given in (operands, preprocessed.operands):
        _check_documents(given, mask)
    layout, compute, device = _libraries(q, operands)
    saved = {
        name: inputs.float32_bits(_backend.host(x) if layout is np else x)
        for name, x in forward.saved.items()
    }
    run = BackwardRun(
        forward, sizes, layout, compute, device, wanted, inputs.sink_bits(forward.sink), saved
    )
    run.take(operands)
    run.take(preprocessed.operands)

    def by_row(x: Array) -> Array:
        x = run.of_caller(x).T.reshape(-1)
        return inputs.float32_bits(x) if x.dtype == np.float32 else x

    prologue = backward_tile.Prologue(
        run.layout.zeros((0,), dtype=np.uint32),  # what it was for is in the copies
        *(by_row(x) for x in (preprocessed.base, preprocessed.rest, preprocessed.dead)),
    )
    delta = None if preprocessed.delta is None else by_row(preprocessed.delta)
    return run.backward(RowsBefore(prologue, delta))


def _check_forward(forward: Any) -> None:
    if not isinstance(forward, Forward):
        raise TypeError(
            f"forward is a {type(forward).__name__}; pass the result of a forward, or Forward.from_kernel"
        )


def _checked_operands(operands: Any, uses: tuple[Use, ...]) -> Recipe:
    """The recipe of operands that have a copy for each of `uses`."""
    if not isinstance(operands, Prepared):
        raise TypeError(
            f"operands are a {type(operands).__name__}; pass what attention.prepare or operands_from gives"
        )
    recipe = operands.recipe
    names = copy_names(recipe)
    missing = sorted({names[use] for use in uses if names[use] not in operands.operands})
    if missing:
        raise ValueError(f"the operands have no {', '.join(missing)}; this stage takes them")
    tensors = [tensor for tensor, all_uses in INPUT_USES.items() if set(all_uses) & set(uses)]
    if recipe.guard_operands == "inputs":
        lacking = [
            tensor
            for tensor in tensors
            if any(needs_high(recipe, use) for use in INPUT_USES[tensor] if use in uses)
            and tensor not in operands.guards
        ]
        if lacking:
            raise ValueError(
                f"recipe {recipe.name!r} takes {', '.join(lacking)} in bfloat16 in guarded blocks; the operands have"
                " no such guards, give them"
            )
    return recipe


def _sizes(q: Array, k: Array, v: Array) -> Sizes:
    if k.shape[2] != q.shape[2] or v.shape[:2] != k.shape[:2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has codes of shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; they are (tokens,"
            " heads, channels), q and k with equally many channels, k and v with the same tokens and heads"
        )
    return Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2])


def _libraries(x: Array, operands: Prepared) -> tuple[ModuleType, ModuleType, object | None]:
    """The library of the layout, that of the results, and the device."""
    arrays = [
        part
        for copy in operands.operands.values()
        for part in (copy.codes, copy.scales, copy.token_scales)
        if part is not None
    ]
    compute = _backend.namespace(x)
    return (np if _backend.on_host(*arrays) else compute), compute, _backend.device(x)


def _check_documents(operands: Prepared, mask: Mask) -> None:
    """Refuse operands of other documents, and scales of another shape than codes, blocks and documents give."""
    for made_for, documents, name in (
        (operands.queries, mask.queries, "cu_seqlens"),
        (operands.keys, mask.keys, "cu_seqlens_k" if not mask.same_tokens else "cu_seqlens"),
    ):
        if made_for is not None and made_for != documents:
            raise ValueError(
                f"the operands were made for {made_for} and {name} means {documents}; blocks start at each document,"
                " prepare them again"
            )
    for use, name in copy_names(operands.recipe).items():
        copy = operands.operands.get(name)
        if copy is None or copy.scales is None:
            continue
        operand = operands.recipe.operand(use)
        rows, columns = PRESETS[operand.format].checked_block(operand.block)
        tokens, heads, channels = copy.codes.shape
        documents = mask.keys if use.split(".")[1] in ("k", "v") else mask.queries
        blocks = 1 if columns == "all" else -(-channels // int(columns))
        count = tokens if rows == 1 else _token_blocks(documents)
        if tuple(copy.scales.shape) != (count, heads, blocks):
            raise ValueError(
                f"{name}.scales has shape {tuple(copy.scales.shape)}; for codes {tuple(copy.codes.shape)} and blocks of"
                f" {rows}x{columns} that start at each document it must be {(count, heads, blocks)}"
            )


def _token_blocks(documents: Documents) -> int:
    return sum(-(-length // BLOCK) for length in documents.lengths)
