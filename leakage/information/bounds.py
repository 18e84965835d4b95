"""What each use of a recipe lets through at most: from the tokens it couples, and the scales they can reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
_BY_QUERY = (Use.O_P, Use.DQ_DS)

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
        element_mean, element_most: bits of an element of the sample, over all scales that others can give its block,
            with the token's own elements there alone.
        element_any: bits of any element whatever: exact for bfloat16 elements, log2(scales) for others.
        growths: the same by how far the amax of whole blocks of the sample is raised.
        token_scales: scales that a token's elements have, of the longest document.
        token_elements: elements that a token has.
        token_mean: bits that all elements of a token carry, of the sample: those of one scale are counted jointly.
        token_any: bits that they can carry whatever they are: the bound per token.
    """

    use: Use
    operand: str
    illegal: tuple[UseIllegal, ...]
    unbounded: str | None = None
    scales: int = 1
    element_mean: float = 0.0
    element_most: float = 0.0
    element_any: float = 0.0
    growths: tuple[Growth, ...] = ()
    token_scales: int = 0
    token_elements: int = 0
    token_mean: float = 0.0
    token_any: float = 0.0

    @property
    def legal(self) -> bool:
        """Whether it is proved that nothing gets through by this use."""
        return not self.illegal

    @property
    def severities(self) -> tuple[Severity, ...]:
        """The severities of what is illegal."""
        found = {severity for one in self.illegal for severity in one.severities}
        return tuple(severity for severity in Severity if severity in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeverityBound:
    """What all uses together let through at most, of one severity.

    Attributes:
        severity: the severity.
        uses: the uses by which it is there.
        token: bits a token and head: the sum over these uses, each copy once; None where there is no bound.
        unbounded: why there is none, in words.
    """

    severity: Severity
    uses: tuple[Use, ...]
    token: float | None
    unbounded: str | None = None


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


def severity_bounds(bounds: Iterable[UseBound], structure: Structure) -> tuple[SeverityBound, ...]:
    """The bound of each severity: 0 where no use, and no knob, has it."""
    bounds = tuple(bounds)
    copies = {one.use: one.source for one in structure.uses}
    found = []
    for severity in Severity:
        having = [one for one in bounds if severity in one.severities]
        listed = {one.use for one in having}
        token = math.fsum(one.token_any for one in having if copies.get(one.use) not in listed)
        reason = _no_bound(structure, severity, having)
        found.append(
            SeverityBound(
                severity=severity,
                uses=tuple(one.use for one in having),
                token=token if reason is None else None,
                unbounded=reason,
            )
        )
    return tuple(found)


def _no_bound(structure: Structure, severity: Severity, having: Sequence[UseBound]) -> str | None:
    """Why there is no bound of a severity."""
    knobs = [
        knob.knob
        for knob in structure.knobs
        if any(severity in one.severities for one in knob.illegal)
    ]
    if knobs:
        return f"{', '.join(knobs)} lets values of masked tokens through"
    without = [str(one.use) for one in having if one.unbounded]
    if without:
        return f"{', '.join(without)} has none"
    if not having and any(severity in one.counts for one in structure.illegal):
        return "it comes of more than one use together"
    return None


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
    across = rows if pairs and one.use not in _BY_QUERY else columns
    matrix = values[tensor]
    if pairs and one.use not in _BY_QUERY:
        matrix = matrix.T
    own = _runs(matrix, across)
    amax = np.abs(own).max(axis=1).view(np.uint32)
    if sharing.previous:
        amax = np.zeros_like(amax)  # the scale is another block's, which own elements do not bound
    scales = len(scale_reach.scales_of(block_format).codes)
    element = scale_reach.dequantized(own.view(np.uint32), block_format)
    reach = scale_reach.reachable(amax, block_format, None)
    bits = np.log2(scale_reach.counts(element, reach[:, None, :]))
    joint = np.log2(scale_reach.joint_counts(element, reach))
    most = math.log2(scales)
    if not pairs and not (tensor == "do" and structure.coupling.lse_in_dout):
        most = math.log2(scale_reach.most_values(block_format, sharing.previous))
    elements = longest if pairs else head_dim
    token_scales = -(-elements // across)
    return UseBound(
        use=one.use,
        operand=one.operand,
        illegal=one.illegal,
        scales=scales,
        element_mean=float(bits.mean()),
        element_most=float(bits.max()),
        element_any=most,
        growths=()
        if sharing.previous
        else _growths(values[tensor], rows, columns, block_format, growths),
        token_scales=token_scales,
        token_elements=elements,
        token_mean=float(joint.mean()) * token_scales,
        token_any=token_scales * min(math.log2(scales), across * most),
    )


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
