"""What a file expects of cases: by name, by glob, and refused where it means nothing."""

from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.golden.expectations import Outcome, by_case, chosen, read_expectations
from tests.golden.packs import FIRST, RECIPE, SECOND


@pytest.fixture
def cases(made: Path) -> list[golden.Case]:
    return list(golden.load(made))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["tiny"], [FIRST]),
        ([FIRST], [FIRST]),
        (["tiny*"], [FIRST, SECOND]),
        (["*poison*"], [SECOND]),
        ([f"*.{RECIPE}"], [FIRST, SECOND]),
        (["tiny-poison", "tiny"], [FIRST, SECOND]),
        (["tiny-?oison"], [SECOND]),
    ],
)
def test_cases_are_chosen_by_names_and_globs(
    cases: list[golden.Case], patterns: list[str], names: list[str]
) -> None:
    assert [case.name for case in chosen(cases, patterns)] == names


def test_a_name_without_a_case_is_refused(cases: list[golden.Case]) -> None:
    with pytest.raises(ValueError, match="unknown case 'tiny-poisson'; did you mean 'tiny-poison"):
        chosen(cases, ["tiny", "tiny-poisson"])


def test_the_exact_name_comes_before_globs(cases: list[golden.Case], tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text(
        '["tiny*"]\noutcome = "skip"\nreason = "all"\n'
        '["*"]\noutcome = "skip"\nreason = "never reached"\n'
        '[tiny-poison]\noutcome = "xfail"\nreason = "poison"\n'
    )
    found = by_case(read_expectations(file, what="case"), cases)
    assert {name: (one.outcome, one.reason) for name, one in found.items()} == {
        FIRST: (Outcome.SKIP, "all"),
        SECOND: (Outcome.XFAIL, "poison"),
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.toml", "[a", "is not TOML"),
        ("x.json", "{", "is not JSON"),
        ("x.json", "[]", r"holds \[\]; it must have a table for each case"),
        ("x.toml", '[a]\noutcome = "skip"', "give outcome and reason"),
        ("x.toml", '[a]\noutcome = "skpi"\nreason = "r"', "did you mean 'skip'"),
        ("x.toml", '[a]\noutcome = "skip"\nreason = " "', "say why"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_expectations(tmp_path / name, what="case")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.toml: No such file"):
        read_expectations(tmp_path / "none.toml", what="case")
