"""The suites as pytest runs them: one kernel, one space, a profile, and what is known of the kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from flamia_ref import kernels
from flamia_ref.properties.catalogue import check
from flamia_ref.properties.drawn import Example, Space
from flamia_ref.properties.files import example_line, save_example
from flamia_ref.properties.searching import PROFILES, Profile, search
from flamia_ref.properties.subject import PropertyFailure, Subject


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A kernel under test.

    Attributes:
        subject: the kernel.
        space: the shapes that it is tested on.
        profile: how much is tried.
        first: examples that are tried before others.
        save_to: the file that failing examples are added to; None for none.
    """

    subject: Subject
    space: Space
    profile: Profile
    first: tuple[Example, ...] = ()
    save_to: str | None = None

    def search(self, property: str) -> str:
        """Look for an example that the kernel fails, and return what was tried, as a line.

        Raises as `flamia_ref.properties.search`; the message of a PropertyFailure then ends with the example.
        """
        try:
            return str(
                search(
                    self.subject,
                    property,
                    space=self.space,
                    profile=self.profile,
                    first=self.first,
                )
            )
        except PropertyFailure as failure:
            if self.save_to is not None:
                save_example(self.save_to, failure.example)
            raise PropertyFailure(
                f"{failure}\n{example_line(failure.example)}", failure.example
            ) from None

    def check(self, example: Example) -> None:
        """Hold the kernel to one example. Raises as `flamia_ref.properties.check`."""
        check(self.subject, example)


def subject_named(kernel: str, recipe: str | None) -> Subject:
    """The kernel "module:function", called for a recipe, a name or a JSON file, if one is given.

    Raises KernelError where there is no such kernel, ValueError where there is no such recipe.
    """
    found = Subject(kernel=kernels.load(kernel), name=kernel)
    if recipe is None:
        return found
    from flamia_ref.attention import RECIPES, Recipe

    if recipe in RECIPES or not os.path.isfile(recipe):
        chosen = RECIPES[recipe]
    else:
        chosen = Recipe.from_json(Path(recipe).read_text(encoding="utf-8"))
    keywords = {"recipe": chosen.name, "recipe_json": chosen.to_json()}
    return replace(found, name=f"{kernel} by {chosen.name}", keywords=keywords)


def profile_named(name: str, examples: int | None) -> Profile:
    """A profile, with another number of examples if one is given."""
    return PROFILES[name] if examples is None else replace(PROFILES[name], examples=examples)
