"""Write docs/quality.md from the results in docs/evidence/quality-*.json.

Run from the root of the checkout: python docs/quality.py
The results are those of examples/smollm2; its README has the commands that make them anew.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES, safeguards  # noqa: E402

PAGE = ROOT / "docs" / "quality.md"
EVIDENCE = ROOT / "docs" / "evidence"
FILES = ("quality-h200.json", "quality-cpu.json")

REFERENCE = "float32"
BASE_LINES = ("transformers-eager", "transformers-sdpa")
INPUTS = ("dq", "dk", "dv", "dout")
WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp", "norms")
BOUND = 1e-3
"""How far float32 attention may be from transformers' own, in nats."""

HEAD = """# A real model

Made by `python docs/quality.py` from the results of [examples/smollm2](../examples/smollm2/README.md), which says what
is measured and how to repeat it. SmolLM2-135M-Instruct, everything but attention in float32, attention by a recipe:
forward for the loss, forward and backward for gradients.

Losses are means of -log p of the next token, in nats. Brackets: {level:.0%} intervals over documents, by resampling
whole documents. *From float32*: the difference from float32 attention, document by document; an interval that holds 0
means that this text does not tell the two apart. A difference d makes the perplexity exp(d) times as large: 0.01 nats
are 1%.

*Work in bf16*: the share of multiply-accumulates that leaves low precision in documents of this length, of the forward
beside losses, of both passes beside gradients. Of a recipe with guarded blocks, which are those on the diagonal, it
falls as documents grow, and what it loses in longer ones was not measured here:
{guarded}.
"""

LONG = 8192
FORWARD, BOTH = ("s", "o"), ("s", "o", "dp", "dv", "dq", "dk")

BASE = """
`{reference}` is this example's own attention through the same adapter as recipes. Against transformers' own, of any
document the loss differs by at most:
"""

GRADIENTS = """
### Gradients of one step

Of the mean loss of {documents} documents of {length} tokens, against float32 attention: *relative* is the length of the
difference over that of the gradient. By q, k, v as attention takes them and by its output (dout), and by the parameters
of a layer: the median of all layers, and in brackets the largest. *All*: all parameters as one vector. The errors of a
layer hold what the layers above it brought.

"""

COSINES = """
Cosines with the gradient of float32 attention, the smallest of all layers:

"""


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def head(cells: Iterable[str]) -> str:
    """The first two lines of a table."""
    cells = list(cells)
    return row(cells) + "|" + "---|" * len(cells) + "\n"


def between(one: Mapping[str, float], places: int, sign: str = "") -> str:
    """A mean with its interval."""
    mean, low, high = (f"{one[name]:{sign}.{places}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def seconds(one: Mapping[str, Any]) -> tuple[str, str]:
    """The cells of an entry's seconds."""
    return f"{one['seconds']:.0f}", f"{one['cpu_seconds']:.0f}"


def share(name: str, length: int, products: Iterable[str]) -> float | None:
    """The share of the multiply-accumulates of some products that is in high precision, in a causal document; None for
    what is no recipe of the registry. All products are of equal size: heads have as many channels in v as in q."""
    if name not in RECIPES:
        return None
    shares = [
        one.high_precision
        for one in safeguards(RECIPES[name], lengths=[length])
        if one.use.split(".")[0] in products
    ]
    return float(sum(shares) / len(shares))


def work(name: str, length: int, products: Iterable[str]) -> str:
    """The cell of that share."""
    found = share(name, length, products)
    return "-" if found is None else percent(found)


def percent(found: float) -> str:
    """A share, to two digits where it is small."""
    return f"{100 * found:.0f}%" if found == 0 or found >= 0.1 else f"{100 * found:.2g}%"


def guarded(length: int) -> str:
    """The recipes whose share depends on the length, with those of the forward."""
    found = []
    for name in RECIPES:
        here, there = (share(name, tokens, FORWARD) for tokens in (length, LONG))
        if here != there:
            found.append(
                f"{percent(here)} of the forward of `{name}` at {length} tokens, {percent(there)} at {LONG}"
            )
    return "; ".join(found) or "there is none"


def missing(names: Iterable[str], what: str, device: str) -> Iterator[str]:
    """Which recipes were not run, and what runs them."""
    names = list(names)
    if names:
        where = "cpu" if device.startswith("CPU") else "cuda"
        command = f"python -m examples.smollm2 {what} --device {where} --missing --json FILE"
        yield f"\nNot run on this device, so not in the table: {listed(names)}.\n"
        yield f"`{command}` adds them to the results.\n"


def without_gradients(attentions: Mapping[str, Any], device: str) -> Iterator[str]:
    """Which recipes have no row among gradients, and why."""
    alone = [name for name, recipe in RECIPES.items() if not recipe.has_backward]
    alone += [name for name, one in in_order(attentions) if "left_out" in one and name not in alone]
    yield f"\nForward only, so without gradients: {listed(alone)}.\n"
    rest = (name for name in RECIPES if name not in (*attentions, *alone))
    yield from missing(rest, "gradients", device)


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(f"`{name}`" for name in names)


def in_order(attentions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries: the reference, transformers' own, the recipes by the registry, then recipes of files."""
    first = (REFERENCE, *BASE_LINES, *RECIPES)
    names = [name for name in first if name in attentions]
    yield from ((name, attentions[name]) for name in names)
    yield from ((name, one) for name, one in attentions.items() if name not in first)


def loss_rows(attentions: Mapping[str, Any], length: int) -> Iterator[str]:
    """A row for each attention with its loss."""
    times = ("seconds", "CPU seconds")
    yield head(["attention", "loss", "perplexity", "from float32", "work in bf16", *times])
    for name, one in in_order(attentions):
        used = work(name, length, FORWARD)
        if "nll" not in one:
            lost = f"NaN or infinite in {one['documents_without_a_loss']} documents"
            yield row([f"`{name}`", lost, "-", "-", used, *seconds(one)])
            continue
        from_reference = "-" if name == REFERENCE else between(one["difference"], 5, "+")
        loss, perplexity = between(one["nll"], 4), f"{one['perplexity']:.3f}"
        yield row([f"`{name}`", loss, perplexity, from_reference, used, *seconds(one)])


def base_lines(attentions: Mapping[str, Any]) -> Iterator[str]:
    """How far the reference is from transformers' own. Raises: ValueError beyond the bound."""
    yield BASE.format(reference=REFERENCE)
    yield "\n"
    for name in BASE_LINES:
        pairs = zip(
            attentions[name]["document_nll"], attentions[REFERENCE]["document_nll"], strict=True
        )
        most = max(abs(x - y) for x, y in pairs)
        if most > BOUND:
            raise ValueError(
                f"{name} differs from {REFERENCE} by {most:g} nats; a fault is somewhere"
            )
        # Losses are kept with 7 digits.
        yield f"- `{name}`: {f'{most:.1g}' if most >= 1e-6 else 'less than 1e-06'} nats\n"


def gradient_rows(attentions: Mapping[str, Any], length: int) -> Iterator[str]:
    """A row for each attention with the relative errors of its gradients."""
    names = (*INPUTS, *WEIGHTS)
    yield head(["attention", *names, "embedding", "all", "work in bf16", "seconds", "CPU seconds"])
    for name, groups, one in compared(attentions):
        cells = [middle_and_most(groups.get(group)) for group in names]
        for group in ("embedding", "all parameters"):
            cells.append(f"{groups[group]['relative'][0]:.2g}")
        yield row([f"`{name}`", *cells, work(name, length, BOTH), *seconds(one)])


def cosine_rows(attentions: Mapping[str, Any]) -> Iterator[str]:
    """A row for each attention with the smallest cosines."""
    names = (*INPUTS, *WEIGHTS, "embedding", "all parameters")
    yield head(["attention", *names])
    for name, groups, _ in compared(attentions):
        found = (groups.get(group) for group in names)
        yield row([f"`{name}`", *("-" if x is None else least_cosine(x) for x in found)])


def compared(attentions: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The entries that have gradients to compare: name, groups, entry."""
    for name, one in in_order(attentions):
        if "groups" in one:
            yield name, one["groups"], one


def middle_and_most(group: Mapping[str, list[float | None]] | None) -> str:
    """The median and the largest relative error over layers."""
    if group is None:
        return "-"
    values = [x for x in group["relative"] if x is not None]
    if len(values) < len(group["relative"]):
        return f"NaN in {len(group['relative']) - len(values)} layers"
    return f"{statistics.median(values):.2g} [{max(values):.2g}]"


def least_cosine(group: Mapping[str, list[float | None]]) -> str:
    """The smallest cosine over layers."""
    values = [x for x in group["cosine"] if x is not None]
    return f"{min(values):.5f}" if len(values) == len(group["cosine"]) else "NaN"


def section(data: Mapping[str, Any]) -> Iterator[str]:
    """What one device found."""
    loss, step = data.get("perplexity"), data.get("gradients")
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    yield f"\n## {data['device']}\n\n"
    if loss is not None:
        documents = loss["documents"]
        dates, own = (
            sorted({one[name] for one in loss["attentions"].values()})
            for name in ("date", "flamia-ref")
        )
        yield (
            f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; flamia-ref {', '.join(own)}, {versions}.\n"
            f"{documents['documents']} documents of {documents['length']} tokens, {documents['tokens']} in all, of"
            f" {data['text']['from']}; SHA-256 of paths and tokens {documents['sha256_of_tokens'][:16]}.\n"
            "Seconds are of one run, compiling included; CPU seconds those of all cores together, which others that use"
            " the machine make no longer.\n\n"
        )
        yield from loss_rows(loss["attentions"], documents["length"])
        rest = (name for name in RECIPES if name not in loss["attentions"])
        yield from missing(rest, "perplexity", data["device"])
        if all(name in loss["attentions"] for name in BASE_LINES):
            yield from base_lines(loss["attentions"])
    if step is not None:
        yield GRADIENTS.format(**step["documents"])
        yield from gradient_rows(step["attentions"], step["documents"]["length"])
        yield COSINES
        yield from cosine_rows(step["attentions"])
        yield from without_gradients(step["attentions"], data["device"])
    else:
        yield "\n### Gradients of one step\n\nNot run on this device.\n"


def page(results: Iterable[Mapping[str, Any]]) -> str:
    """The whole page."""
    results = list(results)
    first = next(one["perplexity"] for one in results if "perplexity" in one)
    about = {"level": first["intervals"]["level"], "guarded": guarded(first["documents"]["length"])}
    return HEAD.format(**about) + "".join(part for one in results for part in section(one))


def read() -> list[dict[str, Any]]:
    """The results that there are, the GPU's first."""
    found = (EVIDENCE / name for name in FILES)
    return [json.loads(path.read_text(encoding="utf-8")) for path in found if path.is_file()]


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
