"""docs/golden.md says what the suites hold, and names cases and tests that exist."""

import re
from pathlib import Path

import pytest

from flamia_ref.golden import SUITES
from flamia_ref.golden.flags import FLAGS
from flamia_ref.golden.manifest import SCHEMA_VERSION
from flamia_ref.golden.migration import CHANGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "golden.md").read_text()


def rows(part: str) -> list[list[str]]:
    """The cells of the rows of a table between two comments, without its head."""
    text = PAGE.split(f"<!-- {part} -->\n")[1].split(f"<!-- /{part} -->")[0]
    lines = text.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_flag_is_in_the_table() -> None:
    assert [(flag, text) for flag, text in rows("flags")] == [
        (f"`{flag}`", text) for flag, text in FLAGS.items()
    ]


def test_every_public_fault_has_a_case_or_a_test() -> None:
    table = rows("faults")
    assert [row[0] for row in table] == [f"B{number}" for number in range(25, 48)]
    names = {case.name for case in SUITES["standard"]}
    for number, _, thread, cases, tests in table:
        assert re.fullmatch(r"\[[\w.-]+/[\w.-]+ \d+\]\(https://github\.com/[^)]+\)", thread), thread
        assert cases or tests, number
        for name in re.findall(r"`([^`]+)`", cases):
            assert name in names, (number, name)
        for test in re.findall(r"`([^`]+)`", tests):
            path, function = test.split("::")
            assert re.search(rf"^def {function}\b", (ROOT / path).read_text(), re.M), (number, test)


@pytest.mark.parametrize("suite", SUITES)
def test_the_numbers_of_cases(suite: str) -> None:
    (row,) = re.findall(rf"^\| `{suite}` \| (\d+)", PAGE, re.M)
    assert int(row) == len(SUITES[suite])


def test_the_schema_versions() -> None:
    listed = re.findall(r"^\| (\d) \| (.*) \|$", PAGE, re.M)
    assert [int(version) for version, _ in listed] == list(range(1, SCHEMA_VERSION + 1))
    assert {int(version): text for version, text in listed[1:]} == dict(CHANGES)
