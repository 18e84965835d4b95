"""How a recipe compares with what a kernel gave, stage by stage in the order of the dataflow."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.bitwise import Aligned, align
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.matching.samples import Sample, tensor_names
from flamia_ref.golden.simulation import simulate_inputs
from flamia_ref.golden.stage import Place

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

Key = tuple[float, ...]

NEAR_SHARE = 0.05
"""The share of equal elements of a stage from which a recipe is near; by chance alone few are equal."""
NEAR_DISTANCE = 0.8
"""The relative L2 distance below which a recipe is near.

Of `out` the registered ones are at most about 0.33 apart, another mask is at 0.86, zeros at 1, other inputs above.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFit:
    """How one stage of a recipe compares with what was given for it.

    Attributes:
        name: the stage.
        backward: whether it is one of the backward.
        elements: those that were compared; masked pairs that a kernel skipped are not.
        equal: those whose bits are equal, a NaN equal to any other.
        difference, norm: sums of squares, of the difference and of the recipe's values, where both are finite.
        lost: those that are NaN or infinite in one alone, or differently so: no distance says how far apart they are.
        steps: the largest distance in representable numbers, of codes in codes; None where nothing is a number.
        note: why it cannot be compared, "" where it can.
    """

    name: str
    backward: bool
    elements: int = 0
    equal: int = 0
    difference: float = 0.0
    norm: float = 0.0
    lost: int = 0
    steps: int | None = 0
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether every bit is equal."""
        return not self.note and self.equal == self.elements

    @property
    def share(self) -> float:
        """The share of elements with equal bits."""
        if self.note:
            return 0.0
        return self.equal / self.elements if self.elements else 1.0

    @property
    def relative_l2(self) -> float:
        """The relative L2 distance: 0 for equal values, infinite from zeros alone and where some are lost."""
        if self.note or self.lost:
            return math.inf
        if self.norm == 0:
            return math.inf if self.difference else 0.0
        return math.sqrt(self.difference / self.norm)

    def to_data(self) -> dict[str, Any]:
        """As JSON has it; a distance that is no finite number is null."""
        distance = self.relative_l2
        return {
            "stage": self.name,
            "elements": self.elements,
            "equal": self.equal,
            "relative_l2": distance if math.isfinite(distance) else None,
            "largest_distance": self.steps,
            "not_finite": self.lost,
            "note": self.note,
        }

    def plus(self, other: StageFit) -> StageFit:
        """Both together: another document or another case of the same stage."""
        numbers = [one for one in (self.steps, other.steps) if one is not None]
        return dataclasses.replace(
            self,
            elements=self.elements + other.elements,
            equal=self.equal + other.equal,
            difference=self.difference + other.difference,
            norm=self.norm + other.norm,
            lost=self.lost + other.lost,
            steps=max(numbers, default=None),
            note=self.note or other.note,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How a recipe compares with samples.

    Attributes:
        stages: what was given and the recipe has, in the order of its dataflow.
        absent: stages that were given and the recipe has not.
        failed: why the recipe could not be run on them, "" where it could.
        not_run: whether something of the backward was given, and that of the recipe was not run.
        digest: of the recipe's own tensors that were compared; recipes of one digest give the same bits here.
    """

    stages: tuple[StageFit, ...] = ()
    absent: tuple[str, ...] = ()
    failed: str = ""
    not_run: bool = False
    digest: str = ""

    @property
    def exact(self) -> bool:
        """Whether the recipe has every stage that was given, to the last bit."""
        return self.equal_so_far and not self.not_run and not self.absent

    @property
    def equal_so_far(self) -> bool:
        """Whether every stage that was compared is equal, and there is one."""
        return not self.failed and bool(self.stages) and all(stage.exact for stage in self.stages)

    @property
    def departs(self) -> str | None:
        """The first stage, in the order of the dataflow, that is not equal."""
        return next((stage.name for stage in self.stages if not stage.exact), None)

    @property
    def elements(self) -> int:
        """How many elements were compared."""
        return sum(stage.elements for stage in self.stages)

    @property
    def near(self) -> bool:
        """Whether a stage has a share of `NEAR_SHARE` equal elements, or a relative L2 below `NEAR_DISTANCE`.

        lse is a logarithm, which is close to that of anything: beside other stages only its bits count.
        """
        stages = [stage for stage in self.stages if stage.elements]
        measured = [stage for stage in stages if stage.name != "lse"] or stages
        return any(stage.share >= NEAR_SHARE for stage in stages) or any(
            stage.relative_l2 < NEAR_DISTANCE for stage in measured
        )

    @property
    def key(self) -> Key:
        """What recipes are ranked by, the larger the better: the forward first, then the backward.

        Of each: whether every stage is equal; how many stages are, from the first on without a gap; how many in all;
        their mean share of equal elements; minus their mean relative L2, at most 1 a stage, and 2 where it is none.
        """
        if self.failed:
            return (-1.0,) * 11
        parts = (
            [stage for stage in self.stages if stage.backward == backward]
            for backward in (False, True)
        )
        ranks = [rank for part in parts for rank in _rank(part)]
        return (*ranks, -float(len(self.absent)))

    def to_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "exact": self.exact,
            "departs": self.departs,
            "stages": [stage.to_data() for stage in self.stages],
            "absent": list(self.absent),
            "backward_not_run": self.not_run,
            "failed": self.failed,
        }

    def plus(self, other: Fit) -> Fit:
        """Both together, of other samples."""
        found = {stage.name: stage for stage in self.stages}
        for stage in other.stages:
            found[stage.name] = found[stage.name].plus(stage) if stage.name in found else stage
        return Fit(
            stages=tuple(found.values()),
            absent=tuple(dict.fromkeys((*self.absent, *other.absent))),
            failed=self.failed or other.failed,
            not_run=self.not_run or other.not_run,
            digest=hashlib.sha256(f"{self.digest} {other.digest}".encode()).hexdigest(),
        )


def _rank(stages: list[StageFit]) -> Key:
    if not stages:
        return (0.0, 0.0, 0.0, 0.0, 0.0)
    chain = next((at for at, stage in enumerate(stages) if not stage.exact), len(stages))
    exact = sum(stage.exact for stage in stages)
    share = sum(stage.share for stage in stages) / len(stages)
    distance = sum(map(_distance, stages)) / len(stages)
    return (float(chain == len(stages)), float(chain), float(exact), share, -distance)


def _distance(stage: StageFit) -> float:
    return min(stage.relative_l2, 1.0) if math.isfinite(stage.relative_l2) else 2.0


def fit(recipe: Recipe, sample: Sample, *, backward: bool = True) -> Fit:
    """How a recipe compares with a sample. `backward`: whether to run that pass, where something of it was given."""
    try:
        places = sample.places(recipe)
    except ValueError as error:
        return Fit(failed=str(error))
    compared = {name: one for name, one in places.items() if sample.result(one) is not None}
    wanted = {one.stage.name for one in compared.values()}
    later = any(one.stage.backward for one in compared.values())
    run = later and backward
    try:
        with np.errstate(all="ignore"):
            expected = simulate_inputs(
                sample.spec, sample.inputs, recipe, backward=run, wanted=wanted
            )
    except (ValueError, TypeError) as error:
        return Fit(failed=str(error))
    known = {one.stage.name for one in places.values()}
    found: dict[str, StageFit] = {}
    digest = hashlib.sha256()
    for name, place in compared.items():
        if place.stage.backward and not run:
            continue
        digest.update(f"{name} {place.stage.view} {expected[name].shape}".encode())
        digest.update(expected[name].tobytes())
        one = _compared(sample, place, expected[name])
        stage = place.stage.name
        found[stage] = found[stage].plus(one) if stage in found else one
    absent = tuple(
        name for name in tensor_names(sample) if name not in known and name not in places
    )
    return Fit(
        stages=tuple(found.values()),
        absent=absent,
        not_run=later and not run,
        digest=digest.hexdigest(),
    )


def together(fits: Iterable[Fit]) -> Fit:
    """Fits of several samples as one."""
    first, *rest = fits
    for one in rest:
        first = first.plus(one)
    return first


def _compared(sample: Sample, place: Place, expected: Tensor) -> StageFit:
    stage = place.stage
    empty = StageFit(name=stage.name, backward=stage.backward, steps=None)
    given = sample.result(place)
    if given is None:
        return empty
    view = sample.views.get(place.name, sample.views.get(f"{stage.name}.0"))
    if view is not None and view is not stage.view and {view, stage.view} != {"F32", "BF16"}:
        return dataclasses.replace(empty, note=f"given as {view}, {stage.view} in the recipe")
    aligned = align(place, expected, given)
    if not isinstance(aligned, Aligned):
        return dataclasses.replace(empty, note=aligned[1])
    with np.errstate(all="ignore"):
        differs = aligned.differs()
        considered = np.ones(differs.shape, np.bool_)
        if stage.masked_optional:
            considered &= sample.spec.visible(place.document or 0) | ~aligned.skipped()
        differs = differs & considered
        left, right = aligned.values(aligned.expected), aligned.values(aligned.actual)
        finite = np.isfinite(left) & np.isfinite(right) & considered
        lost = int((differs & ~finite).sum())
        left, right = left[finite], right[finite]
        steps = aligned.largest(differs)[0] if differs.any() else 0
        elements = int(considered.sum())
        return StageFit(
            name=stage.name,
            backward=stage.backward,
            elements=elements,
            equal=elements - int(differs.sum()),
            difference=float(np.square(left - right).sum()),
            norm=float(np.square(left).sum()),
            lost=lost,
            steps=steps,
        )
