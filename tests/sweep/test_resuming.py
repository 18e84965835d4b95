"""What a run that was stopped leaves: when it is used, when it is made again, when it is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import cli, golden
from flamia_ref.attention import RECIPES
from flamia_ref.golden import making, source_code
from tests.golden.packs import FIRST, RECIPE, SECOND, flip
from tests.sweep.conftest import contents

ROOT = Path(__file__).resolve().parents[2]
FILE = f"{FIRST}.safetensors"


class Counting:
    """The simulator, which counts its cases, and stops before one of them."""

    def __init__(self, stop_before: str | None = None) -> None:
        self.true = making.simulate
        self.calls: list[str] = []
        self.stop_before = stop_before

    def __call__(self, spec: Any, recipe: Any) -> Any:
        if spec.name == self.stop_before:
            raise KeyboardInterrupt
        self.calls.append(spec.name)
        return self.true(spec, recipe)


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is left of a run that was stopped after two cases of four."""
    with monkeypatch.context() as patch:
        patch.setattr(making, "simulate", Counting("third"))
        with pytest.raises(KeyboardInterrupt) as caught:
            golden.make(tmp_path / "pack", suite="several")
    folder = tmp_path / ".pack.part"
    (note,) = caught.value.__notes__
    assert note == (
        f"2 cases are kept in {folder}; the same command resumes there, and deleting that folder "
        "forgets them"
    )
    assert [path.name for path in tmp_path.iterdir()] == [".pack.part"]
    return folder


def resume(
    part: Path, monkeypatch: pytest.MonkeyPatch, *, suite: str = "several", **options: Any
) -> list[str]:
    """Make the pack, and return the cases that were run."""
    counting = Counting()
    monkeypatch.setattr(making, "simulate", counting)
    golden.make(part.with_name("pack"), suite=suite, **options)
    return counting.calls


def test_what_is_done_is_not_done_again(
    part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, str]] = []
    again = resume(part, monkeypatch, progress=lambda *step: told.append(step))
    assert again == ["third", "fourth"]
    assert told == [(2, 4, f"third.{RECIPE}"), (3, 4, f"fourth.{RECIPE}")]
    assert contents(part.with_name("pack")) == contents(whole)
    assert not part.exists()


def damage(part: Path, how: str) -> None:
    file, record = part / "pack" / FILE, part / "done" / f"{FIRST}.json"
    match how:
        case "a bit":
            flip(file, file.stat().st_size - 1)
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "longer":
            file.write_bytes(file.read_bytes() + b"\0")
        case "missing":
            file.unlink()
        case "link":
            file.rename(part.with_name("elsewhere"))
            file.symlink_to(part.with_name("elsewhere"))
        case "folder":
            file.unlink()
            file.mkdir()
        case "no record":
            record.unlink()
        case "torn record":
            record.write_text(record.read_text()[:20])
        case "huge record":
            record.write_text('{"size": 1' + "0" * 30 + "}")
        case "odd record":
            record.write_text("[]")


DAMAGE = (
    "a bit",
    "cut",
    "longer",
    "missing",
    "link",
    "no record",
    "torn record",
    "huge record",
) + ("odd record",)


@pytest.mark.parametrize("how", DAMAGE)
def test_what_was_changed_is_made_again(
    part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    damage(part, how)
    assert resume(part, monkeypatch) == ["tiny", "third", "fourth"]
    assert contents(part.with_name("pack")) == contents(whole)
    # A link is replaced, and what it leads to stays.
    assert (how == "link") == part.with_name("elsewhere").exists()
    if how == "link":
        assert part.with_name("elsewhere").read_bytes() == contents(whole)[FILE]


def test_foreign_files_among_the_cases_do_not_become_part_of_the_pack(
    part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part / "pack" / "extra").write_text("")
    (part / "pack" / FIRST).mkdir()
    resume(part, monkeypatch)
    assert contents(part.with_name("pack")) == contents(whole)


def test_other_code_makes_everything_again(
    part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "code_digest", lambda: "0" * 64)
    assert len(resume(part, monkeypatch)) == 4
    assert contents(part.with_name("pack")) == contents(whole)


def test_the_digest_of_the_code_covers_every_module_that_computes(tmp_path: Path) -> None:
    files = dict(source_code._files())
    for name in (
        "attention/softmax.py",
        "formats/scalar.py",
        "golden/simulation.py",
        "_float32.py",
    ):
        assert name in files
    assert any(name.startswith("attention/recipes/") for name in files)
    assert any(name.startswith("golden/data/") for name in files)
    program = "from flamia_ref.golden.source_code import code_digest; print(code_digest())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(done.stdout.strip()) == 64


def test_another_recipe_of_the_same_name_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(RECIPES[RECIPE].to_json()) | {"name": "mine"}
    kind = type(RECIPES[RECIPE])
    first = kind.from_json(json.dumps(data))
    data["tiles"] |= {"query": 64, "key": 64}
    second = kind.from_json(json.dumps(data))
    with monkeypatch.context() as patch:
        patch.setattr(making, "simulate", Counting("tiny-poison"))
        with pytest.raises(KeyboardInterrupt):
            golden.make(tmp_path / "pack", [first], suite="small")
    counting = Counting()
    monkeypatch.setattr(making, "simulate", counting)
    golden.make(tmp_path / "pack", [second], suite="small")
    assert counting.calls == ["tiny", "tiny-poison"]


def test_unfinished_work_of_another_kind_is_not_thrown_away(
    part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(part.rglob("*"))
    for options in ({"suite": "small"}, {"shard": "1/2"}):
        with pytest.raises(ValueError, match="holds unfinished work, 'suite several, ") as caught:
            resume(part, monkeypatch, **options)
        assert "start anew with --force" in str(caught.value)
        assert not hasattr(caught.value, "__notes__")
    assert sorted(part.rglob("*")) == before
    assert resume(part, monkeypatch, suite="small", force=True) == ["tiny", "tiny-poison"]
    assert [path.name for path in part.parent.iterdir()] == ["pack"]
    assert len(golden.load(part.with_name("pack"))) == 2


def test_a_folder_of_that_name_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".pack.part").mkdir()
    (tmp_path / ".pack.part" / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ValueError, match=r"holds 'thesis.txt', which is not ours; move it"):
            golden.make(tmp_path / "pack", suite="small", force=force)
    assert (tmp_path / ".pack.part" / "thesis.txt").read_text() == "mine"
    (tmp_path / ".other.part").symlink_to(tmp_path / ".pack.part")
    with pytest.raises(ValueError, match="is no folder of ours"):
        golden.make(tmp_path / "other", suite="small")
    (tmp_path / ".third.part").write_text("mine")
    with pytest.raises(ValueError, match="is no folder of ours"):
        golden.make(tmp_path / "third", suite="small")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def second(done: int, _: int, __: str) -> None:
        if done == 1:
            with pytest.raises(ValueError, match="is writing") as caught:
                golden.make(tmp_path / "pack", suite="small")
            refused.append(str(caught.value))

    golden.make(tmp_path / "pack", suite="small", progress=second)
    assert refused == [
        f"process {os.getpid()} is writing {tmp_path / 'pack'}; wait until it ends, or choose "
        "another folder"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]
    assert len(golden.load(tmp_path / "pack")) == 2


HOLDS = """
import os, sys, time
from pathlib import Path
from flamia_ref.golden.locking import locked
with locked(Path(sys.argv[1]), Path("pack")):
    if sys.argv[2] == "with a child" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["alone", "with a child"])
def test_the_lock_of_a_dead_process_is_taken_over(
    part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(part), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert other.stdout is not None
        pid = int(other.stdout.readline())
        with pytest.raises(ValueError, match=f"process {pid} is writing"):
            resume(part, monkeypatch)
        other.kill()
        other.wait()
        assert resume(part, monkeypatch) == ["third", "fourth"]
    finally:
        os.killpg(other.pid, signal.SIGKILL) if how == "with a child" else other.kill()
        other.wait()
        if other.stdout is not None:
            other.stdout.close()
    assert contents(part.with_name("pack")) == contents(whole)


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The superuser may write anywhere, so the system's answer is put in its mouth.
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"cannot write .*: Permission denied; nothing was left"):
        golden.make(tmp_path / "pack", suite="small")
    assert list(tmp_path.iterdir()) == []


def test_a_real_disk_that_is_full(whole: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    # Room for the first case, a few small files, and half of the second.
    first, second = (len(contents(whole)[f"{name}.safetensors"]) for name in (FIRST, SECOND))
    size = first + 5 * 4096 + second // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a file system")
    try:
        with pytest.raises(ValueError, match="No space left on device; 1 case is kept") as caught:
            golden.make(disk / "pack", suite="several")
        assert "the same command resumes" in str(caught.value)
        subprocess.run([*mount[:4], f"remount,size={size * 10}", *mount[5:]], check=True)
        golden.make(disk / "pack", suite="several")
        assert len(golden.load(disk / "pack")) == 4
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_ctrl_c_on_the_command_line_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(making, "simulate", Counting("tiny-poison"))
        assert cli.main(["golden", "make", str(tmp_path / "pack"), "--suite", "small"]) == 130
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == (
        f"flamia-ref: interrupted; 1 case is kept in {tmp_path / '.pack.part'}; the same command "
        "resumes there, and deleting that folder forgets them\n"
    )
    assert cli.main(["golden", "make", str(tmp_path / "pack"), "--suite", "small"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


@pytest.mark.nightly
def test_a_killed_command_is_resumed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "flamia_ref.cli", "golden", "make", str(tmp_path / "pack")]
    process = subprocess.Popen([*arguments, "--executor", "2"], cwd=ROOT)
    done = tmp_path / ".pack.part" / "done"
    for _ in range(1200):
        if process.poll() is not None or (done.is_dir() and os.listdir(done)):
            break
        time.sleep(0.01)
    process.kill()
    process.wait()
    if not (tmp_path / "pack").exists():
        kept = len(os.listdir(done))
        assert kept >= 1
        result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    shutil.rmtree(tmp_path / ".pack.part", ignore_errors=True)
    result = subprocess.run(
        [*arguments[:-1], str(tmp_path / "again")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "pack") == contents(tmp_path / "again")
