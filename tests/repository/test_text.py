"""What no file of the repository may hold."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.repository.layout import ROOT

# Absolute paths of somebody's machine: home folders and folders of a build service.
MACHINE_PATH = re.compile(rb"(?<![\w.~$})-])/(?:home|root|Users|work|builds|mnt)/\w")


def files() -> list[Path]:
    """Return what git has or would take: tracked files and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in files()
        for match in MACHINE_PATH.finditer(path.read_bytes())
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
@pytest.mark.parametrize("before", ["", "see ", '"', "(", "path=", "file://"])
def test_such_a_place_is_recognised(folder: str, before: str) -> None:
    assert MACHINE_PATH.search(f"{before}/{folder}/name".encode())


@pytest.mark.parametrize("text", ["a/work/b", "$HOME/work/b", "../work/b", "~/work/b", "/workers/"])
def test_a_relative_path_is_not(text: str) -> None:
    assert not MACHINE_PATH.search(text.encode())
