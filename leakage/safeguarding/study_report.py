"""What a safeguards study found, and its forms."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.safeguarding.alternatives import Group
from flamia_ref.leakage.safeguarding.points import Alone, StudyPoint


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SafeguardsStudy:
    """Every safeguard on the uses of a recipe that leak. `str(study)` is its text.

    Attributes:
        recipe: the recipe as it is.
        sample, lengths, head_dim, causal, window: the inputs that errors are measured on.
        at: lengths of a document for which work is counted; the first counts in the front, and bytes are of it.
        groups: the groups that were changed; none where no use leaks or has a safeguard in its place.
        held: names of groups that stayed as they are.
        alone: each alternative of each group, the others as they are.
        points: every combination that was measured, the recipe as it is first.
        possible: combinations of all alternatives that are computed, those that leak too.
        safe: those of alternatives whose uses do not leak alone. No other can be proven: what a use makes illegal
            alone, it makes illegal beside any other.
        considered: different legal recipes among these, without the alternatives that are left out.
        contradictory: combinations that no recipe is.
        missing: combinations that may be on the front and were not measured, as the runs were spent.
        runs: runs of the simulator.
        guarded, guarded_at: the share of guarded blocks, of those with a visible pair, in the sample and at each
            length of `at`.
        exhaustive: whether all were measured.
    """

    recipe: Recipe
    sample: str
    lengths: tuple[int, ...]
    head_dim: int
    causal: bool
    window: tuple[int | None, int | None]
    at: tuple[int, ...]
    groups: tuple[Group, ...]
    held: tuple[str, ...]
    alone: tuple[Alone, ...]
    points: tuple[StudyPoint, ...]
    possible: int
    safe: int
    considered: int
    contradictory: int
    missing: int
    runs: int
    guarded: Fraction
    guarded_at: tuple[Fraction, ...]
    exhaustive: bool

    @property
    def base(self) -> StudyPoint:
        """The recipe as it is."""
        return self.points[0]

    @property
    def front(self) -> tuple[StudyPoint, ...]:
        """The combinations that nothing legal beats in error, work and bytes together, by work, then error."""
        found = [point for point in self.points if point.front]
        return tuple(sorted(found, key=lambda one: (one.work[0], one.error)))

    @property
    def measured(self) -> int:
        """How many legal combinations were measured."""
        return sum(not point.illegal for point in self.points)

    def named(self, name: str) -> StudyPoint | None:
        """The point with the products of a registered recipe, None if it is no point of this study."""
        return next((point for point in self.points if name in point.names), None)

    @property
    def exit_code(self) -> int:
        """0: a study finds what it finds."""
        return 0

    def to_text(self) -> str:
        """Return the study for people: each alternative alone, then the front."""
        from flamia_ref.leakage.safeguarding.study_text import describe

        return describe(self)

    def to_json(self) -> str:
        """Return the study as JSON: every point with its choices, errors, costs and standing."""
        from flamia_ref.leakage.safeguarding.study_document import render

        return render(self)

    def to_figure(self) -> Any:
        """Draw error against the share of work, with the front, as a matplotlib figure.

        Raises ImportError without matplotlib.
        """
        from flamia_ref.leakage.safeguarding.study_picture import figure

        return figure(self)

    def to_png(self) -> bytes:
        """Return that figure as a PNG file."""
        from flamia_ref.leakage.safeguarding.study_picture import png

        return png(self)

    def __str__(self) -> str:
        return self.to_text()
