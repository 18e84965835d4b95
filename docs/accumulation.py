"""Write the tables in docs/accumulation.md: the instructions with what they rest on, and what the notebook printed.

Run from the root of the checkout: python docs/accumulation.py
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.arithmetic import INSTRUCTIONS, Instruction, Result, Summation  # noqa: E402

PAGE = ROOT / "docs" / "accumulation.md"
PROBE = ROOT / "docs" / "evidence" / "probe-sm90-h200.json"
NOTEBOOK = ROOT / "notebooks" / "03_accumulation.ipynb"
INSTRUCTIONS_START = "<!-- instructions, by docs/accumulation.py -->\n"
ERRORS_START = "<!-- errors, printed by notebooks/03_accumulation.ipynb -->\n"
BOUNDS_START = "<!-- bounds, printed by the same -->\n"
END = "<!-- end -->\n"

FAMILIES = {
    "sm100.tcgen05": "Blackwell (B200), `tcgen05.mma`",
    "sm100.mma": "Blackwell (B200), `mma.sync`",
    "sm90.wgmma": "Hopper, `wgmma`",
    "sm90.mma": "Hopper, `mma.sync`",
    "sm120.mma": "Blackwell (RTX), `mma.sync`",
    "sm89.mma": "Ada, `mma.sync`",
    "sm80.mma": "Ampere, `mma.sync`",
}
RESULTS = {
    Result.FLOAT32: "f32, cut",
    Result.FLOAT32_13: "f32, cut to 13 bits",
    Result.FLOAT16: "f16, nearest",
}
PARTS = ("alignment", "exponent_floor", "special_values")
HEAD = """
| instruction | operands | scales | L | F | E0 | result | terms, bits, rounding | floor | special values | H200 |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def confirmed() -> Counter[str]:
    """How many results of each model a device gave, where none differed."""
    results: Counter[str] = Counter()
    for report in json.loads(PROBE.read_text(encoding="utf-8"))["reports"]:
        for outcome in report["outcomes"]:
            if outcome["model"] not in INSTRUCTIONS:
                continue
            if outcome["status"] != "confirmed" or outcome["mismatches"]:
                raise ValueError(
                    f"{PROBE.name}: {outcome['probe']} is not confirmed; say so in the page"
                )
            results[outcome["model"]] += outcome["results"]
    return results


def family(instruction: Instruction) -> str:
    """The device and the instruction that a name begins with."""
    return ".".join(instruction.name.split(".")[:2])


def operands(instruction: Instruction) -> str:
    """Element formats; the two 8-bit and the three narrower ones by what they are called together."""
    names = instruction.operand_formats
    together = {("e4m3", "e5m2"): "FP8", ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"): "FP8, FP6, FP4"}
    either = " or ".join(names) if instruction.same_formats else ", ".join(names)
    return together.get(names, either)


def scales(instruction: Instruction) -> str:
    """Formats and blocks of the scales."""
    blocks: dict[str, list[str]] = {}
    for scaling in instruction.scalings:
        blocks.setdefault(scaling.format, []).append(str(scaling.block))
    return ", ".join(f"{name} / {' or '.join(sizes)}" for name, sizes in blocks.items())


def row(instruction: Instruction, results: Counter[str]) -> str:
    """The row of one instruction, with its newline."""
    terms = str(instruction.terms)
    if instruction.group > 1:
        terms += f", groups of {instruction.group}"
    count = results[instruction.name]
    cells = [
        f"`{instruction.name}`",
        operands(instruction),
        scales(instruction),
        terms,
        str(instruction.fraction_bits),
        str(instruction.exponent_floor),
        RESULTS[instruction.result],
        *(str(instruction.evidence[part]) for part in PARTS),
        f"{count:,}" if count else "",
    ]
    return f"| {' | '.join(cells)} |\n"


def table(instructions: Iterable[Instruction] = tuple(INSTRUCTIONS.values())) -> str:
    """The tables of all fused instructions, a family of devices each."""
    fused = [each for each in instructions if each.summation is Summation.FUSED]
    results = confirmed()
    parts = []
    for name, title in FAMILIES.items():
        members = [each for each in fused if family(each) == name]
        parts += [f"\n**{title}**\n", HEAD, *(row(each, results) for each in members)]
        fused = [each for each in fused if each not in members]
    if fused:
        raise ValueError(f"no family has {fused[0].name}; add it to FAMILIES")
    return "".join(parts)


def printed(first: str) -> str:
    """The table whose first line begins with `first`, among what the notebook printed when it last ran."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    streams = [output.get("text", ()) for cell in cells for output in cell.get("outputs", ())]
    for lines in map(list, streams):
        if lines and lines[0].startswith(first):
            return "".join(line for line in lines if line.startswith("|"))
    raise ValueError(f"{NOTEBOOK.name} has printed no table that begins with {first!r}; run it")


def page(text: str) -> str:
    """`text` with the tables in their places."""
    contents = {
        INSTRUCTIONS_START: table(),
        ERRORS_START: "\n" + printed("| machine | K |"),
        BOUNDS_START: "\n" + printed("| sum | K |"),
    }
    for start, content in contents.items():
        before, found, rest = text.partition(start)
        _, ended, after = rest.partition(END)
        if not (found and ended):
            raise ValueError(f"{PAGE.name} has no place for {start.strip()}")
        text = before + start + content + "\n" + END + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
