"""The points of a safeguards study: one combination of safeguards, whether it leaks, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.safeguarding.alternatives import Alternative


class Standing(StrEnum):
    """What is known of a combination."""

    PROVEN = "proven"
    """Its structure is legal, and the proof from its program says so too."""
    LEGAL = "legal"
    """Its structure is legal; its program was not looked at, as it is not on the front."""
    DISPUTED = "disputed"
    """Its structure is legal and its program is not: one of the methods is wrong, and nothing is claimed."""
    LEAKS = "leaks"
    """Its structure is not legal."""


def standing(*, legal: bool, proved: bool | None) -> Standing:
    """The standing that follows from the structure and from the proof, None where there is none."""
    if not legal:
        return Standing.LEAKS
    if proved is None:
        return Standing.LEGAL
    return Standing.PROVEN if proved else Standing.DISPUTED


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudyPoint:
    """One combination.

    Attributes:
        label: letters of a front point, the name of a registered recipe, or "".
        choices: the alternative of each group, by its name.
        recipe: the recipe.
        names: registered recipes with the same six products.
        standing: what is known of its leaks.
        illegal: pairs of tokens that its structure makes illegal in two documents of 64 and 20 tokens, by severity.
        errors: the relative L2 error of "out", "dq", "dk" and "dv", as far as there are gradients.
        error: their root mean square.
        work: for each length of the study the share of multiply-accumulates that leaves low precision.
        kept: bytes kept for the backward, a token and head.
        extra: those beyond the recipe as it is.
        front: whether no legal point beats it, or equals it and comes first: registered recipes, then fewer
            kinds of safeguards.
    """

    label: str
    choices: Mapping[str, Alternative]
    recipe: Recipe
    names: tuple[str, ...]
    standing: Standing
    illegal: Mapping[Severity, int]
    errors: Mapping[str, float]
    error: float
    work: tuple[Fraction, ...]
    kept: float
    extra: float
    front: bool

    @property
    def proven(self) -> bool:
        """Whether the structure and the proof both say that no output can depend on what it must not see."""
        return self.standing is Standing.PROVEN

    @property
    def changes(self) -> str:
        """What differs from the recipe as it is, in words."""
        found = [
            f"{group}: {choice}"
            for group, choice in self.choices.items()
            if choice is not Alternative.AS_IS
        ]
        return "; ".join(found) or "as it is"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alone:
    """One alternative of one group, the others as they are.

    Attributes:
        group, alternative: which.
        reason: why it is not computed; None where it is.
        leaks: whether the group's uses alone make something illegal.
        point: the combination, None where it is not computed.
        left_out: the alternative of the group because of which no combination has this one: it is no worse alone in
            error, work and bytes, and safe. None for one that combinations have, or that leaks.
    """

    group: str
    alternative: Alternative
    reason: str | None
    leaks: bool
    point: StudyPoint | None
    left_out: Alternative | None = None


Merits = tuple[float, ...]

_ERROR_STEP = math.log(1.03)
_BYTES_STEP = math.log(1.01)


def merits(error: float, work: Fraction, kept: float) -> Merits:
    """What points are compared by, less is better: the error in steps of 3%, as less is chance in a small sample; the
    work as it is; bytes in steps of 1%."""
    return _step(error, _ERROR_STEP), float(work), _step(kept, _BYTES_STEP)


def _step(x: float, step: float) -> float:
    """The number of a step of a logarithm, where steps begin at half of them."""
    return float(round(math.log(x) / step)) if x > 0 else -math.inf


def beats(one: Merits, other: Merits) -> bool:
    """Whether one is as good as the other in every respect, and better in one."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def front_of(points: Sequence[Merits]) -> list[int]:
    """The places of the points that no other beats; of equal ones the first."""
    return [
        place
        for place, point in enumerate(points)
        if point not in points[:place] and not any(beats(other, point) for other in points)
    ]
