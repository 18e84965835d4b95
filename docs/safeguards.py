"""Write the fronts of docs/safeguards.md: what the safeguards of some recipes cost.

Run from the root of the checkout, some minutes: python docs/safeguards.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.leakage import SafeguardsStudy, safeguards_study  # noqa: E402
from flamia_ref.leakage.safeguarding.alternatives import Alternative  # noqa: E402
from flamia_ref.leakage.safeguarding.points import StudyPoint  # noqa: E402

PAGE = ROOT / "docs" / "safeguards.md"
END = "<!-- end -->\n"
STUDIED = ("flamia-mxfp8-unguarded", "cudnn-mxfp8")
ERRORS = {"out": "O", "dq": "dQ", "dk": "dK", "dv": "dV"}


def choices(point: StudyPoint) -> str:
    """What the groups are, the same of several groups together."""
    kinds: dict[str, list[str]] = {}
    for group, choice in point.choices.items():
        if choice is not Alternative.AS_IS:
            kinds.setdefault(str(choice), []).append(group)
    text = "; ".join(f"{', '.join(groups)}: {kind}" for kind, groups in kinds.items())
    names = ", ".join(
        f"`{name}`" + title[len(name) :]
        for name, title in zip(point.names, point.titles, strict=True)
    )
    return f"{text or 'as it is'}{f' ({names})' if names else ''}"


def rows(study: SafeguardsStudy) -> Iterator[tuple[str, ...]]:
    """The recipe as it is, registered recipes among the points, and the front."""
    yield (
        "safeguards",
        "standing",
        *ERRORS.values(),
        "all",
        *(f"work at {length}" for length in study.at),
        "bytes kept",
    )
    yield ("---",) * (len(ERRORS) + len(study.at) + 4)
    named = [point for point in study.points[1:] if point.names and not point.front]
    for point in dict.fromkeys([study.base, *named, *study.front]):
        yield (
            choices(point),
            f"{point.standing}{', front' if point.front else ''}",
            *(f"{point.errors[name]:.4f}" for name in ERRORS),
            f"{point.error:.4f}",
            *(f"{100 * float(share):.2f}%" for share in point.work),
            f"{point.kept:.1f}",
        )


def section(name: str) -> str:
    """What one study found."""
    study = safeguards_study(name)
    if study.missing:
        raise RuntimeError(f"{name}: {study.missing} points were not measured; allow more runs")
    counts = (
        f"`{name}`: {study.possible} combinations are computed, {study.possible - study.safe} of them with a use that"
        f" leaks alone; {study.considered} different legal recipes were considered, {study.measured} measured in"
        f" {study.runs} runs; the front has {len(study.front)} points, {sum(x.proven for x in study.front)} of them"
        " proven."
    )
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows(study))
    return f"{counts}\n\n{table}"


def main() -> None:
    """Write the sections of the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name in STUDIED:
        start = f"<!-- {name}, by docs/safeguards.py -->\n"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(END)
        text = f"{before}{start}\n{section(name)}\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
