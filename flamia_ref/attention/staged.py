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
from flamia_ref.attention.belonging import check_bases
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import INPUT_USES, copy_names, needs_high
from flamia_ref.attention.forward_pass import ForwardRun
from flamia_ref.attention.given_operands import check_scales, checked_operands, operand_arrays
from flamia_ref.attention.kernel_results import KernelResults, check_forward, of_forward
from flamia_ref.attention.prepared import Prepared, prepare_dout
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.run import Sizes
from flamia_ref.attention.stages import backward_stages, forward_stages
from flamia_ref.attention.traced import Wanted, check_tiles, check_trace
from flamia_ref.packing import Mask

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
    operands = _checked_operands("operands", operands, _FORWARD)
    recipe = operands.recipe
    wanted = check_trace(trace, forward_stages(recipe), recipe)
    q, k, v = (operands.operand(use).codes for use in _FORWARD)
    inputs.check_extents(q, k, v, other_keys=cu_seqlens_k is not None)
    sizes = _sizes(q, k, v)
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
    inputs.check_sink_range(sink)
    shape = inputs.Shape(
        mask,
        inputs.checked_scale(softmax_scale, sizes.head_dim),
        inputs.checked_softcap(softcap),
    )
    inputs.check_range(shape)
    check_tiles(wanted, mask, sizes.heads, recipe)
    _check_documents(operands, mask)
    arrays = dict(operand_arrays(operands)) | ({} if sink is None else {"sink": sink})
    run = ForwardRun(recipe, shape, sizes, *_libraries(q, arrays), wanted, inputs.sink_bits(sink))
    run.take(operands)
    return run.forward()


def preprocess(dout: Any, forward: Forward) -> Preprocessed:
    """What comes before the backward's products, from dO and the out and lse of a forward.

    Shapes: `dout` [tokens, heads, value channels], float32 or bfloat16 as in `backward`. Raises as `backward`; that
    lse and out belong to q, k and v is not checked.
    """
    found = _checked_forward(forward)
    inputs.check_values("dout", dout, inputs.DTYPES)
    if tuple(dout.shape) != tuple(found.out.shape):
        raise ValueError(
            f"dout has shape {tuple(dout.shape)} and the forward's out {tuple(found.out.shape)}; they must be equal"
        )
    arrays = {"dout": dout} | of_forward(found)
    layout, compute, device = _libraries(dout, arrays)
    bits = inputs.rounded_bits({"dout": dout})["dout"]
    out, lse, saved = found.out, found.lse, found.saved
    if layout is np:
        out, lse = (_backend.host(x) for x in (out, lse))
        saved = {name: _backend.host(x) for name, x in saved.items()}
        check_bases(saved, lse, forward.recipe)
    else:
        bits = _backend.put(bits, compute, device) if isinstance(bits, np.ndarray) else bits
    saved = {name: inputs.float32_bits(inputs.no_gradient(x)) for name, x in saved.items()}
    _, heads, channels = dout.shape
    run = BackwardRun(
        forward,
        Sizes(heads, heads, channels, channels),
        layout,
        compute,
        device,
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
    lse and out belong to the operands is not checked.

    `preprocessed`: from `preprocess`, or made of a kernel's base, rest, dead and delta, all of them [heads, tokens].
    """
    found = _checked_forward(forward)
    recipe, mask = forward.recipe, forward.mask
    if not isinstance(preprocessed, Preprocessed):
        raise TypeError(
            f"preprocessed is a {type(preprocessed).__name__}; pass what attention.preprocess gives, a Preprocessed"
        )
    operands = _checked_operands("operands", operands, _BACKWARD)
    of_dout = _checked_operands("preprocessed.operands", preprocessed.operands, _OF_DOUT)
    for given in (operands, of_dout):
        if given.recipe != recipe:
            raise ValueError(
                f"the operands are of recipe {given.recipe.name!r} and the forward of {recipe.name!r}; take one"
            )
    wanted = check_trace(trace, backward_stages(recipe), recipe)
    q, k, v = (operands.operand(use).codes for use in (Use.S_Q, Use.S_K, Use.DP_V))
    dout = of_dout.operand(Use.DP_DO).codes
    inputs.check_extents(q, k, v, other_keys=True)
    sizes = _sizes(q, k, v)
    if (len(q), len(k)) != (mask.queries.tokens, mask.keys.tokens):
        raise ValueError(
            f"q has {len(q)} tokens and k {len(k)}, but the forward ran on {mask.queries.tokens} and"
            f" {mask.keys.tokens}; pass the operands of that forward"
        )
    for name, x in (("dO", dout), ("forward.out", found.out)):
        if tuple(x.shape) != (len(q), sizes.heads, sizes.value_dim):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; for these q and v it must be"
                f" {(len(q), sizes.heads, sizes.value_dim)}"
            )
    rows = _checked_rows(preprocessed, recipe, (sizes.heads, len(q)))
    check_tiles(wanted, mask, sizes.heads, recipe)
    arrays = of_forward(found) | rows
    for given in (operands, of_dout):
        _check_documents(given, mask)
        arrays |= dict(operand_arrays(given))
    layout, compute, device = _libraries(q, arrays)
    saved = {
        name: inputs.float32_bits(_backend.host(x) if layout is np else x)
        for name, x in found.saved.items()
    }
    run = BackwardRun(
        forward, sizes, layout, compute, device, wanted, inputs.sink_bits(found.sink), saved
    )
    run.take(operands)
    run.take(of_dout)

    def by_row(x: Array) -> Array:
        x = run.of_caller(x).T.reshape(-1)
        return inputs.float32_bits(x) if x.dtype == np.float32 else x

    prologue = backward_tile.Prologue(
        run.layout.zeros((0,), dtype=np.uint32),  # what it was for is in the copies
        *(by_row(rows[name]) for name in ("base", "rest", "dead")),
    )
    delta = by_row(rows["delta"]) if "delta" in rows else None
    return run.backward(RowsBefore(prologue, delta))


def _checked_forward(forward: Any) -> KernelResults:
    if not isinstance(forward, Forward):
        raise TypeError(
            f"forward is a {type(forward).__name__}; pass the result of a forward, or Forward.from_kernel"
        )
    return check_forward(forward)


def _checked_rows(
    preprocessed: Preprocessed, recipe: Recipe, shape: tuple[int, int]
) -> dict[str, Array]:
    """base, rest, dead and, for a recipe that takes one, delta: [heads, tokens]."""
    adds_up = recipe.backward.gradient.delta_source == "p_dp"
    if (preprocessed.delta is None) != adds_up:
        which = "None, but" if preprocessed.delta is None else "given, but"
        does = "adds it up in the backward, leave it None" if adds_up else "takes one"
        raise ValueError(f"preprocessed.delta is {which} recipe {recipe.name!r} {does}")
    kinds = {"base": np.float32, "rest": np.float32, "dead": np.bool_, "delta": np.float32}
    return {
        name: inputs.array_of(
            f"preprocessed.{name}",
            getattr(preprocessed, name),
            kind,
            shape,
            "for these operands it must be (heads, tokens) =",
        )
        for name, kind in kinds.items()
        if not (name == "delta" and adds_up)
    }


def _checked_operands(name: str, operands: Any, uses: tuple[Use, ...]) -> Prepared:
    """Operands that have a copy for each of `uses`."""
    if not isinstance(operands, Prepared):
        raise TypeError(
            f"{name} is a {type(operands).__name__}; pass what attention.prepare or operands_from gives, a Prepared"
        )
    recipe = operands.recipe
    check_computed(recipe)
    found = checked_operands(operands)
    names = copy_names(recipe)
    missing = sorted({names[use] for use in uses if names[use] not in found.operands})
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}; this stage takes them")
    tensors = [tensor for tensor, all_uses in INPUT_USES.items() if set(all_uses) & set(uses)]
    if recipe.guard_operands == "inputs":
        lacking = [
            tensor
            for tensor in tensors
            if any(needs_high(recipe, use) for use in INPUT_USES[tensor] if use in uses)
            and tensor not in found.guards
        ]
        if lacking:
            raise ValueError(
                f"recipe {recipe.name!r} takes {', '.join(lacking)} in bfloat16 in guarded blocks; the operands have"
                " no such guards, give them"
            )
    return found


def _sizes(q: Array, k: Array, v: Array) -> Sizes:
    return Sizes(q.shape[1], k.shape[1], q.shape[2], v.shape[2])


def _libraries(x: Array, arrays: dict[str, Array]) -> tuple[ModuleType, ModuleType, object | None]:
    """The library of the layout, that of the results, and the device, for arrays of one library with `x` among them."""
    inputs.check_one_library(arrays)
    compute = _backend.namespace(x)
    return (np if _backend.on_host(*arrays.values()) else compute), compute, _backend.device(x)


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
    check_scales(operands, mask.queries, mask.keys)
