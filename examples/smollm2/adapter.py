"""Attention by a recipe inside a model of transformers: an attention function to register by a name.

    from transformers import AttentionInterface

    AttentionInterface.register("flamia", attention_function(by_recipe("flamia-mxfp8")))
    model.set_attn_implementation("flamia")

transformers calls an attention function with q [batch, heads, tokens, head_dim] and k, v [batch, kv_heads, tokens,
head_dim] after RoPE. Every row of the batch is one document here: rows are packed behind each other, [tokens of all,
heads, head_dim], with `cu_seqlens`, which is what recipes take. Positions are the model's business, and those of a
batch begin at 0 in every row.

torch goes in and comes out. In between, q, k and v are rounded to bfloat16, the input of every recipe, and travel as
numpy arrays to JAX, on the CPU or on a GPU; the gradient is `attention.backward` of the recipe. This file needs torch
and JAX, and no transformers.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from flamia_ref import attention
from flamia_ref.adapters.tensors import to_numpy, to_torch
from flamia_ref.attention import RECIPES, Recipe

# q, k, v packed, the documents' offsets, the softmax scale -> out, packed
Packed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray, float], torch.Tensor]
Watch = Callable[[int, dict[str, torch.Tensor]], None]


def attention_function(packed: Packed, watch: Watch | None = None) -> Callable[..., Any]:
    """What `AttentionInterface.register` takes, for causal attention over whole documents.

    `watch` is called with the number of the layer and its q, k, v and out as transformers has them, before anything
    else is computed from out: hooks for gradients go there.

    The function raises ValueError for what it cannot do: dropout, a mask with padding, a cache of earlier keys,
    attention that is not causal, a sliding window, a soft cap, sinks.
    """

    def call(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        _check(module, query, key, attention_mask, dropout, others)
        batch, _, length, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else scaling
        offsets = np.arange(batch + 1, dtype=np.int32) * length
        rows = (
            x.transpose(1, 2).reshape(batch * length, -1, x.shape[3]) for x in (query, key, value)
        )
        out = packed(*rows, offsets, scale)
        out = out.reshape(batch, length, *out.shape[1:])
        if watch is not None:
            watch(module.layer_idx, {"q": query, "k": key, "v": value, "out": out})
        return out, None

    return call


def by_recipe(recipe: Recipe | str, *, device: str = "cpu") -> Packed:
    """Attention by a recipe, differentiable if the recipe has a backward. `device`: JAX's, "cpu" or "cuda".

    Inputs are rounded to bfloat16; out, and gradients, are values of the recipe's output format in the inputs' dtype.
    """
    import jax

    chosen = recipe if isinstance(recipe, Recipe) else RECIPES[recipe]
    place = jax.devices(device)[0]

    def to_jax(x: torch.Tensor) -> Any:
        return jax.device_put(to_numpy(torch, x.to(torch.bfloat16)), place)

    def from_jax(x: Any, like: torch.Tensor) -> torch.Tensor:
        return to_torch(torch, np.asarray(x), like.device).to(like.dtype)

    class ByRecipe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, offsets, scale):
            inputs = [to_jax(x) for x in (q, k, v)]
            result = attention.forward(*inputs, chosen, cu_seqlens=offsets, softmax_scale=scale)
            ctx.kept = inputs, result
            return from_jax(result.out, q)

        @staticmethod
        def backward(ctx, dout):
            inputs, result = ctx.kept
            found = attention.backward(*inputs, to_jax(dout), result)
            return *(from_jax(x, dout) for x in (found.dq, found.dk, found.dv)), None, None

    return ByRecipe.apply


def float32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: np.ndarray, scale: float
) -> torch.Tensor:
    """softmax(scale q k^T) v, causal, by document, in the dtype of the inputs: what recipes are compared with."""
    group = q.shape[1] // k.shape[1]
    found = []
    for begin, end in pairwise(offsets):
        queries, keys, values = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        scores = (queries @ keys.transpose(1, 2)) * scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        found.append((weights @ values).transpose(0, 1))
    return torch.cat(found)


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    others: dict[str, Any],
) -> None:
    """Refuse what would be computed otherwise than asked for."""
    if dropout:
        raise ValueError(f"dropout is {dropout}; recipes have none, call model.eval()")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys; pass use_cache=False, whole documents are attended"
        )
    if not others.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError(
            "attention that is not causal was asked for; this adapter has causal attention"
        )
    if attention_mask is not None and not (
        attention_mask.dtype == torch.bool and attention_mask.all()
    ):
        raise ValueError(
            "an attention mask was given; give documents of one length without padding, and no mask"
        )
    for name in ("sliding_window", "softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(f"{name} was given; this adapter has attention without it")
