"""The command line: what it prints, where, and its exit status."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import __version__, _console, cli, golden
from flamia_ref.attention import RECIPES
from flamia_ref.formats import FORMATS, PRESETS
from flamia_ref.golden import making
from tests.golden.packs import FIRST, RECIPE, SECOND, WITH_TINY, flip, offset

ROOT = Path(__file__).resolve().parents[2]
FILE = f"{FIRST}.safetensors"
KERNEL = "flamia_ref.golden.simulator:numpy_kernel"
FAULTY = "examples.kernels:v_scale_off_by_one"
WRONG_BACKWARD = "examples.kernels:delta_of_truncated_o"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two small cases."""
    folder = tmp_path_factory.mktemp("cli") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", WITH_TINY)
        golden.make(folder, suite="tiny")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process, with a suite "tiny"; return status, output and errors."""
    monkeypatch.setattr(making, "SUITES", WITH_TINY)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: Any) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        output, errors = capsys.readouterr()
        return code, output, errors

    return run


def command(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "flamia_ref.cli", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        timeout=120,
        **{"capture_output": True} | options,
    )


def program(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has imported `sys` and `cli`."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom flamia_ref import cli\n{text}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(result: tuple[int, str, str], message: str) -> None:
    """Require exit status 2 and one line on standard error."""
    code, output, errors = result
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.startswith("flamia-ref")
    assert errors.count("\n") == 1
    assert errors.endswith("\n")


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"flamia-ref {__version__}\n", "")
    code, output, errors = run("--help")
    assert (code, errors) == (0, "")
    assert all(word in output for word in ("golden", "formats", "recipes"))
    for group in (["golden"], ["golden", "make"], ["golden", "check"], ["formats"], ["recipes"]):
        assert run(*group, "--help")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["golden"], "the following arguments are required: COMMAND"),
        (["golden", "chek"], "invalid choice: 'chek'"),
        (["golden", "make"], "the following arguments are required: DIR"),
        (["golden", "check", "pack"], "one of the arguments --actual --kernel is required"),
        (["golden", "check", "p", "--actual", "a", "--kernel", "m:f"], "not allowed with"),
        (["golden", "make", "pack", "--rows"], "unrecognized arguments: --rows"),
        (["golden", "make", "pack", "--forc"], "unrecognized arguments: --forc"),
        (
            ["golden", "make", "tests", "--suite", "tiny"],
            "exists and is no golden pack; choose another",
        ),
        (["golden", "make", "new", "--suite", "standart"], "unknown suite 'standart'"),
        (["golden", "make", "no/such/pack"], "there is no folder"),
        (["golden", "make", "new", "--recipe", "flamia"], "unknown recipe 'flamia'"),
        (["golden", "make", "new", "--recipe", "no/such.json"], "cannot read no/such.json"),
        (["golden", "make", "new", "--recipe", "pyproject.toml"], "recipe file pyproject.toml: "),
        (["golden", "make", "new", "--recipe", RECIPE, "--recipe", RECIPE], "given twice"),
        (["golden", "check", "no-such-pack", "--kernel", KERNEL], "there is no folder"),
        (["golden", "check", "tests", "--kernel", KERNEL], "is no golden pack"),
        (["golden", "show", "tests"], "is no golden pack"),
        (["formats", "show", "e4m4"], "unknown format 'e4m4'; did you mean 'e4m3'"),
        (["recipes", "show", "flamia-mxfp8-fold"], "did you mean 'flamia-mxfp8-folded'"),
    ],
)
def test_bad_usage(run: Run, arguments: list[str], message: str) -> None:
    refused(run(*arguments), message)
    assert not (ROOT / "new").exists()


def test_make_then_check(run: Run, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    code, output, errors = run("golden", "make", pack, "--suite", "tiny")
    assert (code, errors) == (0, "")
    digest = golden.load(pack).manifest.digest
    assert f"wrote {pack}: suite tiny, 2 cases" in output
    assert digest in output

    code, output, errors = run("golden", "check", pack, "--kernel", KERNEL)
    assert (code, errors) == (0, "")
    assert output.endswith("PASS: 2 cases: 2 pass\n")

    code, output, errors = run("golden", "check", pack, "--kernel", FAULTY)
    assert (code, errors) == (1, "")
    assert "first departs at v.scales; every stage that leads to it is equal" in output
    # Token 18, the middle one of 37, is number 16 of document 2.
    assert "document 2, kv head 0, token 18, position 16, tile 0, block 0" in output
    scale = int(golden.load(pack)[FIRST].tensors["v.scales"][18, 0, 0])
    assert (
        f"scale: expected 0x{scale:02x} (2^{scale - 127}), "
        f"actual 0x{scale + 1:02x} (2^{scale - 126})"
    ) in output
    assert output.endswith("FAIL: 2 cases: 2 bit mismatch\n")

    code, output, errors = run("golden", "check", pack, "--kernel", WRONG_BACKWARD)
    assert (code, errors) == (1, "")
    assert "first departs at delta; every stage that leads to it is equal" in output

    refused(run("golden", "make", pack, "--suite", "tiny"), "--force")
    assert run("golden", "make", pack, "--suite", "tiny", "--force")[0] == 0
    assert golden.load(pack).manifest.digest == digest


def test_packs_of_several_recipes(run: Run, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    recipes = ("bf16-fa4", "cudnn-mxfp8", "flamia-nvfp4-fp8-ue4m3")
    arguments = [word for name in recipes for word in ("--recipe", name)]
    code, output, _ = run("golden", "make", pack, "--suite", "tiny", *arguments)
    assert code == 0
    assert all(f"{name} ({RECIPES[name].label})" in output for name in recipes)
    code, output, _ = run("golden", "check", pack, "--kernel", KERNEL)
    assert code == 0
    assert output.endswith("PASS: 6 cases: 6 pass\n")
    code, output, _ = run("golden", "show", pack, "tiny.cudnn-mxfp8")
    assert code == 0
    (line,) = (line for line in output.splitlines() if "do.dv.scales.tiled_transposed.2 " in line)
    assert line.split()[1:6] == ["F8_E8M0", "[2,", "1,", "1,", "512]"]
    # Columns are as wide as the longest name.
    assert len({line.index("F8_") for line in output.splitlines() if "F8_" in line}) == 1


def test_a_kernel_without_a_backward(
    run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forward_only.py").write_text(
        "from flamia_ref.golden.simulator import numpy_kernel\n"
        "def kernel(q, k, v, *, cu_seqlens, causal, softmax_scale):\n"
        "    settings = dict(cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale)\n"
        "    return numpy_kernel(q, k, v, **settings)\n"
    )
    code, output, _ = run("golden", "check", made, "--kernel", "forward_only:kernel")
    assert code == 0
    assert output.count("forward only: nothing of the backward was given") == 2
    report = json.loads(
        run("golden", "check", made, "--kernel", "forward_only:kernel", "--json")[1]
    )
    assert {case["note"] for case in report["cases"]} == {
        "forward only: nothing of the backward was given"
    }


def test_check_of_files(run: Run, made: Path, tmp_path: Path) -> None:
    actual = Path(shutil.copytree(made, tmp_path / "actual"))
    assert run("golden", "check", made, "--actual", actual)[0] == 0
    assert run("golden", "check", made, "--actual", actual / FILE)[0] == 0
    (actual / "manifest.json").write_text("{")
    flip(actual / FILE, offset(actual / FILE, "q.scales"))
    code, output, _ = run("golden", "check", made, "--actual", actual)
    assert code == 1
    assert "first departs at q.scales" in output
    assert run("golden", "check", made, "--actual", actual / FILE)[0] == 1
    (actual / FILE).write_bytes(b"junk")
    refused(run("golden", "check", made, "--actual", actual), "no whole safetensors file")
    refused(run("golden", "check", made, "--actual", made), "is the pack's own file")
    refused(run("golden", "check", made, "--actual", tmp_path), "holds no results of this pack")
    refused(run("golden", "check", made, "--actual", tmp_path / "no"), "there is no file or folder")


def test_a_damaged_pack_is_bad_input(run: Run, made: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(made, tmp_path / "pack"))
    flip(pack / FILE, offset(pack / FILE, "out"))
    message = "tensor out was changed since it was written"
    refused(run("golden", "check", pack, "--kernel", KERNEL), message)
    refused(run("golden", "check", pack, "--actual", made), message)
    refused(run("golden", "show", pack, FIRST), message)
    (pack / FILE).unlink()
    refused(run("golden", "show", pack), "is missing; the manifest lists it")


def test_kernels_that_cannot_be_used(
    run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_kernels.py").write_text(
        "def fails(q, k, v, **_):\n    raise RuntimeError('line one\\nline two')\n"
        "def leaves(q, k, v, **_):\n    raise SystemExit(0)\n"
        "def nothing(q, k, v, **_):\n    return {}\n"
    )
    for name, message in [
        ("bad_kernels", "must have the form module:function"),
        ("bad_kernel:f", "there is no module 'bad_kernel' here"),
        ("bad_kernels:fail", "did you mean 'fails'"),
        ("bad_kernels:fails", "RuntimeError: line one line two"),
        ("bad_kernels:leaves", "SystemExit: 0"),
        ("bad_kernels:nothing", "hold no stage and no output"),
    ]:
        refused(run("golden", "check", made, "--kernel", name), message)


def test_json(run: Run, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(
        "from flamia_ref.golden.simulator import numpy_kernel\n"
        "def kernel(*tensors, **keywords):\n"
        "    print('hello')\n"
        "    return numpy_kernel(*tensors, **keywords)\n"
    )
    code, output, errors = run("golden", "check", made, "--kernel", "loud:kernel", "--json")
    assert code == 0
    assert json.loads(output)["passed"] is True
    assert errors == "hello\nhello\n"

    code, output, errors = run("golden", "check", made, "--kernel", KERNEL, "--json", "r.json")
    assert (code, errors) == (0, "")
    assert output.endswith("PASS: 2 cases: 2 pass\n")
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "pass"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "loud.py",
        "r.json",
    ]

    code, output, errors = run("golden", "check", made, "--kernel", KERNEL, "--json", "no/r.json")
    assert code == 2
    assert errors == f"flamia-ref: cannot write no/r.json: there is no folder {tmp_path}/no\n"
    assert output == ""

    code, output, _ = run("golden", "make", "pack", "--suite", "tiny", "--json")
    assert json.loads(output)["cases"] == [FIRST, SECOND]
    assert json.loads(run("golden", "show", "pack", "--json")[1])["suite"] == "tiny"
    shown = json.loads(run("golden", "show", "pack", FIRST, "--json")[1])
    assert shown["spec"]["lengths"] == [2, 0, 35]


def test_show(run: Run, made: Path) -> None:
    code, output, _ = run("golden", "show", made)
    assert code == 0
    assert FIRST in output
    assert "three documents" in output
    code, output, _ = run("golden", "show", made, "tiny")
    assert code == 0
    assert "lengths: 2, 0, 35" in output
    assert "p.o.codes.2" in output
    refused(run("golden", "show", made, "tinny"), "unknown case 'tinny'")


def test_formats_and_recipes(run: Run, tmp_path: Path) -> None:
    code, output, _ = run("formats", "list")
    assert code == 0
    assert all(name in output for name in (*FORMATS, *PRESETS))
    assert json.loads(run("formats", "list", "--json")[1])["formats"] == list(FORMATS)
    for name in (*FORMATS, *PRESETS):
        code, output, _ = run("formats", "show", name)
        assert code == 0
        assert f"name: {name}" in output
        assert ("max: 448.0" in output) == (name in ("e4m3", "ue4m3"))
        assert json.loads(run("formats", "show", name, "--json")[1])["name"] == name
    code, output, _ = run("recipes", "list")
    assert code == 0
    assert all(name in output for name in RECIPES)
    code, output, _ = run("recipes", "show", RECIPE)
    assert code == 0
    assert json.loads(output)["name"] == RECIPE


def test_a_recipe_from_a_file(run: Run, tmp_path: Path) -> None:
    recipe = json.loads(RECIPES[RECIPE].to_json())
    recipe["name"] = "mine"
    (tmp_path / "mine.json").write_text(json.dumps(recipe))
    pack = tmp_path / "pack"
    arguments = ("golden", "make", pack, "--suite", "tiny", "--recipe")
    assert run(*arguments, tmp_path / "mine.json", "--recipe", RECIPE)[0] == 0
    names = [case.name for case in golden.load(pack)]
    assert names == ["tiny.mine", "tiny-poison.mine", FIRST, SECOND]
    assert run("golden", "check", pack, "--kernel", KERNEL)[0] == 0

    del recipe["softmax"]
    (tmp_path / "mine.json").write_text(json.dumps(recipe))
    arguments = ("golden", "make", tmp_path / "other", "--suite", "tiny", "--recipe")
    refused(run(*arguments, tmp_path / "mine.json"), "softmax")
    for text in ("[" * 100_000, "\x00", '{"name": 3}', "null"):
        (tmp_path / "mine.json").write_text(text)
        refused(run(*arguments, tmp_path / "mine.json"), "recipe file")
    (tmp_path / "mine.json").write_bytes(b"\xff\xfe")
    refused(run(*arguments, tmp_path / "mine.json"), "recipe file")
    refused(run(*arguments, tmp_path), "Is a directory")


def test_a_full_disk(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(run("golden", "make", tmp_path / "pack", "--suite", "tiny"), "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    done = program(f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
sys.argv[1:] = ["golden", "make", {str(tmp_path / "pack")!r}]
sys.exit(cli.main())
""")
    refused((done.returncode, done.stdout, done.stderr), "File too large; nothing was left behind")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output(made: Path) -> None:
    with open("/dev/full", "w") as full:
        done = command(
            "golden",
            "show",
            made,
            capture_output=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("golden", "show", made, "--json", "/dev/full")
    assert done.returncode == 2
    assert done.stderr == "flamia-ref: cannot write /dev/full: No space left on device\n"


def test_a_closed_pipe(made: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = command(
            "golden",
            "show",
            made,
            capture_output=False,
            stdout=writing,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM]
)
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    done = program(f"""
import os
from flamia_ref.golden import making
def stopped(*_):
    os.kill(os.getpid(), {int(number)})
    raise AssertionError("the signal did not stop us")
making.simulate = stopped
sys.argv[1:] = ["golden", "make", {str(tmp_path / "pack")!r}]
sys.exit(cli.main())
""")
    assert done.returncode == 128 + number
    assert done.stderr == ("flamia-ref: interrupted\n" if number == signal.SIGINT else "")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_ours_does_not_look_like_a_mismatch(
    run: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a fault")

    monkeypatch.setattr(golden, "load", broken)
    code, _, errors = run("golden", "show", made)
    assert code == 2
    assert "Traceback" in errors


def test_progress_is_for_terminals_only(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_console, "_PROGRESS_AFTER", -1.0)
    assert run("golden", "make", tmp_path / "one", "--suite", "tiny")[2] == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    errors = run("golden", "make", tmp_path / "two", "--suite", "tiny")[2]
    assert errors == f"0 of 2 done, now {FIRST}\n1 of 2 done, now {SECOND}\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_console, "_columns", lambda: 60)
    errors = run("golden", "make", tmp_path / "three", "--suite", "tiny")[2]
    first, second, last = errors.split("\r")[1:]
    assert first == f"[------------------------] 0/2: {FIRST}"[:59] + "\x1b[K"
    assert second.startswith("[############------------] 1/2, 0:0")
    assert len(second) == 59 + len("\x1b[K")
    # The line is clear when the result is printed.
    assert last == "\x1b[K"
