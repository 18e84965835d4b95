"""Published measurements of attention kernels, as the model is fitted to them and held against them."""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.libraries import LIBRARIES
from flamia_ref.schedule.work import Pass, Problem

COLUMNS = (
    "gpu",
    "model",
    "library",
    "library_version",
    "format",
    "mask",
    "batch",
    "queries",
    "keys",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "pass",
    "deterministic",
    "time_ms",
)
MASKS = ("causal", "none")
MEASURED_FORMATS = ("bf16", "fp8", "mxfp8")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured time: a batch of documents of one length.

    Attributes:
        table: the file it comes from, which says whose it is.
        gpu, model: where, and whose shape.
        library, version: whose kernel.
        format: "bf16", "fp8" (a scale a tensor) or "mxfp8".
        causal: whether the mask is causal; else there is none.
        batch, length, heads, kv_heads, head_dim, value_dim: the shape.
        launch: the pass.
        deterministic: whether the sums of its backward have a fixed order.
        milliseconds: the time, quantization not included.
    """

    table: str
    gpu: str
    model: str
    library: str
    version: str
    format: str
    causal: bool
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    launch: Pass
    deterministic: bool
    milliseconds: float

    def __post_init__(self) -> None:
        GPUS[self.gpu]
        LIBRARIES[self.library]
        if self.format not in MEASURED_FORMATS:
            raise unknown_name("format", self.format, MEASURED_FORMATS)
        for name in ("batch", "length", "heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; heads must be a multiple of kv_heads"
            )
        if not 0 < self.milliseconds < math.inf:
            raise ValueError(f"time_ms is {self.milliseconds}; it must be positive")

    @functools.cached_property
    def problem(self) -> Problem:
        """What was computed."""
        return Problem.of(
            np.arange(self.batch + 1) * self.length,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            causal=self.causal,
        )

    @property
    def flops(self) -> float:
        """Multiplications and additions as the tables count them: half of all pairs where the mask is causal."""
        pairs = self.batch * self.heads * self.length**2 / (2 if self.causal else 1)
        if self.launch is Pass.FORWARD:
            return 2 * pairs * (self.head_dim + self.value_dim)
        return 2 * pairs * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def tflops(self) -> float:
        """The rate."""
        return self.flops / self.milliseconds / 1e9


def published() -> tuple[Cell, ...]:
    """Every cell of the tables that come with the package, in the order of the files."""
    folder = resources.files("flamia_ref.schedule") / "published"
    tables = (x for x in folder.iterdir() if x.name.endswith(".csv") and "lengths-" not in x.name)
    files = sorted(tables, key=str)
    return tuple(
        cell for file in files for cell in cells_of(file.read_text("utf-8"), file.name[:-4])
    )


def read(path: str | Path) -> tuple[Cell, ...]:
    """The cells of a CSV file with the columns of the published tables: measurements of one's own.

    Raises: ValueError of one line for a file that is none, with its line.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return cells_of(text, Path(path).stem)


def cells_of(text: str, table: str) -> tuple[Cell, ...]:
    """The cells of one table. Comments begin with #; rows without a time, or with a window, are left out."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{table} has no column {missing[0]!r}; it must have {', '.join(COLUMNS)}")
    return tuple(_cells(reader, table))


def _cells(rows: Iterable[dict[str, str]], table: str) -> Iterable[Cell]:
    for number, row in enumerate(rows, start=1):
        given = [name for name in COLUMNS if row[name] is not None]
        if len(given) < len(COLUMNS):
            raise ValueError(
                f"{table}, row {number} has {len(given)} fields; it must have {', '.join(COLUMNS)}"
            )
        if not row["time_ms"] or row["mask"] not in MASKS or not row["heads"]:
            continue
        try:
            cell = Cell(
                table=table,
                gpu=row["gpu"],
                model=row["model"],
                library=row["library"],
                version=row["library_version"],
                format=row["format"],
                causal=row["mask"] == "causal",
                batch=int(row["batch"]),
                length=int(row["queries"]),
                heads=int(row["heads"]),
                kv_heads=int(row["kv_heads"]),
                head_dim=int(row["head_dim"]),
                value_dim=int(row["value_dim"]),
                launch=Pass(row["pass"]),
                deterministic=row["deterministic"] == "True",
                milliseconds=float(row["time_ms"]),
            )
        except (ValueError, LookupError) as error:
            raise ValueError(
                f"{table}, row {number} {shown(list(row.values()))}: {error}"
            ) from None
        if row["queries"] != row["keys"]:
            raise ValueError(f"{table}, row {number}: queries must equal keys")
        yield cell
