"""Scale bytes as an oracle: which of them changed though a row takes them that may not depend on what was edited.

A scale decides the bits of all that shares it. So a byte that changed is a leak on its own, whether or not the values
of this sample show it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.attention.product import Use
from flamia_ref.leakage.search.setting import BLOCKS, Bools, Setting

Array = NDArray[Any]

OUTPUTS_OF: Mapping[str, tuple[str, ...]] = {
    "s": ("out", "lse"),
    "o": ("out",),
    "dp": ("dq",),
    "dq": ("dq",),
    "dk": ("dk",),
    "dv": ("dv",),
}
"""The outputs that a product decides first; what follows from them is as legal as they are."""

MOST_TOKENS = 2048
"""Tokens of a hunt that compares scale bytes: which of them feed whom is a table of tokens squared."""

_TENSORS = {"q": "q", "k": "k", "v": "v", "do": "dout"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleChange:
    """A scale byte that changed and feeds an output that must not depend on the edit.

    Attributes:
        stage: its stage.
        index: of the byte in the stage.
        before, after: the byte.
        output, token: one of the outputs that it feeds.
        feeds: the tokens, or the pair of runs, that share it, in words.
    """

    stage: str
    index: tuple[int, ...]
    before: int
    after: int
    output: str
    token: int
    feeds: str


def uses_named(stage: str) -> tuple[Use, ...]:
    """The uses that take a stage of scales, by its name alone: "v.scales" by all uses of v, "v.o.scales" by one."""
    parts = stage.split(".")[: stage.split(".").index("scales")]
    wanted = [use for use in Use if use.split(".")[1] == parts[0]]
    return tuple(use for use in wanted if len(parts) == 1 or use.split(".")[0] == parts[1])


def changes(
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    setting: Setting,
    *,
    operand: str,
    tokens: NDArray[np.int64],
    uses: Mapping[str, tuple[Use, ...]] | None = None,
) -> list[ScaleChange]:
    """The bytes that changed and feed a forbidden output, the first of each stage and output.

    `uses`: the uses that take each stage, where that is known better than its name says.
    """
    found: list[ScaleChange] = []
    if setting.tokens > MOST_TOKENS:
        return found
    for stage, x in before.items():
        y = after.get(stage)
        if y is None or x.shape != y.shape or not (x != y).any():
            continue
        of_stage = uses_named(stage) if uses is None else uses.get(_entire(stage), ())
        for output in _outputs(of_stage, setting):
            forbidden = setting.forbidden(output, operand, tokens)
            change = _first(stage, x, y, setting, output, forbidden)
            if change is not None:
                found.append(change)
    return found


def unread(scales: Mapping[str, Array], setting: Setting) -> list[str]:
    """Stages of scales that are not compared: their shape says nothing of which tokens share a byte, or there are more
    than `MOST_TOKENS`."""
    if setting.tokens > MOST_TOKENS:
        return list(scales)
    found = []
    for stage, x in scales.items():
        if _tensor(stage) is None:
            readable = _of_pairs(stage, x, setting) is not None
        else:
            readable = x.ndim >= 1 and _blocks(len(x), setting) is not None
        if not readable or not uses_named(stage):
            found.append(stage)
    return found


def _entire(stage: str) -> str:
    """The name of a stage without the number of a document."""
    head, _, last = stage.rpartition(".")
    return head if last.isdigit() else stage


def _outputs(uses: Iterable[Use], setting: Setting) -> list[str]:
    named = [output for use in uses for output in OUTPUTS_OF[use.split(".")[0]]]
    return [output for output in dict.fromkeys(named) if output in setting.outputs]


def _tensor(stage: str) -> str | None:
    return _TENSORS.get(stage.split(".")[0])


def _first(
    stage: str, x: Array, y: Array, setting: Setting, output: str, forbidden: Bools
) -> ScaleChange | None:
    """The first byte that changed of those that a forbidden token of the output takes."""
    if _tensor(stage) is None:
        found = _of_pairs(stage, x, setting)
        if found is None:
            return None
        table = _pairs_feed(setting, found, tuple(x.shape[1:]), output)
        changed = (x != y).any(axis=0)
    else:
        tensor = str(_tensor(stage))
        if not x.ndim or tensor not in setting.operands or _blocks(len(x), setting) is None:
            return None
        table = _tokens_feed(setting, tensor, output, len(x))
        changed = (x != y).reshape(len(x), -1).any(axis=1)
    # A token takes the bytes of one row, or of one column, of the blocks, those that the table says.
    taken = table.taken & changed[table.where]
    hit = np.flatnonzero(taken.reshape(setting.tokens, -1).any(axis=1) & forbidden)
    if not len(hit):
        return None
    token = int(hit[0])
    block = table.block(token, taken[token])
    places = np.argwhere(x != y)
    index = next(tuple(int(i) for i in one) for one in places if table.of(one) == block)
    return ScaleChange(
        stage=stage,
        index=index,
        before=int(x[index]),
        after=int(y[index]),
        output=output,
        token=token,
        feeds=table.words(block),
    )


@dataclass(frozen=True, kw_only=True)
class _Feed:
    """Which blocks each token of an output takes.

    Attributes:
        where: index arrays [tokens, candidates] into the array of blocks.
        taken: bool [tokens, candidates].
        axes: the axes of a stage that count blocks.
        name: what a block is, in words.
    """

    where: tuple[NDArray[np.int64], ...]
    taken: Bools
    axes: tuple[int, ...]
    name: Any

    def block(self, token: int, taken: Bools) -> tuple[int, ...]:
        """The first of the blocks that are `taken` for a token."""
        candidate = int(np.flatnonzero(taken)[0])
        return tuple(int(axis[token, candidate]) for axis in self.where)

    def of(self, place: NDArray[np.int64]) -> tuple[int, ...]:
        """The block of a byte."""
        return tuple(int(place[axis]) for axis in self.axes)

    def words(self, block: tuple[int, ...]) -> str:
        """A block in words."""
        return str(self.name(block))


@functools.lru_cache(maxsize=64)
def _tokens_feed(setting: Setting, tensor: str, output: str, count: int) -> _Feed:
    """Copies of an input in so many blocks of tokens: a token takes those of its legal sources."""
    blocks = np.asarray(_blocks(count, setting))
    spans = setting.legal.spans(output, tensor)
    members = np.zeros((count, setting.tokens + 1), dtype=np.int64)
    members[blocks, np.arange(setting.tokens) + 1] = 1
    before = np.cumsum(members, axis=1)
    taken = (before[:, spans.end] > before[:, spans.begin]).T
    where = np.broadcast_to(np.arange(count), (setting.tokens, count))
    return _Feed(
        where=(where,),
        taken=taken,
        axes=(0,),
        name=lambda block: _words(np.flatnonzero(blocks == block[0])),
    )


@functools.lru_cache(maxsize=64)
def _blocks(count: int, setting: Setting) -> NDArray[np.int64] | None:
    """The block of each token, where there are `count`: of one token each, or counted from documents' starts, or from
    the first packed token. None where no size gives that count."""
    tokens = setting.tokens
    if count == tokens:
        return np.arange(tokens)
    lengths = np.array(setting.lengths, dtype=np.int64)
    for size in BLOCKS:
        of_document = -(-lengths // size)
        if int(of_document.sum()) == count:
            first = np.concatenate([[0], np.cumsum(of_document)[:-1]])
            return np.asarray(first[setting.document] + setting.place // size)
    for size in BLOCKS:
        if -(-tokens // size) == count:
            return np.arange(tokens) // size
    return np.zeros(tokens, dtype=np.int64) if count == 1 else None


def _of_pairs(stage: str, x: Array, setting: Setting) -> tuple[int, int, int] | None:
    """The document of a stage of pairs, and the queries and keys that a byte stands for."""
    last = stage.split(".")[-1]
    document = int(last) if last.isdigit() else 0
    if document >= len(setting.lengths) or x.ndim != 3:
        return None
    length = setting.lengths[document]
    sizes = []
    for count in x.shape[1:]:
        fits = [size for size in (1, *BLOCKS) if -(-length // size) == count]
        if not fits:
            return None
        sizes.append(fits[0])
    return document, sizes[0], sizes[1]


@functools.lru_cache(maxsize=64)
def _pairs_feed(
    setting: Setting, found: tuple[int, int, int], shape: tuple[int, ...], output: str
) -> _Feed:
    """Copies of P or dS: a query takes the blocks of its row with a visible key, a key those of its column."""
    document, queries, keys = found
    visible = setting.mask.visible(document)
    length, start = len(visible), int(setting.cu_seqlens[document])
    by_key = output in ("dk", "dv")
    own, other = (keys, queries) if by_key else (queries, keys)
    pairs = visible.T if by_key else visible
    count = shape[0] if by_key else shape[1]
    padded = np.zeros((length, count * other), dtype=np.bool_)
    padded[:, :length] = pairs
    taken = np.zeros((setting.tokens, count), dtype=np.bool_)
    taken[start : start + length] = padded.reshape(length, count, other).any(axis=2)
    mine = np.zeros((setting.tokens, count), dtype=np.int64)
    mine[start : start + length] = (np.arange(length) // own)[:, None]
    others = np.broadcast_to(np.arange(count), mine.shape)

    def name(block: tuple[int, ...]) -> str:
        words = []
        for what, index, size in (("queries", block[0], queries), ("keys", block[1], keys)):
            first, last = index * size, min((index + 1) * size, length) - 1
            words.append(f"{what} {start + first} to {start + last}")
        return ", ".join(words)

    return _Feed(
        where=(others, mine) if by_key else (mine, others), taken=taken, axes=(1, 2), name=name
    )


def _words(members: NDArray[np.int64]) -> str:
    first, last = int(members[0]), int(members[-1])
    return f"token {first}" if first == last else f"tokens {first} to {last}"
