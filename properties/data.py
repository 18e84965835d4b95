"""The inputs of an example: base data from a seed by integers alone, and edits of them, as bfloat16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref.golden.inputs import Distribution, hashed, splitmix64
from flamia_ref.properties.drawn import (
    BLOCK,
    OPERANDS,
    Edit,
    Example,
    Family,
    Poison,
    default_scale,
)

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]

_EXPONENT = -8  # of the hash's bell: a standard deviation of 0.8
_ONE = 0x3F80
_LARGEST = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]
_POISONS = {
    Poison.NAN: np.nan,
    Poison.INFINITY: np.inf,
    Poison.NEGATIVE_INFINITY: -np.inf,
    Poison.HUGE: _LARGEST,
}
_APART = 15.0  # logits from 0 of a block's own kind and of the other: together e^30 = 2^43
_RAISED = 40  # of v in even blocks, so that what little weight they have shows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """What a kernel is called with.

    Attributes:
        q, dout: bfloat16 bits [tokens, heads, head_dim].
        k, v: bfloat16 bits [tokens, kv_heads, head_dim].
        lengths: of the documents.
        softmax_scale: what S is multiplied by.
        window: earlier keys that are seen; None for all.
    """

    q: U16
    k: U16
    v: U16
    dout: U16
    lengths: tuple[int, ...]
    softmax_scale: float
    window: int | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        """`cu_seqlens` as integers."""
        return (0, *(int(x) for x in np.cumsum(self.lengths)))

    def edited(self, edits: Iterable[Edit]) -> Inputs:
        """The inputs after edits, one after another."""
        arrays: dict[str, Any] = {name: getattr(self, name).copy() for name in OPERANDS}
        for edit in edits:
            _apply(arrays[edit.operand], edit)
        return replace(self, **arrays)

    def with_garbage(self, document: int, garbage: str) -> Inputs:
        """The inputs with garbage in every token outside one document."""
        start, stop = self.starts[document : document + 2]
        outside = np.ones(len(self.q), np.bool_)
        outside[start:stop] = False
        fill = bits_of(np.array(_POISONS[Poison(garbage)]))
        arrays: dict[str, Any] = {}
        for name in OPERANDS:
            arrays[name] = getattr(self, name).copy()
            arrays[name][outside] = fill
        return replace(self, **arrays)

    def scaled(self, operand: str, exponent: int) -> Inputs:
        """The inputs with one operand times a power of two."""
        with np.errstate(under="ignore"):
            x = bits_of(np.ldexp(values(getattr(self, operand)), exponent))
        scaled: dict[str, Any] = {operand: x}
        return replace(self, **scaled)

    def document(self, index: int, *, tokens: int | None = None) -> Inputs:
        """One document alone, or the first tokens of it."""
        start, stop = self.starts[index : index + 2]
        stop = stop if tokens is None else start + tokens
        arrays: dict[str, Any] = {name: getattr(self, name)[start:stop] for name in OPERANDS}
        return replace(self, **arrays, lengths=(stop - start,))

    def changed_tokens(self, other: Inputs) -> dict[str, npt.NDArray[np.int64]]:
        """The tokens of each operand whose bits differ, operands that do not left out."""
        found = {}
        for name in OPERANDS:
            differs = (getattr(self, name) != getattr(other, name)).any(axis=(1, 2))
            if differs.any():
                found[name] = np.flatnonzero(differs)
        return found


def inputs_of(example: Example) -> Inputs:
    """The inputs of an example before its edits."""
    tokens = sum(example.lengths)
    arrays = {}
    for name in OPERANDS:
        heads = example.heads if name in ("q", "dout") else example.kv_heads
        shape = (tokens, heads, example.head_dim)
        arrays[name] = _base(name, shape, Family(example.family), example)
    return Inputs(
        **arrays,
        lengths=example.lengths,
        softmax_scale=default_scale(example.head_dim),
        window=example.window,
    )


def values(bits: U16) -> F32:
    """The values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bits_of(x: npt.NDArray[Any]) -> U16:
    """Finite values rounded to bfloat16 and held to its largest, NaN and infinity as they are."""
    held = np.where(np.isfinite(x), np.clip(x, -_LARGEST, _LARGEST), x)
    return held.astype(ml_dtypes.bfloat16).view(np.uint16)


def _base(name: str, shape: tuple[int, int, int], family: Family, example: Example) -> U16:
    score = name in ("q", "k")  # with exponents as wide as v's, one key would take it all
    distribution = {
        Family.TOKENS: Distribution.BELL,
        Family.OUTLIERS: Distribution.BELL if score else Distribution.OUTLIERS,
        Family.WIDE: Distribution.BELL if score else Distribution.WIDE,
    }.get(family, Distribution.BELL)
    if family is Family.ONES and score:
        return np.full(shape, _ONE, np.uint16)
    made = hashed(name, shape, seed=example.seed, distribution=distribution, exponent=_EXPONENT)
    if family is Family.TOKENS or (family is Family.WIDE and score):
        stream = int(splitmix64(example.seed, np.array([64 + OPERANDS.index(name)], np.uint64))[0])
        rows = splitmix64(stream, np.arange(shape[0], dtype=np.uint64)) & np.uint64(15)
        made = bits_of(np.ldexp(values(made), rows.astype(np.int32)[:, None, None] - 12))
    return _in_blocks(name, made, example.lengths) if family is Family.BLOCKS else made


def _in_blocks(name: str, bell: U16, lengths: tuple[int, ...]) -> U16:
    """The data of `Family.BLOCKS`: q and k give +15 or -15 logits, by the kinds of their blocks, and a bit."""
    places = np.concatenate([np.arange(length) for length in lengths])
    odd = (places // BLOCK % 2 == 1)[:, None, None]
    if name in ("q", "k"):
        size = np.sqrt(_APART / np.sqrt(bell.shape[2]))
        return bits_of(np.where(odd, -size, size) + values(bell) / 16)
    return bits_of(np.ldexp(values(bell), np.where(odd, 0, _RAISED))) if name == "v" else bell


def _apply(x: U16, edit: Edit) -> None:
    place = (edit.token, slice(None), slice(None) if edit.channel is None else edit.channel)
    old = values(x[place]).astype(np.float64)
    if edit.poison is not None:
        x[place] = bits_of(np.full_like(old, _POISONS[Poison(edit.poison)]))
    elif edit.exponent or edit.sign < 0:
        x[place] = bits_of(np.ldexp(np.where(old == 0, 1.0, old), edit.exponent) * edit.sign)
