"""`flamia-ref leak safeguards`: what it prints, what it writes, its exit status, and how it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import cli
from flamia_ref.leakage import Alternative

PNG = b"\x89PNG\r\n\x1a\n"
FEW = [f"--without={one}" for one in Alternative if one not in ("as it is", "bfloat16")]
QUICK = ["--lengths", "40", "--head-dim", "32", "--no-proof", "--at", "64,100", *FEW]


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    try:
        code = cli.main([str(argument) for argument in ("leak", "safeguards", *arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    output, errors = capsys.readouterr()
    return code, output, errors


def test_a_study_with_its_table_its_picture_and_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, document = tmp_path / "front.png", tmp_path / "study.json"
    code, output, errors = run(
        capsys, "--recipe", "cudnn-mxfp8", *QUICK, "--picture", picture, "--json", document
    )
    assert (code, errors) == (0, "")
    # Four groups of two alternatives: one combination has no use that leaks.
    assert "16 combinations are computed, 15 of them with a use that leaks alone" in output
    assert "[cudnn-mxfp8-pv-bf16]" in output
    assert "work 64" in output
    assert output.endswith(f"wrote {picture}\n")
    assert picture.read_bytes().startswith(PNG)
    found = json.loads(document.read_text(encoding="utf-8"))
    assert found["schema"] == "flamia-ref leak safeguards"
    assert [point["names"] for point in found["points"] if point["front"]] == [
        ["cudnn-mxfp8-pv-bf16"]
    ]
    code, output, errors = run(capsys, "--recipe", "cudnn-mxfp8", *QUICK, "--picture", picture)
    assert (code, output) == (2, "")
    assert "exists" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--recipe", "no-such-recipe"),
        ("--recipe", "cudnn-mxfp8", "--group", "k"),
        ("--recipe", "cudnn-mxfp8", "--without", "folding"),
        ("--recipe", "cudnn-mxfp8", "--at", "0"),
        ("--recipe", "cudnn-mxfp8", "--lengths", "x"),
        ("--recipe", "cudnn-mxfp8", "--data", "/nowhere/inputs.npz"),
        ("--recipe", "cudnn-mxfp8", "--head-dim", "0"),
        ("--recipe", "cudnn-mxfp8", "--head-dim=-4"),
        ("--recipe", "cudnn-mxfp8", "--runs", "0"),
        ("--recipe", "cudnn-mxfp8", "--most", "0"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1


def test_a_file_of_fewer_tokens_than_lengths_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path(__file__).parents[1] / "oracles" / "smollm2" / "layer14-group0.npz"
    arguments = ("--recipe", "cudnn-mxfp8", "--data", file, "--lengths", "512,1")
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert "has 512 tokens, and --lengths asks for 513; give 512 or fewer" in errors
