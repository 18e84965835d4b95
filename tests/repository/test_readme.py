"""What README.md shows is what one gets."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flamia_ref.formats import FORMATS, PRESETS

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples and the command, where the README is followed from the top."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "examples", folder / "examples")
    commands = folder / "bin"
    commands.mkdir()
    command = commands / "flamia-ref"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flamia_ref.cli "$@"\n')
    command.chmod(0o755)
    return folder


def test_every_output(place: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    session = "\n".join(text for kind, text in BLOCKS if kind == "console")
    commands = re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]
    assert len(commands) >= 3
    # One shell for all, so that `echo $?` sees the command before it.
    marker = "-- end of output --"
    script = "\n".join(
        f"{c.splitlines()[0]}\nstatus=$?; echo '{marker}'; (exit $status)" for c in commands
    )
    run = subprocess.run(
        ["sh"],
        input=script,
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    printed = run.stdout.split(f"{marker}\n")
    for command, output in zip(commands, printed, strict=False):
        shown = command.splitlines()[1:]
        lines = output.splitlines()
        if shown and shown[-1] == "...":
            shown, lines = shown[:-1], lines[: len(shown) - 1]
        # Versions are those of whoever runs it.
        shown, lines = (
            [
                re.sub(r"^environment: python [\d.]+, numpy [\d.]+\w*$", "environment", line)
                for line in part
                if line
            ]
            for part in (shown, lines)
        )
        assert lines == shown, command.splitlines()[0]


@pytest.mark.parametrize("index", range(sum(kind == "python" for kind, _ in BLOCKS)))
def test_every_program(index: int, place: Path) -> None:
    text = [text for kind, text in BLOCKS if kind == "python"][index]
    if "import pytest" in text:
        assert text == (ROOT / "examples" / "test_my_kernel.py").read_text()
        assert len([line for line in text.splitlines() if line]) == 7
        return
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True)


def test_every_format_and_preset_is_in_a_table() -> None:
    page = (ROOT / "docs" / "presets.md").read_text()
    for name in FORMATS:
        assert f"`{name}`" in README, name
        assert f"`{name}`" in page, name
    for name in PRESETS:
        assert re.search(rf"^\| `{name}` \| .*\|$", page, re.MULTILINE), name
    assert "[docs/presets.md](docs/presets.md)" in README


def test_every_preset_is_of_a_family_that_the_readme_names() -> None:
    table = README[README.index("| presets | scales | of |") :].split("\n\n")[0]
    cells = " ".join(line.split(" | ")[0] for line in table.splitlines())
    families, base = [], ""
    for name in re.findall(r"`([a-z0-9*-]+)`", cells):
        # `-2d` after `te-nvfp4` is `te-nvfp4-2d`.
        families.append(f"{base}{name}" if name.startswith("-") else name)
        base = base if name.startswith("-") else name
    assert len(families) > 5
    for name in PRESETS:
        assert any(fnmatch.fnmatchcase(name, family) for family in families), name
    for family in families:
        assert any(fnmatch.fnmatchcase(name, family) for name in PRESETS), family


def test_links_lead_somewhere() -> None:
    pictures = re.findall(r'\b(?:src|srcset)="([^"]+)"', README)
    assert len(pictures) == 2  # light and dark
    for target in [*re.findall(r"\]\(([^)#]+)\)", README), *pictures]:
        if "://" not in target:
            assert (ROOT / target).exists(), target
