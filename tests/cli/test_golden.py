"""The commands `golden`: what they write, and what they leave alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import golden
from flamia_ref.golden import making
from flamia_ref.report import Report
from flamia_ref.report.model import CaseResult, Status
from tests.cli.test_cli import FAULTY, KERNEL, ROOT, Run, refused, run
from tests.golden.packs import FIRST, WITH_TINY

__all__ = ["run"]  # a fixture

OLD = ROOT / "tests" / "golden" / "data" / "schema-2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two small cases."""
    folder = tmp_path_factory.mktemp("golden") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", WITH_TINY)
        golden.make(folder, suite="tiny")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_merged(run: Run, made: Path, tmp_path: Path) -> None:
    for index in (1, 2):
        code, output, _ = run(
            *("golden", "make", tmp_path / f"s{index}", "--suite", "tiny"),
            *("--shard", f"{index}/2", "--executor", "serial"),
        )
        assert code == 0
        assert f"s{index}: shard {index}/2, suite tiny, 1 cases" in output
    refused(run("golden", "show", tmp_path / "s1"), "is a shard of a pack; join all shards")
    arguments = ("golden", "merge", tmp_path / "pack", tmp_path / "s2", tmp_path / "s1")
    refused(run(*arguments[:-1]), "shards are missing: 1/2")
    code, output, errors = run(*arguments, "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output)["digest"] == golden.load(made).manifest.digest
    assert contents(tmp_path / "pack") == contents(made)
    refused(run(*arguments), "replace it with --force")
    assert run(*arguments, "--force")[0] == 0


def test_processes(run: Run, made: Path, tmp_path: Path) -> None:
    made_by = ("golden", "make", tmp_path / "p", "--suite", "tiny", "--executor", "2")
    code, _, errors = run(*made_by)
    assert code == 0, errors
    assert contents(tmp_path / "p") == contents(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--executor", "0"], "executor is 0 processes"),
        (["--executor", "threads"], "executor 'threads' is none"),
        (["--executor", "dask:"], "has no address"),
        (["--shard", "3/2"], "shard 3/2 is none"),
        (["--shard", "a"], "shard 'a' is not of the form i/n"),
        (["--shard", "1/2", "--raw"], "a shard has no raw files"),
    ],
)
def test_bad_options_of_make(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    refused(run("golden", "make", tmp_path / "pack", "--suite", "tiny", *arguments), message)
    assert list(tmp_path.iterdir()) == []


def report_of(text: str) -> Report:
    case = CaseResult(name="a", status=Status.PASS, note=text)
    return Report(pack="p", subject="s", numerics_version=1, cases=(case,))


OURS = {
    "json": report_of("x").to_json(),
    "junit": report_of("x").to_junit(),
    "html": report_of("x").to_html(),
}
THEIRS = {
    "json": '{"schema": "other"}',
    "junit": '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="pytest"></testsuites>',
    "html": "<!DOCTYPE html>\n<html><head><title>flamia-ref, my notes</title></head></html>\n",
}


@pytest.mark.parametrize(
    "form", ["json", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("html", "junit"))]
)
def test_a_report_replaces_an_earlier_one_and_nothing_else(
    run: Run, made: Path, tmp_path: Path, form: str
) -> None:
    file = tmp_path / f"report.{form}"
    check = ("golden", "check", made, "--kernel", KERNEL, f"--{form}", file)
    for text in (THEIRS[form], "notes", "\0"):
        file.write_text(text)
        refused(run(*check), f"exists and is no earlier {form} report of flamia-ref")
        assert file.read_text() == text
    for text in ("", OURS[form]):
        file.write_text(text)
        assert run(*check)[0] == 0
        assert len(file.read_text()) > len(text)
    assert run(*check)[0] == 0  # it replaces what it wrote itself
    file.write_text("notes")
    assert run(*check, "--force")[0] == 0
    assert file.read_text() != "notes"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_every_form_of_a_report(run: Run, made: Path, tmp_path: Path) -> None:
    files = {form: tmp_path / f"report.{form}" for form in ("json", "html", "junit")}
    options = [word for form, file in files.items() for word in (f"--{form}", file)]
    code, output, _ = run("golden", "check", made, "--kernel", FAULTY, *options)
    assert code == 1
    assert "v.scales" in output
    assert f"wrote {files['html']}" in output
    assert json.loads(files["json"].read_text())["passed"] is False
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert "<failure" in files["junit"].read_text()
    for case in json.loads(files["json"].read_text())["cases"]:
        assert case["command"] == (
            f"flamia-ref golden check {made} --kernel {FAULTY} --case {case['name']}"
        )


def test_reports_that_collide(run: Run, made: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(made, tmp_path / "pack"))
    check = ("golden", "check", pack, "--kernel", KERNEL)
    one = tmp_path / "one"
    refused(run(*check, "--html", one, "--junit", one), "--html and --junit are both to be")
    refused(run(*check, "--json", one, "--html", one), "are both to be")
    refused(run(*check, "--json", pack / "r.json"), "write reports elsewhere")
    refused(run(*check, "--html", pack / "manifest.json", "--force"), "write reports elsewhere")
    refused(run(*check, "--html", tmp_path / "no" / "r.html"), "there is no folder")
    refused(run("golden", "show", pack, "--json", pack / "manifest.json"), "elsewhere")
    assert contents(pack) == contents(made)
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_a_manifest_elsewhere_is_no_report(run: Run, made: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(made, tmp_path / "pack"))
    refused(run("golden", "show", made, "--json", pack / "manifest.json"), "no earlier json report")
    assert contents(pack) == contents(made)
    assert run("golden", "show", made, "--json", tmp_path / "what.json")[0] == 0
    assert run("golden", "show", made, "--json", tmp_path / "what.json")[0] == 0


def test_the_result_is_said_even_where_a_report_cannot_be_written(
    run: Run, made: Path, tmp_path: Path
) -> None:
    code, output, errors = run("golden", "check", made, "--kernel", KERNEL, "--html", "/dev/full")
    assert code == 2
    assert "PASS: 2 cases: 2 pass" in output
    assert errors == "flamia-ref: cannot write /dev/full: No space left on device\n"


def test_show_a_tensor(run: Run, made: Path) -> None:
    code, output, _ = run("golden", "show", made, "tiny", "cu_seqlens")
    assert code == 0
    assert "axes: starts 4" in output
    assert "first: 0x00000000 0x00000002 0x00000002 0x00000025" in output
    assert "view: I32, stored as I32" in output
    code, output, _ = run("golden", "show", made, "tiny", "v.scales", "--json")
    document = json.loads(output)
    tensor = golden.load(made)[FIRST].tensors["v.scales"]
    assert document["elements"] == tensor.size
    assert document["first"] == [f"0x{int(x):02x}" for x in tensor.reshape(-1)[:16]]
    assert document["computed_from"] == list(
        golden.load(made)[FIRST].places["v.scales"].stage.parents
    )
    refused(run("golden", "show", made, "tiny", "v.scale"), "unknown tensor 'v.scale'")


def test_case_patterns_reach_the_check(
    run: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def check(pack: Any, actual: Any, **options: Any) -> Report:
        given.append({key: value for key, value in options.items() if key != "progress"})
        return report_of("")

    monkeypatch.setattr(golden, "check", check)
    line = ("golden", "check", made, "--kernel", KERNEL)
    assert run(*line)[0] == 0
    assert run(*line, "--case", "tiny*", "--case", "b", "--repeats", 3, "--no-diagnosis")[0] == 0
    assert run(*line, "--instruction", "exact")[0] == 0
    assert given == [
        {},
        {"cases": ("tiny*", "b"), "repeats": 3, "diagnose": False},
        {"instruction": "exact"},
    ]


@pytest.mark.parametrize(
    ("words", "index"),
    [(["18,0,3"], (18, 0, 3)), (["18", "0", "3"], (18, 0, 3)), (["[18, 0, 3]"], (18, 0, 3))],
)
@pytest.mark.parametrize("group", [["golden"], []])
def test_explain(
    run: Run,
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    index: tuple[int, ...],
    group: list[str],
) -> None:
    explanation = pytest.importorskip("flamia_ref.golden.explanation")

    class Explanation:
        def to_text(self) -> str:
            return "as it is"

        def to_json(self) -> str:
            return "{}\n"

    given: list[Any] = []

    def explain(*arguments: Any) -> Explanation:
        given.append(arguments)
        return Explanation()

    monkeypatch.setattr(explanation, "explain", explain)
    assert run(*group, "explain", made, "tiny", "v.scales", *words) == (0, "as it is\n", "")
    assert given == [(golden.load(made)[FIRST], "v.scales", index)]
    refused(run(*group, "explain", made, "tiny", "v.scales", "a"), "give a number an axis")


def test_export(run: Run, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("mine")
    refused(run("golden", "export", made, "--flashinfer", out), "write over what is in it with")
    assert [path.name for path in out.iterdir()] == ["mine"]
    code, output, _ = run("golden", "export", made, "--flashinfer", tmp_path / "new")
    assert code == 0
    assert "new: 2 cases for flashinfer-bench" in output
    assert any((tmp_path / "new").rglob("*"))


def test_raw_files(run: Run, made: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    arguments = ("golden", "make", pack, "--suite", "tiny", "--raw")
    assert run(*arguments)[0] == 0
    assert (pack / "manifest.json").read_bytes() == (made / "manifest.json").read_bytes()
    assert (pack / FIRST / "cu_seqlens.bin").read_bytes() == bytes.fromhex(
        "00000000 02000000 02000000 25000000"
    )
    assert (pack / "raw.txt").is_file()
    # They belong to the pack, and what lies among them does not.
    assert run(*arguments, "--force")[0] == 0
    (pack / FIRST / "mine.bin").write_text("mine")
    refused(run(*arguments, "--force"), "which is no part of the pack")
    assert (pack / FIRST / "mine.bin").read_text() == "mine"


def test_migrate(run: Run, made: Path, tmp_path: Path) -> None:
    refused(run("golden", "migrate", made, tmp_path / "new"), str(made))
    assert list(tmp_path.iterdir()) == []


def test_migrate_says_what_changed(run: Run, tmp_path: Path) -> None:
    code, output, errors = run("golden", "migrate", OLD, tmp_path / "new")
    assert (code, errors) == (0, "")
    wrote, *brought = output.splitlines()
    assert wrote.startswith(f"wrote {tmp_path / 'new'}: ")
    (only,) = brought  # the pack is of version 2, so that 3 alone came since
    assert only.startswith("schema version 3 brought: cases may have keys of their own, ")
    document = json.loads(run("golden", "migrate", OLD, tmp_path / "other", "--json")[1])
    assert document["schema"] == "flamia-ref golden migrate"
    assert list(document["changes"]) == ["3"]
    assert document["digest"] == golden.load(tmp_path / "new").manifest.digest


def test_products_judged_as_another_instruction_adds_them(
    run: Run, made: Path, tmp_path: Path
) -> None:
    file = tmp_path / "r.json"
    line = ("golden", "check", made, "--case", "tiny", "--json", file)
    wgmma = ("--instruction", "sm90.wgmma.bf16")
    refused(run(*line, "--kernel", KERNEL, "--instruction", "sm90.wgmma"), "'sm90.wgmma'")
    assert run(*line, "--kernel", FAULTY, *wgmma)[0] == 1
    document = json.loads(file.read_text())
    assert (
        "products are judged as sm90.wgmma.bf16 adds them, not as the recipe says"
        in document["notes"]
    )
    assert document["cases"][0]["command"] == (
        f"flamia-ref golden check {made} --kernel {FAULTY} --instruction sm90.wgmma.bf16 --case {FIRST}"
    )


def test_help_of_check_says_what_each_verdict_means(run: Run) -> None:
    output = run("golden", "check", "--help")[1]
    for words in (
        "  pass              every tensor is equal bit for bit, or inside its envelope\n",
        "  leak              two cases that differ in hidden tokens alone gave different bits\n",
        "  skipped           the kernel does not take what the case needs; neither passed nor failed\n",
        "2 nothing was compared,",
    ):
        assert words in output


def test_where_all_cases_are_skipped_nothing_was_compared(
    run: Run, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(pack: Any, actual: Any, **options: Any) -> Report:
        case = CaseResult(name="a", status=Status.SKIPPED, note="takes no sink")
        return Report(pack="p", subject="s", numerics_version=1, cases=(case,))

    monkeypatch.setattr(golden, "check", check)
    code, output, _ = run("golden", "check", made, "--kernel", KERNEL)
    assert code == 2
    assert output.endswith("NOTHING COMPARED: 1 case: 1 skipped\n")
    assert "FAIL" not in output


def test_include(run: Run) -> None:
    code, output, _ = run("golden", "include")
    assert code == 0
    assert list(Path(output.strip()).rglob("*.h*"))
    assert json.loads(run("golden", "include", "--json")[1])["folder"] == output.strip()


def test_help_names_every_option(run: Run) -> None:
    wanted = {
        "make": ("--recipe", "--suite", "--raw", "--shard", "--executor", "--force", "--json"),
        "merge": ("--raw", "--force", "--json"),
        "check": (
            "--actual",
            "--kernel",
            "--case",
            "--repeats",
            "--no-diagnosis",
            "--instruction",
            "--html",
            "--junit",
        )
        + ("--json", "--force"),
        "show": ("--json",),
        "explain": ("--json",),
        "migrate": ("--json",),
        "export": ("--flashinfer", "--json"),
        "include": ("--json",),
    }
    for name, options in wanted.items():
        code, output, _ = run("golden", name, "--help")
        assert code == 0
        assert all(option in output for option in options), name
