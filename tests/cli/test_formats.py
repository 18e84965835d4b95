"""`flamia-ref formats list | show | quantize | diff | identify`."""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from flamia_ref import _console, cli
from flamia_ref.formats import FORMATS, PRESETS, dequantize, quantize
from flamia_ref.golden import array_files


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the command in a new folder; return its status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main(["formats", *(str(argument) for argument in arguments)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


def refused(result: tuple[int, str, str], message: str) -> None:
    code, output, errors = result
    assert (code, output) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


def normal(rows: int = 32, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def test_list_is_by_library(run: Any) -> None:
    code, output, _ = run("list")
    assert code == 0
    lines = output.splitlines()
    assert "te (" in output
    for name, preset in PRESETS.items():
        line = next(line for line in lines if line.split()[:1] == [name])
        assert preset.evidence.value in line
        assert preset.scale.name in line
    data = json.loads(run("list", "--json")[1])
    assert data["formats"] == list(FORMATS)
    assert data["presets"] == list(PRESETS)
    assert [name for names in data["libraries"].values() for name in names] == list(PRESETS)
    assert data["libraries"]["torchao"]["torchao-mx-ceil-e4m3"]["rule"] == "2^(ceil(log2 amax) - 8)"


@pytest.mark.parametrize("name", ["te-nvfp4", "torchao018-mx-rceil-e2m1", "qwix018-mx-e4m3"])
def test_show_has_every_field_of_a_preset(run: Any, name: str) -> None:
    code, output, _ = run("show", name)
    assert code == 0
    shown = {line.strip().partition(":")[0]: line for line in output.splitlines()}
    fields = [field.name for field in dataclasses.fields(PRESETS[name])]
    assert set(fields) <= set(shown)
    assert "other" not in shown, "a field has no place among the others of its kind"
    assert PRESETS[name].source in output
    assert PRESETS[name].version in output
    data = json.loads(run("show", name, "--json")[1])
    assert set(fields) <= set(data)
    assert data["evidence"] == PRESETS[name].evidence.value
    assert "Infinity" not in run("show", name, "--json")[1]


def test_show_names_blocks_and_formulas(run: Any) -> None:
    output = run("show", "te-nvfp4")[1]
    for text in (
        "block: 1x16",
        "blocks: 1x16, 16x1",
        "quotient: amax * (tensor_scale * (1 / 6))",
        "scaled: x * min(1 / (scale * (1 / tensor_scale)), largest)",
        "nan_in_contract: no",
    ):
        assert text in output


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_quantize_and_identify(run: Any, ending: str) -> None:
    x = normal()
    np.save("x.npy", x)
    out = f"q{ending}"
    code, output, _ = run("quantize", "x.npy", out, "--preset", "te-nvfp4")
    assert (code, output.splitlines()[0]) == (0, f"wrote {out}: te-nvfp4, blocks of 1x16")
    made, found = quantize(x, "te-nvfp4"), array_files.arrays(out)
    np.testing.assert_array_equal(found["codes"], made.codes)
    np.testing.assert_array_equal(found["scales"], made.scales)
    assert found["tensor_scale"] == made.tensor_scale
    assert found["tensor_scale"].dtype == np.float32
    code, output, _ = run("identify", "x.npy", out)
    assert code == 0
    assert "te-nvfp4" in output.splitlines()[0]
    data = json.loads(run("identify", "x.npy", out, "--json")[1])
    assert "te-nvfp4" in data["explained_by"]
    changed = {name: array.copy() for name, array in found.items()}
    changed["codes"][3, 5] ^= 1
    Path(out).write_bytes(array_files.to_bytes(changed, ending))
    code, output, _ = run("identify", "x.npy", out)
    assert code == 1
    assert output.startswith("None of ")
    assert "first other one [3, 0]" in output


def test_quantize_takes_a_block_and_an_amax_and_bfloat16(run: Any) -> None:
    x = normal().astype(ml_dtypes.bfloat16)
    np.save("x.npy", x)
    Path("x.safetensors").write_bytes(safetensors.numpy.save({"x": x}))
    for name in ("x.npy", "x.safetensors"):
        code, _, errors = run(
            "quantize", name, "q.npz", "--preset", "te-mx-e4m3", "--block", "all", "1", "--force"
        )
        assert (code, errors) == (0, "")
        made = quantize(x, "te-mx-e4m3", block=("all", 1))
        np.testing.assert_array_equal(array_files.arrays("q.npz")["scales"], made.scales)
    options = ("--tensor-amax", "8", "--force")
    assert run("quantize", "x.npy", "q.npz", "--preset", "te-nvfp4", *options)[0] == 0
    assert array_files.arrays("q.npz")["tensor_scale"] == np.float32(2688) / np.float32(8)
    assert run("identify", "x.npy", "q.npz")[0] == 1
    assert run("identify", "x.npy", "q.npz", "--tensor-amax", "8")[0] == 0
    made = quantize(x, "te-nvfp4", tensor_amax=8.0)
    assert np.isfinite(dequantize(made)).all()


def test_quantize_overwrites_only_when_asked_and_leaves_nothing_behind(run: Any) -> None:
    np.save("x.npy", normal())
    given = ("quantize", "x.npy", "q.npz", "--preset", "te-mx-e4m3")
    assert run(*given)[0] == 0
    before = Path("q.npz").read_bytes()
    refused(run(*given), "q.npz exists; choose another name, or replace it with --force")
    assert run(*given, "--force")[0] == 0
    assert Path("q.npz").read_bytes() == before  # the same bytes

    def full(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", full)
        refused(run(*given, "--force"), "cannot write q.npz: No space left on device")
    assert Path("q.npz").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == ["q.npz", "x.npy"]


def test_diff_searches_the_boundaries(run: Any) -> None:
    code, output, _ = run("diff", "te-mx-e4m3", "torchao-mx-rceil-e4m3")
    assert code == 1
    assert "infinity input, scale:" in output
    assert "no difference found on ordinary, tiny, zero inputs" in output
    data = json.loads(run("diff", "te-mx-e4m3", "torchao-mx-rceil-e4m3", "--json")[1])
    assert data["none_of"] == ["ordinary", "tiny", "zero"]
    assert {w["kind"] for w in data["witnesses"]} == {"infinity", "NaN"}
    code, output, _ = run("diff", "te-mx-e4m3", "te-mx-e4m3", "--dtype", "bfloat16")
    assert code == 0
    assert "no difference found at" in output


def test_diff_on_a_file(run: Any) -> None:
    x = normal()
    np.savez("x.npz", other=x, x=x)
    code, output, _ = run("diff", "te-mx-e4m3", "ocp-mx-floor-e4m3", "--input", "x.npz")
    assert code == 1
    a, b = quantize(x, "te-mx-e4m3"), quantize(x, "ocp-mx-floor-e4m3")
    assert f"{(a.scales != b.scales).sum()} scales" in output
    assert "Step: scale rounding" in output
    code, output, _ = run("diff", "te-mx-e4m3", "modelopt-mx-e4m3", "--input", "x.npz")
    assert code == 0
    code, _, errors = run("diff", "te-mx-e4m3", "ocp-mx-floor-e4m3", "--json", "d.json")
    assert (code, errors) == (1, "")
    assert json.loads(Path("d.json").read_text())["witnesses"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "te-mx-e4m4"], "unknown format 'te-mx-e4m4'; did you mean"),
        (["diff", "te-mx-e4m3", "te-mx-e4m4"], "unknown preset 'te-mx-e4m4'"),
        (["diff", "te-mx-e4m3", "te-mx-e5m2"], "not comparable"),
        (["diff", "te-nvfp4", "sage3-nvfp4", "--tensor-amax", "1"], "goes with --input"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "no.npy"], "cannot read no.npy"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "x.npy", "--dtype", "float16"], "--dtype"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "x.txt"], "by its name"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "two.npz"], "name one of them x"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "cut.npy"], "no whole .npy file"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "cut.npz"], "no whole .npz file"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "object.npy"], "no whole .npy file"),
        (
            ["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "cut.safetensors"],
            "no whole safetensors",
        ),
        (["quantize", "x.npy", "q.bin", "--preset", "te-mx-e4m3"], "by its name"),
        (["quantize", "x.npy", "q.npz", "--preset", "te"], "unknown preset 'te'"),
        (["quantize", "x.npy", "no/q.npz", "--preset", "te-mx-e4m3"], "there is no folder"),
        (["quantize", "two.npz", "two.npz", "--preset", "te-mx-e4m3", "--force"], "two names"),
        (["quantize", "x.npy", "q.npz", "--preset", "te-nvfp4", "--tensor-amax", "nan"], "finite"),
        (["quantize", "x.npy", "q.npz", "--preset", "te-mx-e4m3", "--block", "2", "2"], "no block"),
        (["identify", "x.npy", "two.npz"], "has no codes and no scales; it has ['a', 'b']"),
        (["identify", "x.npy", "x.npy"], "by its name"),
        (["quantize", "x.npy", "q.npz/", "--preset", "te-mx-e4m3"], "the name of a folder"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "text.npy"], "does not begin as one"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "vast.npy"], "vast.npy is no whole"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "text.npz"], "a member that is no array"),
        (["diff", "te-mx-e4m3", "te-mx-e4m3", "--input", "float8.npy"], "without a type"),
    ],
)
def test_bad_input(run: Any, arguments: list[str], message: str) -> None:
    x = normal()
    np.save("x.npy", x)
    np.savez("two.npz", a=x, b=x)
    np.save("object.npy", np.array([{}]))
    np.save("float8.npy", x.astype(ml_dtypes.float8_e4m3fn))
    Path("text.npy").write_text("no array")
    with zipfile.ZipFile("text.npz", "w") as archive:
        archive.writestr("notes.txt", "no array")
    with Path("vast.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**17,)}
        np.lib.format.write_array_header_1_0(file, header)
    Path("x.txt").write_text("1")
    for kind in (".npy", ".npz", ".safetensors"):
        source = Path("x.npy") if kind == ".npy" else Path("two.npz")
        Path(f"cut{kind}").write_bytes(source.read_bytes()[:-5])
    result = run(*arguments)
    refused(result, message)
    assert "allow_pickle" not in result[2]
    assert not Path("q.npz").exists()


def test_a_block_that_is_no_number(run: Any) -> None:
    code, _, errors = run("diff", "te-mx-e4m3", "te-mx-e4m3", "--block", "1", "x")
    assert code == 2
    assert "neither a number nor `all`" in errors


def test_one_file_for_two_results(run: Any) -> None:
    np.save("x.npy", normal())
    given = ("quantize", "x.npy", "q.npz", "--preset", "te-mx-e4m3", "--json", "q.npz")
    refused(run(*given), "give two names")
    assert _console.same_file("q.npz", "./q.npz")


def test_the_json_of_quantize_replaces_only_when_asked(run: Any) -> None:
    np.save("x.npy", normal())
    Path("q.json").write_text("kept")
    given = ("quantize", "x.npy", "q.npz", "--preset", "te-mx-e4m3", "--json", "q.json")
    refused(run(*given), "q.json exists")
    assert Path("q.json").read_text() == "kept"
    assert not Path("q.npz").exists()
    assert run(*given, "--force")[0] == 0
    assert json.loads(Path("q.json").read_text())["preset"] == "te-mx-e4m3"
