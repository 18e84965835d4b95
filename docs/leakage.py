"""Write what is computed in docs/leakage.md: uses, recipes by the three methods, kernels, and what code prints.

Run from the root of the checkout, two minutes on two cores: python docs/leakage.py
"""

import contextlib
import functools
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES, Operand, Recipe, Use  # noqa: E402
from flamia_ref.leakage import Certificate, HuntReport, Structure, hunt, prove, structure  # noqa: E402
from flamia_ref.leakage.legal import Severity  # noqa: E402
from flamia_ref.leakage.sharing.text import operand_in_matmul, reached, where  # noqa: E402

PAGE = ROOT / "docs" / "leakage.md"
EVIDENCE = ROOT / "docs" / "evidence"
END = "<!-- end -->\n"

LENGTHS, HEAD_DIM, CALLS = (40, 24), 32, 300
"""What the recipes are looked at with: two documents, the second of which begins inside a block of 32 of the pack."""

BLOCKS = {"1 x 32": (1, 32), "32 x 1": (32, 1), "32 x 32": (32, 32)}
"""Rows and columns that share a scale: tokens and channels of q, k, v and dO; queries and keys of P and dS."""

LEFT = (Use.S_Q, Use.O_P, Use.DP_DO, Use.DV_P, Use.DQ_DS, Use.DK_DS)
"""The uses that are the left operand of their product."""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One recipe by the three methods."""

    structure: Structure
    certificate: Certificate
    hunt: HuntReport


@functools.cache
def looked_at(name: str) -> Looked:
    """The three methods on one recipe, with equal shapes; the hunt has no clock, so it finds the same every time."""
    recipe = RECIPES[name]
    return Looked(
        structure=structure(recipe, lengths=LENGTHS),
        certificate=prove(recipe, lengths=LENGTHS, head_dim=HEAD_DIM),
        hunt=hunt(recipe, lengths=LENGTHS, head_dim=HEAD_DIM, calls=CALLS),
    )


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def head(cells: Iterable[str]) -> str:
    """The first two lines of a table."""
    cells = list(cells)
    return row(cells) + "|" + "---|" * len(cells) + "\n"


# Uses.


def with_one_use(use: Use, block: tuple[int, int]) -> Recipe:
    """The bfloat16 recipe with one operand in MXFP8."""
    base = RECIPES["bf16-fa4"]
    product = str(use).partition(".")[0]
    side = {"left" if use in LEFT else "right": Operand(format="te-mx-e4m3", block=block)}
    return replace(base, name="one-use", **{product: replace(getattr(base, product), **side)})


def uses_table() -> str:
    """What each use makes illegal, by what shares its scale."""
    lines = [head(["operand in matmul", *BLOCKS])]
    for use in Use:
        cells = []
        for block in BLOCKS.values():
            found = structure(with_one_use(use, block), lengths=(64,))
            (one,) = (x for x in found.uses if x.use is use)
            text = f"**{where(one.illegal)}**: {reached(one.illegal)}" if one.illegal else "legal"
            cells.append(text)
        lines.append(row([operand_in_matmul(use), *cells]))
    return "".join(lines)


# Recipes.


def recipes_table(recipes: Mapping[str, Recipe] = RECIPES) -> str:
    """A row for each recipe."""
    return head(["recipe", "structure", "proof", "hunt", "uses that leak"]) + "".join(
        recipe_row(name) for name in recipes
    )


def recipe_row(name: str) -> str:
    """The row of one recipe, by all three methods."""
    found = looked_at(name)
    cells = [structure_cell(found.structure), proof_cell(found.certificate), hunt_cell(found.hunt)]
    return row([f"`{name}`", *cells, uses_cell(found.structure)])


def structure_cell(found: Structure) -> str:
    """How many pairs the structure makes illegal, and of which severity."""
    counts = dict.fromkeys(Severity, 0)
    for one in found.illegal:
        for kind, count in one.counts.items():
            counts[kind] += count
    return _pairs({kind: count for kind, count in counts.items() if count}) or "legal"


def proof_cell(found: Certificate) -> str:
    """The same by the proof."""
    if not found.legal:
        return _pairs(found.severities)
    return "proved, exactly" if found.exact else "proved"


def hunt_cell(found: HuntReport) -> str:
    """The verdict of the hunt, with the operands whose changes showed it."""
    if not found.leaks:
        return f"{found.verdict.replace('_', ' ')} in {found.cases}"
    parts = []
    for kind in Severity:
        of = dict.fromkeys(one.operand for one in found.witnesses if one.severity is kind)
        if of:
            parts.append(f"{_words(kind)} ({', '.join(map(_name, of))})")
    return f"**leak**: {', '.join(parts)}"


def uses_cell(found: Structure) -> str:
    """The uses that make something illegal alone."""
    names = [operand_in_matmul(one.use) for one in found.uses if one.illegal]
    return ", ".join([*names, *(f"`{knob.knob}`" for knob in found.knobs)]) or "-"


def _pairs(counts: Mapping[Any, int]) -> str:
    if not counts:
        return ""
    kinds = ", ".join(f"{counts[kind]} {_words(kind)}" for kind in Severity if kind in counts)
    return f"**{sum(counts.values())} pairs**: {kinds}"


def _words(kind: object) -> str:
    return str(kind).replace("_", " ")


def _name(operand: str) -> str:
    return "dO" if operand == "dout" else operand


# Kernels.


def kernels_section() -> str:
    """What was found in kernels, from the files that examples/leakage/run.py wrote."""
    files = sorted(EVIDENCE.glob("leakage-*.json"))
    return "\n".join(_run_of(json.loads(file.read_text(encoding="utf-8")), file) for file in files)


def _run_of(data: Mapping[str, Any], file: Path) -> str:
    names = ("torch", "triton", "jax", "numpy", "python")
    versions = [f"{name} {data['versions'][name]}" for name in names if name in data["versions"]]
    ran = [one for one in data["kernels"] if "hunt" in one]
    lines = [
        f"### {data['device']}, {data['date']}\n\n",
        f"`{data['command']}`; {', '.join(versions)}; all of it in [{file.name}](evidence/{file.name}).\n\n",
        head(["kernel", "runs on", "documents", "hunt", "compared by", "NaN, infinity", "proof"]),
        *(row(_cells(one)) for one in ran),
    ]
    leaking = [one for one in ran if one["hunt"]["leaks"]]
    if leaking:
        lines.append("\nThe first witness of each that leaks:\n\n")
    for one in leaking:
        lines.append(f"- `{one['kernel']}`, {_lengths(one)}: {_first(one['hunt'])}\n")
    failed = [one for one in data["kernels"] if "failed" in one]
    if failed:
        lines.append("\nFailed:\n\n")
    lines += [f"- `{one['kernel']}`, {_lengths(one)}: {one['failed']}\n" for one in failed]
    missing = [
        f"`{one['kernel']}` ({one['missing']})" for one in data["kernels"] if "missing" in one
    ]
    if missing:
        lines.append(f"\nNot run there: {', '.join(missing)}.\n")
    return "".join(lines)


def _cells(one: Mapping[str, Any]) -> Iterator[str]:
    found = one["hunt"]
    yield f"`{one['kernel']}`"
    yield one["device"]
    yield _lengths(one)
    seen = {witness["severity"] for witness in found["witnesses"]}
    kinds = [_words(kind) for kind in Severity if kind in seen]
    verdict = _words(found["verdict"])
    if found["leaks"]:
        yield f"**leak**: {', '.join(kinds)}"
    else:
        yield f"{verdict} in {found['cases']} perturbations"
    tests: dict[str, list[str]] = {}
    for output, test in found["tests"].items():
        tests.setdefault(test, []).append(output)
    every = len(tests) == 1
    yield "; ".join(x if every else f"{x} ({', '.join(of)})" for x, of in tests.items())
    yield (
        f"reach {len(found['poison'])} of {found['poison_tried']}" if found["poison_tried"] else "-"
    )
    yield _proof(one["proof"]["finite"]) if "proof" in one else "-"


def _proof(found: Mapping[str, Any]) -> str:
    if found["severities"]:
        return _pairs({Severity(kind): count for kind, count in found["severities"].items()})
    return _words(found["verdict"])


def _lengths(one: Mapping[str, Any]) -> str:
    return ", ".join(map(str, one["lengths"]))


def _first(found: Mapping[str, Any]) -> str:
    order = [str(kind) for kind in Severity]
    witness = min(found["witnesses"], key=lambda one: order.index(one["severity"]))
    return str(witness["sentence"])


# The page.

CODE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)
"""A piece of code, and below it what it prints."""


def printed(code: str) -> str:
    """What a piece of code of the page prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "docs/leakage.md", "exec"), {"__name__": "page"})
    return output.getvalue()


def with_outputs(text: str) -> str:
    """The page with what its code prints."""
    return CODE.sub(lambda m: f"```python\n{m[1]}```\n\n```text\n{printed(m[1])}```\n", text)


SECTIONS = {"uses": uses_table, "recipes": recipes_table, "kernels": kernels_section}


def with_section(text: str, name: str, content: str) -> str:
    """The page with another content of a section."""
    start = f"<!-- {name}, by docs/leakage.py -->\n"
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{PAGE.name} has no {start.strip()!r} with an {END.strip()!r} after it")
    return f"{before}{start}\n{content}\n{END}{after}"


def section(text: str, name: str) -> str:
    """The content of a section of the page."""
    return text.partition(f"<!-- {name}, by docs/leakage.py -->\n\n")[2].partition(f"\n{END}")[0]


def page(text: str) -> str:
    """The page, all of it made anew."""
    for name, content in SECTIONS.items():
        text = with_section(text, name, content())
    return with_outputs(text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
