"""`flamia-ref leak structure`: what it prints, what it writes, its exit status, and how it refuses."""

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import cli
from flamia_ref.attention import RECIPES, Use
from flamia_ref.leakage import structure
from flamia_ref.leakage.legal import LegalPairs
from flamia_ref.leakage.sharing import picture
from flamia_ref.report.heat_map import Cell
from tests.leakage.structure_recipes import COL, PREVIOUS, TENSOR, with_operands

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    try:
        code = cli.main([str(argument) for argument in ("leak", "structure", *arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    output, errors = capsys.readouterr()
    return code, output, errors


def test_the_table_of_a_recipe_that_leaks(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = run(capsys, "--recipe", "cudnn-mxfp8")
    assert (code, errors) == (1, "")
    rows = [line.split("  ") for line in output.splitlines()]
    cells = {row[0]: [entry.strip() for entry in row if entry.strip()] for row in rows}
    assert cells["o.v"][1:] == [
        "V in O", "te-mx-e4m3 32x1", "32 tokens", "diagonal", "O, dQ <- v later", "forward",
    ]  # fmt: skip
    assert cells["dk.q"][4:] == ["diagonal", "dK <- q earlier", "backward"]
    assert cells["dk.ds"][3:] == ["32 queries by 1 key", "-", "-", "-"]
    assert cells["s.q"][3] == "one token"
    assert "2 documents of 64, 20 tokens, causal" in output
    # 64 and 20 tokens: 2 blocks of 32 and one of 20.
    assert f"{2 * 496 + 190} illegal pairs" in output
    assert "such as O of token 0 (document 0, 0) <- v of token 1 (document 0, 1)" in output
    assert output.endswith("ILLEGAL here: 7092 pairs of tokens, forward, backward.\n")


@pytest.mark.parametrize("name", ["flamia-mxfp8", "flamia-mxfp8-folded"])
def test_a_legal_recipe(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, output, errors = run(capsys, "--recipe", name, "--lengths", "1000000")
    assert (code, errors) == (0, "")
    assert f"{name} is legal here" in output
    assert "illegal pairs" not in output
    assert "guarded" in output or name != "flamia-mxfp8"


def test_masks_are_said_and_used(capsys: pytest.CaptureFixture[str]) -> None:
    name = "cudnn-mxfp8"
    assert run(capsys, "--recipe", name, "--full", "--lengths", "64,20")[0] == 0
    code, output, _ = run(
        capsys, "--recipe", name, "--full", "--window", "3,-1", "--lengths", "40",
        "--lengths-k", "50", "--top-left",
    )  # fmt: skip
    assert code == 1
    assert "of 40 tokens with 50 keys, top_left, full, window 3, all" in output
    straddling = ("--full", "--grid", "pack", "--lengths", "20,30")
    code, output, _ = run(capsys, "--recipe", name, *straddling)
    assert code == 1
    assert "blocks from the start of the pack" in output
    assert "boundary" in output


def test_only_the_past_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A window of one key: the block before is not seen, and no later one reaches it.
    recipe = with_operands({Use.O_V: PREVIOUS}, gradient={"delta_source": "p_dp"})
    file = tmp_path / "previous.json"
    file.write_text(recipe.to_json())
    code, output, errors = run(capsys, "--recipe", file, "--lengths", "64", "--window", "0,0")
    assert (code, errors) == (0, "")
    assert output.endswith("ILLEGAL here: 1024 pairs of tokens, past.\n")


def test_a_recipe_of_a_file_that_is_not_computed_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(with_operands({Use.S_Q: COL}).to_json())
    code, output, errors = run(capsys, "--recipe", file, "--lengths", "64")
    assert (code, errors) == (1, "")
    assert "every tile" in output


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--recipe", "flamia-mxfp8-unguarded", "--lengths", "64,20")
    code, output, errors = run(capsys, *arguments, "--json")
    assert (code, errors) == (1, "")
    document = json.loads(output)
    assert (document["schema"], document["schema_version"]) == ("flamia-ref leak structure", 1)
    assert (document["recipe"], document["legal"]) == ("flamia-mxfp8-unguarded", False)
    assert document["lengths"] == [64, 20]
    assert [one["use"] for one in document["uses"]] == [str(use) for use in Use]
    (q,) = (one for one in document["uses"] if one["use"] == "s.q")
    assert (q["where"], q["severity"], q["couples"]) == ("every tile", "forward", "block")
    (found,) = (one for one in document["illegal"] if (one["output"], one["input"]) == ("out", "q"))
    assert found["counts"] == {"forward": 1182, "past": 1182}
    (example, *_) = document["examples"]
    assert example == {
        "output": "out", "out_token": 0, "input": "q", "in_token": 1, "severity": "forward",
    }  # fmt: skip
    file = tmp_path / "structure.json"
    code, output, errors = run(capsys, *arguments, "--json", file)
    assert output.startswith("flamia-mxfp8-unguarded, evidence")
    assert json.loads(file.read_text()) == document


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "structure.png"
    code, output, errors = run(capsys, "--recipe", "cudnn-mxfp8", "--png", file)
    assert (code, errors) == (1, "")
    assert output.endswith(f"wrote {file}\n")
    data = file.read_bytes()
    assert data.startswith(SIGNATURE)
    assert zlib.decompress(data[data.index(b"IDAT") + 4 : data.rindex(b"IEND") - 8])
    code, output, errors = run(capsys, "--recipe", "cudnn-mxfp8", "--png", file)
    assert (code, output) == (2, "")
    assert "exists; choose another name" in errors
    assert run(capsys, "--recipe", "cudnn-mxfp8", "--png", file, "--force")[0] == 1


def test_the_cells_of_the_picture_are_the_pairs() -> None:
    found = structure(with_operands({Use.O_V: TENSOR, Use.S_Q: COL}), lengths=[40, 9])
    legal = LegalPairs(found.mask)
    drawn = picture.heat_map(found)
    assert [label for label, _ in drawn.rows] == ["O", "LSE", "dQ", "dK", "dV"]
    for output, (_, panels) in zip(("out", "lse", "dq", "dk", "dv"), drawn.rows, strict=True):
        for name, panel in zip(("q", "k", "v", "dout"), panels, strict=True):
            pairs, may = found.pairs(output, name), legal.dense(output, name)
            for value, where in (
                (Cell.STILL, ~pairs & may),
                (Cell.MOVED, pairs & may),
                (Cell.FORBIDDEN_STILL, ~pairs & ~may),
                (Cell.FORBIDDEN_MOVED, pairs & ~may),
            ):
                np.testing.assert_array_equal(panel.cells[::2] == value, where)
            np.testing.assert_array_equal(panel.cells[::2], panel.cells[1::2])
            count = int((pairs & ~may).sum())
            assert panel.caption == (f"{count} illegal" if count else "legal")


def test_a_picture_of_many_tokens_shows_what_is_illegal_in_each_cell() -> None:
    found = structure("cudnn-mxfp8", lengths=[1000])
    panel = picture.heat_map(found).rows[0][1][2]
    step = 6  # the least with which 1000 tokens are at most 192 cells
    assert panel.cells.shape == (2 * 167, 167)
    pairs = found.illegal_pairs("out", "v")
    for row, column in ((0, 0), (0, 1), (10, 11), (100, 100), (100, 20), (166, 166)):
        part = pairs[row * step : (row + 1) * step, column * step : (column + 1) * step]
        assert (panel.cells[2 * row, column] == Cell.FORBIDDEN_MOVED) == part.any()


def test_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = ("--recipe", "cudnn-mxfp8")
    for arguments, message in (
        ((), "--recipe"),
        (("--recipe", "cudnn"), "unknown recipe 'cudnn'"),
        (("--recipe", "no/such.json"), "no/such.json"),
        ((*recipe, "--lengths", "a"), "must be whole numbers"),
        ((*recipe, "--lengths", "-3"), "lengths must be whole numbers from 0 on"),
        ((*recipe, "--window", "3"), "must be two whole numbers"),
        ((*recipe, "--window", "3,2"), "hides every key to the right"),
        ((*recipe, "--lengths-k", "3"), "give equally many"),
        ((*recipe, "--grid", "tile"), "invalid choice"),
        ((*recipe, "--png", tmp_path), "it is a folder"),
        ((*recipe, "--lengths", "5000", "--png", tmp_path / "x.png"), "a picture shows"),
        ((*recipe, "--png", tmp_path / "x", "--json", tmp_path / "x"), "give two names"),
    ):
        code, output, errors = run(capsys, *arguments)
        assert (code, output) == (2, ""), arguments
        assert message in errors, arguments
        assert errors.count("\n") == 1, arguments
    assert not list(tmp_path.iterdir())


def test_a_process_of_its_own_without_jax() -> None:
    program = """
import sys
from flamia_ref import cli
for name in ("jax", "matplotlib", "torch", "hypothesis"):
    sys.modules[name] = None
sys.exit(cli.main(["leak", "structure", "--recipe", "cudnn-mxfp8"]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "ILLEGAL here" in done.stdout


def test_every_recipe_has_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RECIPES:
        code, output, _ = run(capsys, "--recipe", name)
        assert output.startswith(f"{name}, evidence {RECIPES[name].label}")
        assert code == int(not structure(name, lengths=[64]).legal)
