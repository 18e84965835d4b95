"""What was found about the consistency of a recipe: a verdict, a line and the numbers for each property."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from flamia_ref._errors import unknown_name
from flamia_ref.attention.data import plain
from flamia_ref.evidence import Evidence

SCHEMA = "flamia-ref consistency"
SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """What was found about a property."""

    HOLDS = "holds"
    HOLDS_OUTSIDE_GUARDED_BLOCKS = "holds outside guarded blocks"
    BROKEN = "broken"
    MEASURED = "measured"
    """A number, neither kept nor broken."""
    NO_BACKWARD = "no backward"
    """There is nothing to look at: the recipe has no backward."""


TITLES: Mapping[str, str] = {
    "C1": "the backward's S comes from the forward's codes",
    "C2": "q, k, v and dO each have one value in both their products",
    "C3": "dV takes the P that made O",
    "C4": "delta is of the O that was returned",
    "C5": "the rows of dS sum to zero",
    "gradient": "without quantizers and roundings, the backward is the gradient of the forward",
    "packing": "packed documents give what each gives alone, bit for bit",
    "prefix": "the first tokens alone give the first rows of out, lse and dq, bit for bit",
}
"""The properties by name, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Property:
    """One property of one recipe.

    Attributes:
        name, title: from `TITLES`.
        verdict: what was found.
        finding: the same in one line.
        details: what else there is to say, a line each.
        figures: the numbers behind it, by name.
    """

    name: str
    title: str
    verdict: Verdict
    finding: str
    details: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Consistency:
    """All properties of one recipe. `str(consistency)` is the text."""

    recipe: str
    evidence: Evidence
    properties: tuple[Property, ...]

    def __getitem__(self, name: str) -> Property:
        for one in self.properties:
            if one.name == name:
                return one
        raise unknown_name("property", name, TITLES)

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the properties that are broken."""
        return tuple(one.name for one in self.properties if one.verdict is Verdict.BROKEN)

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 nothing is broken, 1 something is."""
        return 1 if self.broken else 0

    def to_text(self) -> str:
        """The report for people: a line a property, and under it what was found."""
        lines = [f"recipe {self.recipe}: evidence {self.evidence}"]
        for one in self.properties:
            lines.append(f"{one.name:<9} {one.verdict}: {one.title}")
            lines += [f"{'':<9}   {line}" for line in (one.finding, *one.details)]
        broken = ", ".join(self.broken)
        lines.append(f"BROKEN: {broken}" if broken else "nothing is broken")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "broken": list(self.broken),
            **plain(self),
        }
        for entry in document["properties"]:  # JSON has no NaN and no infinity
            entry["figures"] = {
                name: value if np.isfinite(value) else str(value)
                for name, value in entry["figures"].items()
            }
        return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return self.to_text()
