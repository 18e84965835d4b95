"""A kernel author who has the README alone: the eight lines, and the workflow to copy, in a repository of their own."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.repository.layout import ROOT, project

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Your kernel in your CI")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
WORKFLOW = ROOT / "examples" / "ci" / "flamia-ref.yml"
INSTALLS = re.compile(r"^\S*python3? -m pip install [a-z -]+$")


def lines() -> list[str]:
    """The eight lines."""
    (text,) = [body for kind, body in BLOCKS if kind == "sh" and "test_golden.py" in body]
    return text.splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a broken kernel, and the commands that installing would bring."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, runs in (("flamia-ref", "-m flamia_ref.cli "), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {runs}"$@"\n')
        (commands / name).chmod(0o755)
    return tmp_path


def shell(repository: Path, script: str, *, status: int) -> str:
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {
        "PATH": f"{repository / 'bin'}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CI": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        ["sh", "-e"],
        input=script,
        cwd=repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def test_there_are_eight_lines_and_what_they_install_is_ours() -> None:
    written = lines()
    assert len(written) == 8
    assert INSTALLS.match(written[0])
    assert written[0].split()[4:] == [project()["project"]["name"], "pytest"]
    # In a file of its own the test passes the linter; in the README every line counts.
    compile("\n".join(written[3:6]), "test_golden.py", "exec")


def test_the_eight_lines_name_what_is_broken(repository: Path, made: Path) -> None:
    shutil.copytree(made, repository / "pack")
    _, make, *rest = lines()
    assert make == "flamia-ref golden make pack --recipe flamia-mxfp8-folded"
    (*others, last) = rest
    printed = shell(repository, "\n".join([*others, f"{last} --flamia-cases tiny"]), status=1)
    (failed,) = [line for line in printed.splitlines() if line.startswith("FAILED ")]
    for part in ("q.scales: bit mismatch", "head ", "token ", "block 0", "scale expected 0x"):
        assert part in failed
    assert failed.endswith(
        "; The scale rule rounds the scale down (OCP), preset ocp-mx-floor-e4m3."
    )
    assert printed.count("first departs at q.scales; every stage that leads to it is equal") == 1


@pytest.mark.nightly
def test_the_eight_lines_as_they_stand(repository: Path) -> None:
    printed = shell(repository, "\n".join(lines()[1:]), status=1)
    (shown,) = [body for kind, body in BLOCKS if kind == "text"]
    assert " ".join(shown.split()) in [" ".join(line.split()) for line in printed.splitlines()]
    assert "6 failed" in printed


def jobs() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [line for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_the_workflow_is_for_github() -> None:
    found = jobs()
    assert list(found) == ["cpu", "gpu"]
    assert found["gpu"]["runs-on"] == ["self-hosted", "gpu"]
    for job in found.values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
        assert "always()" in job["steps"][-1]["if"]


def test_every_command_and_option_of_the_workflow_is_there() -> None:
    plugin = (ROOT / "flamia_ref" / "pytest_plugin.py").read_text(encoding="utf-8")
    for job in jobs().values():
        for command in commands(job):
            words = shlex.split(command)
            program = Path(words[0]).name
            if INSTALLS.match(command) or words[:3] == ["python3", "-m", "venv"]:
                continue
            assert program in ("flamia-ref", "python"), command
            if program == "flamia-ref":
                assert words[1:3] == ["golden", "make"]
                for option in (word for word in words if word.startswith("--")):
                    assert option in ("--recipe", "--suite")
            for option in (word for word in words if word.startswith("--flamia")):
                assert f'"{option}"' in plugin


@pytest.mark.nightly
def test_the_commands_of_the_cpu_job_find_the_broken_kernel(repository: Path, made: Path) -> None:
    pytest.importorskip("xdist")
    shutil.copytree(made, repository / "pack")
    (repository / "test_golden.py").write_text("\n".join(lines()[3:6]) + "\n")
    install, make, check = commands(jobs()["cpu"])
    assert INSTALLS.match(install)
    assert make.startswith("flamia-ref golden make pack ")
    printed = shell(repository, check, status=1)
    assert "2 failed" in printed
    assert (repository / "golden.xml").stat().st_size > 0
    page = (repository / "golden.html").read_text(encoding="utf-8")
    assert "tiny.flamia-mxfp8-folded" in page
    assert "q.scales" in page
    for test in ET.parse(repository / "golden.xml").iter("testcase"):
        (failure,) = test.iter("failure")
        assert failure.attrib["message"].startswith("CaseFailed: ")
        assert "\n" not in failure.attrib["message"]
        assert "first departs at" in (failure.text or "")


@pytest.mark.nightly
def test_the_make_command_of_the_cpu_job(repository: Path) -> None:
    _, make, _ = commands(jobs()["cpu"])
    assert "wrote pack: suite smoke, 6 cases" in shell(repository, make, status=0)
