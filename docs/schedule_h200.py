"""Hold the model of schedules against PyTorch's attention on an H200, and write docs/schedule-h200.md.

Reads docs/evidence/h200-torch.csv and docs/evidence/h200-packed.csv, which benchmarks/h200_attention.py writes.
"""

import csv
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flamia_ref.attention import RECIPES  # noqa: E402
from flamia_ref.schedule import POLICIES  # noqa: E402
from flamia_ref.schedule.cost import tile_cycles  # noqa: E402
from flamia_ref.schedule.fitting import LONG, SHORT, Fit, Group, fit, predicted  # noqa: E402
from flamia_ref.schedule.hardware import GPUS  # noqa: E402
from flamia_ref.schedule.kernel import kernel_of  # noqa: E402
from flamia_ref.schedule.libraries import LIBRARIES  # noqa: E402
from flamia_ref.schedule.measured import Cell, read  # noqa: E402
from flamia_ref.schedule.order import Order  # noqa: E402
from flamia_ref.schedule.simulation import run  # noqa: E402
from flamia_ref.schedule.work import Pass, Problem, work_of  # noqa: E402

EVIDENCE = ROOT / "docs" / "evidence"
TORCH, PACKED = EVIDENCE / "h200-torch.csv", EVIDENCE / "h200-packed.csv"
FITTED_DIM = 128

PAGE = """# Schedules: the model against PyTorch's attention on an H200

Written by `python docs/schedule_h200.py` from `docs/evidence/h200-torch.csv` and `h200-packed.csv`, which
`python3 -m benchmarks.h200_attention` measured. BF16; medians of CUDA events, no cache flushed.

{header}

What is fitted: for each library and pass an efficiency, on the cells of {long} tokens, and an overhead, on the causal
cell of {short}, both of {dim} channels. All other cells are predicted; packed documents and 64 channels have no
constants of
their own.

What is assumed:

{assumed}
- Times are milliseconds. A backward's is all that autograd runs: delta, the conversion of dQ and,
  with grouped heads, the sum over heads.
- Packed documents have as many key/value heads as heads; PyTorch's jagged tensors take no grouped ones.

{fits}

## Documents of one length

{dense}

## Packed documents

`natural` hands out document after document, in it head after head. FlashAttention-2's grid has heads outermost: the
column `grid`. Both have the same tiles and constants. An order's ratio is its time over that of the documents as drawn.
Where a measured time is many times the model's and hardly depends on the documents, the model says nothing of it:
PyTorch's cuDNN path, of which the reason was not looked for.

{packed}

{left}
"""

HEADS = (
    *("library", "pass", "channels", "mask", "length", "heads"),
    *("measured", "predicted", "error", "role"),
)
PACKED_HEADS = (
    *("library", "pass", "documents", "of", "measured", "natural", "error", "grid", "error"),
    *("ratio measured", "natural", "grid"),
)
FIT_HEADS = (
    *("library", "version", "pass", "efficiency", "overhead, cycles", "what", "cells"),
    *("median error", "worst"),
)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One measured pass over packed documents, and what the model says of two orders."""

    group: Group
    model: str
    documents: int
    measured: float
    natural: float
    grid: float


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Markdown that reads as text too: columns of equal width."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [heads, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| " + " | ".join(x.ljust(width) for x, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def role(cell: Cell) -> str:
    """What a cell was for."""
    if cell.head_dim == FITTED_DIM and cell.length == LONG:
        return "efficiency"
    if cell.head_dim == FITTED_DIM and cell.length == SHORT and cell.causal:
        return "overhead"
    return "checked"


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a file, comments left out."""
    lines = [x for x in path.read_text("utf-8").splitlines() if x and not x.startswith("#")]
    return list(csv.DictReader(lines))


def packed_of(rows: list[dict[str, str]], fits: Mapping[Group, Fit]) -> Iterator[Packed]:
    """The measured rows that there are constants for."""
    for row in rows:
        if not row["time_ms"]:
            continue
        launch = Pass(row["pass"])
        group = Group(row["gpu"], row["library"], row["library_version"], launch, row["format"])
        if group not in fits:
            continue
        lengths = [int(x) for x in row["lengths"].split()]
        problem = Problem.of(
            [0, *np.cumsum(lengths).tolist()],
            heads=int(row["heads"]),
            kv_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]),
            causal=row["mask"] == "causal",
        )
        kernel = kernel_of(RECIPES["bf16-fa4"], launch, size=LIBRARIES[row["library"]].size(launch))
        work = work_of(problem, launch, kernel.size)
        gpu = GPUS[row["gpu"]]
        cycles = tile_cycles(work, kernel, gpu, fits[group].constants)
        grid = Order(places=np.lexsort((work.block, work.document, work.head)))
        natural, outer = (
            run(cycles, order, gpu.sms.value).makespan / gpu.clock.value * 1e3
            for order in (POLICIES["natural"].of(work, gpu, cycles), grid)
        )
        yield Packed(
            group=group,
            model=row["model"],
            documents=len(lengths),
            measured=float(row["time_ms"]),
            natural=natural,
            grid=outer,
        )


def percent(value: float) -> str:
    """A share with its sign."""
    return f"{100 * value:+.1f}%"


def packed_rows(found: list[Packed]) -> list[tuple[str, ...]]:
    """The table of packed documents."""
    drawn = {(x.group, x.model.split("/")[0]): x for x in found if x.model.endswith("/drawn")}
    rows = []
    for one in found:
        base = drawn.get((one.group, one.model.split("/")[0]))
        ratios = ("", "", "")
        if base is not None:
            ratios = tuple(
                f"{getattr(one, name) / getattr(base, name):.3f}"
                for name in ("measured", "natural", "grid")
            )
        rows.append(
            (
                one.group.library,
                one.group.launch.value,
                one.model,
                str(one.documents),
                f"{one.measured:.3f}",
                f"{one.natural:.3f}",
                percent(one.natural / one.measured - 1),
                f"{one.grid:.3f}",
                percent(one.grid / one.measured - 1),
                *ratios,
            )
        )
    return rows


def fit_rows(
    fits: Mapping[Group, Fit], cells: list[tuple[Cell, float]], packed: list[Packed]
) -> Iterator[tuple[str, ...]]:
    """Constants, and how wrong the predictions of each kind are."""
    for group in sorted(fits):
        constants = fits[group].constants
        own = [x for x in cells if Group.of(x[0]) == group and role(x[0]) == "checked"]
        kinds = {
            f"{dim} channels": [t / c.milliseconds - 1 for c, t in own if c.head_dim == dim]
            for dim in (128, 64)
        }
        mine = [x for x in packed if x.group == group]
        kinds["packed, natural"] = [x.natural / x.measured - 1 for x in mine]
        kinds["packed, grid"] = [x.grid / x.measured - 1 for x in mine]
        for kind, errors in kinds.items():
            if errors:
                yield (
                    group.library,
                    group.version,
                    group.launch.value,
                    f"{constants.efficiency:.3f}",
                    f"{constants.overhead:.0f}",
                    kind,
                    str(len(errors)),
                    f"{100 * float(np.median(np.abs(errors))):.1f}%",
                    percent(max(errors, key=abs)),
                )


def main() -> int:
    """Write the page, and the tables to standard output."""
    for path in (TORCH, PACKED):
        if not path.exists():
            sys.stderr.write(
                f"there is no {path}; python3 -m benchmarks.h200_attention writes it\n"
            )
            return 2
    cells = [cell for cell in read(TORCH) if cell.library in LIBRARIES]
    fits = fit([cell for cell in cells if cell.head_dim == FITTED_DIM])
    dense = [
        (cell, predicted(cell, fits[Group.of(cell)].constants))
        for cell in cells
        if Group.of(cell) in fits
    ]
    rows = rows_of(PACKED)
    packed = list(packed_of(rows, fits))
    dense_rows = [
        (
            cell.library,
            cell.launch.value,
            str(cell.head_dim),
            "causal" if cell.causal else "none",
            str(cell.length),
            f"{cell.heads}/{cell.kv_heads}",
            f"{cell.milliseconds:.3f}",
            f"{time:.3f}",
            percent(time / cell.milliseconds - 1),
            role(cell),
        )
        for cell, time in dense
    ]
    notes = [
        f"- {row['library']}, {row['model']}, {row['pass']}, {row['queries']} tokens, {row['heads']}/{row['kv_heads']}:"
        f" {row['note']}"
        for row in (*rows_of(TORCH), *rows)
        if not row["time_ms"]
    ]
    header = [x[2:] for x in TORCH.read_text("utf-8").splitlines() if x.startswith("# ")]
    libraries = dict.fromkeys(group.library for group in fits)
    parts = {
        "fits": table(FIT_HEADS, list(fit_rows(fits, dense, packed))),
        "dense": table(HEADS, dense_rows),
        "packed": table(PACKED_HEADS, packed_rows(packed)),
        "left": "\n".join(["## Not taken", "", *notes]) if notes else "",
    }
    page = PAGE.format(
        header="\n".join(f"- {x}" for x in header),
        assumed="\n".join(f"- {name}: {LIBRARIES[name].assumed}." for name in libraries),
        long=LONG,
        short=SHORT,
        dim=FITTED_DIM,
        **parts,
    )
    (ROOT / "docs" / "schedule-h200.md").write_text(page.rstrip() + "\n", encoding="utf-8")
    sys.stdout.write("\n\n".join(x for x in parts.values() if x) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
