"""The same documents by several recipes and policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flamia_ref.attention import Recipe
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.launches import Simulation, simulate
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.work import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Simulations by recipe and policy.

    Attributes:
        problem: the documents.
        gpu, library: of all.
        entries: recipe, policy (None: what the library does) and the simulation.
    """

    problem: Problem
    gpu: str
    library: str
    entries: tuple[tuple[str, str | None, Simulation], ...]


def compare(
    problem: Problem,
    recipes: Sequence[Recipe | str],
    *,
    policies: Sequence[str] | None = None,
    gpu: str = "B200",
    library: str = "cudnn",
    fused: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Simulate every recipe under every policy.

    Args:
        problem, gpu, library, fused: as in `simulate`.
        recipes: recipes, or names in `RECIPES`.
        policies: names in `POLICIES`; None for what the library does and all that fit the documents.
        progress: is called with the number of simulations done, that of all, and what was done last.
    """
    GPUS[gpu]
    equal = len(set(problem.mask.queries.lengths)) < 2
    names: list[str | None] = (
        [None, *(name for name, one in POLICIES.items() if equal or not one.dense)]
        if policies is None
        else [POLICIES[name].name for name in policies]
    )
    count = len(recipes) * len(names)
    entries = []
    for recipe in recipes:
        for name in names:
            found = simulate(problem, recipe, gpu=gpu, policy=name, library=library, fused=fused)
            entries.append((found.recipe.name, name, found))
            if progress is not None:
                progress(len(entries), count, f"{found.recipe.name}, {name or library}")
    return Comparison(problem=problem, gpu=gpu, library=library, entries=tuple(entries))
