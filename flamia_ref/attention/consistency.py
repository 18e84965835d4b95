"""Whether the parts of a recipe fit together: named properties, each with what was found on fixed inputs.

The inputs are bell-shaped values and ones of wide exponents (`samples`), in packed documents of 150, 1 and 45 tokens,
with 2 query heads, 1 key/value head and head_dim 64. Where keys are other tokens than queries, there are 45, 0 and 150
of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flamia_ref.attention import gradient_cases, inputs, invariance, measures, samples
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import INPUT_USES, copy_names
from flamia_ref.attention.description import form
from flamia_ref.attention.findings import TITLES, Consistency, Property, Verdict
from flamia_ref.attention.measures import Run
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.samples import Sample

_LENGTHS, _HEADS, _KV_HEADS, _HEAD_DIM = (150, 1, 45), 2, 1, 64
_KEYS = (45, 0, 150)
_PREFIXES = (1, 7, 33, 50, 64, 100, 130)
_WITNESS_PREFIX = 8  # tokens of a witness, whose later token is 16
_GRADIENT_TOLERANCE = 1e-12
_DELTA_TOLERANCE = 2.0**-16  # of the sum of the magnitudes; 64 float32 roundings stay below 2^-18

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
    tell = progress or (lambda done, total, name: None)
    tell(0, 3, "traced runs")
    if chosen.has_backward:
        runs = [measures.traced(chosen, sample, causal=True) for sample in (bell, wide)]
        found = [_c1(runs), _c2(runs), _c3(runs[0]), _c4(runs[0]), _c5(runs[0])]
        found.append(_gradient(runs[0]))
    else:
        names = ("C1", "C2", "C3", "C4", "C5", "gradient")
        nothing = "the recipe has a forward alone: none of its operands is used twice"
        found = [_property(name, Verdict.NO_BACKWARD, nothing, {}) for name in names]
    tell(1, 3, "packing")
    found.append(_packing(chosen, wide))
    tell(2, 3, "prefixes")
    found.append(_prefix(chosen, bell, wide))
    return Consistency(recipe=chosen.name, evidence=chosen.label, properties=tuple(found))


def _property(
    name: str,
    verdict: Verdict | bool,
    finding: str,
    figures: dict[str, float],
    details: list[str] | None = None,
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
    recipe = runs[0].recipe
    own = recipe.backward.gradient.normalisation == "row_softmax"
    source = "S by a softmax of its own" if own else "S and lse"
    finding = (
        f"S is one product in both passes, and the backward's P follows from the traced {source}, to the bit, in"
        f" {pairs - differing} of {pairs} visible pairs"
    )
    forward, backward = recipe.softmax.score_factor, recipe.backward.gradient.score_factor
    details = []
    if forward != backward:
        details.append(
            f"c is rounded as {forward} in the forward and as {backward} in the backward"
        )
    figures: dict[str, float] = {"pairs": pairs, "differing": differing}
    return _property("C1", differing == 0, finding, figures, details)


def _c2(runs: list[Run]) -> Property:
    recipe, names = runs[0].recipe, copy_names(runs[0].recipe)
    broken: list[str] = []
    details: list[str] = []
    figures: dict[str, float] = {}
    for tensor, uses in INPUT_USES.items():
        shown = "dO" if tensor == "do" else tensor
        counts = {run.sample.name: measures.two_values(run, tensor) for run in runs}
        for sample, count in counts.items():
            figures[f"{tensor}.{sample}.differing"] = count.differing / count.elements
            figures[f"{tensor}.{sample}.relative"] = count.relative
        products = " and ".join(_product(use) for use in uses)
        formats = " and ".join(f"{_product(use)} takes {form(recipe.operand(use))}" for use in uses)
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
        guarded = [_product(use) for use in uses if recipe.product(_field(use)).guarded]
        if guarded:
            line += f"; guarded blocks of {' and '.join(guarded)} take the inputs"
        details.append(line)
    if broken:
        return _property("C2", False, f"two values: {', '.join(broken)}", figures, details)
    if any(recipe.product(name).guarded for name in ("s", "o", "dp", "dq")):
        verdict, finding = (
            Verdict.HOLDS_OUTSIDE_GUARDED_BLOCKS,
            "one value each, but in guarded blocks",
        )
    else:
        verdict, finding = Verdict.HOLDS, "one value each"
    return _property("C2", verdict, finding, figures, details)


def _c3(run: Run) -> Property:
    count = measures.two_roundings(run)
    share = count.differing / count.elements
    finding = (
        f"{count.differing} of {count.elements} visible pairs ({100 * share:.2g}%) have P rounded otherwise in dV than"
        f" in O, which moves dV by {count.relative:.2g} of itself"
    )
    figures = {"pairs": count.elements, "differing": count.differing, "relative": count.relative}
    return _property("C3", Verdict.MEASURED, finding, figures)


def _c4(run: Run) -> Property:
    found = measures.delta(run)
    holds = found.halved and found.returned < min(_DELTA_TOLERANCE, found.unrounded)
    finding = (
        f"delta is the row sum of dO times the returned O within {found.returned:.2g} of its magnitudes; of O before"
        f" its rounding it is {found.unrounded:.2g} away"
    )
    halves = "half the out gives exactly half the delta"
    details = [halves if found.halved else halves.replace("gives", "does not give")]
    if run.recipe.backward.gradient.delta_source == "high_precision_out":
        details.append(
            "delta takes high_precision_out, the O of P in bfloat16 that the forward keeps"
        )
    figures = {"returned": found.returned, "unrounded": found.unrounded}
    return _property("C4", holds, finding, figures, details)


def _c5(run: Run) -> Property:
    found = measures.row_sums(run)
    finding = (
        f"row sums are {found.together:.2g} of the magnitudes of dS, all rows together; of its own row's the root mean"
        f" square is {found.root_mean_square:.2g}, the largest {found.largest:.2g}"
    )
    return _property("C5", Verdict.MEASURED, finding, found._asdict())


def _gradient(run: Run) -> Property:
    recipe, sample, scale = run.recipe, run.sample, run.forward.softmax_scale
    figures = dict.fromkeys(("dq", "dk", "dv", "dsink"), 0.0)
    other = samples.bell(_KEYS, sample.q.shape[1], sample.k.shape[1], sample.q.shape[2])
    cases = list(gradient_cases.cases(sample, other))
    bad = []
    for case in cases:
        found = gradient_cases.deviations(recipe, case, scale)
        for name, distance in found.items():
            figures[name] = float(np.maximum(figures[name], distance))  # a NaN stays
        if not all(distance <= _GRADIENT_TOLERANCE for distance in found.values()):
            bad.append(f"{case.name}: {_shown(found)}")
    finding = f"largest deviation, of the largest element: {_shown(figures)}; {_GRADIENT_TOLERANCE:g} is allowed"
    straight = cases[0].gradient(recipe, scale, quantized=True)
    added = {
        name: float(np.linalg.norm(getattr(run.backward, name) - other) / np.linalg.norm(other))
        for name, other in zip(("dq", "dk", "dv"), straight[:3], strict=True)
    }
    details = [
        *(f"not the gradient with {line}" for line in bad),
        f"tried with {', '.join(case.name for case in cases)}",
        "with them, the error that the backward adds to the exact gradient of its forward, causal, relative L2:"
        f" {_shown(added)}",
    ]
    figures |= {f"added.{name}": value for name, value in added.items()}
    return _property("gradient", not bad, finding, figures, details)


def _shown(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in figures.items())


def _packing(recipe: Recipe, sample: Sample) -> Property:
    others = samples.wide(_KEYS, *sample.q.shape[1:2], *sample.k.shape[1:])
    sink = np.resize(gradient_cases.SINK, sample.q.shape[1]).astype(np.float32)
    everything = {"causal": False, "window": gradient_cases.BOTH, "alignment": "top_left"}
    details, count = [], 0
    for name, other, attended in (
        ("causal", None, {"causal": True}),
        ("full", None, {"causal": False}),
        (
            "with other keys",
            others,
            everything | {"softcap": gradient_cases.SOFTCAP, "sink": sink},
        ),
    ):
        changes = invariance.packing(recipe, sample, other=other, **attended)
        count += len(changes)
        details += [f"{name}: {change}" for change in changes[:1]]
    *some, last = map(str, _LENGTHS)
    documents = (
        f"documents of {', '.join(some)} and {last} tokens, in two orders, causal, full, and with other keys, a"
        " window, a soft cap and a sink"
    )
    results = "out, lse, dq, dk and dv" if recipe.has_backward else "out and lse"
    finding = f"{documents}: {results} are " + (
        "not those of each alone" if count else "those of each alone"
    )
    return _property("packing", not count, finding, {"changes": count}, details)


def _prefix(recipe: Recipe, bell: Sample, wide: Sample) -> Property:
    details: list[str] = []
    figures: dict[str, float] = {}
    for sample, lengths in (
        (bell.taken((0,)), _PREFIXES),
        (wide.taken((0,)), _PREFIXES),
        (samples.public_witness(), (_WITNESS_PREFIX,)),
        (samples.key_witness(), (_WITNESS_PREFIX,)),
    ):
        found = invariance.prefix(recipe, sample, lengths)
        bad = {length: changes for length, changes in found.items() if changes}
        figures[f"{sample.name}.prefixes"] = len(found)
        figures[f"{sample.name}.changed"] = len(bad)
        shown = ", ".join(map(str, lengths))
        line = f"{sample.name}: the first {shown} of {len(sample.q)} tokens; "
        if bad:
            length, changes = next(iter(bad.items()))
            line += f"those of {', '.join(map(str, bad))} change. Of {length}, {changes[0]}"
        else:
            line += "none change" if len(found) > 1 else "no change"
        details.append(line)
    changed, tried = (
        sum(int(value) for name, value in figures.items() if name.endswith(end))
        for end in (".changed", ".prefixes")
    )
    finding = f"{changed} of {tried} prefixes change with the tokens after them"
    return _property("prefix", not changed, finding, figures, details)


def _field(use: Use) -> str:
    return use.split(".")[0]


def _product(use: Use) -> str:
    """A product as people write it."""
    name = _field(use)
    return f"d{name[1:].upper()}" if name.startswith("d") else name.upper()
