"""What a hunt runs on: shapes, documents, the mask, and who may not depend on whom under it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention.protection import documents_of
from flamia_ref.leakage.legal import LegalPairs, Severity
from flamia_ref.packing.mask import Mask

Bools = NDArray[np.bool_]

OPERANDS = ("q", "k", "v", "dout")
FORWARD = ("out", "lse")
GRADIENTS = ("dq", "dk", "dv")
OUTPUTS = (*FORWARD, *GRADIENTS)

BLOCKS = (16, 32, 64, 128)
"""Sizes of blocks and tiles that tokens may share."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The shapes and the mask of one hunt.

    Attributes:
        mask: documents and who sees whom; queries and keys are the same tokens.
        head_dim, heads, kv_heads: the shape of q, and of k and v.
        softmax_scale: what scores are multiplied by.
        backward: whether dout is given and gradients are compared.
    """

    mask: Mask
    head_dim: int
    heads: int
    kv_heads: int
    softmax_scale: float
    backward: bool

    def to_document(self) -> dict[str, Any]:
        """The setting as plain data, by the keywords of `of`."""
        return {
            "lengths": list(self.lengths),
            "head_dim": self.head_dim,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "causal": self.mask.causal,
            "window": list(self.mask.window),
            "alignment": self.mask.alignment,
            "softmax_scale": self.softmax_scale,
            "backward": self.backward,
        }

    @classmethod
    def of(
        cls,
        *,
        lengths: Sequence[int],
        head_dim: Any,
        heads: Any,
        kv_heads: Any,
        causal: Any,
        window: Any,
        alignment: Any,
        softmax_scale: Any,
        backward: Any,
    ) -> Setting:
        """A setting from what callers give. Raises TypeError or ValueError of one line."""
        queries, keys = documents_of(lengths, None)
        mask = Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)
        sizes = {
            name: whole(name, given, least=1)
            for name, given in (("head_dim", head_dim), ("heads", heads), ("kv_heads", kv_heads))
        }
        if sizes["heads"] % sizes["kv_heads"]:
            raise ValueError(
                f"heads is {heads} and kv_heads {kv_heads}; heads must be a multiple of kv_heads"
            )
        if not isinstance(backward, (bool, np.bool_)):
            raise TypeError(f"backward is {shown(backward)}; it must be True or False")
        scale = 1 / math.sqrt(sizes["head_dim"]) if softmax_scale is None else softmax_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float, np.number)):
            raise TypeError(f"softmax_scale is {shown(scale)}; it must be a number, or None")
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"softmax_scale is {shown(scale)}; it must be above 0 and finite")
        return cls(mask=mask, softmax_scale=float(scale), backward=bool(backward), **sizes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self.mask.queries.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self.mask.queries.tokens

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """Where the documents begin and end."""
        return np.array(self.mask.queries.offsets, dtype=np.int32)

    @property
    def operands(self) -> tuple[str, ...]:
        """The inputs that are there."""
        return OPERANDS if self.backward else OPERANDS[:3]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs that are wanted."""
        return OUTPUTS if self.backward else FORWARD

    def shape(self, name: str) -> tuple[int, int, int]:
        """The shape of an input or an output, tokens first; lse has one channel here."""
        heads = self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads
        return (self.tokens, heads, 1 if name == "lse" else self.head_dim)

    @functools.cached_property
    def legal(self) -> LegalPairs:
        """The legal pairs of the mask."""
        return LegalPairs(self.mask)

    @functools.cached_property
    def document(self) -> NDArray[np.int64]:
        """The document of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @functools.cached_property
    def place(self) -> NDArray[np.int64]:
        """The place of each token in its document."""
        return np.arange(self.tokens) - self.cu_seqlens[:-1].astype(np.int64)[self.document]

    def forbidden(self, output: str, operand: str, tokens: NDArray[np.int64]) -> Bools:
        """Which tokens of `output` may depend on none of `tokens` of `operand`."""
        spans = self.legal.spans(output, operand)
        named = np.zeros(self.tokens + 1, dtype=np.int64)
        named[1:][tokens] = 1
        before = np.cumsum(named)
        found: Bools = before[spans.end] == before[spans.begin]
        return found

    def severities(
        self, output: str, out_tokens: Any, operand: str, tokens: Any
    ) -> frozenset[Severity]:
        """Every severity of illegal dependencies of some tokens of `output` on some tokens of `operand`."""
        out_tokens, tokens = np.asarray(out_tokens), np.asarray(tokens)
        if not out_tokens.size or not tokens.size:
            return frozenset()
        found = self.legal.severity(output, out_tokens[:, None], operand, tokens[None, :])
        return frozenset(Severity(one) for one in set(found.ravel().tolist()))


def whole(name: str, given: Any, *, least: int) -> int:
    """A whole number that a caller gave. Raises TypeError or ValueError of one line."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        raise TypeError(f"{name} is {shown(given)}; it must be a whole number")
    if given < least:
        raise ValueError(f"{name} is {given}; it must be {least} or more")
    return int(given)


def wanted_severities(given: Any) -> tuple[Severity, ...]:
    """The severities that a caller names, all for None. Raises UnknownName."""
    if given is None:
        return tuple(Severity)
    if isinstance(given, str):
        given = (given,)
    found = []
    for one in given:
        if one not in tuple(Severity):
            raise unknown_name("severity", one, Severity)
        found.append(Severity(one))
    if not found:
        raise ValueError("severities is empty; name at least one, or None for all")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Which forbidden pairs of different tokens a setting has, for one operand.

    Attributes:
        severities: of those whose output's token shares a block with the source: by size of the block in `BLOCKS`.
        apart: severities that have pairs, none of which shares even the largest block.
        shareable: severities of which a block can hold a source and a token that the forbidden output legally takes,
            so that a scale shared between them would leak.
    """

    severities: dict[Severity, tuple[int, ...]]
    apart: tuple[Severity, ...]
    shareable: frozenset[Severity]


def reach(setting: Setting, operand: str, outputs: Iterable[str]) -> Reach:
    """What a hunt with this operand can find, from the shapes alone."""
    rows, sources = _pairs(setting.tokens)
    together = {size: _share(setting, rows, sources, size) for size in BLOCKS}
    sharing: dict[Severity, set[int]] = {}
    every: set[Severity] = set()
    shareable: set[Severity] = set()
    for output in outputs:
        spans = setting.legal.spans(output, operand)
        begin, end = spans.begin[rows], spans.end[rows]
        illegal = (sources < begin) | (sources >= end)
        if not illegal.any():
            continue
        kinds = setting.legal.severity(output, rows, operand, sources)
        for kind in Severity:
            of_kind = illegal & (kinds == kind)
            if of_kind.any():
                every.add(kind)
                sizes = {size for size in BLOCKS if (of_kind & together[size]).any()}
                sharing.setdefault(kind, set()).update(sizes)
        taking = illegal & together[max(BLOCKS)] & (end > begin)
        shareable |= set(kinds[taking].tolist())
    ordered = {kind: tuple(sorted(sharing[kind])) for kind in Severity if sharing.get(kind)}
    return Reach(
        severities=ordered,
        apart=tuple(kind for kind in Severity if kind in every and kind not in ordered),
        shareable=frozenset(shareable),
    )


_DENSE = 512  # tokens, up to which every pair is looked at


def _pairs(tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of different tokens, all of them or enough to show every kind."""
    token = np.arange(tokens)
    if tokens <= _DENSE:
        rows, sources = (x.ravel() for x in np.meshgrid(token, token, indexing="ij"))
    else:
        steps = [1, 2, 3, 7, 15, 31, 63, 127, *(1 << n for n in range(7, tokens.bit_length()))]
        apart = np.array([*steps, *(-step for step in steps)])
        rows, sources = np.broadcast_arrays(token[:, None], token[:, None] + apart)
        rows, sources = rows.ravel(), sources.ravel()
    kept = (rows != sources) & (sources >= 0) & (sources < tokens)
    return rows[kept], sources[kept]


def _share(
    setting: Setting, rows: NDArray[np.int64], sources: NDArray[np.int64], size: int
) -> Bools:
    """Whether two tokens are in one block, counted from the documents' starts or from the first packed token."""
    packed = rows // size == sources // size
    local = (setting.document[rows] == setting.document[sources]) & (
        setting.place[rows] // size == setting.place[sources] // size
    )
    found: Bools = packed | local
    return found
