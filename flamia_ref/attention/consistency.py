"""Whether the parts of a recipe fit together: named properties, each with what was found on fixed inputs.

The inputs are bell-shaped values and ones of wide exponents (`samples`), in packed documents of 150, 1 and 45 tokens, with
2 query heads, 1 key/value head and head_dim 64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flamia_ref.attention import exact, inputs, invariance, measures, samples
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import INPUT_USES, copy_names
from flamia_ref.attention.findings import TITLES, Consistency, Property, Verdict
from flamia_ref.attention.measures import Run
from flamia_ref.attention.recipe import Operand, Recipe, Use
from flamia_ref.attention.samples import Sample

_LENGTHS, _HEADS, _KV_HEADS, _HEAD_DIM = (150, 1, 45), 2, 1, 64
_PREFIXES = (1, 7, 33, 50, 64, 100, 130)
_WITNESS_PREFIX = 8  # tokens of the public witness, whose later token is 16
_GRADIENT_TOLERANCE = 1e-12
_DELTA_TOLERANCE = (
    2.0**-16
)  # of the sum of the magnitudes; float32 sums of 64 terms stay below 2^-18

Progress = Callable[[int, int, str], None]


def check(recipe: Recipe | str, *, progress: Progress | None = None) -> Consistency:
    """The consistency of a recipe, measured by running it in numpy: some seconds.

    `progress` is called with what is done, how much there is, and its name. Raises ValueError for a recipe that this
    package does not compute.
    """
    chosen = inputs.chosen_recipe(recipe)
    check_computed(chosen)
    shape = (_HEADS, _KV_HEADS, _HEAD_DIM)
    bell, wide = samples.bell(_LENGTHS, *shape), samples.wide(_LENGTHS, *shape)
    runs: list[Run] = []
    steps: tuple[tuple[str, Callable[[], Property | None]], ...] = (
        ("run", lambda: runs.append(measures.traced(chosen, bell, causal=True))),
        ("run", lambda: runs.append(measures.traced(chosen, wide, causal=True))),
        ("C1", lambda: _c1(runs)),
        ("C2", lambda: _c2(runs)),
        ("C3", lambda: _c3(runs[0])),
        ("C4", lambda: _c4(runs[0])),
        ("C5", lambda: _c5(runs[0])),
        ("gradient", lambda: _gradient(chosen, bell)),
        ("packing", lambda: _packing(chosen, wide)),
        ("prefix", lambda: _prefix(chosen, bell, wide)),
    )
    found = []
    for done, (name, step) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), name)
        one = step()
        if one is not None:
            found.append(one)
    return Consistency(recipe=chosen.name, evidence=chosen.label, properties=tuple(found))


def _property(
    name: str,
    verdict: Verdict | bool,
    finding: str,
    details: list[str] | None = None,
    **figures: float,
) -> Property:
    if isinstance(verdict, bool):
        verdict = Verdict.HOLDS if verdict else Verdict.BROKEN
    return Property(
        name=name,
        title=TITLES[name],
        verdict=verdict,
        finding=finding,
        details=tuple(details or ()),
        figures=figures,
    )


def _c1(runs: list[Run]) -> Property:
    counts = [measures.recomputed_scores(run) for run in runs]
    differing, pairs = (sum(count[index] for count in counts) for index in range(2))
    finding = (
        f"S is one product in both passes, and the backward's P follows from the traced S and lse, to the bit, in"
        f" {pairs - differing} of {pairs} visible pairs"
    )
    recipe = runs[0].recipe
    forward, backward = recipe.softmax.score_factor, recipe.gradient.score_factor
    details = []
    if forward != backward:
        details.append(
            f"c is rounded as {forward} in the forward and as {backward} in the backward"
        )
    return _property("C1", differing == 0, finding, details, pairs=pairs, differing=differing)


def _c2(runs: list[Run]) -> Property:
    recipe, names = runs[0].recipe, copy_names(runs[0].recipe)
    broken, details, figures = [], [], {}
    for tensor, uses in INPUT_USES.items():
        shown = "dO" if tensor == "do" else tensor
        counts = {run.sample.name: measures.two_values(run, tensor) for run in runs}
        for sample, count in counts.items():
            figures[f"{tensor}.{sample}.differing"] = count.differing / count.elements
            figures[f"{tensor}.{sample}.relative"] = count.relative
        products = " and ".join(_product(use) for use in uses)
        formats = " and ".join(
            f"{_product(use)} takes {_form(recipe.operand(use))}" for use in uses
        )
        if names[uses[0]] == names[uses[1]] and recipe.operand(uses[0]).block is not None:
            line = f"{shown}: one copy in {products}"
        elif any(count.differing for count in counts.values()):
            broken.append(shown)
            seen = ", ".join(
                f"{100 * count.differing / count.elements:.2g}% of the elements of {sample}, by {count.relative:.2g}"
                for sample, count in counts.items()
            )
            line = f"{shown}: {formats}; they differ in {seen}"
        else:
            line = f"{shown}: {formats}; the values are the same"
        guarded = [_product(use) for use in uses if getattr(recipe, _field(use)).guarded]
        if guarded:
            line += f"; guarded blocks of {' and '.join(guarded)} take the inputs"
        details.append(line)
    if broken:
        return _property("C2", False, f"two values: {', '.join(broken)}", details, **figures)
    if any(product.guarded for product in (recipe.s, recipe.o, recipe.dp, recipe.dq)):
        verdict, finding = (
            Verdict.HOLDS_OUTSIDE_GUARDED_BLOCKS,
            "one value each, but in guarded blocks",
        )
    else:
        verdict, finding = Verdict.HOLDS, "one value each"
    return _property("C2", verdict, finding, details, **figures)


def _c3(run: Run) -> Property:
    count = measures.two_roundings(run)
    share = count.differing / count.elements
    finding = (
        f"{count.differing} of {count.elements} visible pairs ({100 * share:.2g}%) have P rounded otherwise in dV than in O,"
        f" which moves dV by {count.relative:.2g} of itself"
    )
    return _property(
        "C3",
        Verdict.MEASURED,
        finding,
        pairs=count.elements,
        differing=count.differing,
        relative=count.relative,
    )


def _c4(run: Run) -> Property:
    found = measures.delta(run)
    holds = found.halved and found.returned < min(_DELTA_TOLERANCE, found.unrounded)
    finding = (
        f"delta is the row sum of dO times the returned O within {found.returned:.2g} of its magnitudes; with O before its"
        f" rounding it would be {found.unrounded:.2g} away"
    )
    halves = "half the out gives exactly half the delta"
    details = [halves if found.halved else halves.replace("gives", "does not give")]
    return _property(
        "C4", holds, finding, details, returned=found.returned, unrounded=found.unrounded
    )


def _c5(run: Run) -> Property:
    found = measures.row_sums(run)
    finding = (
        f"row sums are {found.together:.2g} of the magnitudes of dS, all rows together; of its own row's the root mean"
        f" square is {found.root_mean_square:.2g}, the largest {found.largest:.2g}"
    )
    return _property("C5", Verdict.MEASURED, finding, **found._asdict())


def _gradient(recipe: Recipe, sample: Sample) -> Property:
    given = [x.astype(np.float64) for x in (sample.q, sample.k, sample.v, sample.dout)]
    scale = inputs.checked_scale(None, _HEAD_DIM)
    figures = dict.fromkeys(("dq", "dk", "dv"), 0.0)
    for causal in (True, False):
        expected = exact.gradient(
            *given,
            recipe,
            sample.documents,
            causal=causal,
            softmax_scale=scale,
            quantized=False,
        )
        found = exact.backward(*given, recipe, sample.documents, causal=causal, softmax_scale=scale)
        for name in figures:
            one, other = getattr(found, name), getattr(expected, name)
            distance = float(np.abs(one - other).max() / np.abs(other).max())
            figures[name] = max(figures[name], distance)
    shown = ", ".join(f"{name} {distance:.2g}" for name, distance in figures.items())
    finding = (
        f"largest deviation, of the largest element: {shown}; {_GRADIENT_TOLERANCE:g} is allowed"
    )
    holds = all(distance <= _GRADIENT_TOLERANCE for distance in figures.values())
    return _property("gradient", holds, finding, **figures)


def _packing(recipe: Recipe, sample: Sample) -> Property:
    details, count = [], 0
    for causal in (True, False):
        changes = invariance.packing(recipe, sample, causal=causal)
        count += len(changes)
        details += [f"{'causal' if causal else 'full'}: {change}" for change in changes[:1]]
    *some, last = map(str, _LENGTHS)
    documents = f"documents of {', '.join(some)} and {last} tokens, in two orders, causal and full"
    finding = f"{documents}: out, lse, dq, dk and dv are " + (
        "not those of each alone" if count else "those of each alone"
    )
    return _property("packing", not count, finding, details, changes=count)


def _prefix(recipe: Recipe, bell: Sample, wide: Sample) -> Property:
    details, tried, changed = [], 0, 0
    for sample, lengths in (
        (bell.taken((0,)), _PREFIXES),
        (wide.taken((0,)), _PREFIXES),
        (samples.public_witness(), (_WITNESS_PREFIX,)),
    ):
        found = invariance.prefix(recipe, sample, lengths)
        bad = {length: changes for length, changes in found.items() if changes}
        tried, changed = tried + len(found), changed + len(bad)
        line = f"{sample.name}: the first {', '.join(map(str, lengths))} of {len(sample.q)} tokens"
        if bad:
            length, changes = next(iter(bad.items()))
            line += f"; changed: {', '.join(map(str, bad))}. Of {length}, {changes[0]}"
        details.append(line)
    finding = f"{changed} of {tried} prefixes change with the tokens after them"
    return _property("prefix", not changed, finding, details, prefixes=tried, changed=changed)


def _field(use: Use) -> str:
    return use.split(".")[0]


def _product(use: Use) -> str:
    """A product as people write it."""
    name = _field(use)
    return f"d{name[1:].upper()}" if name.startswith("d") else name.upper()


def _form(operand: Operand) -> str:
    if operand.block is None:
        return operand.format
    return f"{operand.format} {operand.block[0]}x{operand.block[1]}"
