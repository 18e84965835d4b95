"""Compilers and programs that do what they should not: each is one line, and never a result."""

from pathlib import Path

import pytest

from flamia_ref.device import toolchain
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.toolchain import (
    Compiler,
    ProgramFailed,
    compile_program,
    describe_device,
    find_compiler,
    run_program,
)

ARCH = ARCHITECTURES["sm_90a"]


def script(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


def nvcc(tmp_path: Path, text: str) -> Compiler:
    """A compiler whose last two arguments are the output, behind -o, and the source."""
    out = 'for one do before="$last"; last="$one"; done; out="$before"\n'
    return Compiler(path=str(script(tmp_path / "nvcc", out + text)), release=(13, 0))


def test_a_compiler_that_does_not_speak_utf8(tmp_path: Path) -> None:
    compiler = nvcc(tmp_path, r"printf 'error: \331tat\n' >&2; exit 1" + "\n")
    with pytest.raises(ProgramFailed, match=r"refuses convert.cu: error: .tat"):
        compile_program(compiler, tmp_path, "convert", ARCH)


def test_what_a_compiler_says_names_no_folder(tmp_path: Path) -> None:
    compiler = nvcc(tmp_path, 'echo "$last(3): fatal error: no" >&2; exit 1\n')
    with pytest.raises(ProgramFailed) as caught:
        compile_program(compiler, tmp_path, "convert", ARCH)
    assert str(tmp_path) not in str(caught.value)
    assert "convert.cu(3): fatal error: no" in str(caught.value)


def test_a_compiler_that_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"wrote no program for convert.cu"):
        compile_program(nvcc(tmp_path, "exit 0\n"), tmp_path, "convert", ARCH)


@pytest.mark.parametrize(
    "said",
    [
        "rubbish",
        "{}",
        "null",
        '{"name": "x"}',
        "",
        '{"name": "x", "capability": 9.0, "driver_cuda": "13.0", "runtime_cuda": "13.0"}',
    ],
)
def test_a_description_that_is_none(tmp_path: Path, said: str) -> None:
    made = f'printf \'#!/bin/sh\\necho %s\\n\' "\'{said}\'" > "$out"; chmod +x "$out"\n'
    with pytest.raises(ProgramFailed, match="not a description"):
        describe_device(nvcc(tmp_path, made), tmp_path)


def test_a_program_that_writes_no_file(tmp_path: Path) -> None:
    program = script(tmp_path / "special-sm_90a", "exit 0\n")
    with pytest.raises(ProgramFailed, match=r"ended well and wrote no 0.out"):
        run_program(program, [b"1234"], tmp_path)


def test_a_compiler_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "nvcc").write_bytes(b"\x7fELF rubbish")
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(ValueError, match=r"nvcc does not run: Exec format error$"):
        find_compiler(tmp_path / "nvcc")


def test_a_compiler_that_writes_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no CUDA release; is it nvcc"):
        find_compiler(script(tmp_path / "nvcc", r"printf '\\377\\376\\200'" + "\n"))


def test_a_command_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_COMPILE_SECONDS", 0.2)
    with pytest.raises(ProgramFailed) as caught:
        compile_program(nvcc(tmp_path, "exec sleep 9\n"), tmp_path, "convert", ARCH)
    assert str(caught.value) == "nvcc could not compile convert.cu: it took more than 0.2 s"
