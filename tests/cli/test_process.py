"""The command as a process: its streams, its signals, its files, whatever a kernel does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import _console, cli, golden
from flamia_ref.attention import RECIPES
from flamia_ref.golden import making
from tests.golden.packs import FIRST, RECIPE, SECOND, WITH_TINY, flip, forge

ROOT = Path(__file__).resolve().parents[2]

NIGHTLY = pytest.mark.nightly  # each of these is a process; one of each kind runs daily


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two small cases."""
    folder = tmp_path_factory.mktemp("process") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", WITH_TINY)
        golden.make(folder, suite="tiny")
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with kernels of all kinds."""
    (tmp_path / "odd.py").write_text(
        "import asyncio, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "import pytest\n"
        "from flamia_ref.golden.simulator import numpy_kernel as good\n"
        "def loud(*a, **k):\n"
        "    os.write(1, b'from C\\n')\n"
        "    print('hello')\n"
        "    print('again', file=sys.__stdout__, flush=True)\n"
        "    os.system('echo from a child')\n"
        "    return good(*a, **k)\n"
        "def late(*a, **k):\n"
        "    import ctypes\n"
        "    ctypes.CDLL(None).puts(b'buffered by C')\n"
        "    return good(*a, **k)\n"
        "def cancelled(*a, **k): raise asyncio.CancelledError\n"
        "def skipped(*a, **k): pytest.skip('no GPU')\n"
        "def left(*a, **k): sys.exit(0)\n"
        "def closed(*a, **k): raise GeneratorExit\n"
        "def touching(*a, **k):\n"
        "    Path('called').touch()\n"
        "    return good(*a, **k)\n"
        "def slow(*a, **k):\n"
        "    Path('called').touch()\n"
        "    time.sleep(60)\n"
    )
    return tmp_path


def start(here: Path, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a folder."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(
        [sys.executable, "-m", "flamia_ref.cli", *map(str, arguments)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})},
        text=True,
        **{key: value for key, value in streams.items() if key != "env"},
    )


def run(here: Path, *arguments: Any, **options: Any) -> tuple[int, str, str]:
    """Run the command in a folder; return status, output and errors."""
    process = start(here, *arguments, **options)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


Inside = Callable[..., tuple[int, str, str]]


@pytest.fixture
def inside(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Inside:
    """`run` in this process, for what needs none of its own, without the seconds of a start."""
    monkeypatch.chdir(here)

    def inside(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return inside


def refused(result: tuple[int, str, str], message: str) -> None:
    """Require exit status 2 and one printable line on standard error."""
    code, output, errors = result
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert errors[:-1].isprintable()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("cancelled", f"failed in case {FIRST}: CancelledError"),
        pytest.param("skipped", "Skipped: no GPU", marks=NIGHTLY),
        ("left", "SystemExit: 0"),
        pytest.param("closed", "GeneratorExit", marks=NIGHTLY),
    ],
)
def test_a_kernel_cannot_choose_the_exit_status(
    here: Path, made: Path, kernel: str, message: str
) -> None:
    refused(run(here, "golden", "check", made, "--kernel", f"odd:{kernel}"), message)


def test_what_a_kernel_prints_is_not_the_result(here: Path, made: Path) -> None:
    code, output, errors = run(here, "golden", "check", made, "--kernel", "odd:loud", "--json")
    assert code == 0
    assert json.loads(output)["passed"] is True
    for text in ("from C", "hello", "again", "from a child"):
        assert errors.count(f"{text}\n") == 2
    code, output, errors = run(here, "golden", "check", made, "--kernel", "odd:late", "--json")
    assert (code, errors.count("buffered by C\n")) == (0, 2)
    assert json.loads(output)["passed"] is True


def test_the_report_names_what_was_typed(here: Path, made: Path) -> None:
    (here / "alias.py").write_text("from odd import good as mine\n")
    code, output, _ = run(
        here, "golden", "check", os.path.relpath(made, here), "--kernel", "alias:mine"
    )
    assert code == 0
    assert output.startswith(f"alias:mine against {os.path.relpath(made, here)}, numerics")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=NIGHTLY), signal.SIGINT]
)
def test_a_signal_while_a_kernel_runs(here: Path, made: Path, number: signal.Signals) -> None:
    process = start(here, "golden", "check", made, "--kernel", "odd:slow")
    for _ in range(600):
        if (here / "called").exists():
            break
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert output == ""
    assert errors == ("flamia-ref: interrupted\n" if number == signal.SIGINT else "")


def test_a_signal_that_was_ignored_still_is(here: Path, made: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from flamia_ref import cli\n"
        "import odd\n"
        "def hup(*a, **k):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    return odd.good(*a, **k)\n"
        "odd.hup = hup\n"
        f"sys.argv[1:] = ['golden', 'check', {str(made)!r}, '--kernel', 'odd:hup']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "closed", [pytest.param("1", marks=NIGHTLY), pytest.param("2", marks=NIGHTLY), "0 1 2"]
)
def test_closed_streams(here: Path, made: Path, closed: str) -> None:
    closing = " ".join(f"{number}>&-" for number in closed.split())
    for arguments, status in [
        ("formats list", 0),
        (f"golden check {made} --kernel odd:loud", 0),
        (f"golden check {made} --kernel odd:left", 2),
        ("formats", 2),
    ]:
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m flamia_ref.cli {arguments} {closing}"],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        assert ("1" not in closed.split()) or done.stdout == ""


def test_names_that_the_terminal_cannot_show(here: Path, made: Path, inside: Inside) -> None:
    (here / "pack\u00fc\udcff").symlink_to(made)
    for encoding in ("ascii", "utf-8"):
        code, output, errors = run(
            here, "golden", "show", "pack\u00fc\udcff", env={"PYTHONIOENCODING": encoding}
        )
        assert (code, errors) == (0, "")
        assert "udcff: suite tiny" in output
    refused(inside("golden", "show", "no\x1b[2J\nsuch"), r"no\x1b[2J such")
    refused(run(here, "golden", "show", made, "x", "y", "\x1b[2J"), r"arguments: \x1b[2J")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("no/such/r.json", "there is no folder"),
        pytest.param("folder", "it is a folder", marks=NIGHTLY),
        pytest.param("odd.py/r.json", "there is no folder", marks=NIGHTLY),
        pytest.param("a" * 300, "File name too long", marks=NIGHTLY),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_first(
    here: Path, made: Path, file: str, message: str
) -> None:
    (here / "folder").mkdir()
    result = run(here, "golden", "check", made, "--kernel", "odd:touching", "--json", file)
    refused(result, message)
    assert not (here / "called").exists()


def test_a_folder_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The superuser may write anywhere, so the system's answer is put in its mouth.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main(["formats", "list", "--json", str(tmp_path / "r.json")]) == 2
    assert f"{tmp_path} may not be written" in capsys.readouterr().err


def test_a_report_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "link.json").symlink_to("real.json")
    _console.write(str(tmp_path / "link.json"), "after")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "after"

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device"):
        _console.write(str(tmp_path / "real.json"), "broken")
    assert (tmp_path / "real.json").read_text() == "after"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_a_damaged_case_is_found_before_the_kernel_runs(here: Path, made: Path) -> None:
    pack = here / "pack"
    subprocess.run(["cp", "-r", made, pack], check=True)
    file = pack / f"{SECOND}.safetensors"
    flip(file, file.stat().st_size - 1)
    result = run(here, "golden", "check", "pack", "--kernel", "odd:touching")
    refused(result, "was changed since it was written")
    assert not (here / "called").exists()


def test_recipe_files(here: Path, inside: Inside) -> None:
    text = RECIPES[RECIPE].to_json()
    file = here / "recipe.json"
    arguments = ("golden", "make", "pack", "--recipe", "recipe.json")
    file.write_text(text.replace('"query": 128', '"query": 64').replace('"key": 128', '"key": 64'))
    refused(inside(*arguments), "differs from the registered one of that name; rename it")
    file.write_text(text.replace('"query": 128', '"query": 64, "query": 128'))
    refused(inside(*arguments), "recipe file recipe.json: 'query' comes twice in one object")
    file.write_text(text.replace('"flamia-mxfp8-folded"', '"mine", "name": "flamia-mxfp8-folded"'))
    refused(inside(*arguments), "recipe file recipe.json: 'name' comes twice in one object")
    assert not (here / "pack").exists()
    refused(
        inside("golden", "make", "pack", "--recipe", "flamia"),
        "did you mean 'flamia-mxfp8' or 'flamia-mxfp8-folded' or 'flamia-mxfp8-unguarded'?",
    )


def test_force_replaces_packs_that_cannot_be_read(here: Path, made: Path) -> None:
    pack = here / "pack"
    for kind in ("other version", "changed", "damaged case"):
        subprocess.run(["cp", "-r", made, pack], check=True)
        if kind == "other version":
            forge(pack, lambda document: document.update(schema_version=2))
        elif kind == "changed":
            text = (pack / "manifest.json").read_text()
            (pack / "manifest.json").write_text(text.replace("three documents", "four documents"))
        else:
            (pack / f"{FIRST}.safetensors").unlink()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(making, "SUITES", WITH_TINY)
            with pytest.raises(ValueError, match="replace it with --force"):
                golden.make(pack, suite="tiny")
            golden.make(pack, suite="tiny", force=True)
        assert [case.name for case in golden.load(pack)] == [FIRST, SECOND]
        subprocess.run(["rm", "-r", pack], check=True)


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, marks=NIGHTLY) for text in ("", "{", "[]", "\xff")),
        '{"schema": "other", "cases": []}',
    ],
)
def test_force_spares_what_may_be_no_pack(
    here: Path, made: Path, inside: Inside, text: str
) -> None:
    pack = here / "pack"
    subprocess.run(["cp", "-r", made, pack], check=True)
    (pack / "manifest.json").write_text(text)
    for force in ([], ["--force"]):
        result = inside("golden", "make", "pack", *force)
        refused(result, "does not say what belongs to a pack; delete the folder")
    assert (pack / f"{FIRST}.safetensors").exists()
