"""Write docs/recipes.md: the recipes side by side, which consistency properties each has, and what they cost.

Run from the root of the checkout, two minutes: python docs/tables.py
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES, Recipe, bytes_kept, safeguards  # noqa: E402
from flamia_ref.attention import consistency as checks  # noqa: E402
from flamia_ref.attention.description import form  # noqa: E402
from flamia_ref.attention.findings import TITLES, Consistency, Verdict  # noqa: E402
from flamia_ref.attention.product import Guard, Operand, Scope, Use  # noqa: E402

FILE = ROOT / "docs" / "recipes.md"

VERDICTS = {
    Verdict.HOLDS: "holds",
    Verdict.HOLDS_OUTSIDE_GUARDED_BLOCKS: "outside guarded blocks",
    Verdict.BROKEN: "**broken**",
    Verdict.NO_BACKWARD: "-",
}
SAMPLES = ("bell", "wide", "public witness", "key witness")
DECIDED = ("C1", "C2", "C4", "gradient", "packing", "prefix")

HEAD = """# Recipes

Made by `python docs/tables.py`. A recipe is data: `flamia-ref recipes show NAME` prints it, its steps are numbered in
the docstring of its module in `flamia_ref/attention/recipes/`.

## Properties

`flamia-ref recipes check NAME` measures these and says what it found, also of a recipe in a JSON file. The inputs are
fixed: bell-shaped values and values of wide exponents, bfloat16, in packed documents of 150, 1 and 45 tokens, 2 query
heads, 1 key/value head, head_dim 64; where keys are other tokens than queries, 45, 0 and 150 of them.

| name | property |
|---|---|
"""

EXPLANATION = """
- C2 looks at every element of q, k, v and dO as its two products take it. Where scales are powers of two, two blocks
  give an element one value, unless it is so small in one of them that e4m3 loses bits: that is rare in bell-shaped
  values. An element in FP4 with a UE4M3 scale has up to 6 significant bits, and e4m3 holds 4.
- The gradient test evaluates the backward that the recipe's data describe in float64, quantizers and roundings the
  identity, and compares it with the exact gradient of the forward: causal and full, with windows, with other keys than
  queries in both alignments, with a soft cap and with a sink. 1e-12 of the largest element is allowed. The passes that
  compute bits are held to an implementation of their own, in `tests/independent/`.
- Packing is tried causal, full, and with other keys, a window, a soft cap and a sink.
- The evidence of a recipe is the weakest of its steps; that of each step is in the recipe.

Prefixes that change with the tokens after them, causal. Bell-shaped values hide what the public witness of MXFP8's leak
shows (NVIDIA/TransformerEngine issue 3248).

"""

NUMBERS = """
## Numbers

On the bell-shaped values, causal.

- C3: visible pairs whose P is rounded otherwise in dV than in O, and how far that alone moves dV (relative L2).
- C5: row sums of dS relative to its magnitudes: of all rows together, and the root mean square over rows. The exact dS
  has row sums of zero.
- Last, what the backward's quantizers and roundings add: dq, dk and dv against the exact gradient of the recipe's
  forward, straight through its quantizers (relative L2).

| recipe | C3: pairs | C3: dV | C5: all | C5: rms | dq | dk | dv |
|---|---|---|---|---|---|---|---|
"""

USES = """
## What each product takes

Format, rows x columns of the block that shares a scale, and where the scale goes. *same as* another use: the codes are
those, nothing is quantized twice. *folded*: the other operand of the product takes the scale in before it is quantized.
*guarded*: blocks of 32 queries by 32 keys with a visible and a masked pair run in bfloat16, both operands. *promoted
from* another use: the values of its codes, in another element and with another scale.
"""

KEPT_TOKENS, KEPT_CHANNELS = 8192, 128
BYTES = f"""
## Bytes kept for the backward

Codes and scales of q, k and v that the backward reads, in bytes for one token and one head of each, with
head_dim {KEPT_CHANNELS}: each copy once and without padding, FP4 two codes a byte. cuDNN's kernels read two copies of q
and two of k, and in the backward one of the two that they make of v. Recipes without a backward keep nothing. A
promoted copy follows from the one that it is promoted from and need not be kept. dO's copies are made in the backward.

*Guards*: the bfloat16 values of q, k and v that guarded blocks read besides. *Of cuDNN's*: both sums, relative to that
of `cudnn-mxfp8`. *Laid out*: kept codes and scales in the orientations that kernels load, each document filled up to
128 rows, here one of {KEPT_TOKENS} tokens. Every recipe keeps out and lse besides. `attention.bytes_kept` counts other
shapes.

"""

EVERYTHING = """
## Everything else

Schedules are other orders of work that are the same path: `recipe.scheduled(NAME)` has the bits of one.

"""
ALIKE = """
The same in all of them that have it, *-* where there is none:

"""

COST_LENGTHS = (200, 2048, 8192, 32768)
COST = """
## Cost of safeguards

What keeps each use from a scale that its outputs may not depend on. *none*: tokens that may not know of each other
share one. *per token*: the scale is of one token, over channels. *zero-fill by select*: masked pairs are 0 before the
scale is taken, and a block holds pairs of one query or of one key.

"""
SHARES = """
The share of all multiply-accumulates, six products together or the two of a forward alone, that leaves low precision:
causal, one document of so many tokens, of the blocks of 32 queries by 32 keys with a visible pair. *Extra operands*:
inputs that are read in bfloat16 besides their codes. `attention.safeguards` counts other documents and masks.

"""


def properties_row(report: Consistency) -> str:
    """The row of one recipe in the table of properties."""
    cells = [VERDICTS[report[name].verdict] for name in DECIDED]
    return row([f"`{report.recipe}`", *cells, str(report.evidence)])


def prefix_row(report: Consistency) -> str:
    """The row of one recipe in the table of prefixes."""
    figures = report["prefix"].figures
    cells = (f"{figures[f'{name}.changed']} of {figures[f'{name}.prefixes']}" for name in SAMPLES)
    return row([f"`{report.recipe}`", *cells])


def numbers_row(report: Consistency) -> str:
    """The row of one recipe in the table of numbers."""
    c3, c5, added = (report[name].figures for name in ("C3", "C5", "gradient"))
    numbers = [
        c3["relative"],
        c5["together"],
        c5["root_mean_square"],
        *(added[f"added.{name}"] for name in ("dq", "dk", "dv")),
    ]
    share = f"{100 * c3['differing'] / c3['pairs']:.2g}%"
    return row([f"`{report.recipe}`", share, *(f"{number:.2g}" for number in numbers)])


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def head(cells: Iterable[str]) -> str:
    """The first two lines of a table."""
    cells = list(cells)
    return row(cells) + "|" + "---|" * len(cells) + "\n"


def use_cell(recipe: Recipe, use: Use) -> str:
    """What one use takes, in words."""
    if not recipe.has_use(use):
        return "-"
    operand = recipe.operand(use)
    words = [form(operand)]
    if operand.same_codes_as is not None:
        words = [f"same as {operand.same_codes_as}"]
    if operand.promoted_from is not None:
        words.append(f"promoted from {operand.promoted_from}")
    if operand.scope is Scope.PREVIOUS_BLOCK:
        words.append("scale of the block before")
    if operand.scope is Scope.STATIC:
        words.append(f"scale 2^{operand.static_scale - 127}")
    if operand.scope is Scope.LARGEST_SCORE:
        words.append("scale of the largest score")
    if operand.dequantized:
        words.append("values in bf16")
    if operand.smoothing != "none":
        words.append(f"less the {operand.smoothing.replace('_', ' ')}")
    if operand.scale_folded_into is not None:
        words.append("folded")
    if operand.guard is not Guard.NONE:
        words.append("guarded")
    return ", ".join(words)


def knob_rows(recipes: Mapping[str, Recipe]) -> Iterable[str]:
    """A row for each knob outside the operands, with the values of all recipes."""

    def leaves(value: object, path: str) -> Iterable[tuple[str, object]]:
        if isinstance(value, Operand):
            return
        if dataclasses.is_dataclass(value) and path != "softmax.emulated":
            for field in dataclasses.fields(value):
                yield from leaves(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
        else:
            yield path, value

    def shown(value: object) -> str:
        if dataclasses.is_dataclass(value):
            value = ", ".join(f"{key} {part}" for key, part in dataclasses.asdict(value).items())
        return "-" if value is None else str(value)

    parts = ("softmax", "gradient", "tiles", "s", "o", "dp", "dv", "dq", "dk")
    alike = []
    yield head(["part", *(f"`{name}`" for name in recipes)])
    for part in parts:
        columns = [dict(leaves(getattr(recipe, part), part)) for recipe in recipes.values()]
        for path in next(column for column in columns if part not in column):
            values = [shown(column.get(path)) for column in columns]  # "-" without a backward
            there = [value for column, value in zip(columns, values, strict=True) if path in column]
            if len(set(there)) > 1:
                yield row([f"`{path}`", *values])
            else:
                alike.append((path, there[0]))
    schedules = (", ".join(one.name for one in recipe.schedules) for recipe in recipes.values())
    yield row(["`schedules`", *(names or "-" for names in schedules)])
    yield ALIKE + head(["part", "all recipes"])
    yield from (row([f"`{path}`", value]) for path, value in alike)


def bytes_rows(recipes: Mapping[str, Recipe]) -> Iterable[str]:
    """A row for each recipe that has a backward with the bytes of what that reads."""
    tensors = ("q", "k", "v", "do")
    shape = {"lengths": [KEPT_TOKENS], "head_dim": KEPT_CHANNELS}
    kept = {
        name: bytes_kept(recipe, **shape) for name, recipe in recipes.items() if recipe.has_backward
    }

    def guards(name: str) -> int:
        return sum(size for tensor, size in kept[name].guards.items() if tensor != "do")

    yield head(["recipe", "q", "k", "v", "dO", "q, k, v", "guards", "of cuDNN's", "laid out"])
    for name, found in kept.items():
        numbers = [
            *(found.per_token_and_head(tensor) for tensor in tensors),
            found.kept / KEPT_TOKENS,
            guards(name) / KEPT_TOKENS,
        ]
        ratio = (found.kept + guards(name)) / kept["cudnn-mxfp8"].kept
        cells = [*(f"{number:g}" for number in numbers), f"{ratio:.2f}"]
        yield row([f"`{name}`", *cells, f"{found.kept_padded / KEPT_TOKENS:g}"])


def safeguard_rows(recipes: Mapping[str, Recipe]) -> Iterable[str]:
    """A row for each use with the safeguards of all recipes."""
    columns = [
        {one.use: str(one.safeguard) for one in safeguards(recipe, lengths=[1])}
        for recipe in recipes.values()
    ]
    yield head(["use", *(f"`{name}`" for name in recipes)])
    for use in Use:
        yield row([f"`{use}`", *(column.get(use, "-") for column in columns)])


def cost_rows(recipes: Mapping[str, Recipe]) -> Iterable[str]:
    """A row for each recipe with what its safeguards read and compute besides."""
    yield head(["recipe", "extra operands", *(f"{length} tokens" for length in COST_LENGTHS)])
    for name, recipe in recipes.items():
        found = [safeguards(recipe, lengths=[length]) for length in COST_LENGTHS]
        extra = dict.fromkeys(tensor for one in found[0] for tensor in one.extra_operands)
        shown = ", ".join("dO" if tensor == "do" else tensor for tensor in extra) or "-"
        shares = (sum(one.high_precision for one in uses) / len(uses) for uses in found)
        yield row([f"`{name}`", shown, *(f"{100 * float(share):.3g}%" for share in shares)])


def data_sections(recipes: Mapping[str, Recipe]) -> str:
    """What is read from the recipes alone."""
    names = [f"`{name}`" for name in recipes]
    lines = [USES, "\n", head(["use", *names])]
    for use in Use:
        cells = (use_cell(recipe, use) for recipe in recipes.values())
        lines.append(row([f"`{use}`", *cells]))
    lines += [BYTES, *bytes_rows(recipes), COST, *safeguard_rows(recipes)]
    lines += [SHARES, *cost_rows(recipes)]
    lines += [EVERYTHING, *knob_rows(recipes)]
    return "".join(lines)


def page(reports: Mapping[str, Consistency], recipes: Mapping[str, Recipe] = RECIPES) -> str:
    """The whole page."""
    titles = "".join(row([f"**{name}**", title]) for name, title in TITLES.items())
    return "".join(
        (
            HEAD,
            titles,
            "\n",
            head(["recipe", *DECIDED, "evidence"]),
            *(properties_row(report) for report in reports.values()),
            EXPLANATION,
            head(["recipe", *SAMPLES]),
            *(prefix_row(report) for report in reports.values()),
            NUMBERS,
            *(
                numbers_row(report)
                for name, report in reports.items()
                if recipes[name].has_backward
            ),
            data_sections(recipes),
        )
    )


if __name__ == "__main__":
    FILE.write_text(page({name: checks.check(name) for name in RECIPES}), encoding="utf-8")
