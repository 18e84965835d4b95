"""What comes of a match: recipes in order, and the knobs that would bring them closer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flamia_ref.attention.description import data_differences
from flamia_ref.golden.matching.fits import Fit, StageFit
from flamia_ref.golden.matching.turning import Turn, distance, percent, words

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_MOST_TURNS = 6  # changes that the text names


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Recipes that give the same bits here, and how they compare.

    Attributes:
        recipes: their names, in the order in which they were given.
        fit: how they compare.
        whole: whether with all that was given; else with the parts in `Match.parts`, which is enough to depart.
    """

    recipes: tuple[str, ...]
    fit: Fit
    whole: bool


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which recipes fit what a kernel gave.

    Attributes:
        subject: whose results these are.
        cases: the names of all cases.
        parts: what every recipe was compared with: the documents and heads of cases.
        entries: the recipes, the best first.
        turns: changes that bring the best few closer, the best first; none where a recipe fits, or none helps.
        fitting: the recipe that gives every bit: the first one, or a changed one; None where none does.
        asked: whether knobs were tried.
        notes: what else a reader must know.
    """

    subject: str
    cases: tuple[str, ...]
    parts: tuple[str, ...]
    entries: tuple[Entry, ...]
    turns: tuple[Turn, ...] = ()
    fitting: Recipe | None = None
    asked: bool = True
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Entry:
        """The recipes that fit best."""
        return self.entries[0]

    @property
    def exact(self) -> bool:
        """Whether a recipe as it is gives every bit that was given."""
        return self.best.fit.exact and self.best.whole

    @property
    def near(self) -> bool:
        """Whether a recipe is near, by `Fit.near`; where none is, the order of the recipes says little."""
        return any(one.fit.near for one in self.entries)

    @property
    def exit_code(self) -> int:
        """0 where a recipe as it is gives every bit, else 1."""
        return 0 if self.exact else 1

    @cached_property
    def changes(self) -> tuple[tuple[str, Any, Any], ...]:
        """Where the recipe that gives every bit differs from the one it was made of; () without any."""
        if self.exact or self.fitting is None:
            return ()
        return tuple(map(tuple, data_differences(self.turns[0].base, self.fitting)))

    def to_json(self) -> str:
        """The result as JSON text."""
        document = {
            "schema": "flamia-ref recipes match",
            "subject": self.subject,
            "cases": list(self.cases),
            "compared_with_every_recipe": list(self.parts),
            "exact": self.exact,
            "near": self.near,
            "recipes": [
                {"names": list(one.recipes), "whole": one.whole, **one.fit.to_data()}
                for one in self.entries
            ],
            "knobs_tried": self.asked and not self.exact,
            "changes": [one.to_data() for one in self.turns],
            "fitting_recipe": None if self.fitting is None else json.loads(self.fitting.to_json()),
            "notes": list(self.notes),
        }
        return json.dumps(document, indent=1) + "\n"

    def to_text(self) -> str:
        """The result in words."""
        lines = [f"{self.subject}: {_verdict(self)}"]
        if not self.best.whole:
            lines.append(f"compared with every recipe: {'; '.join(self.parts)}")
        else:
            lines.append(f"compared: all of {', '.join(self.cases)}")
        lines += ["", f"{' = '.join(self.best.recipes)}:", *_table(self.best.fit)]
        if len(self.entries) > 1:
            lines += ["", "the others, the closest first:"]
            width = max(len(" = ".join(one.recipes)) for one in self.entries[1:])
            lines += [
                f"    {' = '.join(one.recipes):<{width}}  {_in_a_line(one.fit)}"
                for one in self.entries[1:]
            ]
        if self.turns:
            lines += ["", "changes that bring it closer:"]
            lines += [
                line
                for one in self.turns[:_MOST_TURNS]
                for line in _turn(one, found=self.fitting is not None)
            ]
            if len(self.turns) > _MOST_TURNS:
                lines.append(f"    and {len(self.turns) - _MOST_TURNS} more, in the JSON")
        elif self.asked and not self.exact:
            lines += ["", "no change of one knob brings it closer"]
        if not self.exact and self.fitting is not None:
            best = self.turns[0]
            lines += ["", f"{best.base.name} with {best.words} gives every bit"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _verdict(match: Match) -> str:
    best = match.best
    if match.exact:
        if len(best.recipes) == 1:
            return f"{best.recipes[0]} gives every bit"
        return f"{' and '.join(best.recipes)} give every bit, and cannot be told apart here"
    if best.fit.failed:
        return f"no recipe can be run on this: {best.fit.failed}"
    where = best.fit.departs
    if not match.near:
        return _far(best.fit)
    names = " and ".join(best.recipes)
    one = len(best.recipes) == 1
    name = f"{names} is closest" if one else f"{names} (the same here) are closest"
    if where is None:
        return f"no recipe gives all of this; {name}, equal in all that {'it has' if one else 'they have'}"
    return f"no recipe gives every bit; {name} and {'departs' if one else 'depart'} at {where}"


def _far(fit: Fit) -> str:
    stage = next((stage for stage in fit.stages if not stage.exact and stage.elements), None)
    best = (
        ""
        if stage is None
        else f" ({percent(stage)} of {stage.name} equal, relative L2 {distance(stage)})"
    )
    return f"no recipe is near{best}; are inputs, mask and softmax_scale those of the kernel?"


def _table(fit: Fit) -> list[str]:
    if fit.failed:
        return [f"    cannot be run: {fit.failed}"]
    if not fit.stages:
        return ["    has nothing of what was given"]
    width = max(len(stage.name) for stage in fit.stages)
    lines = [f"    {stage.name:<{width}}  {_stage(stage)}" for stage in fit.stages]
    return [*lines, *_rest(fit)]


def _rest(fit: Fit) -> list[str]:
    lines = []
    if fit.absent:
        lines.append(f"    no stages of this recipe: {', '.join(fit.absent)}")
    if fit.not_run:
        lines.append("    its backward was not run, as its forward departs")
    return lines


def _stage(stage: StageFit) -> str:
    if stage.note:
        return f"cannot be compared: {stage.note}"
    if stage.exact:
        return f"equal, {stage.elements} elements"
    words = f"{percent(stage)} of {stage.elements} equal, relative L2 {distance(stage)}"
    if stage.steps is not None:
        words += f", largest distance {stage.steps}"
    if stage.lost:
        words += f", {stage.lost} NaN or infinite in one of the two"
    return words


def _in_a_line(fit: Fit) -> str:
    if fit.failed:
        return f"cannot be run: {fit.failed}"
    departing = next((stage for stage in fit.stages if not stage.exact), None)
    if departing is None:
        words = "equal" if fit.stages else "nothing of what was given"
    elif departing.note:
        words = f"departs at {departing.name}, {departing.note}"
    else:
        words = f"departs at {departing.name}, {percent(departing)} equal"
    if fit.absent:
        words += f"; has no {', '.join(fit.absent[:4])}"
        words += f" and {len(fit.absent) - 4} more" if len(fit.absent) > 4 else ""
    return words


def _turn(turn: Turn, *, found: bool) -> list[str]:
    lines = [f"    {turn.base.name}: {turn.words}: {turn.effect}"]
    if turn.after.exact:
        lines[0] += f", and every bit equal{'' if found else ' of these parts'}"
    if turn.same:
        lines.append(f"        the same bits here: {'; or '.join(map(words, turn.same[:4]))}")
    return lines
