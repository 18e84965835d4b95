"""The published tables: every row says what its own column of rates says, and bad files are refused in one line."""

import csv
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.libraries import LIBRARIES
from flamia_ref.schedule.measured import COLUMNS, cells_of, published, read

FOLDER = resources.files("flamia_ref.schedule") / "published"
FILES = sorted(
    one.name
    for one in FOLDER.iterdir()
    if one.name.endswith(".csv") and not one.name.startswith("lengths-")
)


def rows(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("name", FILES)
def test_rates_are_what_times_say(name: str) -> None:
    # The tables count 2 operations for each pair, product and channel; causal pairs exactly, or as half of all.
    checked = 0
    for row in rows(name):
        if not row["time_ms"] or not row["tflops"] or row["mask"] not in ("causal", "none"):
            continue
        batch, length, heads = (int(row[x]) for x in ("batch", "queries", "heads"))
        d, dv = int(row["head_dim"]), int(row["value_dim"])
        channels = d + dv if row["pass"] == "forward" else 3 * d + 2 * dv
        pairs = {
            "none": (length**2,),
            "causal": (length * (length + 1) / 2, length**2 / 2),
        }[row["mask"]]
        rates = [2 * batch * heads * x * channels / float(row["time_ms"]) / 1e9 for x in pairs]
        # Whole numbers of times that are rounded to a microsecond.
        slack = 0.5 + max(rates) * 0.0005 / float(row["time_ms"]) + 1e-9
        assert min(abs(rate - float(row["tflops"])) for rate in rates) <= slack, row
        checked += 1
    assert checked >= 5


def test_cells_are_the_rows() -> None:
    cells = published()
    assert len(cells) > 600
    per_table = Counter(cell.table for cell in cells)
    for name in FILES:
        wanted = [x for x in rows(name) if x["time_ms"] and x["mask"] in ("causal", "none")]
        assert per_table[name[:-4]] == len(wanted)
    assert all(cell.gpu in GPUS and cell.library in LIBRARIES for cell in cells)
    assert {cell.format for cell in cells} == {"bf16", "fp8", "mxfp8"}


def test_a_cell() -> None:
    # GB200, llama3.1, bfloat16, causal, two documents of 32768: 21.692 ms and 1622 TFLOPS.
    cell = next(
        x
        for x in published()
        if x.table == "cudnn-9.22.0-gb200-llama3.1" and x.milliseconds == 21.692
    )
    assert (cell.batch, cell.length, cell.heads, cell.kv_heads) == (2, 32768, 64, 8)
    assert cell.flops == 2 * 2 * 64 * 32768**2 / 2 * 256
    assert cell.tflops == pytest.approx(1622, abs=0.5)
    # A backward of 192 and 128 channels: 1076 TFLOPS.
    wide = next(x for x in published() if x.milliseconds == 212.546)
    assert wide.tflops == pytest.approx(1076, abs=0.5)
    assert cell.problem.visible_pairs() == 2 * 32768 * 32769 // 2


HEADER = ",".join(COLUMNS)
ROW = "GB200,m,cudnn,v,bf16,causal,1,128,128,2,2,64,64,forward,False,1.5"


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"# mine\n{HEADER}\n{ROW}\n{ROW.replace('1.5', '')}\n")
    (cell,) = read(path)
    assert (cell.table, cell.milliseconds, cell.deterministic) == ("own", 1.5, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'gpu'"),
        (f"{HEADER.replace(',time_ms', '')}\n", "has no column 'time_ms'"),
        (f"{HEADER}\n{ROW.replace('1.5', 'fast')}\n", "row 1 .*could not convert"),
        (f"{HEADER}\n{ROW.replace('1.5', '-1')}\n", "row 1 .*time_ms is .*must be positive"),
        (f"{HEADER}\n{ROW.replace('1.5', 'nan')}\n", "row 1 .*time_ms is .*must be positive"),
        (f"{HEADER}\n{ROW.replace('1.5', 'inf')}\n", "row 1 .*time_ms is .*must be positive"),
        (f"{HEADER}\n{ROW}\n{ROW.replace('128,128', '128,64')}\n", "row 2: queries must equal"),
        (f"{HEADER}\n{ROW.replace('forward', 'sideways')}\n", "row 1 .*sideways"),
        (f"{HEADER}\n{ROW.replace(',1,128', ',0,128')}\n", "row 1.*batch is 0"),
        (f"{HEADER}\n{ROW.replace(',2,2,', ',3,2,')}\n", "row 1.*must be a multiple"),
        (f"{HEADER}\n{ROW.replace('GB200', 'GB20')}\n", "row 1.*GB200"),
        (f"{HEADER}\n{ROW.replace('cudnn', 'cudn')}\n", "row 1.*cudnn"),
        (f"{HEADER}\n{ROW.replace('bf16', 'bf17')}\n", "row 1.*bf16"),
        (f"{HEADER}\n{ROW.rpartition(',')[0]}\n", "row 1 has 15 fields"),
    ],
)
def test_bad_tables(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        cells_of(text, "own")
    assert "\n" not in str(found.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        read(tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot read"):
        read(tmp_path / "odd.csv")
