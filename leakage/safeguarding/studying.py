"""`safeguards_study`: every safeguard and combination on the uses of a recipe that leak, and their Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.attention import Recipe
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.protection import block_counts
from flamia_ref.leakage.proof import prove
from flamia_ref.leakage.safeguarding.alternatives import Alternative
from flamia_ref.leakage.safeguarding.combining import (
    Combination,
    Combiner,
    Progress,
    Single,
    Which,
    differing,
    key_of,
    names_of,
)
from flamia_ref.leakage.safeguarding.measuring import overall
from flamia_ref.leakage.safeguarding.points import (
    ALONE_STEP,
    Alone,
    Merits,
    StudyPoint,
    front_of,
    no_worse,
    standing,
)
from flamia_ref.leakage.safeguarding.prediction import predicted, worth_measuring
from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy
from flamia_ref.leakage.safeguarding.study_samples import StudySample, check_sample, synthetic
from flamia_ref.packing.mask import Mask

LENGTHS = (256,)
AT = (2048, 8192)
MOST_COMBINATIONS = 4000
MOST_RUNS = 90
_PROOF = (36, 8)  # a full block, cut ones, and a document that begins inside a block of the pack
_PROOF_HEAD_DIM = 32
_BATCH = 16
_SLACK = 0.05
_CHANNELS = 4096  # of synthetic data


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
        sample: the inputs that errors are measured on, which have documents of their own; None for synthetic ones with
            outliers, one head of documents of `lengths` tokens and `head_dim` channels.
        causal, window: the mask, as of `attention.forward`.
        at: lengths of a document for which the work is counted; the first counts in the front, and bytes are of it.
        groups: names of the groups that are changed, such as "k" or "dq.k", one at least; None for all.
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
    lengths_at = checked_lengths(at, "at")
    most, runs = _whole("most", most), _whole("runs", runs)
    for name, given in (("exhaustive", exhaustive), ("prove_front", prove_front)):
        if not isinstance(given, (bool, np.bool_)):
            raise TypeError(f"{name} is {shown(given)}; it must be True or False")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is {shown(progress)}; it must be a function, or None")
    if sample is None:
        sample = synthetic(
            checked_lengths(lengths, "lengths"), _whole("head_dim", head_dim, _CHANNELS)
        )
    else:
        check_sample(sample)
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


def checked_lengths(given: Any, name: str) -> tuple[int, ...]:
    """Lengths of documents as whole numbers. Raises ValueError of one line."""
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


def _whole(name: str, given: Any, largest: int | None = None) -> int:
    whole = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if not whole or given < 1 or (largest is not None and given > largest):
        end = "on" if largest is None else f"to {largest}"
        kind = ValueError if whole else TypeError
        raise kind(f"{name} is {shown(given)}; it must be a whole number from 1 {end}")
    return int(given)


class _Study(Combiner):
    """One study on its way."""

    def report(
        self, *, exhaustive: bool, most: int, runs: int, prove_front: bool
    ) -> SafeguardsStudy:
        self.progress(0, 4, "each alternative alone")
        base = self.combination({})
        singles = self.singles()
        found = [base, *(x.combination for x in singles.values() if x.combination is not None)]
        self.measurer.measure([base.recipe])
        self._check_errors(base)
        self.measurer.measure([one.recipe for one in found], self._reporter("alone"))
        left_out = {} if exhaustive else self._left_out(singles)
        kinds = self.kinds(singles, left_out)
        self.check_count(kinds, most)
        combinations, contradictory = self.combinations(kinds)
        for one in (*found, *self.registered(singles)):
            combinations.setdefault(key_of(one.recipe), one)
        combinations = {key_of(base.recipe): base} | combinations
        every = list(combinations.values())
        missing = self._measure_some(every, exhaustive=exhaustive, runs=runs)
        measured = [one for one in every if self._errors(one) is not None]
        front, proofs = self._front(measured, prove_front)
        order = sorted(front, key=lambda place: self._place(measured[place]))
        labels = dict(zip(order, _letters(), strict=False))
        points = {
            key_of(one.recipe): self._point(one, base, labels.get(place), proofs.get(place))
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
            held=tuple(
                one.name
                for one in self.every
                if one.name not in [group.name for group in self.groups]
            ),
            alone=tuple(self._alone(singles, left_out, points)),
            points=tuple(points.values()),
            possible=self.count(singles, leaking=True),
            safe=self.count(singles),
            considered=sum(not one.illegal for one in every),
            contradictory=contradictory,
            missing=missing,
            runs=self.measurer.runs,
            guarded=_guarded(self.measurer.mask),
            guarded_at=tuple(_guarded(one.mask) for one in self.costs),
            exhaustive=exhaustive,
        )

    def _reporter(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(done, total, f"measuring {what}")

    def _check_errors(self, base: Combination) -> None:
        """Refuse inputs that no error is of: ValueError of one line."""
        for name, error in self._errors(base).items():
            if not np.isfinite(error):
                raise ValueError(
                    f"the relative error of {name} is {error} on {self.sample.name}: its exact result is 0 everywhere,"
                    f" or {self.recipe.name} gives NaN or infinity; give other inputs"
                )

    def _errors(self, one: Combination) -> Any:
        return self.measurer.errors(one.recipe)

    def _left_out(self, singles: Mapping[Which, Single]) -> dict[Which, Alternative]:
        """Safe alternatives that another one of their group is no worse than alone, and which that is."""
        found: dict[Which, Alternative] = {}
        for group in self.groups:
            safe = [
                (self._merits(one), choice)
                for choice in group.alternatives
                if (one := singles[group.name, choice].combination) is not None
                and not singles[group.name, choice].leaks
            ]
            front = front_of([merit for merit, _ in safe], ALONE_STEP)
            for place, (own, choice) in enumerate(safe):
                if place not in front:
                    # By small differences only one that is out itself may be no worse.
                    order = [*front, *(at for at in range(len(safe)) if at != place)]
                    best = next(at for at in order if no_worse(safe[at][0], own, ALONE_STEP))
                    found[group.name, choice] = safe[best][1]
        return found

    def _place(self, one: Combination) -> tuple[Fraction, float]:
        """The order in which points are shown: by work, then by error."""
        return one.work[0], overall(self._errors(one))

    def _merits(self, one: Combination) -> Merits:
        return Merits(overall(self._errors(one)), one.work[0], one.kept)

    def _measure_some(self, every: Sequence[Combination], *, exhaustive: bool, runs: int) -> int:
        """Measure what may be on the front; how many that might be on it are left at the end."""
        legal = [one for one in every if not one.illegal]
        if exhaustive:
            self.measurer.measure([one.recipe for one in legal], self._reporter("combinations"))
            return 0
        named = [one.recipe for one in every if names_of(one.recipe)]
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
        self, measured: Sequence[Combination], prove_front: bool
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
                proofs[place] = bool(self._is_proved(measured[place].recipe))

    def _is_proved(self, recipe: Recipe) -> bool:
        return prove(recipe, lengths=_PROOF, head_dim=_PROOF_HEAD_DIM, **self.mask).legal

    # Results.

    def _point(
        self, one: Combination, base: Combination, label: str | None, proved: bool | None
    ) -> StudyPoint:
        errors = self._errors(one)
        return StudyPoint(
            label=label or "",
            choices=one.choices,
            recipe=one.recipe if label is None else replace(one.recipe, name=self._name(label)),
            names=names_of(one.recipe),
            but_for={name: differing(one.recipe, name) for name in names_of(one.recipe)},
            standing=standing(legal=not one.illegal, proved=proved),
            illegal=one.illegal,
            errors=dict(errors),
            error=overall(errors),
            work=one.work,
            kept=one.kept,
            extra=one.kept - base.kept,
            front=label is not None,
        )

    def _name(self, label: str) -> str:
        return f"{self.recipe.name[:80]}, safeguards {label}"

    def _alone(
        self,
        singles: Mapping[Which, Single],
        left_out: Mapping[Which, Alternative],
        points: Mapping[Hashable, StudyPoint],
    ) -> Iterator[Alone]:
        for (group, choice), single in singles.items():
            one = single.combination
            yield Alone(
                group=group,
                alternative=choice,
                reason=single.reason,
                leaks=single.leaks,
                point=None if one is None else points[key_of(one.recipe)],
                left_out=left_out.get((group, choice)),
            )


def _plain(one: Combination) -> tuple[bool, int]:
    """The order of equal combinations: registered recipes, then fewer kinds of safeguards."""
    return not names_of(one.recipe), len(set(one.choices.values()))


def _guarded(mask: Mask) -> Fraction:
    counts = block_counts(mask)
    return Fraction(counts.guarded, max(counts.visible, 1))


def _letters() -> Iterator[str]:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    yield from alphabet
    yield from (a + b for a in alphabet for b in alphabet)
