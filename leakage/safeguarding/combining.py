"""The combinations of a safeguards study: recipes with other safeguards, which of them leak, what they cost."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from flamia_ref._errors import line, shown, unknown_name
from flamia_ref.attention import RECIPES, Operand, Recipe
from flamia_ref.attention.computed import check_computed
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.safeguarding.alternatives import Alternative, Group, groups_of
from flamia_ref.leakage.safeguarding.applying import Choices, applied
from flamia_ref.leakage.safeguarding.costs import Costs
from flamia_ref.leakage.safeguarding.measuring import Measurer
from flamia_ref.leakage.safeguarding.study_samples import StudySample
from flamia_ref.leakage.sharing.coupling import coupling_of
from flamia_ref.leakage.sharing.structures import structure

Progress = Callable[[int, int, str], None]

_STRUCTURE = (64, 20)  # a full block, a cut one, and a document of less than a block


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A combination that is computed, with what is known before its error is."""

    choices: Choices
    recipe: Recipe
    work: tuple[Fraction, ...]
    kept: float
    illegal: dict[Severity, int]


Which = tuple[str, Alternative]


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """One alternative alone: the combination, and whether the uses of its group leak; or why it is none."""

    combination: Combination | None = None
    reason: str | None = None
    leaks: bool = False

    @property
    def safe(self) -> bool:
        """Whether it is computed and its uses alone make nothing illegal."""
        return self.combination is not None and not self.leaks


class Combiner:
    """Makes the combinations of one study, each recipe once."""

    def __init__(
        self,
        recipe: Recipe,
        sample: StudySample,
        *,
        causal: bool,
        window: Any,
        at: tuple[int, ...],
        names: Sequence[str] | None,
        without: Sequence[Alternative | str],
        report: Progress,
    ) -> None:
        self.recipe, self.sample, self.at, self.progress = recipe, sample, at, report
        self.mask = {"causal": causal, "window": window}
        self.every = groups_of(recipe, causal=causal, window=window)
        self.groups = _chosen(self.every, names, without)
        self.measurer = Measurer(sample, causal=causal, window=window)
        self.constants = self.measurer.constants()
        channels, values = sample.q.shape[2], sample.v.shape[2]
        self.costs = [
            Costs(length, head_dim=channels, value_dim=values, **self.mask) for length in at
        ]
        self._illegal: dict[str, dict[Severity, int]] = {}
        self._made: dict[Hashable, Combination] = {}

    def _recipe(self, choices: Choices) -> Recipe:
        full = {group.name: choices.get(group.name, Alternative.AS_IS) for group in self.groups}
        return applied(self.recipe, self.groups, full, self.constants, self.recipe.name)

    def combination(self, choices: Choices) -> Combination:
        """A combination. Raises ValueError where it is not computed."""
        recipe = self._recipe(choices)
        key = key_of(recipe)
        if key not in self._made:
            check_computed(recipe)
            self._made[key] = Combination(
                choices=dict(choices),
                recipe=recipe,
                work=tuple(costs.work(recipe) for costs in self.costs),
                kept=self.costs[0].kept(recipe) / self.at[0],
                illegal=self._structure(recipe),
            )
        return self._made[key]

    def _structure(self, recipe: Recipe) -> dict[Severity, int]:
        """The illegal pairs of a recipe by severity; recipes that couple alike are looked at once."""
        key = repr(coupling_of(recipe))
        if key not in self._illegal:
            counts: dict[Severity, int] = {}
            for one in structure(recipe, lengths=_STRUCTURE, **self.mask).illegal:
                for severity, count in one.counts.items():
                    counts[severity] = counts.get(severity, 0) + count
            self._illegal[key] = counts
        return self._illegal[key]

    def singles(self) -> dict[Which, Single]:
        """Each alternative alone."""
        found: dict[Which, Single] = {}
        for group in self.groups:
            for choice in group.alternatives:
                try:
                    one = self.combination({group.name: choice})
                except ValueError as error:
                    found[group.name, choice] = Single(reason=line(str(error)))
                    continue
                uses = structure(one.recipe, lengths=_STRUCTURE, **self.mask).uses
                leaks = any(use.illegal for use in uses if use.use in group.uses)
                found[group.name, choice] = Single(combination=one, leaks=leaks)
        return found

    def count(self, singles: Mapping[Which, Single], *, leaking: bool = False) -> int:
        """How many combinations of safe alternatives there are; with `leaking`, of all that are computed."""
        return math.prod(
            sum(
                one.combination is not None if leaking else one.safe
                for choice in group.alternatives
                for one in [singles[group.name, choice]]
            )
            for group in self.groups
        )

    def kinds(
        self, singles: Mapping[Which, Single], left_out: Mapping[Which, Alternative]
    ) -> list[list[Alternative]]:
        """What is combined: the safe alternatives of each group that are not left out."""
        return [
            [
                choice
                for choice in group.alternatives
                if singles[group.name, choice].safe and (group.name, choice) not in left_out
            ]
            for group in self.groups
        ]

    def check_count(self, kinds: Sequence[Sequence[Alternative]], most: int) -> None:
        """Refuse too many combinations: ValueError of one line."""
        count = math.prod(map(len, kinds))
        if count > most:
            names = ", ".join(group.name for group in self.groups)
            raise ValueError(
                f"{self.recipe.name} has {count} combinations of alternatives that are safe alone; allowed are {most}:"
                f" choose among its groups ({names}), leave alternatives out, or allow more"
            )

    def combinations(
        self, kinds: Sequence[Sequence[Alternative]]
    ) -> tuple[dict[Hashable, Combination], int]:
        """Every combination, each recipe once; how many contradict themselves."""
        found: dict[Hashable, Combination] = {}
        contradictory = 0
        for place, choice in enumerate(itertools.product(*kinds)):
            if place % 100 == 0:
                self.progress(place, math.prod(map(len, kinds)), "structures of combinations")
            choices = dict(zip((group.name for group in self.groups), choice, strict=True))
            try:
                one = self.combination(choices)
            except ValueError:
                contradictory += 1
                continue
            found.setdefault(key_of(one.recipe), one)
        return found, contradictory

    def registered(self, singles: Mapping[Which, Single]) -> Iterator[Combination]:
        """Registered recipes that choices of the groups give."""
        for name, other in RECIPES.items():
            uses = dict(other.uses())
            choices = {}
            for group in self.groups:
                for choice in group.alternatives:
                    one = singles[group.name, choice].combination
                    if one is not None and all(
                        use in uses and _alike(one.recipe.operand(use), uses[use])
                        for use in group.uses
                    ):
                        choices[group.name] = choice
                        break
            if len(choices) == len(self.groups):
                with contextlib.suppress(ValueError):
                    found = self.combination(choices)
                    if name in names_of(found.recipe):
                        yield found


def key_of(recipe: Recipe) -> Hashable:
    """Equal for recipes of equal bits, whatever they are called and rest on."""
    guarded = any(product.guarded for _, product in recipe.products())
    return (
        tuple(product for _, product in recipe.products()),
        recipe.softmax,
        recipe.gradient,
        recipe.tiles,
        recipe.guard_operands if guarded else None,
    )


def _alike(one: Operand, other: Operand) -> bool:
    return replace(one, same_codes_as=None) == replace(other, same_codes_as=None)


def names_of(recipe: Recipe) -> tuple[str, ...]:
    """The registered recipes whose products are those of a recipe."""
    own = list(recipe.products())
    return tuple(
        name
        for name, other in RECIPES.items()
        if list(other.products()) == own
        and (
            other.guard_operands == recipe.guard_operands
            or not any(product.guarded for _, product in own)
        )
    )


_PARTS = ("softmax", "gradient", "tiles", "input", "output")


def differing(recipe: Recipe, name: str) -> tuple[str, ...]:
    """What besides the products is not that of a registered recipe."""
    other = RECIPES[name]
    return tuple(part for part in _PARTS if getattr(recipe, part) != getattr(other, part))


def _chosen(
    groups: Sequence[Group], names: Sequence[str] | None, without: Sequence[Alternative | str]
) -> tuple[Group, ...]:
    for what, given in (("groups", names), ("without", without)):
        if given is not None and (isinstance(given, str) or not isinstance(given, Collection)):
            raise TypeError(f"{what} is {shown(given)}; it must be a list of names")
    for one in without:
        if one not in list(Alternative):
            raise unknown_name("alternative", one, Alternative)
    if Alternative.AS_IS in [Alternative(one) for one in without]:
        raise ValueError("without has 'as it is', which every group starts from; take it out")
    known = [group.name for group in groups]
    if names is not None and not names:
        raise ValueError(
            f"groups is []; name groups that change ({', '.join(known) or 'this recipe has none'}), or give None for"
            " all"
        )
    for name in names or ():
        if name not in known:
            raise unknown_name("group", name, known)
    return tuple(
        replace(
            group,
            alternatives=tuple(one for one in group.alternatives if one not in list(without)),
        )
        for group in groups
        if names is None or group.name in names
    )
