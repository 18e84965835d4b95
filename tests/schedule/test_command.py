"""`flamia-ref schedule simulate | compare | validate`."""

import json
import time
from pathlib import Path

import pytest

from flamia_ref import cli
from flamia_ref.schedule.measured import COLUMNS
from flamia_ref.schedule.policies import POLICIES

PNG = b"\x89PNG\r\n\x1a\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main(["schedule", *(str(argument) for argument in arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


SMALL = ("--cu-seqlens", "lengths:300,2x512", "--heads", "4/2")


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("simulate", *SMALL, "--recipe", "cudnn-mxfp8")
    code, text, errors = run(capsys, *arguments)
    assert (code, errors) == (0, "")
    for part in (
        "cudnn-mxfp8 on B200, modelled",
        "3 documents of 300 to 512 tokens",
        "1324 in all",
    ):
        assert part in text
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    # 2, 2 and 2 tiles of 256 queries, 4 heads; 3, 4 and 4 of 128 keys.
    assert lines["forward"][3] == "24"
    assert lines["backward"][3] == "44"
    assert lines["backward"][4] == str(4 * (6 + 10 + 10))
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert found["tokens"] == 1324
    assert [one["tiles"] for one in found["launches"]] == [24, 44]
    assert [one["policy"] for one in found["launches"]] == ["cudnn-thd", "cudnn-thd"]
    assert found["seconds"] == pytest.approx(
        sum(one["seconds"] for one in found["launches"]) + found["quantization_seconds"]
    )
    fused = json.loads(run(capsys, *arguments, "--fused", "--forward", "--json")[1])
    assert fused["quantization_seconds"] == 0
    assert [one["pass"] for one in fused["launches"]] == ["forward"]


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    arguments = ("simulate", *SMALL, "--recipe", "bf16-fa4", "--plot", path)
    code, text, _ = run(capsys, *arguments)
    assert code == 0
    assert text.rstrip().endswith(f"wrote {path}")
    assert path.read_bytes().startswith(PNG)
    path.write_text("mine")
    code, text, errors = run(capsys, *arguments)
    assert (code, text, path.read_text()) == (2, "", "mine")
    assert "--force" in errors
    assert run(capsys, *arguments, "--force")[0] == 0
    assert path.read_bytes().startswith(PNG)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("compare", *SMALL, "--recipe", "bf16-fa4", "--recipe", "flamia-mxfp8")
    code, text, _ = run(capsys, *arguments)
    assert code == 0
    packed = [name for name, one in POLICIES.items() if not one.dense]
    for recipe in ("bf16-fa4", "flamia-mxfp8"):
        lines = [line for line in text.splitlines() if line.startswith(f"{recipe} ")]
        assert len(lines) == 1 + len(packed)
        assert any(line.endswith("*") for line in lines)
    found = json.loads(run(capsys, *arguments, "--policy", "lpt", "--json")[1])
    assert [(x["recipe"], x["asked"]) for x in found["entries"]] == [
        ("bf16-fa4", "lpt"),
        ("flamia-mxfp8", "lpt"),
    ]


def test_validate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = (
        f"GB200,m,cudnn,v,bf16,causal,1,{length},{length},2,2,64,64,forward,False,{time}"
        for length, time in ((32768, 2.0), (2048, 0.05), (8192, 0.2))
    )
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    code, text, _ = run(capsys, "validate", "--measurements", path)
    assert code == 0
    assert "all cells that nothing was fitted on: 1," in text
    assert text.count(" causal ") == 3
    assert "What the model cannot see:" in text
    found = json.loads(run(capsys, "validate", "--measurements", path, "--json")[1])
    assert [x["role"] for x in found["cells"]] == ["efficiency", "overhead", "checked"]
    assert found["cells"][0]["predicted_ms"] == pytest.approx(2.0, rel=1e-6)
    assert " causal " not in run(capsys, "validate", "--measurements", path, "--groups")[1]


@pytest.mark.nightly
def test_validate_the_published_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "validate", "--json")[1])
    assert found["checked"] > 400
    assert found["median"] < 0.1


SIMULATE = ("simulate", *SMALL, "--recipe", "bf16-fa4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SIMULATE, "--gpu", "B20"), "unknown GPU 'B20'; did you mean 'B200'"),
        ((*SIMULATE, "--policy", "ltp"), "unknown policy 'ltp'; did you mean 'lpt'"),
        ((*SIMULATE, "--library", "cudn"), "unknown library 'cudn'; did you mean 'cudnn'"),
        ((*SIMULATE[:-1], "bf16-fa5"), "'bf16-fa5'; did you mean 'bf16-fa4'"),
        ((*SIMULATE, "--policy", "fa4-lpt"), "is of documents of one length"),
        ((*SIMULATE, "--gpu", "H200", "--library", "cudnn_oss"), "nothing was fitted"),
        ((*SIMULATE, "--heads", "4/3"), "must be a multiple of kv_heads"),
        ((*SIMULATE, "--heads", "0"), "heads is 0"),
        ((*SIMULATE, "--heads", "-4"), "--heads is '-4'|expected one argument"),
        ((*SIMULATE, "--heads", "4/2/1"), "must be a number, or two like 32/8"),
        ((*SIMULATE, "--heads", "²"), "must be a number, or two like 32/8"),
        ((*SIMULATE, "--head-dim", ""), "must be a number, or two like 32/8"),
        ((*SIMULATE, "--head-dim", "0"), "head_dim is 0"),
        ((*SIMULATE, "--window", "-2"), "window is|expected one argument"),
        (("compare", *SMALL, "--gpu", "B30"), "unknown GPU 'B30'; did you mean 'B300'"),
        (("compare", *SMALL, "--policy", "lptt"), "did you mean 'lpt'"),
        (("compare", *SMALL, "--recipe", "flamia-mxfp9"), "did you mean 'flamia-mxfp8'"),
        (("simulate", "--cu-seqlens", "lengths:-5", "--recipe", "bf16-fa4"), "no length like 512"),
        (("simulate", "--cu-seqlens", "0,9,5", "--recipe", "bf16-fa4"), "must not decrease"),
        (("simulate", "--cu-seqlens", "nofile", "--recipe", "bf16-fa4"), "no such file"),
        (("validate", "--measurements", "nofile.csv"), "cannot read nofile.csv"),
    ],
)
def test_bad_input(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, text, errors = run(capsys, *arguments)
    assert (code, text) == (2, "")
    (line,) = errors.splitlines()[-1:]
    assert "Traceback" not in errors
    assert any(part in line for part in message.split("|")), line
    assert len(errors.splitlines()) == 1 or line.startswith("flamia-ref schedule"), errors


@pytest.mark.parametrize("given", ["0,0", "lengths:3x0"])
def test_zero_tokens(capsys: pytest.CaptureFixture[str], given: str, tmp_path: Path) -> None:
    arguments = ("simulate", "--cu-seqlens", given, "--recipe", "flamia-mxfp8")
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert (found["tokens"], found["seconds"]) == (0, 0.0)
    code, text, _ = run(capsys, *arguments, "--plot", tmp_path / "nothing.png")
    assert code == 0
    assert "0 in all" in text
    assert run(capsys, "compare", "--cu-seqlens", given, "--recipe", "bf16-fa4")[0] == 0


def test_empty_documents_and_tiles_larger_than_documents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Seven tokens in two documents, with empty ones between: a tile each and head.
    arguments = ("--heads", "4", "--recipe", "bf16-fa4", "--json")
    with_empty = run(capsys, "simulate", "--cu-seqlens", "0,0,3,3,7,7", *arguments)[1]
    found = json.loads(with_empty)
    assert [one["tiles"] for one in found["launches"]] == [8, 8]
    # A tile of the forward holds two blocks of 128 queries, both of which are computed.
    assert [one["products"] for one in found["launches"]] == [16, 8]
    without = json.loads(run(capsys, "simulate", "--cu-seqlens", "0,3,7", *arguments)[1])
    assert found["seconds"] == without["seconds"]


@pytest.mark.parametrize("given", ["lengths:1000x10000", "lengths:10000000"])
def test_ten_million_tokens(capsys: pytest.CaptureFixture[str], given: str) -> None:
    began = time.process_time()
    arguments = ("--heads", "1", "--recipe", "cudnn-mxfp8", "--json")
    code, text, _ = run(capsys, "simulate", "--cu-seqlens", given, *arguments)
    assert code == 0
    assert json.loads(text)["tokens"] == 10_000_000
    assert time.process_time() - began < 10  # a second or two here
