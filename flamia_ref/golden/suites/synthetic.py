"""Cases from formulas, with what most of them share."""

import math
from typing import Any

from flamia_ref.golden.case_fields import Fill
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import Distribution

ONE = 0x3F80  # bfloat16 bits
NAN = 0x7FC0
INFINITY = 0x7F80
DOUBLE = 0x80  # a step of the bits that doubles


def synthetic(
    name: str,
    why: str,
    *,
    lengths: tuple[int, ...],
    seed: int,
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 64,
    **fields: Any,
) -> CaseSpec:
    """Return a case with 1 / sqrt(head_dim) as its scale, causal and bell-shaped unless fields differ.

    The flags that follow from shapes and mask are added to those given.
    """
    given: dict[str, Any] = {
        "causal": True,
        "softmax_scale": 1 / math.sqrt(head_dim),
        "distribution": Distribution.BELL,
        "exponent": -8,
    }
    given |= fields
    flags = tuple(given.pop("flags", ()))
    spec = CaseSpec(
        name=name,
        why=why,
        lengths=lengths,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        seed=seed,
        flags=flags,
        **given,
    )
    return with_flags(spec, flags)


def with_flags(spec: CaseSpec, flags: tuple[str, ...]) -> CaseSpec:
    """Return a case with the flags that follow from its shapes and mask, and those given."""
    from dataclasses import replace

    return replace(spec, flags=(*flags, *(flag for flag in facts(spec) if flag not in flags)))


def facts(spec: CaseSpec) -> tuple[str, ...]:
    """Return the flags that follow from shapes and mask."""
    both = (*spec.lengths, *spec.lengths_of_keys)
    found = {
        "empty-document": 0 in both or not both,
        "partial-block": any(length % 32 for length in both),
        "several-tiles": any(length > 128 for length in both),
        "grouped-heads": spec.heads > spec.kv_heads,
        "full": not spec.causal,
        "different-lengths": spec.lengths != spec.lengths_of_keys,
        "dead-rows": bool(spec.mask.dead().any()),
        "window": spec.window is not None,
        "softcap": spec.softcap is not None,
        "sink": bool(spec.sinks),
        "scale-padding": spec.scale_padding != 0,
        "head-dim-192": spec.head_dim == 192,
    }
    return tuple(flag for flag, holds in found.items() if holds)


def box(
    tensor: str,
    bits: int,
    *,
    tokens: tuple[int, int],
    channels: tuple[int, int] = (0, 64),
    heads: tuple[int, int] = (0, 1),
    steps: tuple[int, int, int] = (0, 0, 0),
) -> Fill:
    """Return a fill, of all channels of one head unless given."""
    return Fill(
        tensor=tensor, tokens=tokens, heads=heads, channels=channels, bits=bits, steps=steps
    )
