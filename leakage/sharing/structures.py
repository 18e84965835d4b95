"""The structure of a recipe: which tokens each use couples, and which of that is illegal, from its data alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention import inputs
from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.legal import Bools, LegalPairs, Severity, Spans, relation
from flamia_ref.leakage.sharing import sampling
from flamia_ref.leakage.sharing.coupling import Coupling, coupling_of
from flamia_ref.leakage.sharing.dependence import Dependence
from flamia_ref.leakage.sharing.example import Example, first_examples
from flamia_ref.leakage.sharing.illegal import Findings, Illegal
from flamia_ref.leakage.sharing.placement import Grid, Placement
from flamia_ref.leakage.sharing.runs import Sets
from flamia_ref.leakage.sharing.sampling import Kinds, Sample
from flamia_ref.leakage.sharing.scales import side_of
from flamia_ref.leakage.sharing.uses import KnobStructure, UseStructure, knobs_of, uses_of
from flamia_ref.packing.documents import Documents
from flamia_ref.packing.mask import Mask

_MOST_TOKENS = 2**31 - 1
_MOST_PAIRS = 1 << 27  # bytes of a dense answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Structure:
    """Which tokens of the inputs each output of a recipe can depend on, and what of that is illegal.

    It holds all that can happen, and is derived from the recipe's data: no arithmetic is run. It is meant for finite
    inputs: a NaN or an infinity can reach further, as 0 times it is NaN. `str(structure)` is its text.

    Attributes:
        recipe: the recipe.
        mask: the documents, and which keys each query sees.
        grid: whether blocks are counted from the start of each document or of the pack.
        coupling: what of the recipe counts.
    """

    recipe: Recipe
    mask: Mask
    grid: Grid
    coupling: Coupling

    @property
    def legal(self) -> bool:
        """Whether nothing is illegal."""
        return not self.illegal

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 where nothing is illegal, or only of severity "past", else
        1."""
        severities = {severity for one in self.illegal for severity in one.counts}
        return int(bool(severities - {Severity.PAST}))

    @functools.cached_property
    def illegal(self) -> tuple[Illegal, ...]:
        """The outputs and inputs with illegal pairs, each with its counts; exact for packs of any length."""
        return tuple(self._findings.all())

    @functools.cached_property
    def examples(self) -> tuple[Example, ...]:
        """For each of `illegal`, a pair of packed tokens of each severity, where one is found."""
        return tuple(
            first_examples(self.mask, self._kinds, self.coupling, self._findings, self.illegal)
        )

    @functools.cached_property
    def uses(self) -> tuple[UseStructure, ...]:
        """The twelve uses, in the order of the dataflow: what each makes illegal, alone."""
        return tuple(uses_of(self.recipe, self.coupling, self._sample, self.grid))

    @functools.cached_property
    def knobs(self) -> tuple[KnobStructure, ...]:
        """What is illegal with no use that couples tokens: the work of a knob of the softmax."""
        return tuple(knobs_of(self.coupling, self._sample, self.grid))

    @property
    def notes(self) -> tuple[str, ...]:
        """What else of the recipe lets tokens reach others, in sentences."""
        found = []
        if self.coupling.guarded and self.coupling.codes:
            found.append(
                "guard_operands is 'codes': guarded blocks take values that all tokens of a scale have shaped"
            )
        if self.recipe.tiles.masked == "computed":
            found.append(
                "tiles.masked is 'computed': a NaN or an infinity reaches every row of its document (0 times it is NaN)"
            )
        if self.recipe.has_backward and self.recipe.backward.gradient.masked_ds == "product":
            found.append(
                "gradient.masked_ds is 'product': dS of a masked pair is NaN where its dP or delta is NaN or infinite;"
                " finite values never show it"
            )
        return tuple(found)

    def spans(self, output: str, input: str) -> tuple[Spans, ...]:
        """The tokens of `input` that each token of `output` can depend on: the union of spans, for packs of any length.

        Raises UnknownName for another output or input than those of `LEGAL`.
        """
        relation(output, input)
        count = self._placement.tokens(side_of(input))
        return tuple(
            Spans(
                begin=np.where(run.some, 0 if run.whole else run.begin, 0),
                end=np.where(run.some, count if run.whole else run.end, 0),
                tokens=count,
            )
            for run in self._sets(output, input)
        )

    def pairs(self, output: str, input: str) -> Bools:
        """The same, dense: bool [tokens of the output, tokens of the input].

        Raises UnknownName as `spans`, and ValueError for packs too long for that.
        """
        rows, columns = (self._placement.tokens(side_of(name)) for name in (output, input))
        relation(output, input)
        if rows * columns > _MOST_PAIRS:
            raise ValueError(
                f"{rows} by {columns} tokens are {rows * columns} pairs; dense are up to {_MOST_PAIRS}, take spans()"
            )
        found = np.zeros((rows, columns), dtype=np.bool_)
        for spans in self.spans(output, input):
            found |= spans.dense()
        return found

    def illegal_pairs(self, output: str, input: str) -> Bools:
        """Those of `pairs` that are not legal."""
        return self.pairs(output, input) & ~LegalPairs(self.mask).dense(output, input)

    def to_text(self) -> str:
        """Return the structure for people: the table of uses, and what is illegal."""
        from flamia_ref.leakage.sharing.text import describe

        return describe(self)

    def to_json(self) -> str:
        """Return the structure as JSON: uses, counts and examples."""
        from flamia_ref.leakage.sharing.document import render

        return render(self)

    def to_png(self) -> bytes:
        """Return a map of the pairs of tokens, an output by an input, as a PNG file.

        Raises ValueError for packs of more than 4096 tokens.
        """
        from flamia_ref.leakage.sharing.picture import heat_map

        return heat_map(self).to_png()

    def __str__(self) -> str:
        return self.to_text()

    @functools.cached_property
    def _sample(self) -> Sample:
        if self.grid is Grid.PACK:
            return sampling.of_pack(self.mask)
        return sampling.sampled(self.mask, self.coupling, self._kinds)

    @functools.cached_property
    def _kinds(self) -> Kinds:
        return sampling.kinds(self.mask)

    @functools.cached_property
    def _findings(self) -> Findings:
        placement = Placement(mask=self._sample.mask, grid=self.grid)
        return Findings(Dependence(coupling=self.coupling, placement=placement), self._sample)

    @functools.cached_property
    def _placement(self) -> Placement:
        return Placement(mask=self.mask, grid=self.grid)

    @functools.cached_property
    def _dependence(self) -> Dependence:
        return Dependence(coupling=self.coupling, placement=self._placement)

    def _sets(self, output: str, input: str) -> Sets:
        return self._dependence.of(output).get(input, ())


def structure(
    recipe: Recipe | str,
    *,
    lengths: Sequence[int],
    causal: bool = True,
    window: Any = None,
    alignment: str = "bottom_right",
    lengths_k: Sequence[int] | None = None,
    grid: Grid | str = Grid.DOCUMENT,
) -> Structure:
    """Which tokens of the inputs each output of a recipe can depend on, for documents of these lengths.

    Args:
        recipe: a `Recipe`, or a name in `RECIPES`; also one that this package does not compute.
        lengths, lengths_k: queries and keys of each document; None for as many keys as queries.
        causal, window, alignment: the mask, as of `attention.forward`.
        grid: "document": blocks are counted from the start of each document, as all recipes here do; "pack": from the
            start of the pack, where they straddle documents and the block before one may be another document's.

    Returns: a `Structure`. What it says is computed when it is asked for, in time that hardly grows with the documents;
    with grid "pack" it does.

    Raises: ValueError or TypeError of one line.
    Source: derived from the dataflow of attention; `docs/leakage.md`.
    """
    chosen = inputs.chosen_recipe(recipe)
    if not isinstance(chosen, Recipe):
        raise TypeError(f"recipe is {shown(recipe)}; it must be a Recipe, or a name in RECIPES")
    queries = _documents(lengths, "lengths")
    keys = queries if lengths_k is None else _documents(lengths_k, "lengths_k")
    if len(queries) != len(keys):
        raise ValueError(
            f"lengths has {len(queries)} documents and lengths_k {len(keys)}; give equally many"
        )
    if grid not in list(Grid):
        raise unknown_name("grid", grid, Grid)
    mask = Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)
    return Structure(recipe=chosen, mask=mask, grid=Grid(grid), coupling=coupling_of(chosen))


def _documents(lengths: Any, name: str) -> Documents:
    try:
        values = np.asarray(lengths)
    except (ValueError, OverflowError):
        values = np.asarray(None)
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.size or values.min() < 0:
        raise ValueError(
            f"{name} must be whole numbers from 0 on, at least one of them; it is {shown(lengths)}"
        )
    offsets = (
        0,
        *np.cumsum(values, dtype=object if values.max() > _MOST_TOKENS else np.int64).tolist(),
    )
    if offsets[-1] > _MOST_TOKENS:
        raise ValueError(
            f"{name} have {shown(offsets[-1])} tokens together; allowed: up to {_MOST_TOKENS}"
        )
    return Documents(offsets)
