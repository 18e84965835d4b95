"""The cases of benchmarks/h200_attention.py, without a GPU."""

from pathlib import Path

from benchmarks.h200_attention import BATCH, LENGTHS, TOKENS, Tables, cases
from flamia_ref.schedule.measured import read
from flamia_ref.schedule.work import Pass


def test_tables_are_read_as_measurements(tmp_path: Path) -> None:
    tables = Tables(tmp_path, ["a comment"])
    dense = [case for case in cases() if not case.lengths]
    for case in dense:
        row = case.row("H200", "torch 2.11.0", "backward")
        tables.write(row | {"time_ms": 2.5, "note": "with, a comma"}, packed=False)
    # A combination that was refused has no time, and is no measurement.
    tables.write(
        dense[0].row("H200", "torch 2.11.0", "forward") | {"note": "refused"}, packed=False
    )
    tables.close()
    cells = read(tmp_path / "h200-torch.csv")
    assert len(cells) == len(dense) == 2 * 2 * 2 * len(LENGTHS)
    assert {cell.launch for cell in cells} == {Pass.BACKWARD}
    assert {(cell.batch, cell.milliseconds) for cell in cells} == {(BATCH, 2.5)}
    assert {cell.length for cell in cells if cell.causal} == set(LENGTHS)


def test_packed_cases() -> None:
    packed = [case for case in cases() if case.lengths]
    assert len(set(packed)) == len(packed)
    assert all(sum(case.lengths) == case.length == TOKENS and case.causal for case in packed)
    for case in packed:
        order = case.model.split("/")[1]
        if order != "drawn":
            assert list(case.lengths) == sorted(case.lengths, reverse=order == "descending")
