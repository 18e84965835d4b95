"""The points of a safeguards study: one combination of safeguards, whether it leaks, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import NamedTuple

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
        names: registered recipes with the same six products, which "but for" their other parts are this one.
        but_for: by these names, which other parts differ: "softmax", "gradient", "tiles" or "input"; none for a recipe
            that is this one in every bit.
        standing: what is known of its leaks.
        illegal: pairs of tokens that its structure makes illegal in two documents of 64 and 20 tokens, by severity.
        errors: the relative L2 error of "out", "dq", "dk" and "dv", as far as there are gradients.
        error: their root mean square.
        work: for each length of the study the share of multiply-accumulates that leaves low precision.
        kept: bytes kept for the backward, a token and head: the copies of q, k and v that it reads, bfloat16 values for
            guarded blocks, out and lse.
        extra: those beyond the recipe as it is.
        front: whether no legal point of the front beats it: no worse in error, work and bytes, and better in one, where
            differences of errors below 3% and of bytes below 1% do not count. Of equal points one is on the front:
            registered recipes, then fewer kinds of safeguards.
    """

    label: str
    choices: Mapping[str, Alternative]
    recipe: Recipe
    names: tuple[str, ...]
    but_for: Mapping[str, tuple[str, ...]]
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
    def titles(self) -> tuple[str, ...]:
        """The names, each with what of that recipe differs."""
        return tuple(
            f"{name} but for {' and '.join(parts)}" if (parts := self.but_for.get(name)) else name
            for name in self.names
        )

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


ERROR_STEP = 1.03
ALONE_STEP = 1.001
"""The same for alternatives alone: what is little beside the errors of other groups is much where these are gone."""
_BYTES_STEP = 1.01


class Merits(NamedTuple):
    """What points are compared by, less is better."""

    error: float
    """Differences below 3% do not count on a front: in a small sample they are chance."""
    work: Fraction
    """Every difference counts."""
    kept: float
    """Bytes; differences below 1% do not count."""


def no_worse(one: Merits, other: Merits, step: float = ERROR_STEP) -> bool:
    """Whether nothing of `one` is larger by a difference that counts. `step`: the ratio from which errors' do."""
    return not any(_less(other, one, step))


def beats(one: Merits, other: Merits, step: float = ERROR_STEP) -> bool:
    """Whether one is no worse in any respect, and better in one by a difference that counts."""
    return no_worse(one, other, step) and any(_less(one, other, step))


def front_of(points: Sequence[Merits], step: float = ERROR_STEP) -> list[int]:
    """The places of the points that no point of the front beats; of those that are equal but for differences that do
    not count, the first.

    This names one set. `beats` has no cycles: around one, work would stay, and of its steps less than half could win in
    error, less than half in bytes. So what nobody beats is in, what that beats is out, and so on. As small differences
    add up, a point may be beaten by such alone as are out themselves; it is in. No point of the front beats or equals
    another; every other point equals one, or is beaten by one or by an equal of one.
    """
    beaten_by = [
        {place for place, other in enumerate(points) if beats(other, point, step)}
        for point in points
    ]
    inside: set[int] = set()
    left = set(range(len(points)))
    while left:
        free = {place for place in left if not beaten_by[place] & left}
        inside |= {place for place in free if not beaten_by[place] & inside}
        left -= free
    found: list[int] = []
    for place in sorted(inside):
        if not any(no_worse(points[first], points[place], step) for first in found):
            found.append(place)
    return found


def _less(one: Merits, other: Merits, step: float) -> tuple[bool, bool, bool]:
    """In which respects one is less, by a difference that counts."""
    return (
        one.error * step < other.error,
        one.work < other.work,
        one.kept * _BYTES_STEP < other.kept,
    )
