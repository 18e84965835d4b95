"""Scheduling policies: in which order the tiles of a launch are taken, as public kernels do it and beyond.

A policy is a pure function of the work, the GPU and what each tile costs. Where no multiprocessor is named, whoever is
free takes the next tile: that is what the hardware does with a grid, and a persistent kernel with a counter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import Registry
from flamia_ref.schedule.hardware import GPU
from flamia_ref.schedule.order import Order
from flamia_ref.schedule.work import Work

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

_MIB = 2**20
_FA4 = "Dao-AILab/flash-attention 01afd16, flash_attn/cute/tile_scheduler.py"
_FA3 = "Dao-AILab/flash-attention 2226ff5, hopper/tile_scheduler.hpp, flash_prepare_scheduler.cu"
_CUDNN = "NVIDIA/cudnn-frontend 0d04be3, python/cudnn/frost/tile_dsl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One way to hand out tiles.

    Attributes:
        name: what it is called here.
        about: one sentence.
        source: whose it is, with the commit that was read; "-" where it is ours.
        dense: whether it is for documents of one length alone.
        order: the function: work, GPU, cycles of each tile -> order.
    """

    name: str
    about: str
    source: str
    order: Callable[[Work, GPU, Floats], Order]
    dense: bool = False

    def of(self, work: Work, gpu: GPU, cycles: Floats) -> Order:
        """The order of these tiles. Raises ValueError for documents of unequal length, where it has none."""
        if self.dense:
            lengths = sorted(set(work.problem.mask.queries.lengths))
            if len(lengths) > 1:
                raise ValueError(
                    f"the policy {self.name!r} is of documents of one length, and these have {lengths[0]} to"
                    f" {lengths[-1]} tokens; take one for packed documents: "
                    + ", ".join(name for name, one in POLICIES.items() if not one.dense)
                )
        return self.order(work, gpu, cycles)


def _sorted(*keys: Counts) -> Order:
    """By the first key, then the second, and so on."""
    return Order(places=np.lexsort(keys[::-1]))


def _natural(work: Work, gpu: GPU, cycles: Floats) -> Order:
    return Order(places=np.arange(len(work)))


def _static(work: Work, gpu: GPU, cycles: Floats) -> Order:
    places = np.arange(len(work))
    return Order(places=places, sm=places % gpu.sms.value)


def _lpt(work: Work, gpu: GPU, cycles: Floats) -> Order:
    return Order(places=np.argsort(-cycles, kind="stable"))


def _blocks(work: Work) -> Counts:
    """Blocks in the order in which kernels with a reversal take them: with a causal mask or a window the last first.
    Tiles of keys are longest first as they are."""
    return -work.block if work.problem.mask.bounded and not work.launch.by_keys else work.block


def _fa4_lpt(work: Work, gpu: GPU, cycles: Floats) -> Order:
    problem = work.problem
    length = max(problem.mask.keys.lengths, default=0)
    one = length * (problem.head_dim + problem.value_dim) * 2
    width = 1 if one > 50 * _MIB else _power(50 * _MIB // max(one, 1))
    head = work.document * problem.heads + work.head
    return _sorted(head // width, _blocks(work), head, work.split)


def _fa4_varlen(work: Work, gpu: GPU, cycles: Floats) -> Order:
    if not work.problem.mask.bounded or work.launch.by_keys:
        return _natural(work, gpu, cycles)
    return _in_head_sections(work, work.document, _heads_in_l2(work, 50 * _MIB, 1))


def _fa3_varlen(work: Work, gpu: GPU, cycles: Floats) -> Order:
    if work.launch.by_keys:
        return _natural(work, gpu, cycles)
    mask = work.problem.mask
    rows, columns = work.size.queries * work.size.stages, work.size.keys
    queries, keys = (np.array(x.lengths, dtype=np.int64) for x in (mask.queries, mask.keys))
    key = -(-keys // columns) * columns
    if mask.causal:
        key = key - -(-queries // rows) * rows
    if mask.window != (None, None):
        key = np.zeros_like(key)  # with a window documents are not sorted
    rank = np.empty(len(key), dtype=np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(len(key))
    width = _heads_in_l2(work, 8 * _MIB, work.problem.group)
    if not mask.bounded:
        return _sorted(rank[work.document], work.head, work.block, work.split)
    return _in_head_sections(work, rank[work.document], width)


def _in_head_sections(work: Work, document: Counts, width: Counts) -> Order:
    section = work.head // width[work.document]
    return _sorted(document, section, _blocks(work), work.head, work.split)


def _heads_in_l2(work: Work, budget: int, times: int) -> Counts:
    """For each document, how many heads are taken together, so that their keys and values fit `budget` bytes."""
    problem = work.problem
    lengths = np.array(problem.mask.keys.lengths, dtype=np.int64)
    tile = (problem.head_dim + problem.value_dim) * 2 * work.size.keys
    rows = work.size.queries * work.size.stages
    tiles = np.maximum(-(-lengths // rows) * rows // work.size.keys, 1)
    found = np.ones_like(lengths)
    for heads in (2, 4, 8, 16):
        found = np.where(tiles * heads <= budget // tile, heads, found)
    return np.minimum(found * times, problem.heads)


def _cudnn_lpt(work: Work, gpu: GPU, cycles: Floats) -> Order:
    return _sorted(_blocks(work), work.document, work.head, work.split)


def _cudnn_lpt_l2(work: Work, gpu: GPU, cycles: Floats) -> Order:
    problem = work.problem
    groups = len(problem.mask.keys) * problem.kv_heads
    one = max(problem.mask.keys.lengths, default=0) * (problem.head_dim + problem.value_dim) * 2
    active = min(max(int(gpu.l2_bytes.value) // max(one, 1), 1), max(groups, 1))
    active = -(-groups // max(-(-groups // active), 1)) or 1
    group = work.document * problem.kv_heads + work.head // problem.group
    return _sorted(
        group // active, _blocks(work), work.head % problem.group, group % active, work.split
    )


def _cudnn_thd(work: Work, gpu: GPU, cycles: Floats) -> Order:
    lengths = np.array(work.problem.mask.queries.lengths, dtype=np.int64)
    rank = np.empty(len(lengths), dtype=np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
    return _sorted(rank[work.document], work.head, _blocks(work), work.split)


def _power(count: int) -> int:
    """The greatest power of two that is not more."""
    return 1 << (max(count, 1).bit_length() - 1)


POLICIES = Registry[Policy](
    "policy",
    (
        (policy.name, policy)
        for policy in (
            Policy(
                name="natural",
                about="the grid as it is: blocks of a head ascending, heads, documents",
                source=f"{_FA4}, SingleTileScheduler; {_CUDNN}/scheduler.py, NATURAL",
                order=_natural,
            ),
            Policy(
                name="static",
                about="persistent: tile i to multiprocessor i modulo their number, in natural order",
                source=f"{_FA4}, StaticPersistentTileScheduler",
                order=_static,
            ),
            Policy(
                name="fa4-lpt",
                about="sections of heads that fit 50 MiB; in a section the longest blocks first",
                source=f"{_FA4}, SingleTileLPTScheduler",
                order=_fa4_lpt,
                dense=True,
            ),
            Policy(
                name="fa4-varlen",
                about="documents as they come; in a document sections of heads, the longest blocks first; a backward"
                " as the grid is",
                source=f"{_FA4}, SingleTileVarlenScheduler",
                order=_fa4_varlen,
            ),
            Policy(
                name="fa3-varlen",
                about="as fa4-varlen, documents sorted by key tiles, with a causal mask less the queries'; a"
                " backward as the grid is",
                source=f"{_FA3}, VarlenDynamicPersistentTileScheduler",
                order=_fa3_varlen,
            ),
            Policy(
                name="cudnn-lpt",
                about="the longest blocks of all heads and documents first",
                source=f"{_CUDNN}/scheduler.py, LPT",
                order=_cudnn_lpt,
                dense=True,
            ),
            Policy(
                name="cudnn-lpt-l2",
                about="the same in sections of key/value heads that fit the L2 cache",
                source=f"{_CUDNN}/scheduler.py, LPT_L2",
                order=_cudnn_lpt_l2,
                dense=True,
            ),
            Policy(
                name="cudnn-thd",
                about="the longest documents first; in a document head after head, the longest blocks first",
                source=f"{_CUDNN}/thd.py",
                order=_cudnn_thd,
            ),
            Policy(
                name="lpt",
                about="the longest tiles of all heads and documents first, by what they cost",
                source="-",
                order=_lpt,
            ),
        )
    ),
)
