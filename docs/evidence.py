"""Write docs/evidence.md: what every recipe, instruction and preset rests on, and what was measured where.

Run from the root of the checkout, a second: python docs/evidence.py
All of it is read from RECIPES, INSTRUCTIONS and PRESETS, and from the results in docs/evidence/.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.arithmetic import INSTRUCTIONS  # noqa: E402
from flamia_ref.attention import RECIPES  # noqa: E402
from flamia_ref.evidence import Evidence, weakest  # noqa: E402
from flamia_ref.formats import PRESETS  # noqa: E402

FILE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "docs" / "evidence"

HEAD = """# Evidence

Made by `python docs/evidence.py`. Every rule carries one label, and a whole shows the label of its weakest step. From
the strongest to the weakest:

"""

RECIPE = """
## Recipes

Steps by label, counted from each recipe's own list: `flamia-ref recipes show NAME` prints it, with the file that was
read or the device that was asked.

"""

INSTRUCTION = """
## Matrix instructions

By device and kind; the label of each part of an instruction, how it adds, what it does below the smallest exponent,
and with NaN and infinity. Sources, bounds and figures: [accumulation.md](accumulation.md).

"""

PRESET = """
## Presets

Block formats by library. What each was compared with: [presets.md](presets.md).

"""

MEASURED = """
## Results in this repository

What was run where, as it was written by the program that ran it. A GPU of yours can ask the same questions:
[device-probe.md](device-probe.md).

"""

CLOSING = """
## What would refute this

One input on which a device gives other bits than a rule labelled *simulated*, *derived* or *assumed* is enough, and
`flamia-ref device probe` looks for it. Nothing here was run on a Blackwell GPU. All rules in one table, with what they
rest on, are in the [README](../README.md#what-is-exact-what-is-modelled-what-is-assumed); decisions that could have
gone another way are in [decisions](decisions/README.md).
"""


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def head(cells: Iterable[str]) -> str:
    """The first two lines of a table."""
    cells = list(cells)
    return row(cells) + "|" + "---|" * len(cells) + "\n"


def labels_table() -> Iterator[str]:
    """What each label means."""
    yield head(["label", "meaning"])
    yield from (row([f"*{label}*", label.meaning]) for label in Evidence)


def recipes_table() -> Iterator[str]:
    """A row for each recipe: how many of its steps have each label."""
    yield head(["recipe", "weakest", *Evidence])
    for name, recipe in RECIPES.items():
        counts = Counter(step.evidence for step in recipe.steps.values())
        yield row(
            [f"`{name}`", f"*{recipe.label}*", *(str(counts[label] or "-") for label in Evidence)]
        )


def instructions_table() -> Iterator[str]:
    """A row for each kind of instructions whose parts have the same labels."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, instruction in INSTRUCTIONS.items():
        parted = name.split(".", 2)
        family, kind = ".".join(parted[:2]), ".".join(parted[2:])
        parts = ", ".join(
            f"{part.replace('_', ' ')} {label}" for part, label in instruction.evidence.items()
        )
        label = str(weakest(instruction.evidence.values()))
        groups.setdefault((family, label, parts), []).append(kind)
    yield head(["instructions", "kinds", "weakest", "parts"])
    for (family, label, parts), kinds in groups.items():
        yield row(
            [
                f"`{family}`",
                ", ".join(f"`{kind}`" for kind in kinds if kind) or "-",
                f"*{label}*",
                parts,
            ]
        )


def presets_table() -> Iterator[str]:
    """A row for each library: how many presets have each label, and of which versions."""
    groups: dict[str, list[Any]] = {}
    for name, preset in PRESETS.items():
        groups.setdefault(name.partition("-")[0], []).append(preset)
    yield head(["presets of", "all", *Evidence, "versions"])
    for library, presets in groups.items():
        counts = Counter(preset.evidence for preset in presets)
        versions = dict.fromkeys(preset.version for preset in presets if preset.version)
        cells = (str(counts[label] or "-") for label in Evidence)
        yield row([f"`{library}-*`", str(len(presets)), *cells, ", ".join(versions) or "-"])


def results_table() -> Iterator[str]:
    """A row for each file of results."""
    yield head(["file", "device", "date", "what it holds"])
    for file in sorted(RESULTS.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        about = data.get("about") or _about(data)
        cells = [
            data.get("device") or "in the text",
            data.get("date") or _dates(data) or "in the text",
        ]
        yield row(
            [
                f"[{file.name}](evidence/{file.name})",
                *cells,
                " ".join(about.split()).replace("|", "\\|"),
            ]
        )


def _about(data: Mapping[str, Any]) -> str:
    if "command" in data:
        return f"`{data['command']}`"
    parts = [
        name for name, value in data.items() if isinstance(value, Mapping) and name != "versions"
    ]
    return ", ".join(parts)


def _dates(data: Mapping[str, Any]) -> str:
    """The dates anywhere in a file, the first and the last."""
    found = sorted(set(_all_dates(data)))
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else ""


def _all_dates(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        if isinstance(data.get("date"), str):
            yield data["date"]
        for value in data.values():
            yield from _all_dates(value)


def page() -> str:
    """The whole page."""
    parts = (
        (HEAD, labels_table()),
        (RECIPE, recipes_table()),
        (INSTRUCTION, instructions_table()),
        (PRESET, presets_table()),
        (MEASURED, results_table()),
    )
    return "".join(text + "".join(table) for text, table in parts) + CLOSING


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
