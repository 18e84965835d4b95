"""The results of a forward and of a backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import kernel_results
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.traced import Trace
from flamia_ref.packing import Documents, Mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """The results of a forward, with what the backward needs to know of it. A pytree once JAX is in use.

    Attributes:
        out: [tokens, heads, value channels] float32 values in the recipe's output format.
        lse: [heads, tokens] float32, natural log, the sink in it; -inf for rows that see no key, and no sink.
        saved: what the recipe keeps for the backward besides out and lse, by name: see
            `flamia_ref.attention.stages.kept_for_backward`.
        trace: the stages asked for, by name.
        sink: [heads] float32 logits, None without.
        recipe, mask, softmax_scale, softcap: what was computed.
    """

    out: Array
    lse: Array
    saved: Mapping[str, Array] = field(default_factory=dict)
    trace: Mapping[Any, Any] = field(default_factory=Trace)
    sink: Array | None = None
    recipe: Recipe
    mask: Mask
    softmax_scale: float
    softcap: float | None = None

    def __post_init__(self) -> None:
        _backend.register_value_type(
            Forward,
            data=("out", "lse", "saved", "trace", "sink"),
            meta=("recipe", "mask", "softmax_scale", "softcap"),
        )

    @property
    def documents(self) -> Documents:
        """The documents of the queries."""
        return self.mask.queries

    @property
    def causal(self) -> bool:
        """Whether later keys are hidden."""
        return self.mask.causal

    @classmethod
    def from_kernel(
        cls,
        out: Any,
        lse: Any,
        recipe: Recipe | str,
        *,
        cu_seqlens: Any = None,
        cu_seqlens_k: Any = None,
        causal: bool = True,
        alignment: str = "bottom_right",
        window: tuple[int | None, int | None] | None = None,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sink: Any = None,
        head_dim: int | None = None,
        saved: Mapping[str, Any] | None = None,
    ) -> Forward:
        """A foreign kernel's results as a `Forward`, for `backward`.

        `out` [tokens, heads, value channels] float32 or bfloat16, rounded to the recipe's output format with an
        `InputRounded` warning where that changes a value; `lse` [heads, tokens] float32, the natural logarithm of the
        sum of exp(softmax_scale S), a sink in it, -inf for a row that sees no key. The keywords are those of the
        kernel's forward; `head_dim` is that of q, where it is not out's and softmax_scale is None. `saved`: what the
        recipe keeps besides out and lse, if anything.

        A base-2 lse cannot be told from a natural one here: multiply it by ln 2 first.

        Raises: ValueError or TypeError for bad shapes, dtypes and lengths, for a NaN in lse where out has none, for
        +inf in lse where out is neither 0 nor NaN, and for a row with lse = -inf whose out is not zero.
        """
        chosen = computed_recipe(recipe)
        given = kernel_results.check_results(
            out,
            lse,
            sink,
            saved,
            chosen,
            head_dim=head_dim,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            alignment=alignment,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
        )
        return cls(
            out=given.out,
            lse=given.lse,
            saved=given.saved,
            sink=given.sink,
            recipe=chosen,
            mask=given.shape.mask,
            softmax_scale=given.shape.softmax_scale,
            softcap=given.shape.softcap,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backward:
    """The results of a backward. A pytree once JAX is in use.

    Attributes:
        dq: [tokens, heads, head_dim] float32 values in the recipe's output format.
        dk, dv: [keys, kv_heads, head_dim] and [keys, kv_heads, value channels] likewise.
        dsink: [heads] float32, not rounded further; None without a sink.
        trace: the stages asked for, by name.
    """

    dq: Array
    dk: Array
    dv: Array
    dsink: Array | None = None
    trace: Mapping[Any, Any] = field(default_factory=Trace)

    def __post_init__(self) -> None:
        _backend.register_value_type(Backward, data=("dq", "dk", "dv", "dsink", "trace"), meta=())
