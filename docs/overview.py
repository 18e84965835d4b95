"""Write docs/overview.md: all recipes in one table, by property, error and cost, and which of them to use.

Run from the root of the checkout, seconds: python docs/overview.py
What takes long is read from the pages and results that are there (docs/recipes.md, docs/errors.md, docs/capacity.md,
and docs/evidence/quality-*.json); what is not there is a dash. No figure and no verdict is written by hand.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from flamia_ref.attention import RECIPES, Recipe, bytes_kept, safeguards  # noqa: E402
from flamia_ref.evidence import Evidence  # noqa: E402
from flamia_ref.formats import PRESETS  # noqa: E402
from flamia_ref.leakage import structure  # noqa: E402
from flamia_ref.leakage.legal import Severity  # noqa: E402

DOCS = ROOT / "docs"
DATA = ROOT / "tests" / "oracles" / "smollm2" / "layer14-group0.npz"
"""What docs/errors.py measures errors on."""
FILE = DOCS / "overview.md"
QUALITY = ("quality-h200.json", "quality-cpu.json")
"""The results of a real model; of those that are there the first that has a recipe counts."""

LENGTHS = (40, 24)
"""Two documents that the structure is looked at for, as in docs/leakage.md."""
TOKENS, CHANNELS = 8192, 128
"""A document for which bytes and work are counted."""

FORWARD, BOTH = ("s", "o"), ("s", "o", "dp", "dv", "dq", "dk")

NONE = "-"
DECIDED = ("C1", "C2", "C4", "gradient")
INVARIANT = ("packing", "prefix")
BITS = ("forward, bits a row at most", "backward, bits a row at most")
BROKEN = "**broken**"

HEAD = """# Which recipe

Made by `python docs/overview.py` from the recipes and from what the other pages measured. A dash: not measured yet,
or there is nothing to measure.

"""

COLUMNS = f"""
- *passes*: whether the recipe has a backward. A recipe has one only where one is public, or is ours.
- *S*, *PV*, *gradients*: elements that the products take, the scores, P times V, and the four products of the backward.
- *weakest evidence*: all that the recipe as a whole may claim, and how many of its steps claim no more
  ([evidence](evidence.md)).
- *consistent*: whether the backward is that of the forward: C1, C2, C4 and the gradient of [recipes.md](recipes.md),
  those that are broken by name. *C3*: how far the backward's own rounding of P moves dV; *C5*: row sums of dS, which
  should be 0. Both are relative.
- *packing*, *prefix*: packed documents, and the first tokens alone, give the same bits.
- *leaks*: what the [structure](leakage.md) makes illegal, by severity; *no* holds for every input.
- *bits a row at most*: how much of what a row must not see it can receive, forward and backward; *no bound*: nothing is
  known ([capacity.md](capacity.md)).
- *bytes of q, k, v*: what the backward reads of them, a token and head of {CHANNELS} channels; after the plus sign,
  bfloat16 values that guarded blocks read besides. [safeguards.md](safeguards.md) counts out and lse too, and has 64
  channels.
- *bf16 at {TOKENS}*: share of multiply-accumulates that leaves low precision, both passes, one causal document of
  {TOKENS} tokens. *bf16 of errors*: the same of the forward, and of both passes, in the documents that errors are
  measured on ({{errors}} tokens). *bf16 of loss*: of the forward, in those of the loss ({{loss}} tokens). Guarded
  blocks are those on the diagonal, so that such a recipe has more of them in short documents.
- *error of O*, *of dQ*: relative to float64, on a layer of a real model ([errors.md](errors.md)).
- *loss*: of a real model, less that with float32 attention, in nats, with its interval ([quality.md](quality.md)).
"""


# What the other pages hold.


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page of Markdown, as rows of cells; the line under the head is left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif not line.startswith("|--") and found[-1]:
            found.append([])
    return [table for table in found if table]


def read(page: str, *columns: str, docs: Path = DOCS) -> dict[str, dict[str, str]]:
    """The rows of the first table of a page that is of recipes and has these columns, by recipe. Empty without one."""
    file = docs / page
    for head, *rows in tables(file.read_text(encoding="utf-8")) if file.is_file() else ():
        if head[0] == "recipe" and set(columns) <= set(head):
            return {cells[0].strip("`"): dict(zip(head, cells, strict=False)) for cells in rows}
    return {}


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a real model lost by a recipe: the device, tokens of a document, the difference from float32 attention."""

    device: str
    length: int
    difference: Mapping[str, float]


def error_lengths() -> tuple[int, ...]:
    """Tokens of each document that errors are measured on."""
    with np.load(DATA) as stored:
        return tuple(int(length) for length in np.diff(stored["cu_seqlens"]))


def qualities(docs: Path = DOCS) -> dict[str, Loss]:
    """The losses by recipe."""
    found: dict[str, Loss] = {}
    for name in QUALITY:
        file = docs / "evidence" / name
        data = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        section = data.get("perplexity", {})
        for recipe, one in section.get("attentions", {}).items():
            if "difference" in one:
                length = section["documents"]["length"]
                loss = Loss(device=data["device"], length=length, difference=one["difference"])
                found.setdefault(recipe, loss)
    return found


# One recipe.


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a recipe; None, or a dash, where nothing is."""

    recipe: Recipe
    leaks: tuple[str, ...]
    properties: Mapping[str, str]
    numbers: Mapping[str, str]
    errors: Mapping[str, str]
    bits: Mapping[str, str]
    loss: Loss | None

    @property
    def name(self) -> str:
        """The name as it stands in a text."""
        return f"`{self.recipe.name}`"

    @property
    def quantizes(self) -> bool:
        """Whether a product takes fewer bits than bfloat16 has."""
        return {"bf16"} != {
            element for name in ("s", "o") for element in elements(self.recipe, (name,))
        }

    @property
    def broken(self) -> list[str]:
        """The properties of consistency that were looked at and are broken."""
        return [name for name in DECIDED if self.properties.get(name) == BROKEN]

    @property
    def known(self) -> bool:
        """Whether its consistency was looked at."""
        return all(self.properties.get(name, NONE) != NONE for name in DECIDED)

    @property
    def sound(self) -> bool:
        """Fit for training, by what is known: a backward that is the forward's, nothing illegal, nothing that moves."""
        moves = any(self.properties.get(name) == BROKEN for name in INVARIANT)
        return (
            self.recipe.has_backward
            and self.known
            and not self.broken
            and not self.leaks
            and not moves
        )

    @property
    def bytes(self) -> tuple[float, float] | None:
        """Bytes kept of q, k and v for a token and head, and what guards read besides; None without a backward."""
        if not self.recipe.has_backward:
            return None
        kept = bytes_kept(self.recipe, lengths=[TOKENS], head_dim=CHANNELS)
        guards = sum(size for tensor, size in kept.guards.items() if tensor != "do")
        return kept.kept / TOKENS, guards / TOKENS

    @property
    def all_bytes(self) -> float:
        """Both together; infinite without a backward."""
        return sum(self.bytes or [float("inf")])

    def error(self, result: str) -> float | None:
        """The relative error of a result, None where there is none."""
        text = self.errors.get(result, NONE)
        return None if text == NONE else float(text.split()[0])


def elements(recipe: Recipe, products: Iterable[str]) -> list[str]:
    """The element formats that some products take, each once."""
    taken = (operand for use, operand in recipe.uses() if use.split(".")[0] in products)
    names: dict[str, None] = {}
    for operand in taken:
        names[
            PRESETS[operand.format].element.name if operand.format in PRESETS else operand.format
        ] = None
    return list(names)


def leaks(recipe: Recipe) -> tuple[str, ...]:
    """The severities of what a recipe's structure makes illegal."""
    found = structure(recipe, lengths=LENGTHS)
    if found.legal:
        return ()
    kinds = {kind for one in found.illegal for kind, count in one.counts.items() if count}
    return tuple(str(kind).replace("_", " ") for kind in Severity if kind in kinds) or ("yes",)


def rows(recipes: Mapping[str, Recipe] = RECIPES, docs: Path = DOCS) -> list[Row]:
    """All recipes with what is known of them."""
    properties = read("recipes.md", *DECIDED, docs=docs)
    numbers = read("recipes.md", "C3: dV", "C5: rms", docs=docs)
    errors = read("errors.md", "O", "dQ", docs=docs)
    bits = read("capacity.md", *BITS, docs=docs)
    losses = qualities(docs)
    return [
        Row(
            recipe=recipe,
            leaks=leaks(recipe),
            properties=properties.get(name, {}),
            numbers=numbers.get(name, {}),
            errors=errors.get(name, {}),
            bits=bits.get(name, {}),
            loss=losses.get(name),
        )
        for name, recipe in recipes.items()
    ]


# The table.


def line(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def weakest(recipe: Recipe) -> str:
    """The weakest label, and how many steps have no better one."""
    labels = [step.evidence for step in recipe.steps.values()]
    return f"{recipe.label}, {labels.count(recipe.label)} of {len(labels)} steps"


def consistent(row: Row) -> str:
    """The cell of consistency."""
    if not row.recipe.has_backward or not row.known:
        return NONE
    partly = [name for name in DECIDED if row.properties[name] not in ("holds", BROKEN)]
    broken = [f"**not {name}**" for name in row.broken]
    return ", ".join([*broken, *(f"{name} {row.properties[name]}" for name in partly)]) or "yes"


def work(recipe: Recipe, lengths: Sequence[int], products: Iterable[str] = BOTH) -> str:
    """The share of multiply-accumulates in high precision, of products of equal size that the recipe has."""
    found = [
        one.high_precision
        for one in safeguards(recipe, lengths=lengths)
        if one.use.split(".")[0] in products
    ]
    share = 100 * float(sum(found) / len(found))
    return f"{share:.0f}%" if share == 0 or share >= 10 else f"{share:.2g}%"


def of_errors(recipe: Recipe) -> str:
    """The cell of the work in high precision where errors are measured: of the forward, of both passes."""
    parts = (FORWARD, BOTH) if recipe.has_backward else (FORWARD,)
    found = dict.fromkeys(work(recipe, error_lengths(), products) for products in parts)
    return ", ".join(found)


def bits(row: Row) -> str:
    """The cell of the bits that get through to a row at most."""
    forward, backward = (row.bits.get(name, NONE) for name in BITS)
    if not row.recipe.has_backward or forward == backward:
        return forward
    return f"forward {forward}, backward {backward}"


def between(one: Mapping[str, float]) -> str:
    """A difference of the loss with its interval."""
    return f"{one['mean']:+.4f} [{one['low']:+.4f}, {one['high']:+.4f}]"


def table(found: Sequence[Row]) -> str:
    """The table of all recipes."""
    head = [
        "recipe",
        "passes",
        "S",
        "PV",
        "gradients",
        "weakest evidence",
        "consistent",
        "C3",
        "C5",
    ]
    head += [
        *INVARIANT,
        "leaks",
        "bits a row at most",
        "bytes of q, k, v",
        f"bf16 at {TOKENS}",
        "bf16 of errors",
    ]
    head += ["error of O", "of dQ", "bf16 of loss", "loss"]
    text = line(head) + "|" + "---|" * len(head) + "\n"
    for row in found:
        recipe, size = row.recipe, row.bytes
        gradients = elements(recipe, ("dp", "dv", "dq", "dk"))
        text += line(
            [
                row.name,
                "both" if recipe.has_backward else "forward",
                *(", ".join(elements(recipe, (name,))) for name in ("s", "o")),
                ", ".join(gradients) or NONE,
                weakest(recipe),
                consistent(row),
                row.numbers.get("C3: dV", NONE),
                row.numbers.get("C5: rms", NONE),
                *(row.properties.get(name, NONE) for name in INVARIANT),
                f"**{', '.join(row.leaks)}**" if row.leaks else "no",
                bits(row),
                NONE
                if size is None
                else f"{size[0]:.4g}" + (f" + {size[1]:.4g}" if size[1] else ""),
                work(recipe, [TOKENS]),
                of_errors(recipe),
                row.errors.get("O", NONE),
                row.errors.get("dQ", NONE),
                NONE if row.loss is None else work(recipe, [row.loss.length], FORWARD),
                NONE if row.loss is None else between(row.loss.difference),
            ]
        )
    return text


# The advice.


def listed(words: Iterable[str]) -> str:
    """Words in a row of a sentence."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def training(found: Sequence[Row], base: Row | None) -> str:
    """What to train with."""
    sound = [row for row in found if row.sound]
    low = [row for row in sound if row.quantizes]
    text = f"**To train with**: of {len(found)} recipes {len(sound)} leak nothing and have a backward that is the"
    text += f" forward's: {listed(row.name for row in sound) or 'none'}."
    measured = [row for row in low if row.error("O") is not None]
    if measured:
        best = min(measured, key=lambda row: row.error("O"))
        small = min(measured, key=lambda row: (row.all_bytes, row.error("O")))
        text += f" Among those in low precision the least error of O is that of {best.name}, {told(best, base)}."
        if small is not best:
            text += f" The fewest bytes are kept by {small.name}, {told(small, base)}."
    missing = [row.name for row in found if row.recipe.has_backward and not row.known]
    if missing:
        text += (
            f" Not judged here, since their consistency was not measured yet: {listed(missing)}."
        )
    return text


def told(row: Row, base: Row | None) -> str:
    """What a recipe costs, in words."""
    error, gradient = row.error("O"), row.error("dQ")
    guarded = row.bytes is not None and bool(row.bytes[1])
    parts = [f"error of O {error:.2g}" if error is not None else ""]
    parts += [f"of dQ {gradient:.2g}" if gradient is not None else ""]
    if guarded and (error is not None or gradient is not None):
        here, both = (work(row.recipe, error_lengths(), x) for x in (FORWARD, BOTH))
        parts.append(f"both with {here} of the forward's work and {both} of all in bfloat16")
    if row.loss is not None:
        here = work(row.recipe, [row.loss.length], FORWARD)
        there = f" with {here} of the forward's work in bfloat16" if guarded else ""
        parts.append(f"loss {between(row.loss.difference)}{there}")
    if guarded:
        there = work(row.recipe, [TOKENS])
        parts.append(
            f"at {TOKENS} tokens only {there} of all work, and error and loss were not measured there"
        )
    if row.bytes is not None:
        share = (
            f" ({row.all_bytes / base.all_bytes:.2f} of {base.name})"
            if base and base is not row
            else ""
        )
        parts.append(f"{row.all_bytes:.4g} bytes{share}")
    return ", ".join(part for part in parts if part)


def use(row: Row) -> str:
    """What a recipe is for, by what is known of it."""
    moves = [name for name in INVARIANT if row.properties.get(name) == BROKEN]
    if row.leaks:
        return f"**not where leaks matter** (it leaks: {', '.join(row.leaks)})"
    if not row.recipe.has_backward:
        return "**forward alone**"
    if row.broken or moves:
        return f"**with care**, broken: {listed([*row.broken, *moves])}"
    if not row.known:
        return "**not judged**, its consistency was not measured"
    return "**to train with**" + ("" if row.quantizes else ", as the base line")


def firm(recipe: Recipe) -> float:
    """The share of a recipe's steps that are specified, measured, read or derived."""
    labels = (Evidence.SPECIFIED, Evidence.MEASURED, Evidence.SOURCE, Evidence.DERIVED)
    return sum(step.evidence in labels for step in recipe.steps.values()) / len(recipe.steps)


def each(found: Sequence[Row], base: Row | None) -> str:
    """A line a recipe: what for, what it costs, how sure."""
    lines = []
    for row in sorted(found, key=lambda row: (bool(row.leaks), not row.sound, row.name)):
        cost = told(row, base)
        text = f"- {row.name}: {use(row)}. {cost[:1].upper()}{cost[1:]}{'.' if cost else ''}"
        text += f" {firm(row.recipe):.0%} of its steps are firm."
        lines.append(wrapped(" ".join(text.split()), indent="  "))
    return "\n".join(lines)


def leaking(found: Sequence[Row]) -> str:
    """What not to train with."""
    bad = [row for row in found if row.leaks]
    if not bad:
        return "**What leaks**: none of them."
    named = "; ".join(f"{row.name} ({', '.join(row.leaks)})" for row in bad)
    return (
        f"**What leaks**: {named}. Their outputs or gradients can depend on tokens that the mask forbids. The error and"
        " the loss of such a recipe say nothing against it: a loss may be lower because the answer leaked."
        " How many bits get through: [capacity.md](capacity.md)."
    )


def inference(found: Sequence[Row]) -> str:
    """What is a forward alone."""
    some = [row for row in found if not row.recipe.has_backward]
    if not some:
        return ""
    good = [row for row in some if not row.leaks]
    good = sorted(
        good, key=lambda row: row.error("O") if row.error("O") is not None else float("inf")
    )
    text = f"**Forward alone**: {listed(row.name for row in some)}."
    if good:
        with_errors = "; ".join(
            f"{row.name}, {told(row, None)}" if told(row, None) else row.name for row in good
        )
        text += f" Of these, leaking nothing: {with_errors}."
    else:
        text += " All of these leak by structure, across the tokens that share a scale."
    return text


def losses(found: Sequence[Row]) -> str:
    """What a real model says."""
    some = sorted((row for row in found if row.loss), key=lambda row: row.loss.difference["mean"])
    if not some:
        return ""
    devices = listed(dict.fromkeys(row.loss.device for row in some))
    apart = [
        row for row in some if not row.loss.difference["low"] <= 0 <= row.loss.difference["high"]
    ]
    same = listed(row.name for row in some if row not in apart) or "none"
    text = f"**A real model** ({devices}), {len(some)} recipes: not told from float32 attention by this text, since the"
    text += f" interval of the loss holds 0: {same}."
    if apart:
        most = apart[-1] if apart[-1].loss.difference["mean"] > 0 else apart[0]
        text += f" Furthest from it is {most.name}, {between(most.loss.difference)} nats."
    return text


def sure(found: Sequence[Row]) -> str:
    """How far all of this can be trusted."""
    labels = [row.recipe.label for row in found]
    each = listed(f"{labels.count(label)} {label}" for label in Evidence if label in labels)
    shares = {row.name: firm(row.recipe) for row in found}
    best, worst = max(shares, key=shares.get), min(shares, key=shares.get)
    return (
        f"**How sure**: by its weakest step every recipe has one label: {each}. By steps, what is firm (specified,"
        f" measured, read or derived) is from {shares[worst]:.0%} ({worst}) to {shares[best]:.0%} ({best}). Leaks and"
        " consistency follow from a recipe's data and are proved or checked bit for bit; errors and losses are those of"
        " the simulator, on one layer and one small model. No recipe was run on a Blackwell GPU: what a device would"
        " refute is in [evidence.md](evidence.md)."
    )


def page(found: Sequence[Row]) -> str:
    """The whole page."""
    base = next((row for row in found if not row.quantizes and row.recipe.has_backward), None)
    parts = (training(found, base), leaking(found), inference(found), losses(found), sure(found))
    advice = "\n\n".join(wrapped(part) for part in parts if part)
    advice += f"\n\n### Recipe by recipe\n\n{each(found, base)}"
    errors = listed(str(length) for length in error_lengths())
    lengths = dict.fromkeys(str(row.loss.length) for row in found if row.loss is not None)
    columns = COLUMNS.format(errors=errors, loss=listed(lengths) if lengths else "no")
    text = f"{HEAD}## Which to use, what it costs, how sure we are\n\n{advice}\n\n"
    return f"{text}## All recipes\n\n{table(found)}{columns}"


def wrapped(text: str, width: int = 120, indent: str = "") -> str:
    """A paragraph in lines, all but the first indented. Words keep together what is in back quotes."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(indent + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(page(rows()), encoding="utf-8")
