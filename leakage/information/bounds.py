"""What each use of a recipe lets through at most: from the tokens it couples, and the scales they can reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flamia_ref.attention.product import Operand, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import PRESETS
from flamia_ref.formats.block import BlockFormat
from flamia_ref.leakage.information import scale_reach
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import Draws, rounded
from flamia_ref.leakage.sharing.coupling import PAIR_USES, Sharing
from flamia_ref.leakage.sharing.structures import Structure
from flamia_ref.leakage.sharing.uses import UseIllegal, UseStructure

_BLOCKS = 64  # of a sample of values
BY_QUERY = (Use.O_P, Use.DQ_DS)
"""Uses of pairs whose rows are summed along keys."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Bits of an element whose block's amax illegal tokens raise up to its 2^`powers`-fold, over the sample."""

    powers: int
    mean: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UseBound:
    """What one use lets through at most, for finite inputs. Bits are a head's.

    A bound is 0 where the structure of the recipe has nothing illegal by this use: that is a proof. Elsewhere it is the
    logarithm of how many values there can be, not of how many are likely.

    Attributes:
        use: the use.
        operand: its format and block.
        illegal: what it makes illegal alone, as the structure says.
        unbounded: why there is no bound, in words; None where there is one.
        scales: how many scales its rule can give a block; log2 of that bounds what all elements of one scale say
            together, of however many tokens.
        row_scales: scales that illegal tokens can change, and that a row of an output takes elements of: of the blocks
            that hold both legal tokens and illegal ones, at the longest document.
        row: bits that all of those together can have, whatever the elements are: the bound of a row by this use.
        element_mean, element_most: bits of an element of the sample, over all scales that others can give its block,
            with the token's own elements there alone.
        element_any: bits of any element whatever: exact for bfloat16 elements, log2(scales) for others.
        growths: the same by how far the amax of whole blocks of the sample is raised.
        source_elements: elements that one token has there, of the longest document.
        source_mean: bits that the values of one token's elements have together, of the sample: those of one scale are
            counted jointly. A row takes the elements of many tokens: this is no bound of a row.
    """

    use: Use
    operand: str
    illegal: tuple[UseIllegal, ...]
    unbounded: str | None = None
    scales: int = 1
    row_scales: int = 0
    row: float = 0.0
    element_mean: float = 0.0
    element_most: float = 0.0
    element_any: float = 0.0
    growths: tuple[Growth, ...] = ()
    source_elements: int = 0
    source_mean: float = 0.0

    @property
    def legal(self) -> bool:
        """Whether it is proved that nothing gets through by this use."""
        return not self.illegal

    @property
    def severities(self) -> tuple[Severity, ...]:
        """The severities of what is illegal."""
        found = {severity for one in self.illegal for severity in one.severities}
        return tuple(severity for severity in Severity if severity in found)


def use_bounds(
    structure: Structure,
    values: Mapping[str, Floats],
    *,
    head_dim: int,
    growths: Iterable[int],
) -> tuple[UseBound, ...]:
    """The bound of every use that the recipe has.

    Args:
        structure: of the recipe, for the documents that count.
        values: a sample of each tensor, "q", "k", "v" and "do" [tokens, channels], "p" and "ds" [queries, keys].
        head_dim: channels of a head.
        growths: powers of two for `Growth`.
    """
    growths = tuple(growths)
    longest = max(structure.mask.keys.lengths, default=0)
    found = []
    for one in structure.uses:
        if not structure.recipe.has_use(one.use):
            continue
        if not one.illegal:
            found.append(UseBound(use=one.use, operand=one.operand, illegal=()))
            continue
        found.append(_bound(structure, one, values, head_dim, longest, growths))
    return tuple(found)


def sample(*, head_dim: int, seed: int) -> dict[str, Floats]:
    """Bell-shaped values of each input, rounded to bfloat16, [tokens, channels]."""
    draws = Draws(seed, 1)
    shape = (4 * _BLOCKS, head_dim)
    return {name: rounded(draws.bell(shape)).astype(np.float32) for name in ("q", "k", "v", "do")}


def _bound(
    structure: Structure,
    one: UseStructure,
    values: Mapping[str, Floats],
    head_dim: int,
    longest: int,
    growths: tuple[int, ...],
) -> UseBound:
    operand = _quantizing(structure.recipe, one.use)
    sharings = structure.coupling.uses[one.use].sharings
    reason = _unbounded(operand, sharings, one)
    if reason is not None:
        return UseBound(use=one.use, operand=one.operand, illegal=one.illegal, unbounded=reason)
    block_format, sharing = PRESETS[operand.format], sharings[0]
    tensor = str(one.use).split(".")[1]
    pairs = one.use in PAIR_USES
    if operand.block is None:
        raise AssertionError("a preset has a block")
    rows, columns = (
        extent if isinstance(extent, int) else size
        for extent, size in zip(
            operand.block, (longest, longest if pairs else head_dim), strict=True
        )
    )
    # Own elements of a token lie along channels; of a query along keys; of a key along queries.
    across = rows if pairs and one.use not in BY_QUERY else columns
    matrix = values[tensor]
    if pairs and one.use not in BY_QUERY:
        matrix = matrix.T
    own = _runs(matrix, across)
    amax = np.abs(own).max(axis=1).view(np.uint32)
    if sharing.previous:
        amax = np.zeros_like(amax)  # the scale is another block's, which own elements do not bound
    element = scale_reach.dequantized(own.view(np.uint32), block_format)
    reach = scale_reach.reachable(amax, block_format, None)
    bits = np.log2(scale_reach.counts(element, reach[:, None, :]))
    joint = np.log2(scale_reach.joint_counts(element, reach))
    computed = pairs or (tensor == "do" and structure.coupling.lse_in_dout)
    scales = scale_reach.scale_count(block_format, computed=computed, zero=sharing.previous)
    most = math.log2(scales)
    if not computed:
        most = math.log2(scale_reach.most_values(block_format, sharing.previous))
    elements = longest if pairs else head_dim
    runs = -(-elements // across)
    row_scales = _row_scales(one.use, runs, previous=sharing.previous)
    # At least one token of the block is illegal, unless the scale is another block's.
    legal = rows * columns if pairs or sharing.previous else (rows - 1) * columns
    return UseBound(
        use=one.use,
        operand=one.operand,
        illegal=one.illegal,
        scales=scales,
        row_scales=row_scales,
        row=row_scales * min(math.log2(scales), legal * most),
        element_mean=float(bits.mean()),
        element_most=float(bits.max()),
        element_any=most,
        growths=()
        if sharing.previous or not growths
        else _growths(values[tensor], rows, columns, block_format, growths),
        source_elements=elements,
        source_mean=float(joint.mean()) * runs,
    )


def _row_scales(use: Use, runs: int, *, previous: bool) -> int:
    """How many scales that illegal tokens can change a row of an output takes elements of, at most.

    Causal, blocks counted from the start of a document: of blocks of tokens, and of blocks of queries for what has a
    value for each pair, one holds legal tokens and illegal ones. A scale that is the block before's is changed in that
    block, and by it in the next one.

    Args:
        use: the use.
        runs: blocks beside each other: along channels for an input, along keys or queries for pairs.
        previous: whether a scale is that of the block before.
    """
    blocks = 2 if previous else 1
    if use in PAIR_USES and use not in BY_QUERY:
        # dK and dV of a token take all queries' blocks of its keys; of one of them a part of the queries is illegal.
        return blocks
    return blocks * runs


def _quantizing(recipe: Recipe, use: Use) -> Operand:
    """The operand whose codes a use takes."""
    operand = recipe.operand(use)
    return operand if operand.same_codes_as is None else _quantizing(recipe, operand.same_codes_as)


def _unbounded(operand: Operand, sharings: tuple[Sharing, ...], one: UseStructure) -> str | None:
    if operand.format not in PRESETS:
        return f"its format {operand.format} has no rule by which scales could be enumerated"
    if operand.promoted_from is not None or len(sharings) != 1:
        return "it is quantized more than once"
    if getattr(operand, "smoothing", "none") != "none":
        return "a mean of tokens is taken off before it is quantized"
    if one.folded_into is not None:
        return f"its scale is folded into {one.folded_into}"
    return scale_reach.not_enumerable(PRESETS[operand.format])


def _runs(matrix: Floats, across: int) -> Floats:
    """Some runs of `across` neighbours in a row, of rows and columns spread over the matrix, none all zero."""
    columns = matrix.shape[1] // across * across
    if not columns:
        matrix = np.pad(matrix, ((0, 0), (0, across - matrix.shape[1])))
        columns = across
    runs = np.ascontiguousarray(matrix[:, :columns]).reshape(-1, across)
    runs = runs[(runs != 0).any(axis=1)]
    if not len(runs):
        return np.ones((1, across), dtype=np.float32)
    chosen = np.unique(np.linspace(0, len(runs) - 1, 4 * _BLOCKS).astype(np.int64))
    return np.ascontiguousarray(runs[chosen])


def _growths(
    matrix: Floats, rows: int, columns: int, block_format: BlockFormat, growths: tuple[int, ...]
) -> tuple[Growth, ...]:
    """Bits of the elements of whole blocks, by how far their amax is raised."""
    rows, columns = min(rows, matrix.shape[0]), min(columns, matrix.shape[1])
    down, over = matrix.shape[0] // rows, matrix.shape[1] // columns
    grid = matrix[: down * rows, : over * columns].reshape(down, rows, over, columns)
    flat = grid.swapaxes(1, 2).reshape(-1, rows * columns)
    blocks = np.ascontiguousarray(flat[(flat != 0).any(axis=1)][:_BLOCKS])
    if not len(blocks):
        return ()
    amax = np.abs(blocks).max(axis=1).view(np.uint32)
    element = scale_reach.dequantized(blocks.view(np.uint32), block_format)
    found = []
    for powers in growths:
        reach = scale_reach.reachable(amax, block_format, powers)[:, None, :]
        bits = np.log2(scale_reach.counts(element, reach))
        found.append(Growth(powers=powers, mean=float(bits.mean()), most=float(bits.max())))
    return tuple(found)
