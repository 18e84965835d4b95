"""A program that stops `golden.make` at every step it takes on disk, and looks at what is left.

``python -m tests.sweep.stops FOLDER KIND SCENARIO [FIRST STRIDE]`` prints JSON: how many steps there
are, and what was wrong, which is nothing. KIND is kill, interrupt, full (this step alone fails) or
filled (every later step that writes fails too). SCENARIO is new or force, which replaces another pack.
"""

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.golden import making
from flamia_ref.golden.cases import CaseSpec
from tests.golden.packs import spec

SMALL = (spec(lengths=(2, 0, 5)), spec(name="other", lengths=(3,), seed=12))
OLD = (spec(name="old", lengths=(4,), seed=13),)
WRITING = {"open", "os.mkdir", "os.rename"}
REMOVING = {"os.remove", "os.rmdir"}


class Steps:
    """Counts steps on disk, once armed, and stops at one of them."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.armed = False
        self.taken = 0
        self.stop_at = -1
        self.kind = ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or event not in WRITING | REMOVING:
            return
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str) or not path.startswith(self.root):
                return
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        self.taken += 1
        if self.taken < self.stop_at:
            return
        if self.kind == "filled" and event in WRITING:
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.taken > self.stop_at:
            return
        match self.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                raise KeyboardInterrupt
            case "full":
                raise OSError(errno.ENOSPC, "No space left on device")


def contents(folder: Path) -> dict[str, bytes] | None:
    if not folder.is_dir():
        return None
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def in_a_child(call: Callable[[], None]) -> int:
    """Call in a fork of this process, which has everything imported; return how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException as error:  # noqa: BLE001  a child must not go on as its parent
            (Path(sys.argv[1]) / "error").write_text(f"{type(error).__name__}: {error}")
            code = 3 if isinstance(error, KeyboardInterrupt) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main(root: Path, kind: str, scenario: str, first: int, stride: int) -> dict[str, Any]:
    steps = Steps(root)
    sys.addaudithook(steps)
    canned = {one.name: making.simulate(one, recipe()) for one in (*SMALL, *OLD)}
    calls = root / "calls"

    def simulate(one: CaseSpec, _: Any) -> dict[str, Any]:
        armed, steps.armed = steps.armed, False
        with open(calls, "a") as file:
            file.write(f"{one.name}\n")
        steps.armed = armed
        return canned[one.name]

    making.simulate = simulate
    making.SUITES = Registry("suite", [("small", SMALL), ("old", OLD)])
    golden.make(root / "expected", suite="small")
    golden.make(root / "before", suite="old")
    expected, before = contents(root / "expected"), contents(root / "before")
    work = root / "work"
    target, part = work / "pack", work / ".pack.part"
    force = scenario == "force"
    wrong: list[str] = []
    at = first
    while True:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        if force:
            shutil.copytree(root / "before", target)
        calls.write_text("")
        (root / "error").unlink(missing_ok=True)
        reached = root / "reached"
        reached.unlink(missing_ok=True)

        def stopped(at: int = at, reached: Path = reached) -> None:
            steps.kind, steps.stop_at, steps.armed = kind, at, True
            try:
                golden.make(target, suite="small", force=force)
            finally:
                steps.armed = False
                if steps.taken >= at:
                    reached.touch()

        code = in_a_child(stopped)
        if code == 0 and not reached.exists():
            break
        made = calls.read_text().split()
        found = contents(target)
        legal = [expected, before if force else None]
        if kind == "kill" and force and found is None and contents(part / "old") == before:
            # Between two renames: the next run, which is not to replace anything, puts it back.
            if in_a_child(lambda: void(golden.make(target, suite="small"))) != 2:
                wrong.append(f"step {at}: replaced without force")
            found = contents(target)
        if found not in legal:
            wrong.append(f"step {at}: the target holds {sorted(found or ())}")
        if kind == "interrupt" and code not in (0, 3):
            wrong.append(f"step {at}: it ended with {code}, {(root / 'error').read_text()}")
        if kind in ("full", "filled") and code == 2:
            text = (root / "error").read_text()
            if "ValueError: cannot write" not in text or "No space left on device" not in text:
                wrong.append(f"step {at}: {text}")
            says = "same command resumes" in text
            # What is said is so.
            if says != bool(part.is_dir() and os.listdir(part / "done")):
                wrong.append(f"step {at}: {text}; there is {sorted(os.listdir(work))}")
        kept = len(os.listdir(part / "done")) if (part / "done").is_dir() else 0
        if found != expected:
            in_a_child(lambda: void(golden.make(target, suite="small", force=force)))
            if contents(target) != expected:
                wrong.append(f"step {at}: not resumed: {(root / 'error').read_text()}")
            again = calls.read_text().split()[len(made) :]
            if len(again) != len(SMALL) - kept:
                wrong.append(f"step {at}: {kept} cases were kept, and made again: {again}")
            if [path.name for path in work.iterdir()] != ["pack"]:
                wrong.append(f"step {at}: left {sorted(os.listdir(work))}")
        at += stride
    return {"steps": at - 1, "wrong": wrong}


def void(_: object) -> None:
    pass


def recipe() -> Any:
    from flamia_ref.attention import RECIPES

    return RECIPES["flamia-mxfp8-folded"]


if __name__ == "__main__":
    folder, kind, scenario, *numbers = sys.argv[1:]
    first, stride = map(int, numbers or ("1", "1"))
    print(json.dumps(main(Path(folder), kind, scenario, first, stride)))
