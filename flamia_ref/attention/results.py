"""The results of a forward and of a backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import inputs, kernel_results
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Documents


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Forward:
    """The results of a forward, with what the backward needs to know of it. A pytree once JAX is in use.

    Attributes:
        out: [tokens, heads, head_dim] float32 values in the recipe's output format.
        lse: [heads, tokens] float32, natural log; -inf for rows that see no key.
        saved: what the recipe keeps for the backward besides out and lse, by name.
        trace: the stages asked for, by name.
        recipe, documents, causal, softmax_scale: what was computed.
    """

    out: Array
    lse: Array
    saved: Mapping[str, Array] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe
    documents: Documents
    causal: bool
    softmax_scale: float

    def __post_init__(self) -> None:
        _backend.register_value_type(
            Forward,
            data=("out", "lse", "saved", "trace"),
            meta=("recipe", "documents", "causal", "softmax_scale"),
        )

    @classmethod
    def from_kernel(
        cls,
        out: Any,
        lse: Any,
        recipe: Recipe | str,
        *,
        cu_seqlens: Any = None,
        cu_seqlens_k: None = None,
        causal: bool = True,
        alignment: str = "bottom_right",
        window: None = None,
        softmax_scale: float | None = None,
        softcap: None = None,
        sink: None = None,
    ) -> Forward:
        """A foreign kernel's results as a `Forward`, for `backward`.

        `out` [tokens, heads, head_dim] float32 or bfloat16, rounded to the recipe's output format with an
        `InputRounded` warning where that changes a value; `lse` [heads, tokens] float32, the natural logarithm of the
        sum of exp(softmax_scale S), -inf for a row that sees no key. The keywords are those of the kernel's forward.

        A base-2 lse cannot be told from a natural one here: multiply it by ln 2 first.

        Raises: ValueError or TypeError for bad shapes, dtypes and lengths, for a NaN in lse where out has none, for
        +inf in lse where out is neither 0 nor NaN, and for a row with lse = -inf whose out is not zero.
        """
        chosen = inputs.chosen_recipe(recipe)
        check_computed(chosen)
        inputs.refuse_unsupported(
            chosen.name, cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
        )
        inputs.check_alignment(alignment)
        given = kernel_results.check_results(
            out, lse, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale
        )
        return cls(
            out=given.out,
            lse=given.lse,
            recipe=chosen,
            documents=given.documents,
            causal=bool(causal),
            softmax_scale=given.softmax_scale,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Backward:
    """The results of a backward. A pytree once JAX is in use.

    Attributes:
        dq: [tokens, heads, head_dim] float32 values in the recipe's output format.
        dk, dv: [tokens, kv_heads, head_dim] likewise.
        trace: the stages asked for, by name.
    """

    dq: Array
    dk: Array
    dv: Array
    trace: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _backend.register_value_type(Backward, data=("dq", "dk", "dv", "trace"), meta=())
