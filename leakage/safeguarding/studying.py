"""`safeguards_study`: every safeguard and combination on the uses of a recipe that leak, and the Pareto front of them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from flamia_ref._errors import line, shown, unknown_name
from flamia_ref.attention import RECIPES, Operand, Recipe
from flamia_ref.attention.computed import check_computed, computed_recipe
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.proof import prove
from flamia_ref.leakage.safeguarding.alternatives import Alternative, Group, groups_of
from flamia_ref.leakage.safeguarding.applying import Choices, applied
from flamia_ref.leakage.safeguarding.costs import Costs
from flamia_ref.leakage.safeguarding.measuring import Measurer, overall
from flamia_ref.leakage.safeguarding.points import (
    Alone,
    Merits,
    StudyPoint,
    beats,
    front_of,
    merits,
    standing,
)
from flamia_ref.leakage.safeguarding.prediction import predicted, worth_measuring
from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy
from flamia_ref.leakage.safeguarding.study_samples import StudySample, synthetic
from flamia_ref.leakage.sharing.coupling import coupling_of
from flamia_ref.leakage.sharing.structures import structure

Progress = Callable[[int, int, str], None]

LENGTHS = (256,)
AT = (2048, 8192)
MOST_COMBINATIONS = 4000
MOST_RUNS = 90
_STRUCTURE = (64, 20)
_PROOF = (36, 8)  # a full block, cut ones, and a document that begins inside a block of the pack
_PROOF_HEAD_DIM = 32
_BATCH = 16
_SLACK = 0.05


def safeguards_study(
    recipe: Recipe | str,
    *,
    sample: StudySample | None = None,
    lengths: Sequence[int] = LENGTHS,
    head_dim: int = 64,
    causal: bool = True,
    window: Any = None,
    at: Sequence[int] = AT,
    groups: Sequence[str] | None = None,
    without: Sequence[Alternative | str] = (),
    exhaustive: bool = False,
    most: int = MOST_COMBINATIONS,
    runs: int = MOST_RUNS,
    prove_front: bool = True,
    progress: Progress | None = None,
) -> SafeguardsStudy:
    """Every safeguard and combination on the uses of a recipe that leak: safe or not, error, work, bytes, front.

    Uses that share a quantized copy change together, as a group. First each alternative of each group alone, the others
    as they are. Then combinations of those that are safe alone; one that is no better alone than another of its group,
    in error, work and bytes, is left out, and the result says so. All combinations are counted; the errors of those
    that may be on the front are measured with the simulator, until a model that adds up squared errors sees no other.

    Args:
        recipe: a `Recipe` that is computed, or a name in `RECIPES`.
        sample: the inputs that errors are measured on; None for synthetic ones with outliers, one head of documents of
            `lengths` tokens and `head_dim` channels.
        causal, window: the mask, as of `attention.forward`.
        at: lengths of a document for which the work is counted; the first counts in the front, and bytes are of it.
        groups: names of the groups that are changed, such as "k" or "dq.k"; None for all.
        without: alternatives that are not tried.
        exhaustive: measure every combination, also of alternatives that are no better alone.
        most: more combinations are refused.
        runs: runs of the simulator after which no more combinations are measured, unless exhaustive; the result says
            how many may be missing.
        prove_front: whether the combinations on the front are proved from their programs, seconds each.
        progress: called with what is done, of how much, and the name of the step.

    Returns: a `SafeguardsStudy`.
    Raises: ValueError or TypeError of one line: arguments that are none, a recipe that is not computed, too many
        combinations.
    """
    chosen = computed_recipe(recipe)
    lengths_at = _lengths(at)
    sample = synthetic(_lengths(lengths, "lengths"), head_dim) if sample is None else sample
    return _Study(
        chosen,
        sample,
        causal=causal,
        window=window,
        at=lengths_at,
        names=groups,
        without=without,
        report=progress or (lambda *_: None),
    ).report(exhaustive=exhaustive, most=most, runs=runs, prove_front=prove_front)


def _lengths(given: Any, name: str = "at") -> tuple[int, ...]:
    try:
        found = tuple(given)
    except TypeError:
        found = ()
    if not found or any(
        not isinstance(x, (int, np.integer)) or isinstance(x, bool) or not 0 < x < 1 << 24
        for x in found
    ):
        raise ValueError(
            f"{name} is {shown(given)}; it must be whole numbers from 1 to 16777215, at least one of them"
        )
    return tuple(int(x) for x in found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Combination:
    """A combination that is computed, with what is known before its error is."""

    choices: Choices
    recipe: Recipe
    work: tuple[Fraction, ...]
    kept: float
    illegal: dict[Severity, int]


_Which = tuple[str, Alternative]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Single:
    """One alternative alone: the combination, and whether the uses of its group leak; or why it is none."""

    combination: _Combination | None = None
    reason: str | None = None
    leaks: bool = False

    @property
    def safe(self) -> bool:
        return self.combination is not None and not self.leaks


class _Study:
    """One study on its way."""

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
        self._made: dict[Hashable, _Combination] = {}

    # One at a time.

    def report(
        self, *, exhaustive: bool, most: int, runs: int, prove_front: bool
    ) -> SafeguardsStudy:
        self.progress(0, 4, "each alternative alone")
        base = self._combination({})
        singles = self._singles()
        found = [base, *(x.combination for x in singles.values() if x.combination is not None)]
        self.measurer.measure([one.recipe for one in found], self._reporter("alone"))
        left_out = {} if exhaustive else self._left_out(singles)
        kinds = self._kinds(singles, left_out)
        self._check_count(kinds, most)
        combinations, contradictory = self._combinations(kinds)
        for one in (*found, *self._registered(singles)):
            combinations.setdefault(_key(one.recipe), one)
        combinations = {_key(base.recipe): base} | combinations
        every = list(combinations.values())
        missing = self._measure_some(every, exhaustive=exhaustive, runs=runs)
        measured = [one for one in every if self._errors(one) is not None]
        front, proofs = self._front(measured, prove_front)
        order = sorted(front, key=lambda place: self._place(measured[place]))
        labels = dict(zip(order, _letters(), strict=False))
        points = {
            _key(one.recipe): self._point(one, base, labels.get(place), proofs.get(place))
            for place, one in enumerate(measured)
        }
        return SafeguardsStudy(
            recipe=self.recipe,
            sample=self.sample.name,
            lengths=tuple(self.sample.lengths),
            head_dim=self.sample.q.shape[2],
            causal=self.measurer.mask.causal,
            window=self.measurer.mask.window,
            at=self.at,
            groups=self.groups,
            held=tuple(one.name for one in self.every if one not in self.groups),
            alone=tuple(self._alone(singles, left_out, points)),
            points=tuple(points.values()),
            possible=self._count(singles, leaking=True),
            safe=self._count(singles),
            considered=sum(not one.illegal for one in every),
            contradictory=contradictory,
            missing=missing,
            runs=self.measurer.runs,
            exhaustive=exhaustive,
        )

    def _reporter(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(done, total, f"measuring {what}")

    def _errors(self, one: _Combination) -> Any:
        return self.measurer.errors(one.recipe)

    def _recipe(self, choices: Choices) -> Recipe:
        full = {group.name: choices.get(group.name, Alternative.AS_IS) for group in self.groups}
        return applied(self.recipe, self.groups, full, self.constants, self.recipe.name)

    def _combination(self, choices: Choices) -> _Combination:
        """A combination. Raises ValueError where it is not computed."""
        recipe = self._recipe(choices)
        key = _key(recipe)
        if key not in self._made:
            check_computed(recipe)
            self._made[key] = _Combination(
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

    def _singles(self) -> dict[_Which, _Single]:
        """Each alternative alone."""
        found: dict[_Which, _Single] = {}
        for group in self.groups:
            for choice in group.alternatives:
                try:
                    one = self._combination({group.name: choice})
                except ValueError as error:
                    found[group.name, choice] = _Single(reason=line(str(error)))
                    continue
                uses = structure(one.recipe, lengths=_STRUCTURE, **self.mask).uses
                leaks = any(use.illegal for use in uses if use.use in group.uses)
                found[group.name, choice] = _Single(combination=one, leaks=leaks)
        return found

    def _left_out(self, singles: Mapping[_Which, _Single]) -> dict[_Which, Alternative]:
        """Safe alternatives that another one of their group is no worse than alone, and which that is."""
        found: dict[_Which, Alternative] = {}
        for group in self.groups:
            safe = [
                (self._merits(one), choice)
                for choice in group.alternatives
                if (one := singles[group.name, choice].combination) is not None
                and not singles[group.name, choice].leaks
            ]
            for place, (own, choice) in enumerate(safe):
                for at, (merit, other) in enumerate(safe):
                    if beats(merit, own) or (merit == own and at < place):
                        found[group.name, choice] = other
                        break
        return found

    def _place(self, one: _Combination) -> tuple[Fraction, float]:
        """The order in which points are shown: by work, then by error."""
        return one.work[0], overall(self._errors(one))

    def _merits(self, one: _Combination) -> Merits:
        return merits(overall(self._errors(one)), one.work[0], one.kept)

    # Combinations.

    def _count(self, singles: Mapping[_Which, _Single], *, leaking: bool = False) -> int:
        """How many combinations of safe alternatives there are; with `leaking`, of all that are computed."""
        return math.prod(
            sum(
                one.combination is not None if leaking else one.safe
                for choice in group.alternatives
                for one in [singles[group.name, choice]]
            )
            for group in self.groups
        )

    def _kinds(
        self, singles: Mapping[_Which, _Single], left_out: Mapping[_Which, Alternative]
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

    def _check_count(self, kinds: Sequence[Sequence[Alternative]], most: int) -> None:
        count = math.prod(map(len, kinds))
        if count > most:
            names = ", ".join(group.name for group in self.groups)
            raise ValueError(
                f"{self.recipe.name} has {count} combinations of alternatives that are safe alone; allowed are {most}:"
                f" choose among its groups ({names}), leave alternatives out, or allow more"
            )

    def _combinations(
        self, kinds: Sequence[Sequence[Alternative]]
    ) -> tuple[dict[Hashable, _Combination], int]:
        """Every combination, each recipe once; how many contradict themselves."""
        found: dict[Hashable, _Combination] = {}
        contradictory = 0
        for place, choice in enumerate(itertools.product(*kinds)):
            if place % 100 == 0:
                self.progress(place, math.prod(map(len, kinds)), "structures of combinations")
            choices = dict(zip((group.name for group in self.groups), choice, strict=True))
            try:
                one = self._combination(choices)
            except ValueError:
                contradictory += 1
                continue
            found.setdefault(_key(one.recipe), one)
        return found, contradictory

    def _registered(self, singles: Mapping[_Which, _Single]) -> Iterator[_Combination]:
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
                    found = self._combination(choices)
                    if name in _names(found.recipe):
                        yield found

    def _measure_some(
        self, every: Sequence[_Combination], *, exhaustive: bool, runs: int
    ) -> int:
        """Measure what may be on the front; how many that might be on it are left at the end."""
        legal = [one for one in every if not one.illegal]
        if exhaustive:
            self.measurer.measure([one.recipe for one in legal], self._reporter("combinations"))
            return 0
        named = [one.recipe for one in every if _names(one.recipe)]
        self.measurer.measure(named, self._reporter("registered recipes"))
        recipes = [one.recipe for one in every]
        costs = np.array([[float(one.work[0]), one.kept] for one in legal])
        places = [place for place, one in enumerate(every) if not one.illegal]
        while True:
            errors = [self._errors(one) for one in every]
            expected = predicted(recipes, errors)
            for place, found in enumerate(errors):
                if found is not None:
                    expected[place] = overall(found)
            measured = np.array([errors[place] is not None for place in places], dtype=bool)
            if not legal:
                return 0
            wanted = worth_measuring(expected[places], measured, costs, _SLACK)
            if not wanted or self.measurer.runs >= runs:
                return len(wanted)
            batch = [legal[place].recipe for place in wanted[:_BATCH]]
            self.progress(self.measurer.runs, runs, f"measuring, {len(wanted)} may be on the front")
            self.measurer.measure(batch)

    def _front(
        self, measured: Sequence[_Combination], prove_front: bool
    ) -> tuple[set[int], dict[int, bool]]:
        """The places of the front among what is legal, and what was proved; what is disputed is on no front."""
        proofs: dict[int, bool] = {}
        while True:
            legal = [
                place
                for place in sorted(range(len(measured)), key=lambda at: _plain(measured[at]))
                if not measured[place].illegal and proofs.get(place, True)
            ]
            found = {
                legal[at] for at in front_of([self._merits(measured[place]) for place in legal])
            }
            unproved = sorted(found - proofs.keys())
            if not unproved or not prove_front:
                return found, proofs
            for done, place in enumerate(unproved):
                self.progress(done, len(unproved), "proving the front")
                proofs[place] = self._is_proved(measured[place].recipe)

    def _is_proved(self, recipe: Recipe) -> bool:
        return prove(recipe, lengths=_PROOF, head_dim=_PROOF_HEAD_DIM, **self.mask).legal

    # Results.

    def _point(
        self, one: _Combination, base: _Combination, label: str | None, proved: bool | None
    ) -> StudyPoint:
        errors = self._errors(one)
        return StudyPoint(
            label=label or "",
            choices=one.choices,
            recipe=one.recipe,
            names=_names(one.recipe),
            standing=standing(legal=not one.illegal, proved=proved),
            illegal=one.illegal,
            errors=dict(errors),
            error=overall(errors),
            work=one.work,
            kept=one.kept,
            extra=one.kept - base.kept,
            front=label is not None,
        )

    def _alone(
        self,
        singles: Mapping[_Which, _Single],
        left_out: Mapping[_Which, Alternative],
        points: Mapping[Hashable, StudyPoint],
    ) -> Iterator[Alone]:
        for (group, choice), single in singles.items():
            one = single.combination
            yield Alone(
                group=group,
                alternative=choice,
                reason=single.reason,
                leaks=single.leaks,
                point=None if one is None else points[_key(one.recipe)],
                left_out=left_out.get((group, choice)),
            )


def _key(recipe: Recipe) -> Hashable:
    """Equal for recipes of equal bits, whatever they are called and rest on."""
    guarded = any(product.guarded for _, product in recipe.products())
    return (
        tuple(product for _, product in recipe.products()),
        recipe.softmax,
        recipe.gradient,
        recipe.tiles,
        recipe.guard_operands if guarded else None,
    )


def _plain(one: _Combination) -> tuple[bool, int]:
    """The order of equal combinations: registered recipes, then fewer kinds of safeguards."""
    return not _names(one.recipe), len(set(one.choices.values()))


def _alike(one: Operand, other: Operand) -> bool:
    return replace(one, same_codes_as=None) == replace(other, same_codes_as=None)


def _names(recipe: Recipe) -> tuple[str, ...]:
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


def _letters() -> Iterator[str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    yield from alphabet
    yield from (a + b for a in alphabet for b in alphabet)


def _chosen(
    groups: Sequence[Group], names: Sequence[str] | None, without: Sequence[Alternative | str]
) -> tuple[Group, ...]:
    for one in without:
        if one not in list(Alternative):
            raise unknown_name("alternative", one, Alternative)
    if Alternative.AS_IS in [Alternative(one) for one in without]:
        raise ValueError("without has 'as it is', which every group starts from; take it out")
    known = [group.name for group in groups]
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

