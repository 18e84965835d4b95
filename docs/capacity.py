"""Write what is computed in docs/capacity.md: how many bits get through, recipe by recipe.

Run from the root of the checkout, some minutes: python docs/capacity.py
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES  # noqa: E402
from flamia_ref.leakage import CapacityReport, ReplacedSuffix, capacity, replaced_suffix  # noqa: E402
from flamia_ref.leakage.legal import Severity  # noqa: E402
from flamia_ref.leakage.sharing.text import NAMES  # noqa: E402

PAGE = ROOT / "docs" / "capacity.md"
DATA = ROOT / "tests" / "oracles" / "smollm2" / "layer14-group0.npz"
END = "<!-- end -->\n"

Row = tuple[str, ...]


def seen(report: CapacityReport, output: str, drawn: str) -> str:
    """The largest corrected entropy of an output over families, and in which families it is above 0."""
    found = [one for one in report.entropies if (one.output, one.drawn) == (output, drawn)]
    if not found:
        return "-"
    most = max(found, key=lambda one: one.entropy.corrected)
    if not any(one.leaks for one in found):
        return "0"
    families = [one.family for one in found if one.leaks]
    return f"{most.entropy.corrected:.1f} ({', '.join(families)})"


def bound(report: CapacityReport, severity: Severity) -> str:
    """The bound of a severity: bits of a row of the output that can receive most, and which that is."""
    found = next(one for one in report.severities if one.severity is severity)
    if found.row is None:
        return "no bound"
    if found.row == 0:
        return "0, proved"
    most = max(found.rows, key=lambda one: one.bits or 0)
    return f"{found.row:.3g} ({NAMES[most.output]})"


def gain(report: CapacityReport) -> str:
    """What the probe got out of its best row."""
    found = [one for one in report.probes if one.differing]
    if not found:
        return "0"
    best = max(found, key=lambda one: one.gain.bits)
    return f"{best.gain.bits:.2f} ± {best.gain.error:.2f} at row {best.row} of {best.block}"


def recipes_rows(reports: Mapping[str, CapacityReport]) -> Iterable[Row]:
    """A row a recipe: bounds, entropies, the probe."""
    for name, report in reports.items():
        backward = RECIPES[name].has_backward
        yield (
            f"`{name}`",
            bound(report, Severity.FORWARD),
            bound(report, Severity.BACKWARD) if backward else "no backward",
            seen(report, "out", "suffix"),
            seen(report, "lse", "suffix"),
            seen(report, "dq", "suffix") if backward else "-",
            gain(report),
        )


def data() -> dict[str, Any]:
    """The real layer: q, k, v, dout in bfloat16, cu_seqlens, softmax_scale."""
    with np.load(DATA) as stored:
        found = {
            name: np.asarray(stored[f"{name}_bits"]).view(ml_dtypes.bfloat16)
            for name in ("q", "k", "v", "dout")
        }
        found["cu_seqlens"] = np.asarray(stored["cu_seqlens"])
        found["softmax_scale"] = float(stored["softmax_scale"])
    return found


def replaced_rows(found: Mapping[str, ReplacedSuffix]) -> Iterable[Row]:
    """A row a recipe: which bits of each output changed."""
    for name, one in found.items():
        cells = []
        for drawn, output in (
            ("suffix", "out"),
            ("suffix", "lse"),
            ("suffix", "dq"),
            ("past_queries", "dk"),
            ("past_queries", "dv"),
        ):
            here = [x for x in one.outputs if (x.drawn, x.output) == (drawn, output)]
            if not here:
                cells.append("-")
                continue
            bits, total = (sum(getattr(x, what) for x in here) for what in ("bits", "of_bits"))
            cells.append("0" if not bits else f"{bits} ({100 * bits / total:.2g}%)")
        yield (f"`{name}`", *cells)


def table(head: Row, rows: Iterable[Row]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recipes_section() -> str:
    """The table of recipes."""
    reports = {name: capacity(recipe) for name, recipe in RECIPES.items()}
    head = (
        "recipe",
        "forward, bits a row at most",
        "backward, bits a row at most",
        "O over suffixes, bits",
        "LSE",
        "dQ",
        "probe, bits",
    )
    return table(head, recipes_rows(reports))


def replaced_section() -> str:
    """The table of replaced suffixes."""
    given = data()
    found = {}
    for name, recipe in RECIPES.items():
        dout = given["dout"] if recipe.has_backward else None
        found[name] = replaced_suffix(
            given["q"],
            given["k"],
            given["v"],
            given["cu_seqlens"],
            recipe,
            dout=dout,
            softmax_scale=given["softmax_scale"],
        )
    head = ("recipe", "O", "LSE", "dQ", "dK, earlier queries replaced", "dV, the same")
    return table(head, replaced_rows(found))


SECTIONS = {"recipes": recipes_section, "replaced": replaced_section}


def with_section(text: str, name: str, content: str) -> str:
    """The page with another content of a section."""
    start = f"<!-- {name}, by docs/capacity.py -->\n"
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{PAGE.name} has no {start.strip()!r} with an {END.strip()!r} after it")
    return f"{before}{start}\n{content}\n{END}{after}"


def main() -> None:
    """Write the sections of the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, made in SECTIONS.items():
        text = with_section(text, name, made())
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
