"""What each use of a recipe couples, and what that makes illegal when nothing else couples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from flamia_ref.attention.description import form
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.legal import LegalPairs, Severity
from flamia_ref.leakage.sharing import sampling
from flamia_ref.leakage.sharing.coupling import PAIR_USES, Coupled, Coupling, product_of
from flamia_ref.leakage.sharing.dependence import Dependence, affected
from flamia_ref.leakage.sharing.illegal import RETURNED, Findings, Illegal, worst
from flamia_ref.leakage.sharing.placement import DOCUMENT, Grid, Placement
from flamia_ref.leakage.sharing.sampling import Sample
from flamia_ref.packing.documents import Documents
from flamia_ref.packing.mask import Mask

_MOST_TOKENS = 2048  # of a sample that uses are looked at over


class Couples(StrEnum):
    """What a use makes a token, or a pair, depend on."""

    NONE = "none"
    """Itself."""
    BLOCK = "block"
    """All that its block holds."""
    PREVIOUS_BLOCK = "previous_block"
    """All that the block before holds."""
    DOCUMENT = "document"
    """All tokens of its document."""
    TENSOR = "tensor"
    """All tokens, of all documents."""


class Where(StrEnum):
    """Where a shared scale reaches what it must not."""

    NONE = "none"
    """Nowhere."""
    DIAGONAL = "diagonal"
    """In blocks of 32 queries by 32 keys that the mask cuts: on the diagonal, at the end of a document, at the edge of
    a window. With those computed from unquantized operands nothing is left."""
    BOUNDARY = "boundary"
    """In blocks that only an end of a document cuts: no mask hides a key of the own document."""
    EVERY_TILE = "every tile"
    """In blocks with no masked pair too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UseIllegal:
    """One output and one input between which a use makes pairs illegal."""

    output: str
    input: str
    severities: tuple[Severity, ...]
    later: bool
    earlier: bool
    other_documents: bool
    where: Where


@dataclass(frozen=True, kw_only=True, slots=True)
class UseStructure:
    """One use of a recipe.

    Attributes:
        use: the use.
        operand: its format and block.
        scope: where its scale comes from.
        couples: what else a token or a pair depends on by it.
        shares: what shares a scale, in words.
        guarded: whether its product computes guarded blocks otherwise.
        folded_into: the use that takes its scale.
        source: the use whose codes, or values, these are.
        illegal: what it makes illegal, alone; over the documents given, or some of each kind.
    """

    use: Use
    operand: str
    scope: Scope
    couples: Couples
    shares: str
    guarded: bool
    folded_into: Use | None
    source: Use | None
    illegal: tuple[UseIllegal, ...]

    @property
    def where(self) -> Where:
        """Where it is illegal: "every tile" if anything is illegal there."""
        return max((one.where for one in self.illegal), key=list(Where).index, default=Where.NONE)

    @property
    def severity(self) -> Severity | None:
        """The worst, None if nothing is illegal."""
        found = {severity: 1 for one in self.illegal for severity in one.severities}
        return worst(found) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobStructure:
    """A knob that makes pairs illegal without any shared scale."""

    knob: str
    illegal: tuple[UseIllegal, ...]


def uses_of(
    recipe: Recipe, coupling: Coupling, sample: Sample, grid: Grid
) -> Iterator[UseStructure]:
    """Every use, looked at over the documents of a sample, or some of them if they are many."""
    bench = _Bench(coupling, sample, grid)
    for use, operand in recipe.uses():
        illegal: tuple[UseIllegal, ...] = ()
        coupled = coupling.uses[use]
        if coupled.sharings or coupled.folded_into is not None:
            alone = coupling.alone(use)
            found = bench.found(alone, use)
            guarded = bench.found(alone.guarding(use), use) if found else ()
            left = {(one.output, one.input) for one in guarded}
            illegal = tuple(_of(one, left, bench.mask) for one in found)
        yield UseStructure(
            use=use,
            operand=form(operand),
            scope=operand.scope,
            couples=_couples(coupling, use),
            shares=_shares(coupling, use, operand),
            guarded=product_of(use) in coupling.guarded,
            folded_into=operand.scale_folded_into,
            source=operand.same_codes_as or operand.promoted_from,
            illegal=illegal,
        )


def knobs_of(coupling: Coupling, sample: Sample, grid: Grid) -> Iterator[KnobStructure]:
    """Knobs that make something illegal alone: so far `softmax.mask_value`."""
    if coupling.masked_scores is None:
        return
    bench = _Bench(coupling, sample, grid)
    found = bench.found(coupling.alone(None), None)
    if found:
        every = {(one.output, one.input) for one in found}
        illegal = tuple(_of(one, every, bench.mask) for one in found)
        yield KnobStructure(knob="softmax.mask_value", illegal=illegal)


class _Bench:
    """Some documents of a sample, each counted once, over which uses are looked at one by one."""

    def __init__(self, coupling: Coupling, sample: Sample, grid: Grid) -> None:
        self.mask = _few(sample.mask, grid, coupling)
        self.sample = sampling.of_pack(self.mask)
        self.legal = LegalPairs(self.mask)
        self.placement = Placement(mask=self.mask, grid=grid)
        self._uncoupled: Dependence | None = None

    def found(self, coupling: Coupling, use: Use | None) -> tuple[Illegal, ...]:
        """What is illegal by a coupling of one use, or of none."""
        dependence = Dependence(coupling=coupling, placement=self.placement)
        outputs: Iterable[str] = RETURNED
        if use is not None:
            dependence = self._legal_of(coupling).by(coupling, use)
            reached = affected(coupling, use)
            outputs = [output for output in RETURNED if output in reached]
        return tuple(Findings(dependence, self.sample, self.legal).all(outputs))

    def _legal_of(self, coupling: Coupling) -> Dependence:
        """The dependence with no use that couples."""
        if self._uncoupled is None:
            nothing = replace(coupling, uses={use: Coupled() for use in Use}, guarded=frozenset())
            self._uncoupled = Dependence(coupling=nothing, placement=self.placement)
        return self._uncoupled


def _few(mask: Mask, grid: Grid, coupling: Coupling) -> Mask:
    """A part of a pack: with blocks from the start of each document, the longest document, the shortest and some
    between; else the first ones, shortened so that those after them are in blocks as before."""
    lengths = np.array([mask.queries.lengths, mask.keys.lengths], dtype=np.int64)
    sizes = lengths.max(axis=0)
    if sizes.sum() <= _MOST_TOKENS:
        return mask
    if grid is Grid.DOCUMENT:
        order = np.argsort(-sizes, kind="stable")
        count = max(2, int(_MOST_TOKENS // max(sizes.max(), 1)))
        chosen = np.unique(np.linspace(0, len(order) - 1, count).astype(np.int64))
        lengths = lengths[:, np.sort(order[chosen])]
    else:
        least, period = sampling.steady_from(mask, coupling), coupling.period
        kinds: list[tuple[int, int]] = []
        for queries, keys in lengths.T.tolist():
            kinds.append(max(kind for kind, _ in sampling.stand_ins(queries, keys, least, period)))
            if sum(map(max, kinds)) > _MOST_TOKENS:
                break
        lengths = np.array(kinds, dtype=np.int64).T
    queries, keys = (Documents((0, *np.cumsum(x).tolist())) for x in lengths)
    return Mask(queries, keys, mask.causal, mask.window, mask.alignment)


def _of(illegal: Illegal, left: set[tuple[str, str]], mask: Mask) -> UseIllegal:
    where = Where.DIAGONAL if mask.bounded else Where.BOUNDARY
    if (illegal.output, illegal.input) in left:
        where = Where.EVERY_TILE
    return UseIllegal(
        output=illegal.output,
        input=illegal.input,
        severities=tuple(illegal.counts),
        later=illegal.later > 0,
        earlier=illegal.earlier > 0,
        other_documents=Severity.CROSS_DOCUMENT in illegal.counts,
        where=where,
    )


def _couples(coupling: Coupling, use: Use) -> Couples:
    found = Couples.NONE
    for sharing in coupling.uses[use].sharings:
        if sharing.rows == DOCUMENT:
            return Couples.DOCUMENT
        if use not in PAIR_USES and not isinstance(sharing.rows, int):
            return Couples.TENSOR
        found = Couples.PREVIOUS_BLOCK if sharing.previous else Couples.BLOCK
    return found


def _shares(coupling: Coupling, use: Use, operand: Operand) -> str:
    """What shares a scale, in words."""
    if operand.scope is Scope.UNIT:
        return "no scale"
    if operand.scope is Scope.HEAD:
        return "one document and key/value head"
    if operand.scope is Scope.STATIC:
        return "a constant scale"
    sharings = coupling.uses[use].sharings
    if not sharings:
        return "one pair" if use in PAIR_USES else "one token"
    parts = []
    for sharing in sharings:
        if use in PAIR_USES:
            queries, keys = _many(sharing.rows, "query"), _many(sharing.columns, "key")
            text = f"{queries} by {keys}"
        elif isinstance(sharing.rows, int):
            text = _many(sharing.rows, "token")
        elif sharing.rows == DOCUMENT:
            text = "all tokens of the document"
        else:
            text = "all tokens of the tensor"
        if operand.smoothing != "none" and sharing is sharings[0]:
            text = f"a mean of {text}"
        parts.append(f"that of the {text} before" if sharing.previous else text)
    return ", then ".join(parts)


def _many(extent: int | str, what: str) -> str:
    plural = {"query": "queries", "key": "keys", "token": "tokens"}[what]
    if not isinstance(extent, int):
        return f"all {plural}"
    return f"{extent} {what if extent == 1 else plural}"
