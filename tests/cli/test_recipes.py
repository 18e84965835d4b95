"""`flamia-ref recipes list | diff | check`."""

import dataclasses
import json
from pathlib import Path

import pytest

from flamia_ref import cli
from flamia_ref.attention import RECIPES, consistency
from flamia_ref.attention.findings import TITLES, Consistency, Property, Verdict
from tests.golden.packs import older

FOLDED = RECIPES["flamia-mxfp8-folded"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "recipes", "list")
    assert code == 0
    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    words = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert words["bf16-fa4"] == f"evidence {RECIPES['bf16-fa4'].label} q k v dO: bf16"
    assert words["cutlass-fp8"].endswith(" q k v: e4m3")  # which has no dO
    assert words["fp8-fa4"].endswith(" q k v: e4m3 per head")
    assert words["attn-qat-nvfp4"].endswith(" q k v: cudnn-qat-nvfp4 1x16; dO: bf16")
    data = json.loads(run(capsys, "recipes", "list", "--json")[1])
    assert list(data["recipes"]) == list(data["summaries"]) == list(RECIPES)


@pytest.mark.parametrize(
    "command",
    [
        ("recipes", "list"),
        ("recipes", "show", "bf16-fa4"),
        ("formats", "list"),
        ("leak", "structure", "--recipe", "bf16-fa4", "--lengths", "8"),
        ("leak", "safeguards", "--recipe", "bf16-fa4"),
        ("leak", "prove", "--recipe", "bf16-fa4"),
        ("leak", "hunt", "--recipe", "bf16-fa4"),
        ("leak", "demo"),
        ("device", "probe"),
    ],
)
def test_no_command_replaces_a_file_that_it_was_not_told_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "mine.png"
    file.write_bytes(b"a picture")
    code, output, errors = run(capsys, *command, "--json", file)
    assert (code, output) == (2, "")
    assert errors == (
        f"flamia-ref: {file} exists; choose another name, or replace it with --force\n"
    )
    assert file.read_bytes() == b"a picture"


def test_a_file_is_replaced_with_force(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("old")
    assert run(capsys, "recipes", "list", "--json", file, "--force")[0] == 0
    assert list(json.loads(file.read_text())["recipes"]) == list(RECIPES)


def test_what_show_prints_is_a_recipe_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    for name in RECIPES:
        file.write_text(run(capsys, "recipes", "show", name)[1])
        code, output, _ = run(capsys, "recipes", "diff", name, file)
        assert (code, output) == (0, "data: 0 differences\nevidence: 0 differences\n")


def test_a_file_of_before_and_one_of_a_later_version(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, name = tmp_path / "mine.json", FOLDED.name
    file.write_text(json.dumps(older(FOLDED.to_json())))
    code, output, _ = run(capsys, "recipes", "diff", name, file)
    assert code == 1
    assert output.startswith("data: 1 differences\n    schedules\n")
    data = json.loads(FOLDED.to_json())
    data["tiles"]["sparse"] = True
    file.write_text(json.dumps(data))
    for command in (("diff", name, file), ("check", file)):
        code, output, errors = run(capsys, "recipes", *command)
        assert (code, output) == (2, "")
        assert "unknown field of recipe.tiles 'sparse'" in errors
        assert errors.count("\n") == 1


def test_files_that_are_no_recipe_and_one_with_a_byte_order_mark(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(FOLDED.to_json(), encoding="utf-8-sig")
    assert run(capsys, "recipes", "show", file)[1] == FOLDED.to_json() + "\n"
    for data, message in (
        (b"{", "recipe is not JSON: "),
        (b"\xff", "is not UTF-8 text: "),
        (b'{"schema": 3}', "recipe has schema 3 and this version reads schema 1 and 2; "),
    ):
        file.write_bytes(data)
        for command in (("show", file), ("check", file), ("diff", FOLDED.name, file)):
            code, output, errors = run(capsys, "recipes", *command)
            assert (code, output) == (2, "")
            assert f"recipe file {file}" in errors
            assert message in errors
            assert errors.count("\n") == 1


def test_diff(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = dataclasses.replace(
        FOLDED,
        name="mine",
        tiles=dataclasses.replace(FOLDED.tiles, masked="skipped"),
        steps={
            **FOLDED.steps,
            "tiles": dataclasses.replace(FOLDED.steps["tiles"], source="elsewhere"),
        },
    )
    (tmp_path / "mine.json").write_text(mine.to_json())
    arguments = ("recipes", "diff", "flamia-mxfp8-folded", tmp_path / "mine.json")
    code, output, errors = run(capsys, *arguments)
    assert (code, errors) == (1, "")
    assert output.startswith('data: 1 differences\n    tiles.masked\n        "computed"\n')
    assert '"source": "elsewhere"' in output
    data = json.loads(run(capsys, *arguments, "--json")[1])
    assert data["recipes"] == ["flamia-mxfp8-folded", "mine"]
    assert data["data"] == [{"path": "tiles.masked", "one": "computed", "other": "skipped"}]
    assert [difference["path"] for difference in data["evidence"]] == ["tiles"]
    code, output, errors = run(capsys, "recipes", "diff", "flamia-mxfp8-folded", "nothing")
    assert (code, output) == (2, "")
    assert "unknown recipe 'nothing'" in errors


@pytest.mark.parametrize("verdict", Verdict)
def test_check(
    verdict: Verdict,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The report is measured elsewhere; here it is made up."""

    def made_up(recipe, *, progress):
        assert progress is None  # standard error is no terminal here
        one = Property(
            name="C2", title=TITLES["C2"], verdict=verdict, finding="so", figures={"pairs": 3}
        )
        return Consistency(recipe=recipe.name, evidence=recipe.label, properties=(one,))

    monkeypatch.setattr(consistency, "check", made_up)
    status = 1 if verdict is Verdict.BROKEN else 0
    code, output, errors = run(capsys, "recipes", "check", "bf16-fa4")
    assert (code, errors) == (status, "")
    assert output.startswith("recipe bf16-fa4: evidence ")
    assert f"C2        {verdict}: {TITLES['C2']}\n" in output
    data = json.loads(run(capsys, "recipes", "check", "bf16-fa4", "--json")[1])
    assert data["schema"] == "flamia-ref consistency"
    assert data["properties"][0]["figures"] == {"pairs": 3}
    file = tmp_path / "mine.json"
    file.write_text(dataclasses.replace(FOLDED, name="mine").to_json())
    assert run(capsys, "recipes", "check", file)[1].startswith("recipe mine: ")


def test_check_of_a_recipe_that_is_not_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = dataclasses.replace(FOLDED, s=dataclasses.replace(FOLDED.s, tile_order="descending"))
    (tmp_path / "wrong.json").write_text(wrong.to_json())
    code, output, errors = run(capsys, "recipes", "check", tmp_path / "wrong.json")
    assert (code, output) == (2, "")
    assert (
        "has s.tile_order = 'descending'; computed is 'ascending': it is a sum over channels"
        in errors
    )


@pytest.mark.parametrize("command", ["diff", "check"])
def test_help_says_what_the_exit_status_means(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = run(capsys, "recipes", command, "--help")
    assert code == 0
    assert "Exit status 1 if" in output
