"""Draw docs/pictures/departure.svg: one V scale byte too large by one, seen in every stage behind it.

Run from the root of the checkout: python docs/pictures/departure.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from examples.kernels import v_scale_off_by_one  # noqa: E402
from flamia_ref import golden  # noqa: E402
from flamia_ref.golden.actual import stored  # noqa: E402

CASE = "smollm2-layer14"
HEAD = 0
CELL = 2
GAP = 26
TOP = 44
EQUAL, DIFFERS, TEXT = "#dfe3e8", "#c8102e", "#57606a"


def panels(case: "golden.Case", actual: dict) -> list[tuple[str, str, int, np.ndarray]]:
    """Title, caption, columns drawn for one element, and where bits differ, of the faulty document."""
    token = len(case.tensors["v"]) // 2
    document = int(np.searchsorted(np.asarray(case.spec.starts), token, side="right")) - 1
    start = case.spec.starts[document]
    rows = slice(start, start + case.spec.lengths[document])

    def differs(name: str, index: tuple) -> np.ndarray:
        expected, given = np.asarray(case.tensors[name])[index], np.asarray(actual[name])[index]
        if given.dtype != expected.dtype:  # bfloat16 values as float32
            given = (given.view(np.uint32) >> 16).astype(expected.dtype)
        if expected.dtype == np.float32:
            expected, given = expected.view(np.uint32), given.view(np.uint32)
        return expected != given

    of = f".{document}"
    return [
        ("v.scales", "a byte a key token", 16, differs("v.scales", (rows, 0))),
        ("v.codes", "key tokens x channels", 1, differs("v.codes", (rows, 0))),
        ("s", "queries x keys", 1, differs(f"s{of}", (HEAD,))),
        ("p.o.scales", "queries x key blocks", 32, differs(f"p.o.scales{of}", (HEAD,))),
        ("p.o.codes", "queries x keys", 1, differs(f"p.o.codes{of}", (HEAD,))),
        ("o", "queries x channels", 1, differs("o", (rows, HEAD))),
        ("out", "queries x channels", 1, differs("out", (rows, HEAD))),
    ]


def svg(drawn: list[tuple[str, str, int, np.ndarray]]) -> str:
    """The panels side by side, cells that differ in red."""
    x, parts = 10, []
    for title, caption, repeat, elements in drawn:
        count = int(elements.sum())
        note = f"{count} of {elements.size} differ" if count else "equal"
        cells = np.repeat(elements, repeat, axis=1)
        height, width = (CELL * extent for extent in cells.shape)
        parts.append(f'<text x="{x}" y="16" class="title">{title}</text>')
        parts.append(f'<text x="{x}" y="30" class="note">{caption}</text>')
        parts.append(f'<rect x="{x}" y="{TOP}" width="{width}" height="{height}" fill="{EQUAL}"/>')
        for row, line in enumerate(cells):
            edges = np.flatnonzero(np.diff(np.concatenate(([0], line.astype(np.int8), [0]))))
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                at = f'x="{x + CELL * first}" y="{TOP + CELL * row}"'
                size = f'width="{CELL * (last - first)}" height="{CELL}"'
                parts.append(f'<rect {at} {size} fill="{DIFFERS}"/>')
        parts.append(f'<text x="{x}" y="{TOP + height + 16}" class="note">{note}</text>')
        x += max(width, 100) + GAP
    height = TOP + 26 + CELL * max(len(elements) for *_, elements in drawn)
    style = (
        f".title{{font:bold 13px monospace;fill:{TEXT}}}.note{{font:11px sans-serif;fill:{TEXT}}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x} {height}" width="{x}">'
    return "\n".join([head, f"<style>{style}</style>", *parts, "</svg>", ""])


def golden_stages(case: "golden.Case") -> tuple[str, ...]:
    """The stages that a simulator can be asked for."""
    return case.recipe.dataflow.trace(backward=False)


def main() -> None:
    """Make a pack, run the faulty kernel on one case, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        golden.make(Path(folder) / "pack")
        case = next(case for case in golden.load(Path(folder) / "pack") if case.spec.name == CASE)
        settings = {"causal": case.spec.causal, "softmax_scale": case.spec.softmax_scale}
        results = v_scale_off_by_one(**case.inputs(), **settings, trace=golden_stages(case))
        actual = {name: one.array for name, one in stored(results, case).items()}
        (ROOT / "docs" / "pictures" / "departure.svg").write_text(svg(panels(case, actual)))


if __name__ == "__main__":
    main()
